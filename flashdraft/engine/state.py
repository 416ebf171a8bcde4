"""What a GPU keeps between steps, and what the host tells it before each: everything a captured graph reads or writes.

Shape letters: S slots (sequences that may run at once), B block size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flashdraft.engine.cache import PagePool
from flashdraft.engine.sampling import SampleTable, sample_line
from flashdraft.engine.scheduler import PrefillChunk, Sequence, VerifyRow
from flashdraft.kernels.step import TILE_ROWS

RING = 4  # host buffers in turn, so that filling one never waits for the copy of the one before
MOST_PREFILLS = 16


@dataclass(frozen=True)
class DeviceLimits:
    """Sizes that the tensors of a step are made for."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_proposals: int
    enforce_eager: bool
    deterministic: bool
    proposal_noise: float = 0.0

    @property
    def max_prefills(self) -> int:
        """Prompts that a step may compute parts of: the head takes the last rows of all of them."""
        return min(MOST_PREFILLS, self.max_num_seqs)


class SlotState:
    """Every slot's tokens so far, as far as a step needs them. Row S belongs to nobody: rows of padding use it."""

    def __init__(self, max_num_seqs: int, block_size: int, device: torch.device) -> None:
        rows, whole = max_num_seqs + 1, torch.long
        self.length = torch.ones(rows, dtype=whole, device=device)  # tokens known; the anchor is at position length - 1
        self.prompt = torch.zeros(rows, dtype=whole, device=device)  # length of the prompt
        self.anchor = torch.zeros(rows, dtype=whole, device=device)
        self.proposals = torch.zeros((rows, block_size - 1), dtype=whole, device=device)
        self.sampling = torch.zeros((rows, SampleTable.COLUMNS), dtype=torch.float64, device=device)

    def place(self, sequence: Sequence) -> None:
        """A sequence takes its slot: all its tokens are known to the host, and nothing of it is under way."""
        request, tokens = sequence.request, sequence.tokens
        device, slot = self.length.device, sequence.slot
        integers = torch.tensor([len(tokens), len(request.prompt), tokens[-1]])
        line = torch.tensor(sample_line(request.params, request.seed or 0, request.choice), dtype=torch.float64)
        if device.type == "cuda":
            integers, line = integers.pin_memory(), line.pin_memory()
        integers = integers.to(device, non_blocking=True)
        self.length[slot], self.prompt[slot], self.anchor[slot] = integers.unbind()
        self.sampling[slot] = line.to(device, non_blocking=True)

    def advance(self, rows: SequenceOf[tuple[int, int, int]]) -> None:
        """Slots whose (slot, length, anchor) the host has decided."""
        if not rows:
            return
        slots, lengths, anchors = torch.tensor(rows, device=self.length.device).T
        self.length[slots], self.anchor[slots] = lengths, anchors


class Plan:
    """What a step is to do, int32, in one device buffer of named parts that one copy fills."""

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        self._places: dict[str, slice] = {}
        total = 0
        for name, size in sizes.items():
            self._places[name] = slice(total, total + size)
            total += size
        self.buffer = torch.full((total,), -1, dtype=torch.int32, device=device)
        self._cuda = device.type == "cuda"
        self._host = [torch.empty(total, dtype=torch.int32, pin_memory=self._cuda) for _ in range(RING)]
        self._copied: list[torch.cuda.Event | None] = [None] * RING
        self._turn = 0

    def __getitem__(self, name: str) -> Tensor:
        return self.buffer[self._places[name]]

    def upload(self, values: Mapping[str, Iterable[int]]) -> None:
        """Fill the parts from their beginnings; everything else is -1."""
        turn = self._turn = (self._turn + 1) % RING
        if (event := self._copied[turn]) is not None:
            event.synchronize()
        host = self._host[turn]
        array = host.numpy()
        array.fill(-1)
        for name, numbers in values.items():
            numbers = np.fromiter(numbers, dtype=np.int32)
            place = self._places[name]
            array[place.start : place.start + len(numbers)] = numbers
        self.buffer.copy_(host, non_blocking=True)
        if self._cuda:
            event = self._copied[turn] = torch.cuda.Event()
            event.record()


def asked_rows(rows: SequenceOf[VerifyRow]) -> dict[str, list[int]]:
    """The parts of a plan that say which rows to verify, and who drafts."""
    starts = itertools.accumulate((row.width + 1 for row in rows[:-1]), initial=0)
    return dict(
        row_slot=[row.sequence.slot for row in rows for _ in range(row.width + 1)],
        row_offset=[i for row in rows for i in range(row.width + 1)],
        seq_slot=[row.sequence.slot for row in rows],
        seq_start=list(starts) if rows else [],
        seq_rows=[row.width + 1 for row in rows],
        draft_slot=[row.sequence.slot for row in rows if row.width],
    )


def padded_rows(chunk: PrefillChunk) -> int:
    """Rows that a chunk takes: tiles hold rows of one sequence."""
    return -(-chunk.count // TILE_ROWS) * TILE_ROWS


def asked_chunks(chunks: SequenceOf[PrefillChunk]) -> dict[str, list[int]]:
    """The parts of a plan that say which positions of which prompts to compute, and behind which rows prompts end."""
    asked: dict[str, list[int]] = {
        name: [] for name in ("chunk_slot", "chunk_first", "chunk_rows", "chunk_end", "chunk_ids", "prompt_slot", "prompt_row")
    }
    for chunk in chunks:
        slot, end, row = chunk.sequence.slot, chunk.start + chunk.count, len(asked["chunk_ids"])
        for first in range(chunk.start, end, TILE_ROWS):
            asked["chunk_slot"].append(slot)
            asked["chunk_first"].append(first)
            asked["chunk_rows"].append(min(TILE_ROWS, end - first))
            asked["chunk_end"].append(end)
        asked["chunk_ids"] += chunk.sequence.tokens[chunk.start : end] + [-1] * (padded_rows(chunk) - chunk.count)
        if chunk.last:
            asked["prompt_slot"].append(slot)
            asked["prompt_row"].append(row + chunk.count - 1)
    return asked


@dataclass
class _Written:
    """What a slot of the tables holds: whose pages, after how many preemptions, how many in each group."""

    sequence: Sequence
    epoch: int
    pages: list[int]
    room: int = 0  # of the sequence, when they were written


class DeviceTables:
    """Unit numbers of every running sequence [slabs, S, pages] on the device. Entries of no page may hold anything."""

    def __init__(self, pool: PagePool, max_num_seqs: int, max_tokens: int) -> None:
        self.pool = pool
        pages = -(-max_tokens // pool.page_size)
        self.limit = pages * pool.page_size  # positions that a sequence may have
        self.units = torch.zeros((pool.num_slabs, max_num_seqs, pages), dtype=torch.int32, device=pool.memory.device)
        self._written: dict[int, _Written] = {}  # by slot

    def forget(self) -> None:
        """Take every sequence for a new one in its slot."""
        self._written.clear()

    def sync(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Write the pages gained since the last call, in one copy; returns the sequences that are new in their slots."""
        places: list[int] = []
        units: list[int] = []
        new = []
        _, slots, pages = self.units.shape
        for sequence in sequences:
            slot, epoch = sequence.slot, sequence.output.preemptions
            owner = self._written.get(slot)
            if owner is None or owner.sequence is not sequence or owner.epoch != epoch:
                owner = self._written[slot] = _Written(sequence, epoch, [0] * len(self.pool.groups))
                new.append(sequence)
            if 0 < owner.room == sequence.room:
                continue  # it has gained no page, as in most steps
            owner.room = sequence.room
            for group, own in zip(self.pool.groups, sequence.held, strict=True):
                written = owner.pages[group.index]
                for index in range(max(written, own.first_held), len(own.pages)):
                    page = own.pages[index]
                    assert page is not None
                    for slab, unit in enumerate(page.units, group.first_slab):
                        places.append((slab * slots + slot) * pages + index)
                        units.append(unit)
                owner.pages[group.index] = len(own.pages)
        if places:
            pair = torch.tensor([places, units])
            if self.units.is_cuda:
                pair = pair.pin_memory()
            where, what = pair.to(self.units.device, non_blocking=True)
            self.units.view(-1).index_copy_(0, where, what.int())
        return new
