"""Conversations as prompts, by a target's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from flashdraft.errors import ConfigError, RequestError
from flashdraft.media import text_of


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """The prompt ids of a conversation. Raises ConfigError for a tokenizer without a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "this target's tokenizer has no chat template: continue a plain prompt with LLM.generate, or on the command "
            "line with `flashdraft generate --raw`"
        )
    if reserved := {"tokenize", "return_tensors", "return_dict", "add_generation_prompt"} & set(chat_template_kwargs or {}):
        raise RequestError(f"chat_template_kwargs may not hold {sorted(reserved)[0]}: it is set here")
    for message in messages:
        content = message.get("content")
        for text in [content] if isinstance(content, str) else map(text_of, content or ()):
            checked(text or "")
    try:
        encoded: Any = tokenizer.apply_chat_template(
            [dict(m) for m in messages], add_generation_prompt=True, return_dict=True, **(chat_template_kwargs or {})
        )
    except Exception as error:  # jinja raises whatever the template says
        raise RequestError(f"the chat template refuses these messages: {error}") from error
    return list(encoded["input_ids"])


def checked(text: str) -> str:
    """The text, if it is one: a lone surrogate (bytes that were no UTF-8) has no tokens. Raises RequestError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError("the prompt is not valid Unicode text (it holds bytes that are no UTF-8)") from error
    return text
