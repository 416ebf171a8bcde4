"""Images and audio in prompts: which rows of a step are theirs, what those are given, and how far they see."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from flashdraft.engine.request import Request, Span
from flashdraft.engine.scheduler import PrefillChunk
from flashdraft.engine.state import padded_rows
from flashdraft.errors import RequestError
from flashdraft.targets.target import MediaRows, Target

# Of a medium in some rows: the first of them, and which of its embeddings they take.
Part = tuple[int, Span, slice]


def check_media(request: Request, target: Target, most_rows: int) -> None:
    """Raises RequestError for media that a target does not take, and for placeholders of no media."""
    if target.media is None:
        if request.media:
            raise RequestError("this target takes text alone: leave out images and audio")
        return
    if request.media and request.params.prompt_logprobs is not None:
        raise RequestError("log-probabilities of a prompt are for text alone: leave out images and audio, or prompt_logprobs")
    covered: set[int] = set()
    for span in request.media:
        positions = range(span.start, span.start + span.length)
        if tuple(span.embeddings.shape) != (span.length, target.hidden_size):
            raise RequestError(f"a medium of {span.length} positions needs embeddings [{span.length}, {target.hidden_size}]")
        if not positions or span.start < 0 or not covered.isdisjoint(positions):
            raise RequestError("media must each have positions of their own in the prompt")
        if any(p >= len(request.prompt) or request.prompt[p] not in target.media.placeholders for p in positions):
            raise RequestError("media must lie where the prompt has their placeholders")
        if span.whole and span.length > most_rows:
            raise RequestError(
                f"an image of {span.length} tokens is computed in one step, and a step takes {most_rows}: raise "
                "max_num_batched_tokens, or send a smaller image"
            )
        covered.update(positions)
    if not covered and target.media.placeholders.isdisjoint(request.prompt):
        return  # as most are: the loop below takes 10 ms for 131,072 tokens
    for position, token in enumerate(request.prompt):
        if token in target.media.placeholders and position not in covered:
            raise RequestError(
                f"the prompt holds token {token}, which stands for an image or audio, where there is none: leave it out, and "
                "send media as parts of a message"
            )


def parts_of(chunks: SequenceOf[PrefillChunk]) -> Iterator[Part]:
    """The media in the rows of a step's chunks, each of which begins at a multiple of a tile."""
    first = 0
    for chunk in chunks:
        for span in chunk.sequence.request.media:
            low, high = max(span.start, chunk.start), min(span.start + span.length, chunk.start + chunk.count)
            if low < high:
                yield first + low - chunk.start, span, slice(low - span.start, high - span.start)
        first += padded_rows(chunk)


def asked_media(chunks: SequenceOf[PrefillChunk], rows: int) -> dict[str, list[int]]:
    """The parts of a plan that say which rows are media, and up to which position a row sees at least (-1: its own)."""
    asked = dict(chunk_media=[-1] * rows, chunk_reach=[-1] * rows)
    for first, span, part in parts_of(chunks):
        rows_of_it = slice(first, first + part.stop - part.start)
        count = part.stop - part.start
        asked["chunk_media"][rows_of_it] = [1] * count
        if span.whole:
            asked["chunk_reach"][rows_of_it] = [span.start + span.length - 1] * count
    return asked


def put_embeddings(chunks: SequenceOf[PrefillChunk], buffer: Tensor) -> None:
    """Embeddings of the media in the rows of chunks, to their rows of `buffer` [T, H]."""
    for first, span, part in parts_of(chunks):
        buffer[first : first + part.stop - part.start].copy_(span.embeddings[part], non_blocking=True)


def media_of(chunk: PrefillChunk, rows: int, target: Target) -> tuple[MediaRows | None, Tensor | None]:
    """Of one chunk's rows, padded to `rows`: what media put there, and how far each sees; None where it is text."""
    if not any(True for _ in parts_of([chunk])):
        return None, None
    asked = asked_media([chunk], rows)
    buffer = torch.zeros((rows, target.hidden_size), dtype=target.dtype, device=target.device)
    put_embeddings([chunk], buffer)
    where, reach = (torch.tensor(asked[name], device=target.device) for name in ("chunk_media", "chunk_reach"))
    return (where > 0, buffer), reach
