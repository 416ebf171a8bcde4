"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from flashdraft.engine.request import TokenLogprobs
from flashdraft.server.service import Service

LEAST = -9999.0  # JSON has no minus infinity


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
    top = [{token_text(service, token): _finite(value) for token, value in entry.top} for entry in entries]
    return {
        "tokens": texts,
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": top,
        "text_offset": offsets,
    }, offset


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
