"""The NVFP4 product, emulated on the CPU, is the reference on dequantized weights; its storage loses nothing."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernels.emulation.narrow_emulation import COMPILER, SMALL_GPU, Emulator, build, guarded, on_gpu
from kernels.products import DEVICES, GEMMA4_E4B, require_nvrtc
from torch import Tensor

from flashdraft.errors import ConfigError
from flashdraft.kernels import narrow, nvrtc
from flashdraft.kernels.fused import argmax_linear, fused_linear, fused_linear_reference
from flashdraft.kernels.narrow_plan import NVFP4, Device, NarrowOptions, plan
from flashdraft.kernels.nvfp4 import Nvfp4Weight, dequantized, nvfp4_argmax, nvfp4_linear, repacked, unpacked

SHALLOW, DEEP = NarrowOptions(depth=3), NarrowOptions(depth=4)
FEW_BYTES = Device((9, 0), 4, 72 << 10, 74 << 10)  # slices of 320 inputs
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if COMPILER is None:
        pytest.skip("g++, which compiles the emulation of the CUDA kernel, is not installed")
    return build(tmp_path_factory.mktemp("emulation"))


def checkpoint(rows: int, k: int) -> tuple[Tensor, Tensor, float]:
    """Any codes, and scales of every size: all powers, subnormal ones, the greatest, and none at all."""
    scales = torch.exp2(torch.randint(-9, 9, (rows, k // 16)).float()) * (1 + torch.randint(0, 8, (rows, k // 16)) / 8)
    scales = scales.clamp(max=448).to(torch.float8_e4m3fn)
    scales[0, 0] = 0.0
    return torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8), scales, 0.37 / k


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "k"), [(2, 64), (48, 192), (70, 320)])
def test_the_kernels_storage_holds_every_value_exactly(rows, k, gated):
    codes, scales, scale = checkpoint(rows, k)
    packed = repacked(codes, scales, scale, gated=gated)
    assert packed.packed.shape == (-(-rows // 16), k // 64, 576)
    found = unpacked(packed, torch.float32)
    torch.testing.assert_close(found, dequantized(codes, scales, scale), rtol=2**-22, atol=0)
    assert found.count_nonzero() > 0.6 * found.numel()  # codes 0 and 8 are none


def test_all_scales_of_the_format_are_kept():
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)  # all but NaN and negative ones
    scales = torch.cat((every, every[:1])).view(2, 64)
    codes = torch.full((2, 512), 0x22, dtype=torch.uint8)
    assert torch.equal(unpacked(repacked(codes, scales, 1.0), torch.float32)[:, ::16], scales.float())


def test_what_has_no_such_storage_is_refused():
    codes, scales, scale = checkpoint(16, 128)
    with pytest.raises(ConfigError, match="multiple of 64"):
        repacked(codes[:, :40], scales[:, :5], scale)
    for bad in (-1.0, float("nan")):
        scales[3, 2] = bad
        with pytest.raises(ConfigError, match="negative or not finite"):
            repacked(codes, scales, scale)


EPILOGUES: list[dict[str, Any]] = [
    {},
    {"bias": True},
    {"activation": "silu", "gated": True},
    {"activation": "gelu_tanh", "gated": True, "bias": True},
    {"activation": "gelu_tanh", "multiply": True},
]


def case(rows: int, outputs: int, k: int, **features: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of nvfp4_linear, and those of the reference."""
    gated = features.pop("gated", False)
    weight_rows = 2 * outputs if gated else outputs
    codes, scales, scale = checkpoint(weight_rows, k)
    scales = scales.float().clamp(0.25, 2).to(torch.float8_e4m3fn)
    arguments: dict[str, Any] = {"x": guarded((rows, k), torch.bfloat16)}
    if features.pop("bias", False):
        arguments["bias"] = torch.randn(weight_rows).bfloat16()
    if features.pop("multiply", False):
        arguments["multiply"] = guarded((rows, outputs), torch.bfloat16)
    arguments |= features
    weight = repacked(codes, scales, scale, gated=gated)
    return arguments | {"weight": weight}, arguments | {"weight": dequantized(codes, scales, scale), "gated": gated}


def assert_as_reference(
    library: ctypes.CDLL, mine: dict[str, Any], reference: dict[str, Any], device: Device, depth: int
) -> Emulator:
    emulator = Emulator(library, device)
    found = nvfp4_linear(**mine, options=NarrowOptions(depth=depth), machine=emulator.machine())
    wide = {name: v.float() if isinstance(v, Tensor) else v for name, v in reference.items()}
    torch.testing.assert_close(found.float(), fused_linear_reference(**wide)[0], rtol=2**-6, atol=2**-6)
    return emulator


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
def test_every_epilogue(library, epilogue):
    for index, (rows, outputs) in enumerate(((3, 1), (8, 37), (16, 131), (17, 72), (64, 24), (70, 24))):
        assert_as_reference(library, *case(rows, outputs, 64 * (index + 1), **epilogue), SMALL_GPU, 4)


@pytest.mark.parametrize(("k", "several"), [(320, False), (1408, True), (2560, True)])
def test_slices_of_k_in_different_blocks(library, k, several):
    for rows in (2, 8, 11):
        for epilogue in (EPILOGUES[1], EPILOGUES[3]):
            emulator = assert_as_reference(library, *case(rows, 45, k, **epilogue), FEW_BYTES, 3)
            assert {p.cut.slices > 1 for p in emulator.plans} == {several}


def test_a_rows_bits_are_its_own(library):
    mine, _ = case(23, 70, 448)
    run = lambda x: nvfp4_linear(mine["weight"], x, options=DEEP, machine=Emulator(library).machine())  # noqa: E731
    alone = torch.cat([run(row) for row in mine["x"].split(1)])
    assert torch.equal(run(mine["x"]), alone)


def test_the_likeliest_token(library):
    mine, _ = case(11, 300, 192)
    ids = nvfp4_argmax(mine["weight"], mine["x"], options=DEEP, machine=Emulator(library).machine())
    logits = nvfp4_linear(mine["weight"], mine["x"], options=DEEP, machine=Emulator(library).machine())
    assert ids.tolist() == logits.float().argmax(-1).tolist()


@pytest.mark.parametrize("rows", [1, 17, 300])
def test_without_the_kernel_the_weight_is_taken_in_bf16(rows):
    mine, reference = case(rows, 48, 128, activation="silu", gated=True)
    wide = fused_linear_reference(**reference | {"weight": reference["weight"].bfloat16()})[0]
    torch.testing.assert_close(fused_linear(**mine, gated=True)[0], wide)
    kept = mine | {"weight": mine["weight"].with_copy(torch.bfloat16)}
    assert torch.equal(fused_linear(**kept, gated=True)[0], fused_linear(**mine, gated=True)[0])
    mine, reference = case(rows, 48, 128)
    logits = fused_linear_reference(**reference | {"weight": reference["weight"].bfloat16()})[0]
    assert argmax_linear(mine["weight"], mine["x"]).tolist() == logits.argmax(-1).tolist()


def test_weights_side_by_side_keep_their_own_scales(library):
    checkpoints = [checkpoint(rows, 192) for rows in (32, 16, 48)]
    checkpoints[1] = (*checkpoints[1][:2], 0.02)
    weight = Nvfp4Weight.concatenated([repacked(*one) for one in checkpoints])
    whole = torch.cat([dequantized(*one) for one in checkpoints])
    torch.testing.assert_close(unpacked(weight, torch.float32), whole, rtol=2**-22, atol=0)
    x = guarded((5, 192), torch.bfloat16)
    found = nvfp4_linear(weight, x, options=DEEP, machine=Emulator(library).machine())
    expected = x.float() @ whole.T
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=2**-7 * float(expected.abs().max()))


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("name", GEMMA4_E4B)
def test_plans_fit_and_keep_enough_under_way(device, name):
    outputs, k, gated = GEMMA4_E4B[name]
    for rows in (1, 8, 16, 64):
        chosen = plan(rows, outputs, k, gated, device, storage=NVFP4)
        assert chosen.shared * chosen.resident <= device.total_shared
        assert chosen.cut.fold == 1
        assert chosen.grid[0] * chosen.grid[1] <= device.multiprocessors * chosen.resident + chosen.grid[1]


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_nvrtc_compiles_it_for_every_gpu(device):
    require_nvrtc()
    chosen = plan(8, 10240, 2560, True, device, storage=NVFP4)
    features = narrow.Features(
        k=2560, slice_steps=chosen.cut.slice_steps, split=chosen.cut.slices > 1, gated=True, activation=1
    )
    source = narrow.SOURCE.text(narrow.constants(chosen, features, torch.bfloat16, NVFP4))
    image = nvrtc.compile_image(source, "narrow_linear", device.capability, headers=narrow.SOURCE.files())
    assert image.startswith(b"\x7fELF")


def moved(weight: Nvfp4Weight) -> Nvfp4Weight:
    return replace(weight, packed=weight.packed.cuda(), scales=weight.scales.cuda())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
def test_on_a_gpu_it_is_the_reference(epilogue):
    for rows, outputs, k in ((8, 1000, 2560), (3, 77, 5120), (40, 300, 320), (100, 300, 320), (300, 77, 320)):
        mine, reference = case(rows, outputs, k, **epilogue)
        weight = mine["weight"]
        on_it = on_gpu(mine) | {"weight": moved(weight)}
        wide = {name: v.cuda().float() if isinstance(v, Tensor) else v for name, v in reference.items()}
        expected = fused_linear_reference(**wide)[0]
        error = (nvfp4_linear(**on_it).float() - expected).norm() / expected.norm()
        assert error < 4e-3, "bf16 rounds by up to 2^-9"


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_the_likeliest_token_and_its_bits():
    mine, _ = case(64, 5000, 2560)
    weight, x = moved(mine["weight"]), mine["x"].cuda()
    logits = nvfp4_linear(weight, x)
    assert nvfp4_argmax(weight, x).tolist() == logits.float().argmax(-1).tolist()
    for part in 20 * [slice(0, 1), slice(5, 13), slice(31, 64)]:
        assert torch.equal(nvfp4_linear(weight, x[part]), logits[part])


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_weights_are_repacked_as_on_the_cpu():
    codes, scales, scale = checkpoint(200, 640)
    for gated in (False, True):
        here, there = (repacked(codes.to(d), scales.to(d), scale, gated=gated).packed for d in ("cpu", "cuda"))
        assert torch.equal(here, there.cpu())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows", [8, 40, 300])
def test_on_a_gpu_a_graph_holds_the_product(rows):
    mine, reference = case(rows, 300, 320)
    weight, x = moved(mine["weight"]).with_copy(torch.bfloat16), mine["x"].cuda()
    fused_linear(weight, x)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fused_linear(weight, x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        found = fused_linear(weight, x)[0]
    graph.replay()
    expected = fused_linear_reference(**reference | {"x": reference["x"].float()})[0].cuda()
    assert (found.float() - expected).norm() / expected.norm() < 4e-3
