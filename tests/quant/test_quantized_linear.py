"""A quantized layer keeps its bits, and computes what its dequantized weight does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flashdraft.quant.linear import QuantizedLinear, RoundedInputLinear, expand
from flashdraft.quant.nvfp4 import quantize, round_input


def layer(input_scale: float | None = None, bias: bool = False) -> QuantizedLinear:
    packed = quantize(torch.randn(24, 32))
    packed = packed if input_scale is None else packed.with_input_scale(torch.tensor(input_scale))
    return QuantizedLinear(packed, torch.randn(24) if bias else None)


@pytest.mark.parametrize("bias", [False, True])
def test_it_computes_with_the_dequantized_weight(bias: bool) -> None:
    one, x = layer(bias=bias), torch.randn(2, 3, 32)
    assert torch.equal(one(x), F.linear(x, one.packed.dequantize(), one.bias))
    assert type(one.expanded(torch.float32)) is nn.Linear
    assert (one.in_features, one.out_features) == (32, 24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_input_scale_rounds_the_inputs(dtype: torch.dtype) -> None:
    one, x = layer(0.002), torch.randn(5, 32, dtype=dtype)
    assert one.input_scale is not None
    rounded = round_input(x, one.input_scale).to(dtype)
    assert not torch.equal(rounded, x)
    assert torch.equal(one(x), F.linear(rounded, one.packed.dequantize().to(dtype)))


def test_casts_leave_codes_and_scales_alone() -> None:
    one = layer(0.0123456)
    before = {name: tensor.clone() for name, tensor in one.state_dict().items()}
    model = nn.Sequential(one, nn.LayerNorm(24)).to(torch.bfloat16)
    assert model[1].weight.dtype == torch.bfloat16
    for name, tensor in one.state_dict().items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor.float(), before[name].float())
    expanded = expand(model, torch.float32).to(torch.bfloat16)[0]
    assert isinstance(expanded, RoundedInputLinear)
    assert expanded.input_scale.dtype == torch.float32
    assert expanded.weight.dtype == torch.bfloat16
