"""Products with NVFP4 weights (four-bit codes, a scale for 16 of them) and 16-bit inputs: Python side of cuda/nvfp4.cuh.

Shape letters: T rows, K inputs, N outputs. Few rows take the narrow kernel, which reads at the speed of memory, and whose
storage `repacked` makes. From 32 rows on it is slower than products with a weight in 16 bits, of which `with_copy` keeps one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from flashdraft.errors import ConfigError
from flashdraft.kernels.narrow import Machine, Weight, device_of, narrow_argmax, narrow_linear
from flashdraft.kernels.narrow_plan import FASTEST, NVFP4, STEP, NarrowOptions, cut

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 to 7; bit 3 is the sign
GROUP = 16  # inputs of a scale
SHIFT = 2.0**52  # nvfp4.cuh: codes are times 2^-126, scales times 2^74
TILE, LANES = 16, 32
CHUNK = 1 << 24  # codes that are repacked at a time


@dataclass(frozen=True)
class Nvfp4Weight:
    """A weight [rows, K] in the narrow kernel's storage: `packed` uint8 [tiles, K / 64, 576], `scales` float32 [tiles].

    gated: it is [gate; up], and a tile has 8 rows of each. copy: the same [rows, K] in 16 bits, for many rows at once.
    """

    packed: Tensor
    scales: Tensor
    rows: int
    k: int
    gated: bool = False
    copy: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.k

    @property
    def narrow(self) -> Weight:
        return Weight(self.packed, self.rows, self.k, NVFP4, scales=self.scales)

    def with_copy(self, dtype: torch.dtype) -> Nvfp4Weight:
        """With the 16-bit weight that products of many rows read."""
        return replace(self, copy=unpacked(self, dtype))

    @classmethod
    def concatenated(cls, weights: Sequence[Nvfp4Weight]) -> Nvfp4Weight:
        """Outputs side by side, of weights of one K whose tiles are full: rows a multiple of 16."""
        assert all(w.rows % TILE == 0 and w.k == weights[0].k and not w.gated for w in weights)
        packed, scales = torch.cat([w.packed for w in weights]), torch.cat([w.scales for w in weights])
        return cls(packed, scales, sum(w.rows for w in weights), weights[0].k)


def repacked(codes: Tensor, scales: Tensor, scale: float, *, gated: bool = False) -> Nvfp4Weight:
    """From the checkpoint's layout: codes uint8 [rows, K / 2], the even column in the low nibble; scales float8_e4m3fn
    [rows, K / 16], none negative; `scale` of the whole tensor (weight_scale_2). gated: rows are [gate; up].

    Raises ConfigError for K that is no multiple of 64 and for scales that are negative or not finite.
    """
    rows, k = codes.shape[0], 2 * codes.shape[1]
    if k % STEP or scales.shape != (rows, k // GROUP):
        raise ConfigError(
            f"NVFP4 kernels take weights of a multiple of {STEP} inputs with a scale for {GROUP}, not {rows} x {k}"
        )
    height = TILE // 2 if gated else TILE
    outputs = rows // 2 if gated else rows
    tiles = -(-outputs // height)
    small, empty = _small_scales(scales)
    packed = torch.empty(tiles, k // STEP, TILE * STEP // 2 + TILE * STEP // GROUP, dtype=torch.uint8, device=codes.device)
    for part in _parts(tiles, TILE * k):
        index = _rows_of(part, height, outputs, gated).to(codes.device)
        packed[part, :, : TILE * STEP // 2] = _arranged_codes(codes[index], empty[index])
        packed[part, :, TILE * STEP // 2 :] = _arranged_scales(small[index])
    return Nvfp4Weight(packed, torch.full((tiles,), scale * SHIFT, device=codes.device), rows, k, gated)


def _parts(tiles: int, codes_of_tile: int) -> Iterator[slice]:
    count = max(1, CHUNK // codes_of_tile)
    return (slice(start, min(start + count, tiles)) for start in range(0, tiles, count))


def _rows_of(tiles: slice, height: int, outputs: int, gated: bool) -> Tensor:
    """[tiles, 16]: the weight rows of each; behind the last one it is repeated."""
    own = (torch.arange(tiles.start, tiles.stop)[:, None] * height + torch.arange(height)).clamp(max=outputs - 1)
    return torch.cat((own, own + outputs), 1) if gated else own


def _small_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 of 5 bits of exponent (from 2^-9 on) and 3 of mantissa, subnormal ones too; and where a scale is 0."""
    values = scales.float()
    if not bool((values.isfinite() & (values >= 0)).all()):
        raise ConfigError("an NVFP4 weight has scales that are negative or not finite: quantize it again")
    mantissa, exponent = torch.frexp(values)  # in [0.5, 1)
    small = (exponent + 8 << 3) | ((mantissa * 16).to(torch.int32) - 8)
    return torch.where(values > 0, small, 0).to(torch.uint8), values == 0


@cache
def _places(device: torch.device) -> Tensor:
    """[4, 16]: the bits of a code in a half word, for each of the four pairs (Nvfp4::unpacked)."""
    code = torch.arange(16)
    sign, rest = code >> 3, code & 7
    last = sign << 14 | (rest & 1) << 13 | (rest >> 1) << 10
    return torch.stack((sign << 15 | rest << 6, sign << 12 | rest << 3, sign << 9 | rest, last)).to(device)


def _arranged_codes(codes: Tensor, empty: Tensor) -> Tensor:
    """[tiles, 16, K / 2] -> uint8 [tiles, steps, 512]: for lane (g, t) four words, of rows g and g + 8, 8 k of each half."""
    tiles, _, pairs = codes.shape
    whole = torch.stack((codes & 15, codes >> 4), -1).view(tiles, TILE, -1, GROUP)
    whole = torch.where(empty[..., None], 0, whole)
    # tile, row half, g, step, half of the step, t, pair, first or second of it
    eight = whole.view(tiles, 2, 8, 2 * pairs // STEP, 2, 4, 4, 2).long()
    bits = torch.stack([_places(codes.device)[pair][eight[..., pair, :]] for pair in range(4)]).sum(0)
    words = bits[..., 0] | bits[..., 1] << 16
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return words.permute(0, 3, 2, 5, 1, 4).contiguous().view(torch.uint8).view(tiles, -1, LANES * 16)


def _arranged_scales(scales: Tensor) -> Tensor:
    """[tiles, 16, K / 16] -> uint8 [tiles, steps, 64]: for rows g and g + 8 and half of t those of both halves of the step."""
    tiles = scales.shape[0]
    split = scales.view(tiles, 2, 8, -1, 2, 2)  # tile, row half, g, step, half of the step, half of t
    return split.permute(0, 3, 2, 5, 1, 4).reshape(tiles, -1, TILE * STEP // GROUP)


def dequantized(codes: Tensor, scales: Tensor, scale: float) -> Tensor:
    """float32 [rows, K] from the checkpoint's layout."""
    values = torch.tensor([*VALUES, *(-value for value in VALUES)], device=codes.device)
    whole = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()
    return values[whole] * (scales.float() * scale).repeat_interleave(GROUP, 1)


def unpacked(weight: Nvfp4Weight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[rows, K] from the kernel's storage, rounded once."""
    height = TILE // 2 if weight.gated else TILE
    outputs = weight.rows // 2 if weight.gated else weight.rows
    whole = torch.empty(weight.rows, weight.k, dtype=dtype, device=weight.packed.device)
    for part in _parts(len(weight.packed), TILE * weight.k):
        tiles = _unpacked_tiles(weight.packed[part], weight.scales[part]).to(dtype)
        end = min(part.stop * height, outputs)
        for begin, rows in ((0, slice(0, height)), (outputs, slice(height, TILE)))[: 1 + weight.gated]:
            target = whole[begin + part.start * height : begin + end]
            target.copy_(tiles[:, rows].flatten(0, 1)[: len(target)])
    return whole


def _unpacked_tiles(packed: Tensor, scales: Tensor) -> Tensor:
    """float32 [tiles, 16, K]."""
    tiles, steps, _ = packed.shape
    words = packed[:, :, : TILE * STEP // 2].contiguous().view(torch.int32).view(tiles, steps, 8, 4, 2, 2)
    words = words.permute(0, 4, 2, 1, 5, 3).long() & 0xFFFFFFFF  # tile, row half, g, step, half of the step, t
    halves = torch.stack((words & 0xFFFF, words >> 16), -1)
    shifted = [halves >> 6, halves >> 3, halves]
    codes = [part & 7 | (halves >> sign & 1) << 3 for part, sign in zip(shifted, (15, 12, 9), strict=True)]
    codes.append((halves >> 10 & 3) << 1 | halves >> 13 & 1 | (halves >> 14 & 1) << 3)
    values = torch.tensor([*VALUES, *(-value for value in VALUES)], device=words.device)
    codes_of_row = torch.stack(codes, -2).reshape(tiles, TILE, -1)
    small = packed[:, :, TILE * STEP // 2 :].view(tiles, steps, 8, 2, 2, 2).permute(0, 4, 2, 1, 5, 3)
    small = small.reshape(tiles, TILE, -1).int()
    factors = torch.ldexp((small & 7) + 8.0, (small >> 3) - 12) * (scales / SHIFT)[:, None, None]
    return values[codes_of_row] * factors.repeat_interleave(GROUP, -1)


def nvfp4_linear(
    weight: Nvfp4Weight,
    x: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    multiply: Tensor | None = None,
    options: NarrowOptions = FASTEST,
    machine: Machine | None = None,
) -> Tensor:
    """z [T, N] bf16 of x [T, K] bf16: `fused_linear_reference` on the dequantized weight, for what `supports` accepts."""
    after = dict(bias=bias, activation=activation, multiply=multiply, gated=weight.gated)
    return narrow_linear(weight.narrow, x, **after, options=options, machine=machine)  # type: ignore[arg-type]


def nvfp4_argmax(weight: Nvfp4Weight, x: Tensor, *, options: NarrowOptions = FASTEST, machine: Machine | None = None) -> Tensor:
    """int32 [T]: of every row of x [T, K] the lowest index of the greatest logit in bf16, -1 where it is not finite."""
    return narrow_argmax(weight.narrow, x, options=options, machine=machine)


def is_one_slice(weight: Nvfp4Weight) -> bool:
    """Whether `nvfp4_argmax` takes it."""
    return cut(weight.rows, weight.k, False, device_of(weight.packed.device), NVFP4).slices == 1


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """bf16 inputs on a GPU of compute capability 8.0 or more."""
    return device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (8, 0)
