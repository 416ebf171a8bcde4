"""The narrow product's CUDA source, emulated on the CPU, is fused_linear_reference, and a row's bits are its own."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from dataclasses import replace
from math import ceil
from typing import Any

import pytest
import torch
from kernels.emulation.narrow_emulation import (
    COMPILER,
    SMALL_GPU,
    Emulator,
    assert_replays_equal,
    build,
    guarded,
    on_gpu,
)
from kernels.products import DEVICES, GEMMA4_E4B, H200, L40S, require_nvrtc
from torch import Tensor

from flashdraft.errors import ConfigError
from flashdraft.kernels import narrow, nvrtc
from flashdraft.kernels.fused import fused_linear_reference
from flashdraft.kernels.narrow import narrow_argmax, narrow_linear
from flashdraft.kernels.narrow_plan import Device, NarrowOptions, cut, plan

SHALLOW, DEEP = NarrowOptions(depth=3), NarrowOptions(depth=4)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
FEW_BYTES = Device((9, 0), 4, 72 << 10, 74 << 10)  # slices of 320 inputs


GATE_UP = {"k": 2560, "activation": 2, "gated": True}
COMPILED: dict[str, tuple[int, dict[str, Any]]] = {
    "gate and up": (8, GATE_UP),
    "gate and up, 16 rows": (16, GATE_UP),
    "down": (8, {"k": 10240}),
    "head": (8, {"k": 2560, "argmax": True}),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if COMPILER is None:
        pytest.skip("g++, which compiles the emulation of the CUDA kernel, is not installed")
    return build(tmp_path_factory.mktemp("emulation"))


def case(rows: int, outputs: int, k: int, dtype: torch.dtype = torch.bfloat16, **features: Any) -> dict[str, Any]:
    """Arguments of fused_linear_reference; `features`: its names, with True for tensors."""
    weight_rows = 2 * outputs if features.get("gated") else outputs
    arguments: dict[str, Any] = {
        "weight": guarded((weight_rows, k), dtype, lambda *shape: torch.randn(*shape) / k**0.5),
        "x": guarded((rows, k), dtype),
    }
    if features.pop("bias", False):
        arguments["bias"] = torch.randn(weight_rows).to(dtype)
    if features.pop("multiply", False):
        arguments["multiply"] = guarded((rows, outputs), dtype)
    return arguments | features


def run(emulator: Emulator, arguments: dict[str, Any], options: NarrowOptions = DEEP) -> Tensor:
    return narrow_linear(**arguments, options=options, machine=emulator.machine())


def assert_as_reference(found: Tensor, arguments: dict[str, Any]) -> None:
    z, _ = fused_linear_reference(**arguments)
    assert found.shape == z.shape
    assert found.dtype == z.dtype
    torch.testing.assert_close(found, z, rtol=2**-6, atol=2**-6)


EPILOGUES: list[dict[str, Any]] = [
    {},
    {"bias": True},
    {"activation": "silu"},
    {"activation": "gelu_tanh", "gated": True},
    {"activation": "silu", "gated": True, "bias": True},
    {"activation": "gelu_tanh", "multiply": True},
    {"activation": "silu", "multiply": True, "bias": True},
]


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
def test_every_epilogue(library, epilogue):
    for index, (rows, outputs) in enumerate(((3, 1), (8, 37), (16, 131), (17, 72))):
        arguments = case(rows, outputs, 64 * (index + 1), **epilogue)
        assert_as_reference(run(Emulator(library), arguments), arguments)


@pytest.mark.parametrize("rows", range(1, 18))
def test_every_number_of_rows(library, rows):
    arguments = case(rows, 50, 192, activation="silu", gated=True)
    assert_as_reference(run(Emulator(library), arguments), arguments)


@pytest.mark.parametrize(("k", "slices"), [(320, 1), (704, 4), (1280, 5)])
@pytest.mark.parametrize("epilogue", [EPILOGUES[1], EPILOGUES[4], EPILOGUES[5]], ids=str)
def test_slices_of_k_in_different_blocks(library, k, slices, epilogue):
    for rows in (2, 8, 11):
        emulator = Emulator(library, FEW_BYTES)
        arguments = case(rows, 45, k, **epilogue)
        assert_as_reference(run(emulator, arguments, SHALLOW), arguments)
        assert {p.cut.slices for p in emulator.plans} == {slices}


def test_float16(library):
    for epilogue in EPILOGUES:
        arguments = case(7, 256, 192, torch.float16, **epilogue)
        assert_as_reference(run(Emulator(library), arguments), arguments)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("outputs", "k", "device"), [(300, 448, SMALL_GPU), (33, 320, SMALL_GPU), (20, 960, FEW_BYTES)])
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(library, outputs, k, device, gated):
    activation = "silu" if gated else None
    arguments = case(64, outputs, k, gated=gated, activation=activation)
    emulator = Emulator(library, device)
    z = run(emulator, arguments, SHALLOW)
    for part in (slice(0, 1), slice(0, 8), slice(3, 12), slice(40, 57), slice(31, 64)):
        assert torch.equal(run(emulator, arguments | {"x": arguments["x"][part]}, SHALLOW), z[part])
    assert {p.tiles_of_rows for p in emulator.plans} >= {1, 2}


def test_a_rows_bits_do_not_depend_on_grid_queue_or_when_copies_arrive(library):
    arguments = case(8, 300, 448)
    z = run(Emulator(library), arguments, DEEP)
    for multiprocessors, options, late in itertools.product((1, 4, 6), (DEEP, SHALLOW), (True, False)):
        emulator = Emulator(library, replace(SMALL_GPU, multiprocessors=multiprocessors), late_copies=late)
        assert torch.equal(run(emulator, arguments, options), z)


def test_more_rows_than_fit_take_several_launches(library):
    device = replace(SMALL_GPU, block_shared=72 << 10, total_shared=74 << 10)
    emulator = Emulator(library, device)
    arguments = case(40, 24, 320, activation="silu", multiply=True)
    assert_as_reference(run(emulator, arguments, SHALLOW), arguments)
    assert [p.tiles_of_rows for p in emulator.plans] == [2, 2, 1]


def test_rows_that_do_not_lie_on_16_bytes_are_copied(library):
    arguments = case(3, 16, 64)
    arguments["x"] = torch.randn(3, 65).bfloat16()[:, 1:]
    assert_as_reference(run(Emulator(library), arguments), arguments)


@pytest.mark.parametrize(("rows", "outputs"), [(7, 130), (16, 700), (3, 9)])
def test_argmax_is_the_lowest_index_of_the_greatest_value(library, rows, outputs):
    # Small whole numbers: most rows have several greatest values.
    whole = lambda *shape: torch.randint(-2, 3, shape)  # noqa: E731
    weight, x = guarded((outputs, 128), torch.bfloat16, whole), guarded((rows, 128), torch.bfloat16, whole)
    logits = fused_linear_reference(weight, x)[0].float()
    lowest = (logits == logits.amax(1, keepdim=True)).float().argmax(1)
    ids = narrow_argmax(weight, x, options=SHALLOW, machine=Emulator(library).machine())
    assert ids.dtype == torch.int32
    assert ids.tolist() == lowest.tolist()


def test_argmax_of_a_row_without_a_finite_greatest_value_is_minus_one(library):
    weight, x = torch.randn(100, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    weight[7, :], x[3, :] = torch.inf, 1.0
    x[4, :] = -1.0  # -inf at output 7 only
    ids = narrow_argmax(weight, x, options=DEEP, machine=Emulator(library).machine()).tolist()
    assert ids[1:4] == [-1, -1, -1]
    assert ids[4] == fused_linear_reference(weight, x)[0][4].float().argmax().item()


SHAPES = GEMMA4_E4B | {"Llama 70B's down": (8192, 28672, False), "one output": (1, 64, False), "10 steps": (5120, 640, True)}


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_plans_fit_the_device_and_slices_cover_k(shape, device):
    parts = cut(*shape, device)
    assert (parts.slices - 1) * parts.slice_steps < shape[1] // 64 <= parts.slices * parts.slice_steps
    for rows in (1, 8, 16, 64):
        chosen = plan(rows, *shape, device)
        assert chosen.cut == parts
        assert chosen.tiles_of_rows * 8 >= min(rows, 16)
        assert chosen.shared <= device.block_shared
        assert chosen.resident * (chosen.shared + 1024) <= device.total_shared
        own_steps = ceil(parts.tiles / chosen.grid[0]) * parts.slice_steps
        assert chosen.depth * 8 * 2048 // parts.fold >= 48 << 10 or chosen.depth * 8 >= own_steps
        assert chosen.grid[0] * chosen.grid[1] <= max(chosen.resident * device.multiprocessors, parts.slices)


@pytest.mark.parametrize("shape", GEMMA4_E4B.values(), ids=GEMMA4_E4B)
def test_on_an_h200_two_kernels_of_8_rows_fit_beside_each_other_with_64_kb_of_weights_under_way(shape):
    chosen = plan(8, *shape, H200)
    assert chosen.resident == 2
    own_steps = ceil(chosen.cut.tiles / chosen.grid[0]) * chosen.cut.slice_steps
    assert chosen.depth * 8 * 2048 // chosen.cut.fold >= 64 << 10 or chosen.depth * 8 >= own_steps
    assert chosen.cut.slices == shape[1] // 2560 + 1 if shape[1] == 4096 else max(1, shape[1] // 2560)


def test_a_queue_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="choose fewer"):
        plan(8, 2560, 2560, False, L40S, NarrowOptions(depth=20))


def test_weights_on_the_cpu_are_not_supported():
    assert not narrow.supports(torch.zeros(16, 64, dtype=torch.bfloat16))


def cuda_source(rows: int, features: dict[str, Any], device: Device) -> str:
    chosen = plan(rows, 10240, features["k"], features.get("gated", False), device)
    parts = chosen.cut
    built = narrow.Features(slice_steps=parts.slice_steps, split=parts.slices > 1, **features)
    return narrow.SOURCE.text(narrow.constants(chosen, built, torch.bfloat16))


@pytest.mark.parametrize(("rows", "features"), COMPILED.values(), ids=COMPILED)
def test_on_an_h200_no_register_is_spilled(tmp_path, rows, features):
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("nvcc, which reports registers, is not installed")
    (tmp_path / "kernel.cu").write_text(cuda_source(rows, features, H200))
    command = [compiler, "-std=c++17", "-arch=sm_90", f"-I{nvrtc.SOURCES}", "-Xptxas", "-v", "-cubin", "kernel.cu"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    report = built.stdout + built.stderr
    assert built.returncode == 0, report
    assert "0 bytes stack frame, 0 bytes spill stores" in report
    assert "warning" not in report


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_nvrtc_compiles_it_for_every_gpu(device):
    require_nvrtc()
    source = cuda_source(8, GATE_UP, device)
    image = nvrtc.compile_image(source, "narrow_linear", device.capability, headers=narrow.SOURCE.files())
    assert image.startswith(b"\x7fELF")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
def test_on_a_gpu_it_is_the_reference(epilogue):
    for rows, outputs, k in ((8, 1000, 2560), (3, 77, 10240), (40, 300, 320)):
        arguments = on_gpu(case(rows, outputs, k, **epilogue))
        assert_as_reference(narrow_linear(**arguments), arguments)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("k", [2560, 10240])
def test_on_a_gpu_a_rows_bits_do_not_depend_on_the_number_of_rows_nor_on_the_run(k):
    arguments = on_gpu(case(64, 2560, k, activation="silu", gated=True))
    z = narrow_linear(**arguments)
    for part in 20 * [slice(0, 1), slice(5, 13), slice(3, 19), slice(31, 64)]:
        assert torch.equal(narrow_linear(**(arguments | {"x": arguments["x"][part]})), z[part])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("pdl", [True, False])
def test_on_a_gpu_a_captured_chain_of_products_repeats_itself(pdl):
    options = NarrowOptions(pdl=pdl)
    first, second = on_gpu(case(8, 10240, 2560, activation="silu")), on_gpu(case(8, 2560, 10240))

    def chain(x: Tensor) -> Tensor:
        for _ in range(4):
            z = narrow_linear(**(first | {"x": x}), options=options)
            out = narrow_linear(second["weight"], z, options=options)
            ids = narrow_argmax(first["weight"], out, options=options)
            x = x + out + ids[:, None].to(x.dtype) / 4096
        return x

    assert_replays_equal(chain, first["x"])
