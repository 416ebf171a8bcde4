"""NVFP4: four-bit floats (E2M1) with an FP8 (E4M3) scale for every 16 inputs and one float32 scale for a tensor.

value = CODES[code] * weight_scale * weight_scale_2. Codes are packed two a byte, the even column in the low nibble; bit 3 is
the sign. The same bits as NVIDIA Model Optimizer 0.47 writes, except that an all-zero tensor stays finite.
Format: docs/quantization.md. Shape letters: N outputs, K inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashdraft.errors import ConfigError

GROUP = 16
MAX_CODE, MAX_SCALE, MIN_SCALE = 6.0, 448.0, 2.0**-9  # of E2M1; of E4M3, and its smallest positive value
FLUSHED = 2.0**-6  # a Marlin reader takes block scales below for zero
CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Packed:
    """A weight [N, K] in NVFP4."""

    weight: Tensor  # uint8 [N, K/2]
    scale: Tensor  # float8_e4m3fn [N, K/16]
    scale_2: Tensor  # float32 scalar
    input_scale: Tensor | None = None  # float32 scalar: inputs are quantized too

    def dequantize(self) -> Tensor:
        """The weight in float32 [N, K]."""
        return decode(unpack(self.weight), self.scale, self.scale_2)

    def with_input_scale(self, input_scale: Tensor) -> Packed:
        return replace(self, input_scale=input_scale)

    @property
    def flushed_share(self) -> float:
        """The share of block scales below 2^-6."""
        return float((self.scale.float() < FLUSHED).float().mean())


def check_weight(weight: Tensor, name: str = "the weight") -> None:
    """Raises ConfigError for what cannot be quantized: not [N, K] with K a multiple of 16, or not finite; of one on the meta
    device by its shape alone."""
    if weight.dim() != 2 or weight.shape[1] % GROUP or not weight.numel():
        raise ConfigError(
            f"{name} has shape {list(weight.shape)}: NVFP4 takes [outputs, inputs] with a multiple of {GROUP} inputs: leave it "
            "out with --ignore"
        )
    if not weight.is_meta and not torch.stack(torch.aminmax(weight)).isfinite().all():
        raise ConfigError(f"{name} holds NaN or infinite values: take an earlier checkpoint")


def amax(tensors: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of several tensors, float32 scalar."""
    return torch.stack([torch.stack(torch.aminmax(t)).abs().max().float() for t in tensors]).max()


def tensor_scale(largest: Tensor) -> Tensor:
    """weight_scale_2 or input_scale of tensors whose largest magnitude is this; of all zeros that of 1, so that none is 0."""
    return torch.where(largest > 0, largest, 1.0).float() / (MAX_CODE * MAX_SCALE)


def block_amax(weight: Tensor) -> Tensor:
    """The largest magnitude of every 16 inputs, float32 [N, K/16]."""
    return weight.unflatten(-1, (-1, GROUP)).abs().amax(-1).float()


def max_scales(weight: Tensor, scale_2: Tensor) -> Tensor:
    """Block scales by which the largest of each block becomes 6: float8_e4m3fn [N, K/16]."""
    scale = block_amax(weight) / (MAX_CODE * scale_2)
    return _to_e4m3(torch.where(scale == 0, 1.0, scale))


def static_scales(largest: Tensor, global_amax: Tensor) -> Tensor:
    """Block scales [N, K/16] by which `largest` [N, K/16] becomes 6, as they are frozen before a search or GPTQ.

    Another order of operations than max_scales, hence in rare cases other bits.
    """
    scale = largest / MAX_CODE
    scale = torch.where(scale == 0, 1.0, scale)
    return _to_e4m3(scale * MAX_SCALE / (torch.where(global_amax > 0, global_amax, 1.0) / MAX_CODE))


def _to_e4m3(scale: Tensor) -> Tensor:
    return scale.clamp(MIN_SCALE, MAX_SCALE).to(torch.float8_e4m3fn)


def encode(weight: Tensor, scale: Tensor, scale_2: Tensor) -> Tensor:
    """Codes uint8 [N, K] of a weight under these scales."""
    x = weight.float().unflatten(-1, (-1, GROUP)) / (scale.float() * scale_2)[..., None]
    return nearest_codes(x).flatten(-2)


def nearest_codes(x: Tensor) -> Tensor:
    """Codes uint8 of numbers already divided by their scales; ties as Model Optimizer breaks them, -0.0 as code 0."""
    size = x.abs()
    code = (size > 0.25).to(torch.uint8)
    code += size >= 0.75
    code += size > 1.25
    code += size >= 1.75
    code += size > 2.5
    code += size >= 3.5
    code += size > 5
    return code | (x < 0).to(torch.uint8) << 3


def decode(codes: Tensor, scale: Tensor, scale_2: Tensor) -> Tensor:
    """Values float32 [N, K] of codes uint8 [N, K]."""
    values = code_values(codes).unflatten(-1, (-1, GROUP))
    return (values * (scale.float() * scale_2)[..., None]).flatten(-2)


def code_values(codes: Tensor) -> Tensor:
    """The numbers, float32, that codes stand for before any scale."""
    return _table(codes.device)[codes.int()]


@functools.cache
def _table(device: torch.device) -> Tensor:
    """On a GPU made once: a column of GPTQ must not wait for a copy from the host."""
    return torch.tensor([*CODES, *(-c for c in CODES)], device=device)


def pack(codes: Tensor) -> Tensor:
    """uint8 [..., K] of codes -> [..., K/2]."""
    return codes[..., 1::2] << 4 | codes[..., ::2]


def unpack(packed: Tensor) -> Tensor:
    """uint8 [..., K/2] -> codes [..., K]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def quantize(weight: Tensor, scale_2: Tensor | None = None, name: str = "the weight") -> Packed:
    """Round-to-nearest with max_scales. scale_2: of the fused group, where it is larger than the weight's own."""
    check_weight(weight, name)
    scale_2 = tensor_scale(amax([weight])) if scale_2 is None else scale_2
    scale = max_scales(weight, scale_2)
    return Packed(pack(encode(weight, scale, scale_2)), scale, scale_2)


def round_input(x: Tensor, input_scale: Tensor) -> Tensor:
    """Inputs [..., K] as W4A4 hardware sees them, float32: rounded to NVFP4 under block scales of their own.

    The formula of vLLM's reference, which its kernels are tested against, bit for bit. What lies above 6 * 448 * input_scale is
    clipped; a block too small for a positive scale becomes 0.
    """
    inverse = 1 / input_scale
    scale = (inverse * (block_amax(x) * (1 / MAX_CODE))).clamp(max=MAX_SCALE).to(torch.float8_e4m3fn).float()
    step = scale * (1 / inverse)
    factor = torch.where(step > 0, 1 / step, 0.0)
    codes = nearest_codes(x.float().unflatten(-1, (-1, GROUP)) * factor[..., None])
    return (code_values(codes) * (scale / inverse)[..., None]).flatten(-2)
