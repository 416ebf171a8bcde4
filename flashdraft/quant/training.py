"""Training for four bits: linears that round as NVFP4 will, in the forward pass alone.

A draft trained so loses less when it is quantized, above all by W4A4, whose rounded inputs no choice of weights makes good
afterwards. Gradients pass as if nothing were rounded (straight through), so the weights stay what they were: float32, of any
value, with the names and shapes of nn.Linear. Shape letters: N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashdraft.quant.groups import fused_groups
from flashdraft.quant.linear import linears, swap
from flashdraft.quant.nvfp4 import GROUP, MAX_CODE, MAX_SCALE, amax, block_amax, check_weight, max_scales, tensor_scale
from flashdraft.quant.quantize import HEAD_ROOM, KEPT_OUT_OF_W4A4

Form = Literal["w4a16", "w4a4"]
SAVED = torch.bfloat16  # of drafts, which are quantized from what was saved: other last bits change codes


def round_to_codes(x: Tensor) -> Tensor:
    """The nearest values of E2M1, of numbers already divided by their scales: those of nvfp4.nearest_codes, without codes."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return ((size / step).round() * step).clamp(max=MAX_CODE) * x.sign()


def rounded_weight(weight: Tensor, scale_2: Tensor) -> Tensor:
    """A weight [N, K] as rounding to nearest leaves it, float32."""
    step = max_scales(weight, scale_2).float() * scale_2
    return (round_to_codes(weight.float().unflatten(-1, (-1, GROUP)) / step[..., None]) * step[..., None]).flatten(-2)


def rounded_input(x: Tensor) -> Tensor:
    """Inputs [..., K] as W4A4 sees them, float32, under an input_scale of what they themselves need with its head-room."""
    input_scale = tensor_scale(HEAD_ROOM * x.abs().amax())
    step = (block_amax(x) / (MAX_CODE * input_scale)).clamp(max=MAX_SCALE).to(torch.float8_e4m3fn).float() * input_scale
    x = x.float().unflatten(-1, (-1, GROUP)) * torch.where(step > 0, 1 / step, 0.0)[..., None]
    return (round_to_codes(x) * step[..., None]).flatten(-2)


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """`rounded`, with the gradient of x."""
    return x + (rounded - x).detach()


class RoundingLinear(nn.Linear):
    """An nn.Linear that shares its parameters with the one it stands for, and rounds weight and, with `inputs`, inputs.

    The weight is rounded as `flashdraft quantize --method max` will find it, saved in bfloat16. group: the weights of its fused
    group, which share weight_scale_2.
    """

    def __init__(self, linear: nn.Linear, group: Sequence[nn.Linear], inputs: bool) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.group = [one.weight for one in group]
        self.inputs = inputs

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            weight = rounded_weight(self.weight.to(SAVED), tensor_scale(amax(self.group).to(SAVED)))
        if self.inputs:
            x = straight_through(x, rounded_input(x.detach()).to(x.dtype))
        return F.linear(x, straight_through(self.weight, weight), self.bias)


def round_while_training(module: nn.Module, form: Form) -> None:
    """Swap the linear leaves that `form` quantizes, in place. Raises ConfigError for what cannot be quantized."""
    left = KEPT_OUT_OF_W4A4 if form == "w4a4" else ()
    todo = {name: leaf for name, leaf in linears(module).items() if name not in left}
    for name, leaf in todo.items():
        check_weight(leaf.weight.detach(), f"{name}.weight")
    for names in fused_groups(todo).values():
        for name in names:
            swap(module, name, RoundingLinear(todo[name], [todo[n] for n in names], form == "w4a4"))
