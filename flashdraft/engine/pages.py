"""What one forward pass needs to know of pages: where rows are stored, which keys are gathered, and who sees what."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdraft.engine.cache import NOTHING, TRASH, KVShape, LayerPages, PagePool
from flashdraft.engine.scheduler import Sequence
from flashdraft.kernels.attention import KEY_PAD, KEY_SPLIT, attention, gather_pages, score_mask, write_pages


class PageTables:
    """Unit numbers of every running sequence, by slab, in one preallocated tensor [slabs, slots, pages]."""

    def __init__(self, pool: PagePool, max_num_seqs: int, max_tokens: int) -> None:
        self.pool = pool
        # KEY_SPLIT more than the longest sequence: gathered ranges are rounded up, into the unit of zeros.
        pages = -(-(max_tokens + KEY_SPLIT) // pool.page_size)
        self.units = torch.full((pool.num_slabs, max_num_seqs, pages), NOTHING, dtype=torch.int32, device=pool.memory.device)
        self._written: dict[int, list[tuple[int, int]]] = {}  # slot -> per group (pages written, pages dropped)
        self._owner: dict[int, tuple[Sequence, int]] = {}  # slot -> whose pages, and after how many preemptions

    def sync(self, sequence: Sequence) -> None:
        """Bring a sequence's rows up to date: only pages gained or dropped since the last call are touched."""
        slot, owner = sequence.slot, (sequence, sequence.output.preemptions)
        if self._owner.get(slot) != owner:
            self._owner[slot] = owner
            self._written[slot] = [(0, 0)] * len(self.pool.groups)
            self.units[:, slot].fill_(NOTHING)
        state = self._written[slot]
        for index, own in enumerate(sequence.held):
            written, dropped = state[index]
            group = self.pool.groups[index]
            first, last = group.first_slab, group.first_slab + group.slabs
            if own.first_held > dropped:
                self.units[first:last, slot, dropped : own.first_held] = NOTHING
            start = max(written, own.first_held)
            if len(own.pages) > start:
                rows = [page.units for page in own.pages[start:] if page is not None]
                self.units[first:last, slot, start : len(own.pages)] = torch.tensor(rows, dtype=torch.int32).T
            state[index] = (len(own.pages), own.first_held)


class Rectangle:
    """S sequences of R rows each: positions [S, R] on the host and device, and which rows are real.

    ends[s] is one past the last position that holds a key once this pass has written its rows. reach [S * R]: the last position
    that a row inside an image sees where layers see whole images, -1 for other rows.
    """

    def __init__(
        self,
        tables: PageTables,
        slots: list[int],
        positions: list[list[int]],
        real: list[list[bool]],
        reach: Tensor | None = None,
    ) -> None:
        device = tables.units.device
        self.tables, self.page_size = tables, tables.pool.page_size
        self.num_sequences, self.rows = len(slots), len(positions[0])
        self.slots = torch.tensor(slots, device=device)
        self.positions = torch.tensor(positions, device=device)
        self.real = torch.tensor(real, device=device)
        self.lowest = [min(p) for p in positions]
        self.ends_list = [
            1 + max(p for p, ok in zip(ps, oks, strict=True) if ok) for ps, oks in zip(positions, real, strict=True)
        ]
        self.ends = torch.tensor(self.ends_list, device=device)
        self.reach = None if reach is None else torch.maximum(self.positions, reach.view_as(self.positions))
        self.offsets = (self.positions % self.page_size).flatten()
        self._units: dict[int, Tensor] = {}
        self._gathers: dict[int, Tensor] = {}
        self._views: dict[tuple[int | None, bool, int, bool], tuple[Tensor, int, int]] = {}

    @property
    def flat_positions(self) -> Tensor:
        return self.positions.flatten()

    def write(self, layer: LayerPages, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [S * R, kv heads, D]; rows that are not real go to the trash unit."""
        slab = layer.slab
        units = self._units.get(slab)
        if units is None:
            rows = self.tables.units[slab][self.slots[:, None], self.positions // self.page_size]
            units = self._units[slab] = torch.where(self.real, rows, TRASH).flatten().long()
        write_pages(layer.keys, units, self.offsets, keys)
        write_pages(layer.values, units, self.offsets, values)

    def attend(
        self,
        layer: LayerPages,
        shape: KVShape,
        q: Tensor,
        causal: bool,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        sees_whole_images: bool = False,
    ) -> Tensor:
        """Attention of q [S * R, heads, D] over a layer's pages -> [S * R, heads, Dv]; sinks [heads]."""
        group = q.shape[1] // shape.kv_heads
        mask, first_page, num_keys = self._view(shape.window, causal, group, q.dtype, sees_whole_images)
        slab = layer.slab
        table = self._gathers.get(slab)
        if table is None:
            pages = num_keys // self.page_size
            table = self.tables.units[slab][self.slots, first_page : first_page + pages].contiguous()
            self._gathers[slab] = table
        k, v = gather_pages(layer.keys, table), gather_pages(layer.values, table)
        out = attention(q.view(self.num_sequences, self.rows, *q.shape[1:]), k, v, mask, scale, softcap, sinks)
        return out.flatten(0, 1)

    def _view(self, window: int | None, causal: bool, group: int, dtype: torch.dtype, whole: bool) -> tuple[Tensor, int, int]:
        """The mask of one (window, causal) and the range of keys it covers: the union of what the sequences see."""
        reach = self.reach if whole else None
        key = window, causal, group, reach is not None
        found = self._views.get(key)
        if found is None:
            first = 0 if window is None else max(0, min(self.lowest) - window + 1) // KEY_SPLIT * KEY_SPLIT
            num_keys = -(-(max(self.ends_list) - first) // KEY_PAD) * KEY_PAD
            mask = score_mask(self.positions, first, num_keys, self.ends, window, causal, group, dtype, reach)
            found = self._views[key] = (mask, first // self.page_size, num_keys)
        return found
