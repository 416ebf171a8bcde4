"""Log-probabilities in OpenAI's two forms, and those of prompts in vLLM's."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flashdraft.engine.request import TokenLogprobs
from flashdraft.server.service import Service

LEAST = -9999.0  # JSON has no minus infinity
AT_ONCE = 64  # tokens of a prompt between which others on the event loop get their turn: 2 to 4 ms with 20 likeliest each

Scores = Sequence[TokenLogprobs | None]  # of a prompt's tokens; None for the first


def chat_logprobs(service: Service, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    content = []
    for entry in entries:
        top = [_token(service, token, value) for token, value in entry.top]
        content.append({**_token(service, entry.token, entry.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(service: Service, entries: Sequence[TokenLogprobs], offset: int) -> tuple[dict[str, Any], int]:
    """The form of /v1/completions, and the offset in the text behind these tokens."""
    offsets, texts = [], [token_text(service, entry.token) for entry in entries]
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [_by_text(service, entry) for entry in entries],
        "text_offset": offsets,
    }, offset


def _by_text(service: Service, entry: TokenLogprobs) -> dict[str, float]:
    """The likeliest tokens by their text, likeliest first; of several with one text, such as parts of characters, the first."""
    found: dict[str, float] = {}
    for token, value in entry.top:
        found.setdefault(token_text(service, token), _finite(value))
    return found


async def echoed_logprobs(service: Service, text: str, ids: Sequence[int], scores: Scores, likeliest: int) -> dict[str, Any]:
    """The form of /v1/completions for the tokens of an echoed prompt, whose text is `text`."""
    form: dict[str, Any] = {"tokens": [token_text(service, ids[0])], "token_logprobs": [None], "top_logprobs": [None]}
    entries = [replace(entry, top=entry.top[:likeliest]) for entry in scores if entry is not None]
    for start in range(0, len(entries), AT_ONCE):
        part, _ = completion_logprobs(service, entries[start : start + AT_ONCE], 0)
        for name, own in form.items():
            own += part[name]
        await asyncio.sleep(0)
    special, offset, offsets = set(service.prompts.tokenizer.all_special_ids), 0, []
    for token, own in zip(ids, form["tokens"], strict=True):
        offsets.append(min(offset, len(text)))
        if token not in special or text.startswith(own, offset):  # others, such as one that begins each prompt, are not in it
            offset += len(own)
    return {**form, "text_offset": offsets}


async def prompt_logprobs(service: Service, scores: Scores, likeliest: int) -> list[dict[str, Any] | None]:
    """vLLM's form: for each token of a prompt what it and the likeliest in its place have, by id."""
    found: list[dict[str, Any] | None] = []
    for entry in scores:
        if entry is None:
            found.append(None)
            continue
        own = {entry.token: (entry.logprob, entry.rank)}
        own |= {token: (value, rank) for rank, (token, value) in enumerate(entry.top[:likeliest], 1)}
        found.append(
            {
                str(token): {"logprob": _finite(value), "rank": rank, "decoded_token": token_text(service, token)}
                for token, (value, rank) in own.items()
            }
        )
        if len(found) % AT_ONCE == 0:
            await asyncio.sleep(0)
    return found


def token_text(service: Service, token: int) -> str:
    return token_bytes(service, token).decode("utf-8", "replace")


def _token(service: Service, token: int, logprob: float) -> dict[str, Any]:
    raw = token_bytes(service, token)
    return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(value: float) -> float:
    return max(value, LEAST) if value == value else LEAST


def token_bytes(service: Service, token: int) -> bytes:
    """The bytes of a token by itself, also where they are part of a character."""
    return _token_bytes(service.prompts.tokenizer, token)


@functools.lru_cache(maxsize=1 << 16)
def _token_bytes(tokenizer: Any, token: int) -> bytes:
    (written,) = tokenizer.convert_ids_to_tokens([token])
    text = str(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
    if "\ufffd" not in text or written is None:
        return text.encode()
    if written.startswith("<0x") and len(written) == 6:
        return bytes([int(written[3:5], 16)])
    table = _byte_letters()
    if all(letter in table for letter in written):
        return bytes(table[letter] for letter in written)
    return text.encode()


@functools.cache
def _byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in byte-level vocabularies (GPT-2)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}
