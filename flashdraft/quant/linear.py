"""A linear layer whose weight stays in NVFP4, and what it is expanded to where there is no kernel for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashdraft.kernels import nvfp4
from flashdraft.quant.nvfp4 import GROUP, Packed, round_input


class _KeepsBuffers(nn.Module):
    """Casts of the model leave the buffers' types alone: in bfloat16 a scale would be another one."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self


class QuantizedLinear(_KeepsBuffers):
    """An nn.Linear of weight [N, K] in NVFP4; its buffers have the names and types of the checkpoint format.

    Kernels read the buffers. `forward` is the reference: it dequantizes at every call, so for more than a look take `expanded`.
    """

    weight: Tensor  # uint8 [N, K/2]
    weight_scale: Tensor  # float8_e4m3fn [N, K/16]
    weight_scale_2: Tensor  # float32 scalar
    input_scale: Tensor | None  # float32 scalar

    def __init__(self, packed: Packed, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = packed.weight.shape[0], packed.scale.shape[1] * GROUP
        self.register_buffer("weight", packed.weight)
        self.register_buffer("weight_scale", packed.scale)
        # Copies: linears of a fused group are given one tensor, and safetensors stores no tensor twice.
        self.register_buffer("weight_scale_2", packed.scale_2.clone())
        self.register_buffer("input_scale", None if packed.input_scale is None else packed.input_scale.clone())
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def packed(self) -> Packed:
        return Packed(self.weight, self.weight_scale, self.weight_scale_2, self.input_scale)

    def expanded(self, dtype: torch.dtype) -> nn.Linear:
        """A linear in `dtype` with the same values, for devices without a kernel; with an input_scale it rounds its inputs."""
        return _linear(self.packed.dequantize().to(dtype), self.bias, self.input_scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.expanded(x.dtype)(x)


class RoundedInputLinear(_KeepsBuffers, nn.Linear):
    """A linear that rounds its inputs to NVFP4 first: W4A4, exactly emulated where there is no FP4 hardware."""

    input_scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(round_input(x, self.input_scale).to(x.dtype), self.weight, self.bias)


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights in NVFP4 run there as they are, by inputs of `dtype`."""
    return nvfp4.supports(device, dtype)


def _linear(weight: Tensor, bias: Tensor | None, input_scale: Tensor | None) -> nn.Linear:
    kind = nn.Linear if input_scale is None else RoundedInputLinear
    linear = kind(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().to(weight.dtype), requires_grad=False)
    if input_scale is not None:
        linear.register_buffer("input_scale", input_scale, persistent=False)
    return linear


def linears(module: nn.Module) -> dict[str, nn.Linear]:
    """The linear leaves of a module by name, in its order."""
    return {name: child for name, child in module.named_modules() if isinstance(child, nn.Linear)}


def swap(module: nn.Module, name: str, leaf: nn.Module) -> None:
    """Put `leaf` where the submodule of that dotted name is."""
    parent, _, child = name.rpartition(".")
    setattr(module.get_submodule(parent), child, leaf)


def expand(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Swap every QuantizedLinear for a linear with the same values, in place."""
    for name, child in list(module.named_modules()):
        if isinstance(child, QuantizedLinear):
            swap(module, name, child.expanded(dtype))
    return module
