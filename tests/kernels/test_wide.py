"""The wide product's CUDA source, emulated on the CPU, has the very bits of the narrow product's."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.emulation import narrow_emulation, wide_emulation
from kernels.emulation.narrow_emulation import COMPILER, SMALL_GPU, assert_replays_equal, guarded, on_gpu
from kernels.products import DEVICES, GEMMA4_E4B, H200, require_nvrtc
from torch import Tensor

from flashdraft.errors import ConfigError
from flashdraft.kernels import narrow, nvrtc, wide
from flashdraft.kernels.narrow import narrow_linear
from flashdraft.kernels.narrow_plan import Device, NarrowOptions, cut
from flashdraft.kernels.wide import wide_linear
from flashdraft.kernels.wide_plan import SUMS, Tile, WideOptions, WidePlan, plan

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

# The tiles of emulation/wide_linear.cpp with their queues.
SMALL = WideOptions(tile=Tile(2, 1, 1), stages=4)
LARGE = WideOptions(tile=Tile(2, 3, 2), stages=3)
TWO_GROUPS = WideOptions(tile=Tile(2, 1, 2, 2), stages=2)
LARGE_GROUPS = WideOptions(tile=Tile(4, 2, 4, 2), stages=3)

FEW_BYTES = Device((9, 0), 4, 72 << 10, 74 << 10)  # slices of 320 inputs
SLICES_OF_512 = Device((9, 0), 6, 90 << 10, 92 << 10)
SMOLLM2 = {"SmolLM2's gate and up": (1536, 576, True), "SmolLM2's down": (576, 1536, False)}
SHAPES = GEMMA4_E4B | SMOLLM2 | {"Llama 70B's down": (8192, 28672, False), "one output": (1, 64, False)}
EPILOGUES: list[dict[str, Any]] = [
    {},
    {"bias": True},
    {"activation": "gelu_tanh", "gated": True},
    {"activation": "silu", "gated": True, "bias": True},
    {"activation": "gelu_tanh", "multiply": True},
]


@dataclass
class Emulated:
    narrow_library: ctypes.CDLL
    wide_library: ctypes.CDLL

    def both(self, arguments: dict[str, Any], options: WideOptions, device: Device = SMALL_GPU, **how: bool) -> WidePlan:
        """Asserts that both kernels give the same bits; the plan of the wide one."""
        wanted = self.narrow(arguments, device)
        emulator = wide_emulation.Emulator(self.wide_library, device, **how)
        found = wide_linear(**arguments, options=options, machine=emulator.machine())
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
        return emulator.plans[-1]

    def narrow(self, arguments: dict[str, Any], device: Device = SMALL_GPU) -> Tensor:
        machine = narrow_emulation.Emulator(self.narrow_library, device).machine()
        return narrow_linear(**arguments, options=NarrowOptions(depth=3), machine=machine)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    if COMPILER is None:
        pytest.skip("g++, which compiles the emulation of the CUDA kernels, is not installed")
    builds: tuple[Callable[[Path], ctypes.CDLL], ...] = (narrow_emulation.build, wide_emulation.build)
    return Emulated(*(build(tmp_path_factory.mktemp("emulation")) for build in builds))


def cancelling(rows: int, outputs: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [rows, k] and weight [outputs, k] with exact products of 0 and terms of up to some 10^6: what float32 makes of them,
    about 0.1, is the rounding of sums, and another order gives other values."""
    half = k // 2
    order = torch.randperm(k)
    x, weight = (torch.randn(n, half) * 2.0 ** torch.randint(0, 10, (1, half)) for n in (rows, outputs))
    return torch.cat((x, x), 1)[:, order].to(dtype), torch.cat((weight, -weight), 1)[:, order].to(dtype)


def case(rows: int, outputs: int, k: int, dtype: torch.dtype = torch.bfloat16, **features: Any) -> dict[str, Any]:
    """Arguments of narrow_linear; `features`: its names, with True for tensors."""
    weight_rows = 2 * outputs if features.get("gated") else outputs
    x, weight = cancelling(rows, weight_rows, k, dtype)
    arguments: dict[str, Any] = {"weight": guarded((weight_rows, k), dtype, lambda *_: weight)}
    arguments["x"] = guarded((rows, k), dtype, lambda *_: x)
    if features.pop("bias", False):
        arguments["bias"] = torch.randn(weight_rows).to(dtype)
    if features.pop("multiply", False):
        arguments["multiply"] = guarded((rows, outputs), dtype)
    return arguments | features


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
@pytest.mark.parametrize("options", [SMALL, LARGE], ids=["small", "large"])
def test_every_epilogue(emulated, epilogue, options):
    for index, (rows, outputs) in enumerate(((17, 1), (40, 37), (33, 72))):
        emulated.both(case(rows, outputs, 64 * (index + 1), **epilogue), options)


# With 9 steps all eight orders occur, with 2, 4 and 12 some; 13 is more than one round of the warps.
@pytest.mark.parametrize("steps", [1, 2, 4, 9, 12, 13])
@pytest.mark.parametrize(("outputs", "gated", "fold"), [(45, False, 1), (77, False, 2), (30, True, 1), (38, True, 2)])
def test_tiles_that_start_with_different_warps(emulated, steps, outputs, gated, fold):
    activation = "silu" if gated else None
    chosen = emulated.both(case(35, outputs, 64 * steps, gated=gated, activation=activation), SMALL)
    assert chosen.cut.fold == fold


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("epilogue", [EPILOGUES[0], EPILOGUES[3], EPILOGUES[4]], ids=str)
def test_slices_of_k_in_the_same_block_and_in_several(emulated, parallel, epilogue):
    options = WideOptions(tile=SMALL.tile, stages=4, parallel=parallel)
    for k, outputs, slices in ((704, 45, 4), (1280, 70, 5)):
        chosen = emulated.both(case(37, outputs, k, **epilogue), options, FEW_BYTES)
        assert (chosen.parallel, chosen.cut.slices) == (parallel, slices)


@pytest.mark.parametrize("options", [TWO_GROUPS, LARGE_GROUPS], ids=["small", "large"])
def test_two_groups_of_warps(emulated, options):
    for outputs, features in ((45, EPILOGUES[0]), (77, EPILOGUES[0]), (30, EPILOGUES[3]), (38, EPILOGUES[2])):
        emulated.both(case(39, outputs, 512, **features), options)
    emulated.both(case(35, 40, 1024), options)


@pytest.mark.parametrize("parallel", [False, True])
def test_two_groups_of_warps_and_slices_of_k(emulated, parallel):
    options = WideOptions(tile=TWO_GROUPS.tile, stages=2, parallel=parallel)
    for outputs, k, fold, slices in ((130, 1024, 1, 2), (130, 1536, 2, 3)):
        chosen = emulated.both(case(39, outputs, k), options, SLICES_OF_512)
        assert (chosen.parallel, chosen.cut.fold, chosen.cut.slices) == (parallel, fold, slices)


def test_float16(emulated):
    # The narrow emulation has float16 for 8 rows and tiles of 16 only.
    for options, k in ((SMALL, 128), (LARGE, 64), (TWO_GROUPS, 512)):
        for epilogue in EPILOGUES[:4:3]:
            arguments = case(21, 256, k, torch.float16, **epilogue)
            few = [
                {name: v[start : start + 8] for name, v in arguments.items() if name in ("x", "multiply")}
                for start in (0, 8, 16)
            ]
            wanted = torch.cat([emulated.narrow(arguments | part) for part in few])
            machine = wide_emulation.Emulator(emulated.wide_library).machine()
            assert torch.equal(wide_linear(**arguments, options=options, machine=machine), wanted)


@pytest.mark.parametrize("rows", [1, 8, 31, 32, 33, 64, 65, 100])
def test_every_number_of_rows(emulated, rows):
    for options in (SMALL, LARGE):
        emulated.both(case(rows, 50, 192, activation="silu", gated=True), options)


def test_no_rows_give_no_rows(emulated):
    machine = wide_emulation.Emulator(emulated.wide_library).machine()
    arguments = case(2, 30, 64)
    assert wide_linear(arguments["weight"], arguments["x"][:0], machine=machine).shape == (0, 30)


def test_more_rows_than_a_band(emulated):
    chosen = emulated.both(case(32 * 17 + 3, 40, 64), SMALL)
    assert chosen.pieces == 8 * 18


def test_bits_do_not_depend_on_grid_nor_on_when_copies_arrive(emulated):
    arguments = case(70, 200, 448, activation="silu", multiply=True)
    wanted = emulated.narrow(arguments)
    for late, blocks in itertools.product((True, False), (1, 3, 30)):
        emulator = wide_emulation.Emulator(emulated.wide_library, late_copies=late, most_blocks=blocks)
        assert torch.equal(wide_linear(**arguments, options=SMALL, machine=emulator.machine()), wanted)


def test_rows_that_do_not_lie_on_16_bytes_are_copied(emulated):
    arguments = case(20, 16, 64)
    arguments["x"] = torch.randn(20, 65).bfloat16()[:, 1:]
    emulated.both(arguments, SMALL)


def test_a_queue_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="choose fewer"):
        plan(128, 2560, 2560, False, DEVICES["L40S"], WideOptions(tile=Tile(2, 4, 4), stages=8))


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_plans_fit_the_device(shape, device):
    for rows in (1, 17, 32, 64, 128, 200, 512, 2048, 8192):
        chosen = plan(rows, *shape, device)
        assert chosen.cut == cut(*shape, device)
        assert chosen.shared <= device.block_shared
        assert chosen.resident * (chosen.shared + 1024) <= device.total_shared
        assert chosen.tile.sums(chosen.cut.fold) <= SUMS
        assert chosen.blocks <= chosen.resident * device.multiprocessors


def test_few_kernels_serve_all_numbers_of_rows():
    for shape in GEMMA4_E4B.values():
        plans = {replace(plan(rows, *shape, H200), pieces=0, blocks=0) for rows in range(17, 4097)}
        assert len(plans) <= 8


def test_on_an_h200_128_rows_of_gate_and_up_take_one_round_of_blocks():
    chosen = plan(128, *GEMMA4_E4B["gate and up"], H200)
    assert chosen.tile.rows == 128
    assert 120 <= chosen.blocks == chosen.pieces <= 132


def test_on_an_h200_slices_of_k_are_parallel_for_128_rows_but_not_for_2048():
    assert plan(128, *GEMMA4_E4B["down"], H200).parallel
    assert not plan(2048, *GEMMA4_E4B["down"], H200).parallel


def sources_of(shape: tuple[int, int, bool], rows: int, device: Device) -> str:
    chosen = plan(rows, *shape, device)
    features = narrow.Features(
        k=shape[1],
        slice_steps=chosen.cut.slice_steps,
        split=chosen.cut.slices > 1,
        activation=2 if shape[2] else 0,
        gated=shape[2],
    )
    return wide.SOURCE.text(wide.constants(chosen, features, torch.bfloat16))


@pytest.mark.parametrize("shape", [*GEMMA4_E4B.values()][:4], ids=[*GEMMA4_E4B][:4])
def test_on_an_h200_no_register_is_spilled(tmp_path, shape):
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("nvcc, which reports registers, is not installed")
    for number, text in enumerate(sorted({sources_of(shape, rows, H200) for rows in (128, 2048)})):
        (tmp_path / f"{number}.cu").write_text(text)
        flags = ["-std=c++17", "-arch=sm_90", f"-I{nvrtc.SOURCES}", "-Xptxas", "-v", "-cubin"]
        built = subprocess.run([compiler, *flags, f"{number}.cu"], cwd=tmp_path, capture_output=True, text=True, check=False)
        report = built.stdout + built.stderr
        assert built.returncode == 0, report
        assert "0 bytes stack frame, 0 bytes spill stores" in report, text[: text.index("//")] + report
        assert "warning" not in report


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_nvrtc_compiles_it_for_every_gpu(device):
    require_nvrtc()
    source = sources_of(GEMMA4_E4B["gate and up"], 128, device)
    assert nvrtc.compile_image(source, "wide_linear", device.capability, headers=wide.SOURCE.files()).startswith(b"\x7fELF")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
def test_on_a_gpu_bits_are_the_narrow_kernels(epilogue):
    for outputs, k in ((1000, 2560), (333, 10240), (300, 320), (5120, 576)):
        for rows in (17, 33, 128, 200, 1000):
            arguments = on_gpu(case(rows, outputs, k, **epilogue))
            assert torch.equal(wide_linear(**arguments), narrow_linear(**arguments))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", [s for s in GEMMA4_E4B.values() if s[0] < 262144], ids=[n for n in GEMMA4_E4B if n != "head"])
def test_on_a_gpu_bits_of_large_products_are_the_narrow_kernels_in_every_run(shape):
    outputs, k, gated = shape
    for rows in (32, 64, 128, 1000):
        arguments = on_gpu(case(rows, outputs, k, activation="gelu_tanh" if gated else None, gated=gated))
        wanted = narrow_linear(**arguments)
        for _ in range(10):
            assert torch.equal(wide_linear(**arguments), wanted)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("pdl", [True, False])
def test_on_a_gpu_a_captured_chain_of_products_repeats_itself(pdl):
    options = WideOptions(pdl=pdl)
    first, second = on_gpu(case(128, 10240, 2560, activation="silu")), on_gpu(case(128, 2560, 10240))

    def chain(x: Tensor) -> Tensor:
        for _ in range(4):
            x = x + wide_linear(second["weight"], wide_linear(**(first | {"x": x}), options=options), options=options)
        return x

    assert_replays_equal(chain, first["x"])
