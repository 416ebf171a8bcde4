"""How a product is divided over a Hopper GPU. Sizes as in cuda/hopper_linear.cuh."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import ceil

from flashdraft.errors import ConfigError
from flashdraft.kernels.narrow_plan import STEP, Device

MAX_ROWS = 256  # of a launch
CHUNK, GROUP_THREADS, LINE = 64, 128, 2 * STEP
FEWEST_STAGES, MOST_STAGES = 3, 12
REGISTERS, PRODUCER_REGISTERS = 65536, 40
OTHER_REGISTERS = 40  # of a thread that holds sums: addresses and the like
# Bytes of a multiprocessor left to a small kernel, such as a norm: only beside it can a block ask for its weights early.
LEFT_SHARED = 6 << 10
SPLITS = (1, 2, 4, 8)
# Warpgroups, and chunks of 64 rows of x for each, by the number of chunks.
GROUPS = {1: (1, 1), 2: (2, 1), 3: (3, 1), 4: (2, 2)}


@dataclass(frozen=True)
class HopperOptions:
    """For measurements; the defaults are meant to be the fastest, and 0 is what `plan` holds best.

    width: weight rows of a tile, a multiple of 8, of a gated weight of 16. split: blocks of a cluster that divide K. stages:
    steps in a block's ring. pdl: as in NarrowOptions.
    """

    width: int = 0
    split: int = 0
    stages: int = 0
    pdl: bool = True


FASTEST = HopperOptions()


@dataclass(frozen=True)
class HopperPlan:
    """Up to 64 * `groups` * `deep` rows of x, by blocks of `groups` + 1 warpgroups, one on a multiprocessor.

    `shared`: bytes of a block. The rest is as in HopperOptions.
    """

    groups: int
    deep: int
    width: int
    split: int
    stages: int
    tiles: int
    blocks: int

    @property
    def capacity(self) -> int:
        return CHUNK * self.groups * self.deep

    @property
    def threads(self) -> int:
        return (self.groups + 1) * GROUP_THREADS

    @property
    def stage_bytes(self) -> int:
        return LINE * (self.capacity + self.width)

    @property
    def sums_bytes(self) -> int:
        """Partial sums, which lie where the ring was."""
        return 4 * self.capacity * (self.width + (8 if self.width // 8 % 2 == 0 else 0)) if self.split > 1 else 0

    @property
    def shared(self) -> int:
        return max(self.stages * self.stage_bytes, self.sums_bytes) + 16 * self.stages

    @property
    def launch_registers(self) -> int:
        """Of each thread, at most."""
        return min(REGISTERS // self.threads // 8 * 8, 248)

    @property
    def registers(self) -> int:
        """That a thread with sums needs, about: also for what becomes of them."""
        return self.deep * self.width // 2 + self.width // 8 + OTHER_REGISTERS

    @property
    def consumer_registers(self) -> int:
        """Of a thread that holds sums, by setmaxnreg; 0 where those of the launch do."""
        if self.registers <= self.launch_registers:
            return 0
        whole = (self.groups + 1) * self.launch_registers - PRODUCER_REGISTERS
        return min(240, whole // self.groups // 8 * 8)


@cache
def plan(rows: int, outputs: int, k: int, gated: bool, device: Device, options: HopperOptions = FASTEST) -> HopperPlan:
    """The division that takes the least time by `_clocks`. It depends on ceil(rows / 64) alone: four kernels serve all rows.

    K is divided as is best for 128 rows, whatever `rows` is: a row's bits depend on that alone.
    """
    chunks = ceil(rows / CHUNK)
    assert 1 <= chunks <= MAX_ROWS // CHUNK
    split = options.split or _best(2, outputs, k, gated, device, SPLITS, FASTEST).split
    return _best(chunks, outputs, k, gated, device, (split,), options)


@cache
def _best(
    chunks: int, outputs: int, k: int, gated: bool, device: Device, splits: tuple[int, ...], options: HopperOptions
) -> HopperPlan:
    divisions = (d for d in _divisions(chunks, outputs, k, gated, splits, options) if d.sums_bytes + 64 <= device.block_shared)
    fitted: Iterable[HopperPlan] = (f for d in divisions if (f := _with_ring(d, k, device, options)) is not None)
    best = min(fitted, key=lambda d: _clocks(d, outputs, k, gated, device), default=None)
    if best is None:
        raise ConfigError(
            f"No such division of a product fits in {device.block_shared} bytes of shared memory and {REGISTERS} registers: "
            f"choose a smaller tile or fewer stages."
        )
    return best


def _divisions(
    chunks: int, outputs: int, k: int, gated: bool, splits: tuple[int, ...], options: HopperOptions
) -> Iterator[HopperPlan]:
    unit = 16 if gated else 8
    assert options.width % unit == 0
    groups, deep = GROUPS[chunks]
    for width in [options.width] if options.width else range(unit, 257, unit):
        for split in splits:
            tiles = ceil(outputs / (width // (2 if gated else 1)))
            built = HopperPlan(groups, deep, width, split, 0, tiles, 0)
            if built.registers <= (built.consumer_registers or built.launch_registers) and split <= k // STEP:
                yield built


def _with_ring(division: HopperPlan, k: int, device: Device, options: HopperOptions) -> HopperPlan | None:
    """With as many stages as fit or as there are steps, and its grid: all clusters, or what runs at once where K is whole."""
    left = 0 if options.stages else LEFT_SHARED
    room = min(device.block_shared, device.total_shared - left - 1024)  # the driver takes 1 KB
    clusters = division.tiles if division.split > 1 else min(division.tiles, device.multiprocessors)
    steps = ceil(k // STEP / division.split) * ceil(division.tiles / clusters)
    built = replace(division, blocks=clusters * division.split)
    most = min(MOST_STAGES, max(steps, 1))
    candidates = [options.stages] if options.stages else range(most, min(FEWEST_STAGES, most) - 1, -1)
    # A stage is free once the next one is under way: with a single one there would be no next.
    enough = (replace(built, stages=stages) for stages in candidates if stages > 1 or steps == 1)
    return next((b for b in enough if b.shared <= room), None)


def capacity(split: int, device: Device) -> int:
    """Blocks that run at once. A cluster lies within a group of 16 or 18 multiprocessors: of more than 2 blocks, an H200 runs
    clusters on 120 of its 132 at once (cuOccupancyMaxActiveClusters).
    """
    multiprocessors = device.multiprocessors if split <= 2 else device.multiprocessors * 10 // 11
    return max(1, multiprocessors // split) * split


def _clocks(built: HopperPlan, outputs: int, k: int, gated: bool, device: Device) -> float:
    """An estimate of the whole product's time at 1.755 GHz. Its numbers are fitted to 70 timings on one H200, of eight shapes
    and 24 to 256 rows; they are met within 8 % (RMS).
    """
    weight_rows, part = outputs * (2 if gated else 1), k / built.split
    blocks = built.tiles * built.split
    each = ceil(blocks / capacity(built.split, device))  # items of the busiest multiprocessor
    own, whole = 2 * part * built.width, 2 * part * built.capacity
    bandwidth = 2450  # bytes a clock, of memory
    mean = 2 * weight_rows * k / bandwidth
    limits = (
        # Others' bandwidth a block that has more to read than the mean gets only in part.
        0.47 * mean + 0.53 * max(mean, each * own * device.multiprocessors / bandwidth),
        blocks * (own + whole) / (110 * device.multiprocessors),  # L2
        # Tensor cores, or shared memory, which wgmma reads both from: 16 inputs and 64 rows of x at a time.
        1.07 * each * built.capacity / 64 * part / 16 * max(built.width / 2, 16 + built.width / 4),
        2 * weight_rows * k / (57 * min(blocks, device.multiprocessors)),  # bytes under way over the time they take
        302 * each * ceil(part / STEP),  # waits
    )
    result = built.capacity * built.width
    ending = result / 45.0 if built.split == 1 else 4 * result * (built.split - 1) / built.split / 10.4 + result / 28 + 535
    # While one block or tile ends, the next is read. 3,500 clocks: from the end of the kernel before to the first product.
    return sum(x**2.88 for x in limits) ** (1 / 2.88) + each * ending * (0.6 if each > 1 else 1) + 3500
