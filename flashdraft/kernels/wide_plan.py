"""How a product with many rows is divided over a GPU: item, queue, grid. Sizes as in cuda/wide_linear.cuh."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import ceil, gcd
from typing import NamedTuple

from flashdraft.errors import ConfigError
from flashdraft.kernels.narrow_plan import STEP, WARPS, Cut, Device, cut

SUMS = 160  # float32 sums of a lane, all levels; with fragments and addresses the 255 registers are full
SUMS_OF_TWO = 48  # where two blocks share a multiprocessor
FEWEST_STAGES, MOST_STAGES = 3, 8
PARTIALS, COUNTERS = 1 << 22, 1 << 14  # the workspace that narrow.gpu makes at once


class Tile(NamedTuple):
    """WM, MT, NT and WK of the kernel: `groups` of `high` by 8 / groups / high warps with 16 * `deep` weight rows and
    8 * `wide` rows of x each."""

    high: int
    deep: int
    wide: int
    groups: int = 1

    @property
    def weight_rows(self) -> int:
        return 16 * self.high * self.deep

    @property
    def rows(self) -> int:
        return WARPS // self.groups // self.high * 8 * self.wide

    def sums(self, fold: int) -> int:
        """float32 sums of a lane: of a part (FOLD 2: of its halves), and of the parts before."""
        return 4 * self.deep * self.wide * (fold * self.groups + 1) // self.groups


@dataclass(frozen=True)
class WideOptions:
    """For measurements; the defaults are meant to be the fastest.

    pdl: as in NarrowOptions. tile, stages: of a block's item and queue, None and 0: what `plan` holds best. parallel: slices of
    K in different blocks.
    """

    pdl: bool = True
    tile: Tile | None = None
    stages: int = 0
    parallel: bool | None = None


FASTEST = WideOptions()


@dataclass(frozen=True)
class WidePlan:
    """`pieces` of z, each an item or, `parallel`, one for each slice of K; `blocks` work through them."""

    cut: Cut
    tile: Tile
    stages: int
    resident: int
    parallel: bool
    pieces: int
    blocks: int
    shared: int

    @property
    def workspace(self) -> tuple[int, int, int]:
        """Partial sums, candidates, counters of a parallel plan."""
        return self.pieces * self.cut.slices * self.tile.weight_rows * self.tile.rows, 0, self.pieces


def plan(rows: int, outputs: int, k: int, gated: bool, device: Device, options: WideOptions = FASTEST) -> WidePlan:
    """The division that takes the least time, by `_clocks`, for the next power of 2: few kernels serve all numbers of rows.

    Bits do not depend on it.
    """
    most = max(32, 1 << (rows - 1).bit_length())
    best = _best(most, outputs, k, gated, device, options)
    pieces = best.pieces // ceil(most / best.tile.rows) * ceil(rows / best.tile.rows)
    items = pieces * (best.cut.slices if best.parallel else 1)
    return replace(best, pieces=pieces, blocks=min(items, best.resident * device.multiprocessors))


@cache
def _best(rows: int, outputs: int, k: int, gated: bool, device: Device, options: WideOptions) -> WidePlan:
    parts = cut(outputs, k, gated, device)
    tiles = [options.tile] if options.tile else list(_tiles(parts, rows))
    parallels = (False, True) if options.parallel is None else (options.parallel,)
    found = [
        built
        for tile in tiles
        for parallel in parallels
        if (built := _build(rows, k, parts, tile, parallel and parts.slices > 1, device, options.stages)) is not None
    ]
    if not found:
        raise ConfigError(
            f"A queue of steps does not fit in {device.block_shared} bytes of shared memory: choose fewer or a smaller tile."
        )
    return min(found, key=lambda built: _clocks(built, k, device))


def _tiles(parts: Cut, rows: int) -> Iterator[Tile]:
    """Those whose sums fit in registers and that are not twice as wide as the rows."""
    for high, deep, wide, groups in product((2, 4, 8), range(1, 7), (1, 2, 4, 8), (1, 2)):
        tile = Tile(high, deep, wide, groups)
        fits = wide % groups == 0 and high * groups <= WARPS and tile.weight_rows <= 192 and tile.rows in (32, 64, 128)
        if fits and tile.rows < max(2 * rows, 64) and tile.sums(parts.fold) <= SUMS:
            yield tile


def _build(rows: int, k: int, parts: Cut, tile: Tile, parallel: bool, device: Device, stages: int) -> WidePlan | None:
    last = k // STEP - (parts.slices - 1) * parts.slice_steps
    period = WARPS // gcd(WARPS, parts.slice_steps, last)
    if tile.groups > 1 and period > 1:
        return None
    groups = period * ceil(ceil(parts.tiles / period) / (tile.weight_rows * parts.fold // 16))
    pieces = groups * ceil(rows / tile.rows)
    items = pieces * (parts.slices if parallel else 1)
    built = WidePlan(parts, tile, 0, 1, parallel, pieces, 0, 0)
    if parallel and (built.workspace[0] > PARTIALS or pieces > COUNTERS):
        return None

    def shared(stages: int) -> int:
        results = 4 * tile.weight_rows * tile.rows  # what groups exchange, and sums of slices
        kept = (tile.groups > 1) + (parts.slices > 1 and not parallel)
        queue = stages * tile.groups * 2 * STEP * (tile.weight_rows + tile.rows)
        return queue + WARPS * 8 * tile.wide // tile.groups * 20 * 4 + 128 + kept * results

    half = device.total_shared // 2 - 1024  # the driver takes 1 KB of every block
    two = tile.sums(parts.fold) <= SUMS_OF_TWO and shared(stages or FEWEST_STAGES) <= half
    resident = 2 if two and items > device.multiprocessors else 1
    room = half if resident == 2 else device.block_shared
    stages = stages or max((s for s in range(FEWEST_STAGES, MOST_STAGES + 1) if shared(s) <= room), default=FEWEST_STAGES)
    if shared(stages) > room:
        return None
    blocks = min(items, resident * device.multiprocessors)
    return WidePlan(parts, tile, stages, resident, parallel, pieces, blocks, shared(stages))


def _clocks(built: WidePlan, k: int, device: Device) -> float:
    """An estimate of the busiest multiprocessor's time, from an H200's rates.

    A step takes as long as the slowest of shared memory (128 bytes a clock, read by each warp and written once), tensor cores
    (1,280 products a clock by mma.sync) and L2 (55 bytes a clock for one multiprocessor, 30 for each of all at once).
    """
    tile = built.tile
    items = built.pieces * (built.cut.slices if built.parallel else 1)
    busy = min(items, device.multiprocessors)
    size, results = tile.weight_rows + tile.rows, tile.weight_rows * tile.rows
    shared = WARPS // tile.groups * (16 * tile.deep + 8 * tile.wide) + size
    tensor = results * STEP / 1280
    l2 = 2 * STEP * size / min(55, 30 * device.multiprocessors / busy)
    steps = k / STEP / (built.cut.slices if built.parallel else 1)
    # A barrier, and products that wait for the first fragments; what groups exchange at the end of a part.
    overhead = (60 if built.resident == 2 else 120) / tile.groups
    if tile.groups > 1:
        overhead += results / 32 / max(1, built.cut.slice_steps // WARPS)
    store = 0.15 * results * (2 if built.parallel else 1)
    ending = 4000 if built.parallel else 1500
    return ceil(items / device.multiprocessors) * (steps * (max(shared, tensor, l2) + overhead) + store) + ending
