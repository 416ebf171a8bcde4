"""The Hopper product: its layouts in plain Python, its protocol played through, its source compiled; on a GPU its results."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections import Counter
from typing import Any

import pytest
import torch
from kernels.emulation.narrow_emulation import guarded, on_gpu
from kernels.products import H200, assert_nothing_is_spilled, require_nvrtc
from torch import Tensor

from flashdraft.kernels import hopper, narrow, nvrtc
from flashdraft.kernels.fused import fused_linear_reference
from flashdraft.kernels.hopper import hopper_linear
from flashdraft.kernels.hopper_plan import LINE, HopperOptions, HopperPlan, plan

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a GPU of compute capability 9.0")

EPILOGUES: list[dict[str, Any]] = [
    {},
    {"bias": True},
    {"activation": "gelu_tanh", "gated": True},
    {"activation": "silu", "gated": True, "bias": True},
    {"activation": "gelu_tanh", "multiply": True},
    {"activation": "silu"},
]
# One of each kind of kernel: rows, outputs, inputs, gated, options.
KINDS: dict[str, tuple[int, int, int, bool, HopperOptions]] = {
    "plain": (64, 2560, 256, False, HopperOptions(40, 1)),
    "gated": (128, 10240, 2560, True, HopperOptions(160, 1)),
    "K divided": (128, 2560, 10240, False, HopperOptions(88, 4)),
    "K divided by 8": (128, 256, 2560, False, HopperOptions(24, 8)),
    "three warpgroups": (192, 10240, 2560, True, HopperOptions(160, 1)),
    "two chunks": (256, 10240, 2560, True, HopperOptions(160, 1)),
    "two chunks, K divided": (256, 2560, 10240, False, HopperOptions(80, 4)),
    "widest": (128, 262144, 2560, False, HopperOptions(256, 1)),
}


# Reading the layouts


def place(address: int) -> int:
    """Where a byte of a swizzled matrix lies: 16-byte pieces change places within 1,024 bytes."""
    return address ^ (address >> 7 & 7) << 4


def matrix_field(descriptor: int, first: int, bits: int) -> int:
    return descriptor >> first & (1 << bits) - 1


def matrix_at(shared: int) -> int:
    """`matrix_at` of hopper_linear.cuh."""
    return shared >> 4 & 0x3FFF | 1 << 16 | (8 * LINE >> 4) << 32 | 1 << 62


def test_a_descriptor_says_where_tma_has_put_a_matrix():
    start, rows = 5 * 1024, 160
    # TMA puts row by row, 128 bytes each, piece by piece.
    memory = {place(start + LINE * row + 2 * k): (row, k) for row in range(rows) for k in range(64)}
    for k_of_product in range(0, 64, 16):
        descriptor = matrix_at(start) + (2 * k_of_product >> 4)
        assert matrix_field(descriptor, 62, 2) == 1, "128-byte swizzle"
        assert matrix_field(descriptor, 49, 3) == 0, "the pattern starts at a multiple of 1,024 bytes"
        begin, groups_of_8 = matrix_field(descriptor, 0, 14) << 4, matrix_field(descriptor, 32, 14) << 4
        for row, k in itertools.product(range(rows), range(16)):
            assert memory[place(begin + row // 8 * groups_of_8 + row % 8 * LINE + 2 * k)] == (row, k_of_product + k)


def test_four_lanes_exchange_pairs_for_pieces_of_16_bytes():
    # `exchanged`: value [lane][j] is the pair of the j-th 8 outputs that lane holds.
    values = [[(lane, j) for j in range(4)] for lane in range(4)]
    for distance, places in ((1, ((0, 1), (2, 3))), (2, ((0, 2), (1, 3)))):
        before = [[*row] for row in values]
        for lane, (low, high) in itertools.product(range(4), places):
            give = low if lane & distance else high
            partner = lane ^ distance
            values[lane][give] = before[partner][low if partner & distance else high]
    assert values == [[(other, lane) for other in range(4)] for lane in range(4)]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_parts_of_k_and_of_the_rows_they_finish_cover_them_once(kind):
    rows, outputs, k, gated, options = kind
    chosen = plan(rows, outputs, k, gated, H200, options)
    steps = [range(part * (k // 64) // chosen.split, (part + 1) * (k // 64) // chosen.split) for part in range(chosen.split)]
    assert [step for part in steps for step in part] == [*range(k // 64)]
    assert min(map(len, steps)) > 0
    finished = Counter(
        index * chosen.split + part for part in range(chosen.split) for index in range(chosen.capacity // chosen.split)
    )
    assert finished == Counter(range(chosen.capacity))


# The ring, played through


class Barrier:
    def __init__(self, arrivals: int) -> None:
        self.arrivals, self.pending, self.bytes, self.phase = arrivals, arrivals, 0, 0

    def count(self, arrivals: int = 0, more: int = 0) -> None:
        self.pending -= arrivals
        self.bytes += more
        assert self.pending >= 0
        if self.pending == self.bytes == 0:
            self.pending, self.phase = self.arrivals, self.phase ^ 1


@pytest.mark.parametrize(("stages", "steps"), [(1, 1), (2, 4), (2, 7), (3, 11), (4, 3)])
@pytest.mark.parametrize("seed", range(8))
def test_no_stage_of_the_ring_is_overwritten_before_all_have_used_it(stages, steps, seed):
    """A producer and consumers take their turns at random; loads arrive late and in any order."""
    order, consumers, sizes = random.Random(seed), 2, {"weights": 10, "x": 6}
    filled, emptied = [Barrier(1) for _ in range(stages)], [Barrier(consumers) for _ in range(stages)]
    memory = [dict[str, int]() for _ in range(stages)]
    loads: list[tuple[int, str, int]] = []  # stage, what, step

    def ask_for_weights(stage: int, step: int):
        filled[stage].count(1, sum(sizes.values()))
        loads.append((stage, "weights", step))

    def producer():
        ahead = min(stages, steps)
        for step in range(ahead):
            ask_for_weights(step, step)
        yield
        for step in range(steps):
            stage, parity = step % stages, step // stages % 2 ^ 1
            if step >= ahead:
                while emptied[stage].phase == parity:
                    yield
                ask_for_weights(stage, step)
            loads.append((stage, "x", step))
            yield

    def consumer():
        for step in range(steps):
            stage, parity = step % stages, step // stages % 2
            while filled[stage].phase == parity:
                yield
            yield  # wgmma reads later
            assert memory[stage] == dict.fromkeys(sizes, step)
            if step > 0:  # of the step before all products have ended
                emptied[(step - 1) % stages].count(1)
        emptied[(steps - 1) % stages].count(1)

    running = [producer(), *(consumer() for _ in range(consumers))]
    for _ in range(100_000):
        if not running:
            break
        one = order.choice(running)
        if next(one, "ended") == "ended":
            running.remove(one)
        if loads and order.random() < 0.3:
            stage, what, step = loads.pop(order.randrange(len(loads)))
            memory[stage][what] = step
            filled[stage].count(0, -sizes[what])
    assert not running, "all wait for each other"


# What is handed to the driver


class Driver:
    """Stands in for libcuda: keeps what a tensor map is made of."""

    def cuTensorMapEncodeTiled(self, found, element, rank, address, sizes, strides, box, steps, *rest) -> int:
        assert ctypes.addressof(found._obj) % 64 == 0
        self.said = (element, rank, address.value, [*sizes], [*strides], [*box], [*steps], rest)
        return 0


@pytest.fixture
def driver(monkeypatch):
    hopper._map.cache_clear()
    driver = Driver()
    monkeypatch.setattr(nvrtc, "_driver", lambda: driver)
    yield driver
    hopper._map.cache_clear()


def test_the_map_of_a_gated_weight_takes_gate_and_up_together(driver):
    weight = torch.empty(2 * 96, 320, dtype=torch.bfloat16)[:, :256]
    hopper.weight_map(weight, plan(128, 96, 256, True, H200, HopperOptions(48, 1)), True)
    sizes, strides, box = [256, 96, 2], [640, 96 * 640], [64, 24, 2]
    assert driver.said == (9, 3, weight.data_ptr(), sizes, strides, box, [1, 1, 1], (0, 3, 3, 0))


def test_the_map_of_other_weights_has_one_half(driver):
    weight = torch.empty(100, 256, dtype=torch.float16)
    hopper.weight_map(weight, plan(128, 100, 256, False, H200, HopperOptions(40, 1)), False)
    assert driver.said == (6, 3, weight.data_ptr(), [256, 100, 1], [512, 51200], [64, 40, 1], [1, 1, 1], (0, 3, 3, 0))


def test_the_map_of_the_rows_ends_with_the_last(driver):
    x = torch.empty(100, 512, dtype=torch.bfloat16)[:, 128:384]
    hopper.rows_map(x, plan(100, 2560, 256, False, H200, HopperOptions(40, 1)))
    assert driver.said == (9, 2, x.data_ptr(), [256, 100], [1024], [64, 128], [1, 1], (0, 3, 3, 0))


def test_a_single_row_has_the_pitch_of_its_length(driver):
    x = torch.empty(3, 256, dtype=torch.bfloat16)[::3]
    hopper.rows_map(x, plan(1, 64, 256, False, H200))
    assert driver.said[4] == [512]


def test_maps_are_made_once_for_an_address(driver):
    weight = torch.empty(100, 256, dtype=torch.float16)
    chosen = plan(128, 100, 256, False, H200)
    assert hopper.weight_map(weight, chosen, False) is hopper.weight_map(weight, chosen, False)


def test_rows_that_tma_cannot_take_are_copied():
    fine = torch.zeros(8, 64, dtype=torch.bfloat16)
    assert hopper._described(fine) is fine
    for x in (
        fine[:1].expand(8, 64),
        torch.zeros(8, 65, dtype=torch.bfloat16)[:, 1:],
        torch.zeros(64, 8, dtype=torch.bfloat16).T,
    ):
        copied = hopper._described(x)
        assert copied.is_contiguous()
        assert torch.equal(copied, x)


# The source, compiled


def source(kind: str, dtype: torch.dtype = torch.bfloat16) -> str:
    rows, outputs, k, gated, options = KINDS[kind]
    chosen: HopperPlan = plan(rows, outputs, k, gated, H200, options)
    features = narrow.Features(k=k, activation=2 if gated else 0, gated=gated, bias=not gated)
    return hopper.SOURCE.text(hopper.constants(chosen, features, dtype))


def test_a_wgmma_has_two_registers_for_four_weight_rows():
    lines = source("K divided").splitlines()
    assert '#define FD_PRODUCT "m64n88k16.f32.bf16.bf16"' in lines
    assert f'#define FD_SUMS "{", ".join(f"%{i}" for i in range(44))}"' in lines
    assert '#define FD_A "%44"' in lines


@pytest.mark.parametrize("kind", KINDS)
def test_with_wgmma_no_register_is_spilled(tmp_path, kind):
    assert_nothing_is_spilled(tmp_path, source(kind, torch.float16 if kind == "plain" else torch.bfloat16))


@pytest.mark.parametrize("kind", ["gated", "K divided"])
def test_nvrtc_compiles_it(kind):
    require_nvrtc()
    image = nvrtc.compile_image(source(kind), "hopper_linear", (9, 0), hopper.SOURCE.files(), specific=True)
    assert image.startswith(b"\x7fELF")


# On a GPU


def case(rows: int, outputs: int, k: int, dtype: torch.dtype = torch.bfloat16, **features: Any) -> dict[str, Any]:
    """Arguments of hopper_linear on the GPU, NaN around x; `features`: its names, with True for tensors."""
    weight_rows = 2 * outputs if features.get("gated") else outputs
    arguments: dict[str, Any] = {"weight": (torch.randn(weight_rows, k) / k**0.5).to(dtype)}
    arguments["x"] = guarded((rows, k), dtype)
    if features.pop("bias", False):
        arguments["bias"] = torch.randn(weight_rows).to(dtype)
    if features.pop("multiply", False):
        arguments["multiply"] = guarded((rows, outputs), dtype)
    return on_gpu(arguments | features)


def assert_close(arguments: dict[str, Any], **more: Any) -> None:
    z = hopper_linear(**arguments, **more)
    exact = {name: v.float() if isinstance(v, Tensor) else v for name, v in arguments.items()}
    wanted = fused_linear_reference(**exact)[0]
    assert z.dtype == arguments["x"].dtype
    torch.testing.assert_close(z.float(), wanted, rtol=0.02, atol=0.02)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
def test_on_a_gpu_it_is_the_reference(epilogue, dtype):
    for rows, (outputs, k) in itertools.product(
        (17, 33, 40, 64, 100, 128, 129, 200, 256), ((2560, 2560), (333, 576), (256, 2560))
    ):
        assert_close(case(rows, outputs, k, dtype, **epilogue))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_on_a_gpu_every_kind_of_kernel_is_the_reference(kind):
    rows, outputs, k, gated, options = kind
    for some in (rows, rows - 23):
        assert_close(case(some, outputs, k, activation="gelu_tanh" if gated else None, gated=gated), options=options)


@pytest.mark.gpu
@needs_hopper
def test_on_a_gpu_rows_may_be_strided_overlapping_or_many():
    wide, arguments = torch.randn(100, 4096, device="cuda").bfloat16(), case(100, 320, 2560)
    for x in (wide[:, 64:2624], wide[:, 3:2563], wide[:1, :2560].expand(100, 2560), wide[:, :2560].repeat(6, 1)):
        assert_close(arguments | {"x": x})


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("shape", [(10240, 2560, True), (2560, 10240, False), (256, 2560, False), (333, 576, False)])
def test_on_a_gpu_a_rows_bits_do_not_depend_on_the_number_of_rows(shape):
    outputs, k, gated = shape
    arguments = case(600, outputs, k, activation="silu" if gated else None, gated=gated)
    z = hopper_linear(**arguments)
    for part in [slice(0, 1), slice(5, 13), slice(3, 43), slice(31, 140), slice(100, 300), slice(200, 600)]:
        assert torch.equal(hopper_linear(**(arguments | {"x": arguments["x"][part]})), z[part])


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("pdl", [True, False])
@pytest.mark.parametrize("rows", [40, 128, 256])
def test_on_a_gpu_a_captured_chain_of_products_repeats_itself(pdl, rows):
    options = HopperOptions(pdl=pdl)
    up, down = case(rows, 10240, 2560, activation="gelu_tanh", gated=True), case(rows, 2560, 10240)
    gate, back = case(rows, 256, 2560, activation="gelu_tanh", multiply=True), case(rows, 2560, 256)

    def chain(x: Tensor) -> Tensor:
        for _ in range(4):
            x = x + hopper_linear(down["weight"], hopper_linear(**(up | {"x": x}), options=options), options=options)
            x = x + hopper_linear(back["weight"], hopper_linear(**(gate | {"x": x}), options=options), options=options)
        return x

    wanted = chain(up["x"])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(up["x"])
    for _ in range(200):
        found.zero_()
        graph.replay()
        assert torch.equal(found, wanted)
