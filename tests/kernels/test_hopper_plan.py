"""Divisions of products over a Hopper GPU fit it, and are of the kind that measurements ask for."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import ceil

import pytest
from kernels.products import GEMMA4_E4B, H200

from flashdraft.errors import ConfigError
from flashdraft.kernels.hopper_plan import (
    CHUNK,
    GROUP_THREADS,
    PRODUCER_REGISTERS,
    REGISTERS,
    SPLITS,
    HopperOptions,
    capacity,
    plan,
)
from flashdraft.kernels.narrow_plan import STEP, Device

H100_PCIE = Device((9, 0), 114, 232448, 233472)
SHAPES = GEMMA4_E4B | {"one output": (1, 64, False), "Llama 70B's down": (8192, 28672, False), "a gated one": (1536, 576, True)}
ROWS = (1, 17, 33, 64, 65, 128, 129, 192, 200, 256)


@pytest.mark.parametrize("device", [H200, H100_PCIE], ids=["H200", "H100 PCIe"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_plans_fit_the_device(shape, device):
    outputs, k, gated = shape
    for rows in ROWS:
        chosen = plan(rows, *shape, device)
        assert rows <= chosen.capacity < rows + CHUNK
        assert chosen.shared + 1024 <= device.total_shared
        assert chosen.shared <= device.block_shared
        assert chosen.width % (16 if gated else 8) == 0
        assert 8 <= chosen.width <= 256
        assert chosen.tiles * chosen.width >= outputs * (2 if gated else 1)
        assert chosen.split <= k // STEP
        assert chosen.split in SPLITS
        assert chosen.blocks % chosen.split == 0


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_registers_of_all_warpgroups_are_those_of_the_launch(shape):
    for rows in ROWS:
        chosen = plan(rows, *shape, H200)
        own = chosen.groups * chosen.consumer_registers + PRODUCER_REGISTERS
        assert not chosen.consumer_registers or own <= (chosen.groups + 1) * chosen.launch_registers
        assert chosen.threads * chosen.launch_registers <= REGISTERS
        most = chosen.consumer_registers or chosen.launch_registers
        assert chosen.registers <= most <= 248


def test_all_tiles_are_taken_where_k_is_divided_and_as_many_as_run_at_once_where_it_is_not():
    assert plan(128, 262144, 2560, False, H200, HopperOptions(width=128, split=2)).blocks == 2 * ceil(262144 / 128)
    assert plan(128, 262144, 2560, False, H200, HopperOptions(width=128, split=1)).blocks == 132


def test_k_is_divided_alike_for_all_numbers_of_rows():
    for shape in SHAPES.values():
        assert len({plan(rows, *shape, H200).split for rows in range(1, 257)}) == 1


def test_four_kernels_serve_all_numbers_of_rows():
    for shape in SHAPES.values():
        assert len({plan(rows, *shape, H200) for rows in range(1, 257)}) == 4


def test_a_small_product_uses_most_multiprocessors_by_dividing_k():
    for name in ("down", "q, k and v", "output, sliding"):
        chosen = plan(128, *GEMMA4_E4B[name], H200)
        assert chosen.split > 1
        assert chosen.blocks >= 100


# Width and split that were fastest of up to 23 on an H200, or within 2 % of it.
MEASURED = {
    (128, "gate and up"): {(160, 1)},
    (128, "down"): {(88, 4), (96, 4)},
    (128, "q, k and v"): {(48, 2), (56, 2)},
    (128, "output, sliding"): {(40, 2), (48, 2)},
    (128, "per-layer gate"): {(24, 8), (32, 8)},
    (64, "gate and up"): {(160, 1), (80, 1)},
    (64, "down"): {(88, 4)},
    (256, "gate and up"): {(160, 1)},
    (256, "down"): {(88, 4)},
}


@pytest.mark.parametrize(("rows", "name"), MEASURED)
def test_what_was_fastest_is_chosen(rows, name):
    chosen = plan(rows, *GEMMA4_E4B[name], H200)
    assert (chosen.width, chosen.split) in MEASURED[rows, name]


def test_clusters_of_more_than_two_leave_some_multiprocessors_idle():
    assert [capacity(split, H200) for split in SPLITS] == [132, 132, 120, 120]


def test_options_are_taken():
    for width, split, stages in itertools.product((32, 48), (1, 4), (3, 4)):
        chosen = plan(100, 2560, 2560, False, H200, HopperOptions(width, split, stages))
        assert (chosen.width, chosen.split, chosen.stages) == (width, split, stages)


def test_a_division_that_does_not_fit_is_refused():
    for options in (HopperOptions(width=256, stages=12), HopperOptions(width=256), HopperOptions(stages=1)):
        with pytest.raises(ConfigError, match="choose"):
            plan(256, 2560, 2560, False, H200, options)


def test_the_sums_of_parts_lie_where_the_ring_was_without_meeting_in_banks():
    for width in range(8, 257, 8):
        chosen = replace(plan(64, 2560, 2560, False, H200, HopperOptions(width=width, split=2)), width=width)
        stride = chosen.sums_bytes // chosen.capacity // 4
        assert stride % 4 == 0, "16 bytes are read at a time"
        # A half of a warp writes 8 bytes a lane at a time: rows lane / 4, columns 2 (lane % 4).
        banks = [(lane // 4 * stride + 2 * (lane % 4) + i) % 32 for lane in range(16) for i in range(2)]
        assert len({*banks}) == GROUP_THREADS // 4
