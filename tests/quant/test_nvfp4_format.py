"""NVFP4 has the same bits as Model Optimizer's, and refuses what it cannot hold."""

from __future__ import annotations

import pytest
import torch
from golden import bits, cases, exports
from hypothesis import given, settings
from hypothesis import strategies as st

from flashdraft.errors import ConfigError
from flashdraft.quant.nvfp4 import (
    CODES,
    amax,
    block_amax,
    code_values,
    encode,
    max_scales,
    nearest_codes,
    pack,
    quantize,
    round_input,
    static_scales,
    tensor_scale,
    unpack,
)
from flashdraft.quant.scales import block_errors, searched_scales

TENSORS = {name: case for name, case in cases("tensor").items() if not name.startswith("allzero")}


@pytest.mark.parametrize("name", TENSORS)
def test_codes_scales_and_values_are_the_golden_ones(name: str) -> None:
    case = TENSORS[name]
    packed = quantize(case["input"], case["weight_scale_2"])
    assert bits(packed.scale) == bits(case["weight_scale"])
    assert torch.equal(packed.weight, case["weight"])
    if "dequant_f32" in case:
        assert torch.equal(packed.dequantize(), case["dequant_f32"])
    if "dequant_bf16" in case:
        assert torch.equal(packed.dequantize().bfloat16(), case["dequant_bf16"])


@pytest.mark.parametrize("name", [name for name in TENSORS if "ws2" not in name])
def test_the_scale_of_a_tensor_is_the_golden_one(name: str) -> None:
    assert torch.equal(tensor_scale(amax([TENSORS[name]["input"]])), TENSORS[name]["weight_scale_2"])


@pytest.mark.parametrize("kind", ["w4a16_max", "w4a4_max", "w4a16_static_max", "w4a16_mse_sweep", "w4a16_4o6"])
def test_whole_exports_are_the_golden_ones(kind: str) -> None:
    groups = exports(kind)
    if not groups:
        pytest.skip("FLASHDRAFT_GOLDEN does not name the whole golden set")
    for group in groups:
        largest = amax([linear["input"] for linear in group.values()])
        scale_2 = largest / (6 * 256) if kind == "w4a16_4o6" else tensor_scale(largest)
        for linear in group.values():
            weight = linear["input"].float()
            if kind == "w4a16_static_max":
                scale = static_scales(block_amax(weight), largest)
            elif kind == "w4a16_mse_sweep":
                scale = searched_scales(weight, scale_2)
            elif kind == "w4a16_4o6":  # of the two scales that make the largest weight 6 or 4, the one of less error
                six, four = ((block_amax(weight) / n * 256 / (largest / 6)).to(torch.float8_e4m3fn) for n in (6, 4))
                better = block_errors(weight, four, scale_2) < block_errors(weight, six, scale_2)
                scale = torch.where(better, four.view(torch.uint8), six.view(torch.uint8)).view(torch.float8_e4m3fn)
            else:
                scale = max_scales(weight, scale_2)
            assert torch.equal(scale_2, linear["weight_scale_2"])
            assert bits(scale) == bits(linear["weight_scale"])
            assert torch.equal(pack(encode(weight, scale, scale_2)), linear["weight"])


def test_searched_scales_of_a_fused_group_are_the_golden_ones() -> None:
    group = cases("search")
    scale_2 = tensor_scale(amax([linear["input"] for linear in group.values()]))
    for linear in group.values():
        scale = searched_scales(linear["input"], scale_2)
        assert torch.equal(scale_2, linear["weight_scale_2"])
        assert bits(scale) == bits(linear["weight_scale"])
        assert torch.equal(pack(encode(linear["input"], scale, scale_2)), linear["weight"])


@pytest.mark.parametrize("name", cases("input"))
def test_rounded_inputs_are_those_of_vllms_reference(name: str) -> None:
    case = cases("input")[name]
    assert torch.equal(round_input(case["x"], case["input_scale"]), case["vllm_ref_dq_f32"])
    if "amax" in case:
        assert torch.equal(tensor_scale(case["amax"]), case["input_scale"])


def test_every_code_survives_packing_and_stands_for_its_number() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2, 1)
    assert torch.equal(unpack(pack(codes)), codes)
    assert pack(codes)[0, 0] == 0x10, "the even column is in the low nibble"
    assert code_values(codes)[0].tolist() == [*CODES, *(-value for value in CODES)]
    positive = torch.tensor(CODES)
    assert nearest_codes(positive).tolist() == list(range(8))
    assert nearest_codes(torch.tensor([-0.0, -0.1, -0.25, -6.0])).tolist() == [0, 8, 8, 15]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 10**6), st.sampled_from([1e-6, 1e-2, 1.0, 1e4]))
def test_no_value_is_further_off_than_half_a_step(rows: int, groups: int, seed: int, size: float) -> None:
    weight = torch.randn(rows, groups * 16, generator=torch.Generator().manual_seed(seed)) * size
    packed = quantize(weight)
    step = (packed.scale.float() * packed.scale_2).repeat_interleave(16, 1)
    # Between 4 and 6 the codes are 2 apart; a scale rounded down clips its largest weight by at most an eighth.
    assert ((packed.dequantize() - weight).abs() <= 1.01 * step).all()
    assert torch.equal(quantize(packed.dequantize(), packed.scale_2).dequantize(), packed.dequantize())


def test_a_tensor_of_zeros_stays_finite() -> None:
    packed = quantize(torch.zeros(4, 32))
    assert packed.scale_2 > 0
    assert packed.scale.float().eq(1).all()
    assert not packed.weight.any()
    assert not packed.dequantize().any()
    assert not round_input(torch.zeros(2, 32), packed.scale_2).any()


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(4, 24), r"fc has shape \[4, 24\].*a multiple of 16 inputs"),
        (torch.ones(32), "outputs, inputs"),
        (torch.ones(0, 32), "outputs, inputs"),
        (torch.full((4, 32), torch.nan), "fc holds NaN or infinite"),
        (torch.tensor([[torch.inf] + [0.0] * 15]), "fc holds NaN or infinite"),
    ],
)
def test_what_cannot_be_quantized_is_refused(weight: torch.Tensor, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quantize(weight, name="fc")


def test_the_share_of_scales_that_marlin_flushes_is_counted() -> None:
    weight = torch.ones(1, 32)
    weight[:, 16:] = 2**-16
    assert quantize(weight).flushed_share == 0.5
