"""Statistics are those of the real inputs of every linear, over all the streams it sees."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flashdraft.errors import ConfigError
from flashdraft.quant.calibrate import Calibration, calibrate
from flashdraft.quant.nvfp4 import round_input, tensor_scale
from flashdraft.quant.quantize import Settings, check_ignored, input_scales, quantize_linears


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj"):
            self.add_module(name, nn.Linear(32, 16, bias=False))
        self.o_proj = nn.Linear(16, 32, bias=False)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        for stream in (context, x):
            k, v = self.k_proj(stream), self.v_proj(stream)
        return self.o_proj(self.q_proj(x) + k + v)


@pytest.fixture
def streams() -> tuple[Attention, Tensor, Tensor]:
    return Attention(), torch.randn(2, 5, 32), 4 * torch.randn(2, 7, 32)


def test_keys_and_values_see_both_streams_and_queries_one(streams: tuple[Attention, Tensor, Tensor]) -> None:
    module, x, context = streams
    found = calibrate(module, lambda _: module(x, context))
    both = torch.cat((context.flatten(0, 1), x.flatten(0, 1)))
    torch.testing.assert_close(found["k_proj"].hessian, 2 * both.T @ both / 24)
    torch.testing.assert_close(found["v_proj"].hessian, found["k_proj"].hessian)
    assert found["k_proj"].amax == both.abs().max()
    assert (found["q_proj"].tokens, found["k_proj"].tokens) == (10, 24)
    assert found["q_proj"].amax == x.abs().max()
    scales = input_scales(found, head_room=1.0)
    assert scales["q_proj"] == scales["v_proj"] == tensor_scale(both.abs().max()), "one input_scale for a fused group"
    assert scales["o_proj"] != scales["q_proj"]


def test_padding_does_not_count(streams: tuple[Attention, Tensor, Tensor]) -> None:
    module, x, context = streams
    real = torch.arange(14) < 9

    def run(calibration: Calibration) -> None:
        with calibration.only({14: real}):
            module(x, context)

    found = calibrate(module, run)
    both = torch.cat((context.flatten(0, 1)[real], x.flatten(0, 1)))
    torch.testing.assert_close(found["k_proj"].hessian, 2 * both.T @ both / 19)


def test_hessians_of_w4a4_are_of_rounded_inputs(streams: tuple[Attention, Tensor, Tensor]) -> None:
    module, x, context = streams
    scales = input_scales(calibrate(module, lambda _: module(x, context)))
    rounded = round_input(x.flatten(0, 1), scales["q_proj"])
    found = calibrate(module, lambda _: module(x, context), scales)
    torch.testing.assert_close(found["q_proj"].hessian, 2 * rounded.T @ rounded / 10)


def test_layers_that_no_token_reaches_are_named(streams: tuple[Attention, Tensor, Tensor]) -> None:
    module, x, _ = streams
    with pytest.raises(ConfigError, match=r"no token .* reaches q_proj, v_proj, o_proj"):
        calibrate(module, lambda _: module.k_proj(x))
    with pytest.raises(ConfigError, match="reaches q_proj, k_proj"):
        calibrate(module, lambda _: module(x[:, :0], x[:, :0]))


def test_inputs_that_are_not_finite_are_named(streams: tuple[Attention, Tensor, Tensor]) -> None:
    module, x, context = streams
    context[0, 0, 0] = torch.nan
    with pytest.raises(ConfigError, match=r"inputs of k_proj, v_proj, o_proj are NaN|inputs of k_proj, v_proj are NaN"):
        calibrate(module, lambda _: module(x, context))


@pytest.mark.parametrize("names", [["k_proj"], ["q_proj", "v_proj"]])
def test_a_part_of_a_fused_group_cannot_be_left_out(names: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"only a part of qkv_proj .* ignore qkv_proj or nothing"):
        check_ignored(Attention(), names)
    assert check_ignored(Attention(), ["qkv_proj"]) == {"q_proj", "k_proj", "v_proj"}
    assert check_ignored(Attention(), ["q_proj", "k_proj", "v_proj"]) == {"q_proj", "k_proj", "v_proj"}


def test_names_of_no_linear_are_refused() -> None:
    with pytest.raises(ConfigError, match="gate_proj is no linear of this draft: choose from qkv_proj, o_proj"):
        check_ignored(Attention(), ["gate_proj"])


@pytest.mark.parametrize("method", ["max", "search", "gptq"])
def test_fused_linears_share_their_scale_bit_for_bit(method: str, streams: tuple[Attention, Tensor, Tensor]) -> None:
    module, x, context = streams
    module.v_proj.weight.data *= 5
    found, done = calibrate(module, lambda _: module(x, context)), list[str]()
    layers, reports = quantize_linears(module, found, Settings(method), report=done.append)  # type: ignore[arg-type]
    assert done == list(layers) == [r.name for r in reports] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert layers["q_proj"].weight_scale_2 == layers["v_proj"].weight_scale_2 != layers["o_proj"].weight_scale_2
    assert layers["q_proj"].input_scale is None
    assert all(0 < report.error < 0.02 for report in reports)
    assert max(report.largest_scale for report in reports[:3]) > 224


def test_weights_that_cannot_be_quantized_are_refused_before_any_is(streams: tuple[Attention, Tensor, Tensor]) -> None:
    module, x, context = streams
    found, done = calibrate(module, lambda _: module(x, context)), list[str]()
    module.o_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(ConfigError, match=r"o_proj.weight holds NaN"):
        quantize_linears(module, found, Settings("max"), report=done.append)
    assert done == []
    layers, _ = quantize_linears(module, found, Settings("max"), ignore=["o_proj"])
    assert "o_proj" not in layers


def test_a_layer_of_zeros_is_quantized_and_noted(streams: tuple[Attention, Tensor, Tensor]) -> None:
    module, x, context = streams
    module.o_proj.weight.data.zero_()
    found = calibrate(module, lambda _: module(x, context))
    layers, reports = quantize_linears(module, found, Settings("gptq"))
    assert not layers["o_proj"].packed.dequantize().any()
    assert (reports[-1].error, reports[-1].note) == (0.0, "its weights or its inputs are all zero")
