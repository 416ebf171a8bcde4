"""Log-probabilities of prompt tokens, from the logits of the positions before them."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import torch
from torch import Tensor

from flashdraft.engine.request import TokenLogprobs
from flashdraft.engine.sampling import logprobs
from flashdraft.engine.scheduler import PrefillChunk
from flashdraft.engine.state import padded_rows

ROWS_AT_ONCE = 16  # in float32: 16 MiB for a vocabulary of 262,144, a few times over

Scores = list[tuple[PrefillChunk, list[TokenLogprobs]]]


def scored_rows(chunks: SequenceOf[PrefillChunk]) -> list[int]:
    """The rows of a step that score prompt tokens, each chunk beginning at a multiple of a tile."""
    rows: list[int] = []
    first = 0
    for chunk in chunks:
        rows += range(first, first + chunk.scored)
        first += padded_rows(chunk)
    return rows


def score(chunks: SequenceOf[PrefillChunk], logits: Tensor) -> Scores:
    """What the scored rows of chunks say: raw logits [at least all scored rows, V], one chunk's after another's."""
    scores, first = [], 0
    for chunk in chunks:
        if chunk.scored:
            scores.append((chunk, _score(chunk, logits[first : first + chunk.scored])))
            first += chunk.scored
    return scores


def _score(chunk: PrefillChunk, logits: Tensor) -> list[TokenLogprobs]:
    request, start = chunk.sequence.request, chunk.start + 1
    wanted = request.params.prompt_logprobs
    assert wanted is not None
    tokens = torch.tensor(request.prompt[start : start + chunk.scored], device=logits.device)
    entries: list[TokenLogprobs] = []
    for raw, own in zip(logits.split(ROWS_AT_ONCE), tokens.split(ROWS_AT_ONCE), strict=True):
        ranks = _ranks(raw.float(), own).tolist()
        entries += [replace(e, rank=rank) for e, rank in zip(logprobs(raw, own, wanted), ranks, strict=True)]
    return entries


def _ranks(raw: Tensor, tokens: Tensor) -> Tensor:
    """Ranks [R] of tokens [R] in logits [R, V], 1 for the likeliest; equal logits rank by token id, as in `logprobs`."""
    own = raw.gather(1, tokens[:, None])
    before = torch.arange(raw.shape[1], device=raw.device) < tokens[:, None]
    return ((raw > own) | ((raw == own) & before)).sum(-1) + 1
