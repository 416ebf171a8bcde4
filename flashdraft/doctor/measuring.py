"""The target's answers, its features on them, and what any form of a draft would have accepted: one parallel pass each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flashdraft.draft import DFlashDraft
from flashdraft.engine.request import SamplingParams
from flashdraft.llm import LLM
from flashdraft.quantize.measure import lengths
from flashdraft.quantize.proposing import target_head
from flashdraft.targets.target import Target, packed_attend
from flashdraft.train.data import Records, lay_out, make_batch
from flashdraft.train.features import block_hidden
from flashdraft.train.loss import chunk_rows
from flashdraft.train.validation import walk

PROBED_STEPS = 6  # of the engine, after which the time of the others is known
LEAST_LIKELIHOOD = -30.0  # of a token, so that a few absurd ones do not decide


@dataclass(frozen=True)
class Answer:
    """Token ids of a prompt and of the target's greedy answer."""

    prompt: list[int]
    tokens: list[int]


@contextmanager
def unchanged(target: Target) -> Iterator[None]:
    """Within this context an engine may swap the target's layers for its own; afterwards they are what they were."""
    layers = [(module, dict(module._modules)) for module in target.model.modules()]
    try:
        yield
    finally:
        for module, children in layers:
            module._modules.clear()
            module._modules.update(children)


def answer(llm: LLM, prompts: Sequence[list[int]], max_tokens: int, say: Callable[[float], None]) -> list[Answer]:
    """Greedy answers, all in one batch. `say` is told about how many seconds they will take, once that is known."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    outputs = []
    for ids in prompts:
        [live] = llm.prepare(ids, params)
        llm.engine.check(live.request)
        outputs.append(llm.engine.add(live.request))
    decoding, done = 0, 0.0
    while llm.engine.has_work:
        start = time.monotonic()
        llm.engine.step()
        if all(output.tokens for output in outputs):
            decoding, done = decoding + 1, done + time.monotonic() - start
            if decoding == PROBED_STEPS:
                say(done / decoding * (max_tokens - decoding))
    return [Answer(list(ids), list(output.tokens)) for ids, output in zip(prompts, outputs, strict=True)]


@dataclass(frozen=True)
class Measure:
    """A form of a draft on the answers."""

    lengths: np.ndarray  # of each answer the acceptance length; NaN where it has no step
    likelihood: np.ndarray  # of each answer the mean log-likelihood of its tokens; NaN likewise
    accepted: list[list[int]]  # proposals, of every verify step of every answer; empty if not all anchors were looked at
    broken: float  # share of the proposals from hidden states or logits that are not finite

    @property
    def mean(self) -> float:
        return float(np.nanmean(self.lengths))


class Bench:
    """The target's features on its answers, of all the layers that a form of the draft may want."""

    def __init__(self, target: Target, answers: Sequence[Answer], layer_ids: Sequence[int]) -> None:
        self.target, self.layer_ids = target, sorted(set(layer_ids))
        self.records = Records.from_lists([(a.prompt, a.tokens) for a in answers])
        self.rows_at_once = 8 if target.device.type == "cuda" else 1
        self.features = [self._features(index) for index in range(len(answers))]

    @property
    def longest(self) -> int:
        return int(self.records.lengths.max())

    def _features(self, index: int) -> Tensor:
        """[T, layers, H] of one record."""
        ids = torch.from_numpy(self.records.record(index).astype(np.int64)).to(self.target.device)
        positions = torch.arange(len(ids), device=ids.device)
        self.target.capture(self.layer_ids)
        last = positions[-1:]
        found = self.target.forward(ids, positions, packed_attend(torch.zeros_like(ids), positions), last)[1]
        assert found is not None
        return found.unflatten(-1, (len(self.layer_ids), -1))

    @torch.no_grad()
    def measure(self, draft: DFlashDraft, every: int = 1) -> Measure:
        """`every`: look at every so manieth anchor; then an answer's length is the mean over these, not over verify steps."""
        columns = [self.layer_ids.index(i) for i in draft.config.target_layer_ids]
        runs: list[list[int]] = []
        likelihood: list[float] = []
        broken = rows = 0
        for first in range(0, len(self.records), self.rows_at_once):
            members = range(first, min(first + self.rows_at_once, len(self.records)))
            found, values, bad = self._group(draft, members, columns, every)
            runs += found
            likelihood += [float(v.mean()) if len(v) else float("nan") for v in values]
            broken, rows = broken + bad, rows + sum(map(len, values))
        if every > 1:
            each = np.array([1 + float(np.mean(r)) if r else np.nan for r in runs])
            return Measure(each, np.array(likelihood), [], broken / max(rows, 1))
        accepted = [walk(r, len(r)) for r in runs]
        return Measure(lengths(accepted), np.array(likelihood), accepted, broken / max(rows, 1))

    def _group(
        self, draft: DFlashDraft, members: range, columns: list[int], every: int
    ) -> tuple[list[list[int]], list[Tensor], int]:
        """Of each record leading runs by anchor and log-likelihoods of labels; how many rows are not finite."""
        alone, device = self.rows_at_once == 1, self.target.device
        spans = [range(int(self.records.prompt_lengths[i]), int(self.records.lengths[i]) - 1, every) for i in members]
        longest, most = int(self.records.lengths[members[0]]), len(spans[0])
        if not alone:  # compiled kernels want one shape
            answers = self.records.lengths - self.records.prompt_lengths
            longest, most = -(-self.longest // 128) * 128, len(range(0, int(answers.max()), every))
        layout = lay_out(self.records, [[i] for i in members], longest)
        at = torch.zeros((len(members), max(most, 1)), dtype=torch.long)
        real = torch.zeros_like(at, dtype=torch.bool)
        features = self.features[0].new_zeros((len(members), longest, len(columns) * self.target.hidden_size))
        for b, (index, span) in enumerate(zip(members, spans, strict=True)):
            at[b, : len(span)], real[b, : len(span)] = torch.tensor(list(span), dtype=torch.long), True
            part = self.features[index][:, columns].flatten(1)
            features[b, : len(part)] = part
        batch = make_batch(layout, at, real, draft.config.block_size).to(device)
        if not len(batch.rows):
            return [[] for _ in members], [torch.zeros(0) for _ in members], 0
        hidden = block_hidden(self.target, draft, batch, features)[:, :, 1:].flatten(0, 2)[batch.rows]
        correct, values, bad = self._score(draft, hidden, batch.labels.flatten()[batch.rows])
        grid = torch.zeros(batch.labels.numel(), dtype=torch.long, device=device)
        grid[batch.rows] = correct.long()
        leading = grid.view(batch.labels.shape).cumprod(-1).sum(-1).cpu()
        owner = (batch.rows // batch.labels[0].numel()).cpu()
        runs = [leading[b, : len(span)].tolist() for b, span in enumerate(spans)]
        return runs, [values[owner == b] for b in range(len(members))], bad

    def _score(self, draft: DFlashDraft, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, int]:
        """Whether the likeliest tokens of hidden [R, H] are the labels [R], the labels' log-likelihood, and broken rows."""
        head = target_head(self.target)

        def shared(rows: Tensor) -> Tensor:
            return rows @ head.to(rows.dtype).T

        own = inverse(draft, labels)
        correct, values, bad = [], [], 0
        size = chunk_rows(draft.config.vocab_size)
        for rows, wanted in zip(hidden.split(size), own.split(size), strict=True):
            z = draft.logits(rows, shared).float()
            finite = z.isfinite().all(-1) & rows.isfinite().all(-1)
            known = finite & (wanted >= 0)
            value = z.gather(1, wanted.clamp(min=0)[:, None])[:, 0] - z.logsumexp(-1)
            values.append(torch.where(known, value, LEAST_LIKELIHOOD).clamp(min=LEAST_LIKELIHOOD))
            correct.append(known & (z.argmax(-1) == wanted))
            bad += int((~finite).sum())
        return torch.cat(correct), torch.cat(values).cpu(), bad


def inverse(draft: DFlashDraft, labels: Tensor) -> Tensor:
    """The draft's own ids of target ids; -1 for those that its vocabulary lacks."""
    if draft.d2t is None:
        return labels
    own = torch.arange(len(draft.d2t), device=labels.device)
    table = torch.full((draft.config.vocab_size,), -1, device=labels.device)
    table[draft.to_target_ids(own)] = own
    return table[labels]
