"""An answer as a list of blocks, one behind the other, as the Responses and the Messages API tell it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal

from flashdraft.server.generation import Generation
from flashdraft.server.parsers.events import Call, Content, Reasoning


@dataclass
class Block:
    """Thinking, text, or a call. `text` grows; for a call it is its arguments."""

    kind: Literal["reasoning", "text", "call"]
    index: int
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    name: str = ""
    text: str = ""


@dataclass(frozen=True)
class Change:
    """A block begins, grows by `text`, or ends."""

    what: Literal["start", "delta", "stop"]
    block: Block
    text: str = ""


async def changes(generation: Generation) -> AsyncIterator[Change]:
    """What happens to the blocks of the first answer. Raises APIError, as Generation.parts does."""
    block: Block | None = None
    count = 0
    async for part in generation.parts():
        for event in part.events:
            kind: Literal["reasoning", "text", "call"] = (
                "reasoning" if isinstance(event, Reasoning) else "text" if isinstance(event, Content) else "call"
            )
            if block is not None and (kind == "call" or block.kind != kind):
                yield Change("stop", block)
                block = None
            if block is None:
                block, count = Block(kind, count), count + 1
                block.name = event.name if isinstance(event, Call) else ""
                yield Change("start", block)
            text = event.arguments if isinstance(event, Call) else event.text
            block.text += text
            yield Change("delta", block, text)
    if block is not None:
        yield Change("stop", block)
