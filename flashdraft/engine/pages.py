"""What one forward pass needs to know of pages: where rows are stored, which keys are gathered, and who sees what."""

from __future__ import annotations

import itertools

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


class PackedRows:
    """The rows of one pass: those of S sequences one after another, T in all, padded to a multiple of `multiple`.

    Products see these rows alone. Attention takes each sequence's queries as a line of a rectangle [S, R], where R is the most
    rows of a sequence, padded likewise: its bits depend on R below that (1 and 5 rows differed from 8 in some shapes). Rows of
    padding repeat a sequence's first row, and what they store goes to the trash unit.

    positions: of each sequence's rows. reach [T]: the last position that a row inside an image sees where layers see whole
    images, -1 for other rows.
    """

    def __init__(
        self, tables: PageTables, slots: list[int], positions: list[list[int]], multiple: int, reach: Tensor | None = None
    ) -> None:
        device = tables.units.device
        self.tables, self.page_size = tables, tables.pool.page_size
        counts = [len(own) for own in positions]
        self.count, self.num_sequences, self.width = sum(counts), len(slots), rounded_up(max(counts), multiple)
        self.padding = rounded_up(self.count, multiple) - self.count
        first = positions[0][0]
        self.positions = torch.tensor([p for own in positions for p in own] + [first] * self.padding, device=device)
        self.slots = torch.tensor(slots, device=device)
        self._row_slots = torch.tensor(
            [slot for slot, count in zip(slots, counts, strict=True) for _ in range(count)] + [slots[0]] * self.padding,
            device=device,
        )
        self._lowest, self._highest = min(own[0] for own in positions), max(own[-1] for own in positions)
        self._ends = torch.tensor([own[-1] + 1 for own in positions], device=device)
        self._reach = None if reach is None else torch.maximum(self.positions, reach)
        self._offsets = self.positions % self.page_size
        # Which row stands in which cell of the rectangle, and where each row's answer is found; None: cells are rows.
        self._cells: Tensor | None = None
        if len(self.positions) != self.num_sequences * self.width or min(counts[:-1], default=self.width) < self.width:
            starts = list(itertools.accumulate(counts, initial=0))[:-1]
            cells = [s + (i if i < n else 0) for s, n in zip(starts, counts, strict=True) for i in range(self.width)]
            found = [line * self.width + i for line, n in enumerate(counts) for i in range(n)] + [0] * self.padding
            self._cells, self._found = torch.tensor(cells, device=device), torch.tensor(found, device=device)
        self._units: dict[int, Tensor] = {}
        self._gathers: dict[int, Tensor] = {}
        self._views: dict[tuple[int | None, bool, int, bool], tuple[Tensor, int, int]] = {}

    def padded(self, ids: list[int]) -> list[int]:
        """Token ids of the rows, with those of padding."""
        return ids + ids[:1] * self.padding

    def write(self, layer: LayerPages, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [T, kv heads, D]."""
        slab = layer.slab
        units = self._units.get(slab)
        if units is None:
            units = self._units[slab] = self.tables.units[slab][self._row_slots, self.positions // self.page_size].long()
            units[self.count :] = TRASH
        write_pages(layer.keys, units, self._offsets, keys)
        write_pages(layer.values, units, self._offsets, values)

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
        """Attention of q [T, heads, D] over a layer's pages -> [T, heads, Dv]; sinks [heads]."""
        group = q.shape[1] // shape.kv_heads
        mask, first_page, num_keys = self._view(shape.window, causal, group, q.dtype, sees_whole_images)
        slab = layer.slab
        table = self._gathers.get(slab)
        if table is None:
            pages = num_keys // self.page_size
            table = self.tables.units[slab][self.slots, first_page : first_page + pages].contiguous()
            self._gathers[slab] = table
        k, v = gather_pages(layer.keys, table), gather_pages(layer.values, table)
        q = q if self._cells is None else q[self._cells]
        q = q.view(self.num_sequences, self.width, *q.shape[1:])
        out = attention(q, k, v, mask, scale, softcap, sinks).flatten(0, 1)
        return out if self._cells is None else out[self._found]

    def _view(self, window: int | None, causal: bool, group: int, dtype: torch.dtype, whole: bool) -> tuple[Tensor, int, int]:
        """The mask of one (window, causal) and the range of keys it covers: the union of what the sequences see."""
        reach = self._reach if whole else None
        key = window, causal, group, reach is not None
        found = self._views.get(key)
        if found is None:
            first = 0 if window is None else max(0, self._lowest - window + 1) // KEY_SPLIT * KEY_SPLIT
            num_keys = rounded_up(self._highest + 1 - first, KEY_PAD)
            positions, reach = self._rectangle(self.positions), None if reach is None else self._rectangle(reach)
            mask = score_mask(positions, first, num_keys, self._ends, window, causal, group, dtype, reach)
            found = self._views[key] = (mask, first // self.page_size, num_keys)
        return found

    def _rectangle(self, rows: Tensor) -> Tensor:
        """Rows [T] as [S, R]."""
        return (rows if self._cells is None else rows[self._cells]).view(self.num_sequences, self.width)


def rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
