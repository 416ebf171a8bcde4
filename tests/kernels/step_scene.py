"""State and plans for tests of step.py: sequences of several lengths and widths, one behind the longest text, and padding."""

from __future__ import annotations

import torch
from torch import Tensor

SLOTS, LIMIT = 7, 40
GREEDY = [1.0, 0.0, 2**31, 1.0, 1.0, 0.0, 0.0, 0.0]


class SceneState:
    """Random state of SLOTS slots; that of slot 5 has run past LIMIT, and nobody's row has length 1."""

    def __init__(self, block_size: int, device: str) -> None:
        generator = torch.Generator().manual_seed(block_size)
        self.length = torch.randint(1, LIMIT - 2, (SLOTS + 1,), generator=generator).to(device)
        self.length[1], self.length[5], self.length[-1] = LIMIT - 1, LIMIT + 3, 1
        self.anchor = torch.randint(0, 50, (SLOTS + 1,), generator=generator).to(device)
        self.proposals = torch.randint(0, 4, (SLOTS + 1, block_size - 1), generator=generator).to(device)
        self.prompt = (torch.rand(SLOTS + 1, generator=generator).to(device) * self.length).long()
        line = torch.tensor([0.7, torch.inf, 2**31, 0.95, 0, 2**32 - 1, 12345678, 3], dtype=torch.float64)
        lines = torch.where(
            torch.rand(SLOTS + 1, 1, generator=generator) < 0.5, line, torch.tensor(GREEDY, dtype=torch.float64)
        )
        self.sampling = lines.to(device)

    def parts(self) -> list[Tensor]:
        """What belongs to somebody."""
        return [x[:-1].clone() for x in (self.length, self.anchor, self.proposals)]


def numbers(values: list[int], size: int, device: str) -> Tensor:
    """A part of a plan: int32, -1 where it says nothing."""
    return torch.tensor(values + [-1] * (size - len(values)), dtype=torch.int32, device=device)


def chunk_plan(
    chunks: list[tuple[int, int, int]], tiles: int, device: str
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Tiles of chunks (slot, first position, rows) after one another, and the last row of each; room for one chunk more."""
    cut = [(slot, first + i, min(16, n - i), first + n) for slot, first, n in chunks for i in range(0, n, 16)]
    before = [sum(-(-n // 16) * 16 for _, _, n in chunks[:i]) for i in range(len(chunks))]
    last = [row + n - 1 for row, (_, _, n) in zip(before, chunks, strict=True)]
    slot, first, count, end = (numbers([tile[i] for tile in cut], tiles, device) for i in range(4))
    return (slot, first, count, end), numbers(last, len(chunks) + 1, device)


def verify_plan(
    sequences: list[tuple[int, int]], rows: int, tiles: int, device: str
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """slots, offsets and tiles of (slot, rows) after one another."""
    starts = [sum(n for _, n in sequences[:i]) for i in range(len(sequences))]
    slots = numbers([slot for slot, n in sequences for _ in range(n)], rows, device)
    offsets = numbers([i for _, n in sequences for i in range(n)], rows, device)
    parts = [slot for slot, _ in sequences], starts, [n for _, n in sequences]
    slot, start, count = (numbers(part, tiles, device) for part in parts)
    return slots, offsets, (slot, start, count)
