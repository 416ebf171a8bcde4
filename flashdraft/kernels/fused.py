"""A linear layer with what stands before and after it in a decoder layer: residual, norms, activation; references and dispatch.

Shape letters: T rows, K inputs, N outputs, V vocabulary. Every decoder layer of the Llama, Qwen and Gemma kind is a chain of
`fused_linear` and attention, so one interface serves them all; which kernel computes it is decided here, by device and rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from flashdraft.errors import ConfigError
from flashdraft.kernels import hopper, narrow, nvfp4, wide
from flashdraft.kernels.nvfp4 import Nvfp4Weight

# Up to here a product is bound by reading its weight, and the narrow kernel reads it fastest.
NARROW_ROWS = 16
# Up to here the wide kernel is as fast as cuBLAS, and saves the activation's kernel and the gaps between launches.
WIDE_ROWS = 32
# So it is with the Hopper kernel, where there is one.
HOPPER_ROWS = 256

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True)
class Norm:
    """RMSNorm over the last dimension in float32: x * (mean(x^2) + eps)^-1/2, then times `weight` [K] float32 (None: 1).

    round_first: the normed value is rounded to x's dtype before it meets the weight (Llama, Qwen), not after (Gemma). Where a
    family multiplies by 1 + w, `weight` holds 1 + w.
    """

    weight: Tensor | None
    eps: float
    round_first: bool

    def __call__(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        if self.weight is None:
            return y.to(x.dtype)
        if self.round_first:
            return (y.to(x.dtype).float() * self.weight).to(x.dtype)
        return (y * self.weight).to(x.dtype)


def add_norm_reference(
    x: Tensor, add: Tensor | None, post_norm: Norm | None, scale: float, norm: Norm | None
) -> tuple[Tensor, Tensor]:
    """The residual stream r = (x + post_norm(add)) * scale [T, K], and norm(r), each rounded to x's dtype once computed."""
    r = x
    if add is not None:
        r = x + (add if post_norm is None else post_norm(add))
    if scale != 1.0:
        r = r * scale
    return r, r if norm is None else norm(r)


def fused_linear_reference(
    weight: Tensor,
    x: Tensor,
    *,
    add: Tensor | None = None,
    post_norm: Norm | None = None,
    scale: float = 1.0,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    multiply: Tensor | None = None,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """z [T, N] and the residual stream r [T, K] behind it (x itself without `add` and `scale`).

    r = (x + post_norm(add)) * scale; y = norm(r) weight^T + bias with weight [N, K]. Without an activation z = y; with one
    z = act(y) * multiply, `multiply` [T, N] (None: 1). `gated`: weight is [gate; up] of 2N rows and z = act(gate) * up.
    """
    r, a = add_norm_reference(x, add, post_norm, scale, norm)
    y = F.linear(a, weight, bias)
    if activation is None:
        return y, r
    if gated:
        return gated_activation_reference(y, activation), r
    return activation_multiply_reference(y, activation, multiply), r


def gated_activation_reference(y: Tensor, activation: str) -> Tensor:
    """act(gate) * up of y [T, 2N] = [gate, up] -> [T, N]."""
    gate, up = y.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up


def activation_multiply_reference(y: Tensor, activation: str, multiply: Tensor | None) -> Tensor:
    """act(y) * multiply, both [T, N] (None: 1)."""
    z = ACTIVATIONS[activation](y)
    return z if multiply is None else z * multiply


def argmax_rows_reference(logits: Tensor) -> Tensor:
    """The id of the largest logit of each row, logits [T, V] -> [T] int32.

    The lowest id of equals; -1 where the maximum is not finite or a logit is NaN.
    """
    best, ids = logits.float().max(-1)
    lowest = (logits == best[:, None].to(logits.dtype)).int().argmax(-1)
    return torch.where(best.isfinite(), lowest, torch.full_like(ids, -1)).int()


def soft_cap_reference(z: Tensor, cap: float) -> Tensor:
    """cap * tanh(z / cap), rounded to z's dtype after each of the three, as transformers does."""
    return (z / cap).tanh() * cap


@dataclass(frozen=True)
class FusedOptions:
    """Which kernels may be used on CUDA.

    narrow: products of few rows (above) by our own kernels. deterministic: all products by one kernel, so that a row's bits do
    not depend on the others. pdl: our kernels are launched while the one before still runs and wait inside
    (programmatic dependent launch; without effect before compute capability 9.0). hopper_attention: heads of 512 in prompts by
    the kernel of hopper_attention.py, on compute capability 9.0; not the default before an engine has served with it.
    """

    narrow: bool = True
    deterministic: bool = False
    pdl: bool = True
    hopper_attention: bool = False


DEFAULT = FusedOptions()


def add_norm(
    x: Tensor, add: Tensor | None, post_norm: Norm | None, scale: float, norm: Norm | None, *, options: FusedOptions = DEFAULT
) -> tuple[Tensor, Tensor]:
    """`add_norm_reference` by the fastest kernel there is; x and `add` [T, K] with contiguous rows."""
    if not _has_kernels(x):
        return add_norm_reference(x, add, post_norm, scale, norm)
    return _triton().add_norm(x, add, post_norm, scale, norm, pdl=options.pdl)


def fused_linear(
    weight: Tensor | Nvfp4Weight,
    x: Tensor,
    *,
    add: Tensor | None = None,
    post_norm: Norm | None = None,
    scale: float = 1.0,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    multiply: Tensor | None = None,
    gated: bool = False,
    options: FusedOptions = DEFAULT,
) -> tuple[Tensor, Tensor]:
    """`fused_linear_reference` by the fastest kernels there are; x, `add` [T, K] and `multiply` [T, N] with contiguous rows.

    A weight in NVFP4 that is [gate; up] was repacked as such. Without a copy in 16 bits it is made into one for this call where
    rows are many, which no CUDA graph can hold.
    Raises ConfigError for `deterministic` with a weight that no such kernel can multiply.
    """
    before = dict(add=add, post_norm=post_norm, scale=scale, norm=norm)
    after = dict(bias=bias, activation=activation, multiply=multiply, gated=gated)
    is_few = x.shape[0] <= NARROW_ROWS and _has_kernels(x)
    if isinstance(weight, Nvfp4Weight) and not is_few:
        weight = nvfp4.unpacked(weight, x.dtype) if weight.copy is None else weight.copy
    if not _has_kernels(x):
        return fused_linear_reference(weight, x, **before, **after)  # type: ignore[arg-type]
    # Not inside the product: each of its blocks would norm all rows, 4 us of an H200's time where this kernel takes 1.5.
    r, a = (x, x) if add is None and scale == 1.0 and norm is None else add_norm(x, **before, options=options)  # type: ignore[arg-type]
    few_rows = narrow.NarrowOptions(pdl=options.pdl)
    if isinstance(weight, Nvfp4Weight):
        return nvfp4.nvfp4_linear(weight, a, bias=bias, activation=activation, multiply=multiply, options=few_rows), r
    kernel = _kernel(weight, x.shape[0], options)
    if kernel == "narrow":
        return narrow.narrow_linear(weight, a, **after, options=few_rows), r  # type: ignore[arg-type]
    if kernel == "wide":
        return wide.wide_linear(weight, a, **after, options=wide.WideOptions(pdl=options.pdl)), r  # type: ignore[arg-type]
    if kernel == "hopper":
        return hopper.hopper_linear(weight, a, **after, options=hopper.HopperOptions(pdl=options.pdl)), r  # type: ignore[arg-type]
    y = F.linear(a, weight, bias)
    if activation is None:
        return y, r
    if gated:
        return _triton().gated_activation(y, activation, pdl=options.pdl), r
    return _triton().activation_multiply(y, activation, multiply, pdl=options.pdl), r


def argmax_linear(weight: Tensor | Nvfp4Weight, x: Tensor, *, options: FusedOptions = DEFAULT) -> Tensor:
    """The id [T] int32 of the largest of x weight^T in each row, as `argmax_rows_reference` says it; x [T, K]."""
    few_rows = narrow.NarrowOptions(pdl=options.pdl)
    if isinstance(weight, Nvfp4Weight):
        if _has_kernels(x) and x.shape[0] <= NARROW_ROWS and nvfp4.is_one_slice(weight):
            return nvfp4.nvfp4_argmax(weight, x, options=few_rows)
    elif _has_kernels(x) and _kernel(weight, x.shape[0], options) == "narrow" and narrow.is_one_slice(weight):
        return narrow.narrow_argmax(weight, x, options=few_rows)
    return argmax_rows(fused_linear(weight, x, options=options)[0], options=options)


def _kernel(weight: Tensor, rows: int, options: FusedOptions) -> Literal["narrow", "wide", "hopper"] | None:
    """Which kernel of ours is to multiply; None: cuBLAS.

    Those that do so under `deterministic` have one order of additions for all numbers of rows: Hopper's, elsewhere the wide
    one, of which the narrow one is the twin for few rows.
    """
    if not options.deterministic and not options.narrow:
        return None
    few = rows <= NARROW_ROWS
    if hopper.supports(weight) and (options.deterministic or not few):
        return "hopper" if options.deterministic or rows <= HOPPER_ROWS else None
    if narrow.supports(weight):
        return "narrow" if few else "wide" if options.deterministic or rows <= WIDE_ROWS else None
    if options.deterministic:
        raise ConfigError(
            f"deterministic: there is no such kernel for a {str(weight.dtype).removeprefix('torch.')} product of "
            f"{weight.shape[1]} inputs and {weight.shape[0]} outputs on this GPU; turn `deterministic` off"
        )
    return None


def soft_cap(z: Tensor, cap: float, out: Tensor, *, options: FusedOptions = DEFAULT) -> Tensor:
    """`soft_cap_reference` into `out`, both [T, V] and contiguous: one pass over the logits instead of four."""
    if not _has_kernels(z):
        return out.copy_(soft_cap_reference(z, cap))
    return _triton().soft_cap(z, cap, out, pdl=options.pdl)


def argmax_rows(logits: Tensor, *, options: FusedOptions = DEFAULT) -> Tensor:
    """`argmax_rows_reference` by the fastest kernel there is; logits [T, V] with contiguous rows."""
    if not _has_kernels(logits):
        return argmax_rows_reference(logits)
    return _triton().argmax_rows(logits, pdl=options.pdl)


def _has_kernels(x: Tensor) -> bool:
    return x.device.type == "cuda" and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


def _triton() -> ModuleType:
    from flashdraft.kernels import norm_triton

    return norm_triton
