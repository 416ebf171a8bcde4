"""Linears that round in the forward pass: the numbers are those of the format, the gradients those of no rounding."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from flashdraft.draft import DFlashConfig, DFlashDraft
from flashdraft.errors import ConfigError
from flashdraft.quant.linear import linears
from flashdraft.quant.nvfp4 import CODES, amax, code_values, nearest_codes, quantize, round_input, tensor_scale
from flashdraft.quant.quantize import HEAD_ROOM
from flashdraft.quant.training import RoundingLinear, round_to_codes, round_while_training, rounded_input, rounded_weight


def draft(**sizes: int) -> DFlashDraft:
    torch.manual_seed(1)
    given = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        vocab_size=64, num_target_layers=5, target_layer_ids=(1, 3), mask_token_id=3, windows=(None, None),
        causal=(False, False),
    )  # fmt: skip
    return DFlashDraft(DFlashConfig(**given | sizes))


def test_every_number_becomes_the_value_of_its_nearest_code():
    middles = [(a + b) / 2 for a, b in itertools.pairwise(CODES)]
    x = torch.cat([torch.linspace(-7, 7, 2001), torch.tensor([*CODES, *middles])])
    x = torch.cat([x, -x, x.nextafter(torch.tensor(0.0)), x.nextafter(torch.tensor(9.0))])
    assert round_to_codes(x).equal(code_values(nearest_codes(x)))


def test_a_rounded_weight_is_what_the_format_holds():
    torch.manual_seed(0)
    weight = torch.randn(24, 64) * torch.logspace(-3, 1, 24)[:, None]
    for scale_2 in (tensor_scale(amax([weight])), tensor_scale(3 * amax([weight]))):
        assert rounded_weight(weight, scale_2).equal(quantize(weight, scale_2).dequantize())
    assert rounded_weight(torch.zeros(2, 16), tensor_scale(torch.zeros(()))).equal(torch.zeros(2, 16))


def test_rounded_inputs_are_those_of_w4a4():
    torch.manual_seed(0)
    x = torch.randn(40, 64) * torch.logspace(-4, 0, 40)[:, None]
    x[3] = 0
    mine, format_own = rounded_input(x), round_input(x, tensor_scale(HEAD_ROOM * x.abs().max()))
    different = ~torch.isclose(mine, format_own, rtol=1e-5, atol=0)
    assert different.sum() <= 4  # a number on the border of two codes, by another order of operations
    assert mine[3].equal(torch.zeros(64))


@pytest.mark.parametrize("inputs", [False, True])
def test_gradients_pass_as_if_nothing_were_rounded(inputs):
    torch.manual_seed(0)
    plain = nn.Linear(32, 16)
    rounding, x = RoundingLinear(plain, [plain], inputs), torch.randn(5, 32, requires_grad=True)
    saved = plain.weight.detach().bfloat16()
    weight = rounded_weight(saved, tensor_scale(amax([saved])))
    seen = rounded_input(x.detach()) if inputs else x.detach()
    out = rounding(x)
    torch.testing.assert_close(out, seen @ weight.T + plain.bias)
    assert not torch.allclose(out, plain(x))
    up = torch.randn_like(out)
    by_x, by_weight, by_bias = torch.autograd.grad(out, (x, plain.weight, plain.bias), up)
    torch.testing.assert_close(by_x, up @ weight)
    torch.testing.assert_close(by_weight, up.T @ seen)
    torch.testing.assert_close(by_bias, up.sum(0))


@pytest.mark.parametrize("form", ["w4a16", "w4a4"])
def test_a_draft_keeps_its_parameters_and_fused_groups_share_a_scale(form):
    mine = draft()
    before, names = dict(mine.named_parameters()), list(mine.state_dict())
    round_while_training(mine, form)
    assert list(mine.state_dict()) == names
    assert all(parameter is before[name] for name, parameter in mine.named_parameters())
    rounding = {name: leaf for name, leaf in linears(mine).items() if isinstance(leaf, RoundingLinear)}
    assert set(linears(mine)) - set(rounding) == ({"fc"} if form == "w4a4" else set())
    assert {leaf.inputs for leaf in rounding.values()} == {form == "w4a4"}
    attention = mine.layers[1].self_attn
    together = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert all(a is b for a, b in zip(attention.v_proj.group, together, strict=True))
    assert [id(w) for w in attention.o_proj.group] == [id(attention.o_proj.weight)]


def test_inputs_that_are_no_multiple_of_16_are_refused():
    with pytest.raises(ConfigError, match=r"layers.0.mlp.down_proj.weight has shape \[32, 40\]"):
        round_while_training(draft(intermediate_size=40), "w4a16")
