"""How a product with few rows is divided over a GPU: tiles, slices of K, queue, grid. Sizes as in cuda/narrow_linear.cuh."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil

from flashdraft.errors import ConfigError

MAX_ROWS = 64  # a launch takes 8, 16, 32 or 64 rows, what shared memory holds; more rows than that take several
STEP, WARPS = 64, 8  # as in narrow_linear.cuh
SLICES_COST = 48 << 10  # bytes that a multiprocessor reads in 1.5 us


@dataclass(frozen=True)
class Storage:
    """How a weight lies in memory. row_bytes: of a step of 64 inputs; folds: tiles are of 16 // fold rows; shortest, deepest:
    steps in a warp's queue."""

    row_bytes: int
    folds: tuple[int, ...]
    shortest: int
    deepest: int


DENSE = Storage(128, (1, 2), 3, 8)  # bf16 or fp16; 3 steps: 48 KB a multiprocessor
NVFP4 = Storage(36, (1,), 5, 14)  # as nvfp4.repacked lays it out; 5 steps: 46 KB a multiprocessor


@dataclass(frozen=True)
class NarrowOptions:
    """For measurements; the defaults are meant to be the fastest.

    pdl: programmatic dependent launch where there is one (compute capability 9.0): weights are read while the kernel in front
    still runs, so that one must not write them. depth: steps in a warp's queue, 0: what fits.
    """

    pdl: bool = True
    depth: int = 0


FASTEST = NarrowOptions()


@dataclass(frozen=True)
class Device:
    """What a plan depends on; memory in bytes, of a block (opt-in maximum) and of a multiprocessor."""

    capability: tuple[int, int]
    multiprocessors: int
    block_shared: int
    total_shared: int


@dataclass(frozen=True)
class Cut:
    """How a weight [N, K] is divided: `tiles` of `16 // fold` rows, K in `slices` of `slice_steps` * 64."""

    fold: int
    tiles: int
    slices: int
    slice_steps: int


@dataclass(frozen=True)
class Plan:
    """A launch for up to 8 * `tiles_of_rows` rows; `resident` such blocks fit on a multiprocessor, `shared` bytes each."""

    cut: Cut
    tiles_of_rows: int
    depth: int
    resident: int
    grid: tuple[int, int]
    shared: int


@cache
def cut(outputs: int, k: int, gated: bool, device: Device, storage: Storage = DENSE) -> Cut:
    """The division that reads the fewest bytes on the busiest multiprocessor, where several slices cost as much as 48 KB.

    No slice is longer than what shared memory holds of 16 rows and, for short kernels, lets two fit beside each other. Tiles of
    8 rows where 16 would leave multiprocessors idle: 3,072 outputs on 132 of them are 1.45 tiles of 16 each, hence two, but
    2.9 of 8.
    """
    weight_rows, steps = 2 * outputs if gated else outputs, k // STEP
    limits = (3584, 2560, 1280, 640, 320) if _is_short(weight_rows, device) else (4096, 2560, 1280, 640, 320)
    limit = next(s for s in limits if _shared(storage, 1, s // STEP, 2, storage.shortest) <= device.block_shared)
    fewest = ceil(steps / (limit // STEP))
    choices = []
    for wanted in range(fewest, fewest + 3):
        slice_steps = ceil(steps / wanted)
        slices = ceil(steps / slice_steps)
        parallel = max(1, device.multiprocessors // slices)
        rows = {fold: ceil(ceil(weight_rows * fold / 16) / parallel) * (16 // fold) for fold in storage.folds}
        fold = 1 if rows[1] <= 1.05 * min(rows.values()) else 2
        read = storage.row_bytes * slice_steps * rows[fold] + (SLICES_COST if slices > 1 else 0)
        height = 16 // fold // (2 if gated else 1)
        choices.append((read, Cut(fold, ceil(outputs / height), slices, slice_steps)))
    return min(choices, key=lambda choice: choice[0])[1]


@cache
def plan(
    rows: int,
    outputs: int,
    k: int,
    gated: bool,
    device: Device,
    options: NarrowOptions = FASTEST,
    storage: Storage = DENSE,
) -> Plan:
    """For as many of the rows as fit in one launch.

    Two blocks fit on a multiprocessor where that leaves 64 KB of queue, 48 for a short kernel: while one of them sums, stores
    or waits, the other reads. On an H200 the products of a Gemma 4 E4B layer then take 62 us, with one block each 65.
    """
    parts = cut(outputs, k, gated, device, storage)
    for tiles_of_rows in (8, 4, 2, 1):
        if _shared(storage, parts.fold, parts.slice_steps, tiles_of_rows, storage.shortest * parts.fold) <= device.block_shared:
            break
    tiles_of_rows = min(tiles_of_rows, 1 << (ceil(rows / 8) - 1).bit_length())

    def shared(depth: int) -> int:
        return _shared(storage, parts.fold, parts.slice_steps, tiles_of_rows, depth)

    half = device.total_shared // 2 - 1024  # the driver takes 1 KB of every block
    shortest = storage.shortest + (not _is_short(2 * outputs if gated else outputs, device))
    resident = 2 if shared(options.depth or shortest * parts.fold) <= half else 1
    room = half if resident == 2 else device.block_shared
    grid = min(parts.tiles, max(1, device.multiprocessors * resident // parts.slices)), parts.slices
    most = min(storage.deepest * parts.fold, ceil(ceil(parts.tiles / grid[0]) * parts.slice_steps / WARPS))
    depth = options.depth or max(d for d in range(1, most + 1) if shared(d) <= room)
    if shared(depth) > device.block_shared:
        raise ConfigError(
            f"A queue of {depth} steps does not fit in {device.block_shared} bytes of shared memory: choose fewer."
        )
    return Plan(parts, tiles_of_rows, depth, resident, grid, shared(depth))


def _is_short(weight_rows: int, device: Device) -> bool:
    """16,896 rows of 2,560 take 20 us on an H200."""
    return weight_rows < 128 * device.multiprocessors


def _shared(storage: Storage, fold: int, slice_steps: int, tiles_of_rows: int, depth: int) -> int:
    """Bytes: sums of two sets of patches, rows of x, queue."""
    patches = 2 * WARPS * 8 * (16 // fold) * 4
    return patches + 8 * tiles_of_rows * (2 * STEP * slice_steps + 64) + depth * WARPS * storage.row_bytes * 16 // fold
