"""A target over pages, driven row by row, and the model's own forward to compare it with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from flashdraft.engine.cache import CacheManager, PagePool, kv_shapes
from flashdraft.engine.pages import PackedRows, PageTables
from flashdraft.engine.request import Output, Request, SamplingParams
from flashdraft.engine.runner import Runner
from flashdraft.engine.scheduler import Sequence
from flashdraft.targets.target import Target


@dataclass(frozen=True)
class Rows:
    """Compute these tokens of a sequence at `start` and behind."""

    sequence: Sequence
    start: int
    tokens: list[int]


class PagedRun:
    """A target with the engine's page tables and no scheduler: tests choose which rows of which sequences run together.

    KV memory that belongs to nobody is NaN, so that reading it shows.
    """

    def __init__(self, target: Target, *, page_size: int = 16, max_tokens: int = 768, slots: int = 4) -> None:
        self.target = target
        shapes = kv_shapes(target, None)
        num_bytes = slots * max_tokens * 2 * sum(s.elements(1) for s in shapes) * target.dtype.itemsize
        self.pool = PagePool(shapes, page_size=page_size, num_bytes=num_bytes, dtype=target.dtype, device="cpu")
        self.pool.poison()
        self.cache = CacheManager(self.pool, enable_prefix_caching=False)
        self.tables = PageTables(self.pool, slots, max_tokens)
        self.runner = Runner(target, None, self.pool, self.tables, row_multiple=8)
        target.capture(range(target.num_layers))
        self.slots = list(range(slots))

    def sequence(self) -> Sequence:
        request = Request([1], SamplingParams())
        return Sequence(request, Output(request), 0, [], self.cache.new_sequence(), slot=self.slots.pop())

    def forward(self, batch: list[Rows], multiple: int = 8) -> list[tuple[Tensor, Tensor]]:
        """Logits [n, V], features [n, layers, H] of each entry's n rows, run together and padded as the engine pads."""
        ids, positions = [], []
        for rows in batch:
            end = rows.start + len(rows.tokens)
            assert self.cache.grow(rows.sequence.held, end), "the test's pool is too small"
            self.tables.sync(rows.sequence)
            ids += rows.tokens
            positions.append(list(range(rows.start, end)))
        packed = PackedRows(self.tables, [rows.sequence.slot for rows in batch], positions, multiple)
        attend = self.runner._target_attend(packed)
        logits, features = self.target.forward(torch.tensor(packed.padded(ids)), packed.positions, attend)
        assert features is not None
        counts = [*map(len, positions), packed.padding]
        logits = logits.split(counts)
        features = features.view(-1, self.target.num_layers, features.shape[-1] // self.target.num_layers).split(counts)
        return list(zip(logits[:-1], features[:-1], strict=True))

    def keep(self, rows: Rows) -> None:
        """These rows stay: pages behind the window of the next position are freed, as the scheduler does."""
        self.cache.drop_behind(rows.sequence.held, rows.start + len(rows.tokens))

    def advance(self, *batch: Rows, multiple: int = 8) -> list[tuple[Tensor, Tensor]]:
        out = self.forward(list(batch), multiple)
        for rows in batch:
            self.keep(rows)
        return out


@torch.no_grad()
def own_forward(model: PreTrainedModel, ids: list[int]) -> tuple[Tensor, Tensor]:
    """What transformers computes for a sequence under its own attention: logits [T, V], every layer's output [T, layers, H]."""
    last: list[Tensor] = []
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None) or decoder.h
    # hidden_states end with the normed one; a feature of the last layer is what it was before the norm.
    hook = layers[-1].register_forward_hook(lambda _m, _a, out: last.append(out[0] if isinstance(out, tuple) else out))
    try:
        out = model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    finally:
        hook.remove()
    hidden = [*out.hidden_states[1 : len(layers)], last[0]]
    return out.logits[0], torch.stack([h[0] for h in hidden], 1)


def assert_close(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], rows: slice, rtol: float = 0) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs[rows], atol=1e-4, rtol=rtol)
