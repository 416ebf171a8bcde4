"""Block scales chosen by the error they leave, instead of by the largest weight of a block."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flashdraft.quant.nvfp4 import GROUP, MAX_CODE, max_scales

ELEMENTS, ELEMENTS_ON_GPU = 1 << 20, 1 << 26  # of a weight at once; four times as many take a CPU 1.4 times as long


def row_chunks(weight: Tensor, elements: int | None = None) -> Iterator[slice]:
    """Slices of the rows of a weight [N, K] with about so many elements each."""
    elements = elements or (ELEMENTS_ON_GPU if weight.is_cuda else ELEMENTS)
    step = max(1, elements // weight.shape[1])
    for start in range(0, len(weight), step):
        yield slice(start, min(start + step, len(weight)))


def block_errors(weight: Tensor, scale: Tensor, scale_2: Tensor, importance: Tensor | None = None) -> Tensor:
    """Squared error [N, K/16] that rounding under these scales leaves in each block, inputs weighed by `importance` [K].

    Both sides of a tie are as far off, so the nearest code is found by arithmetic, in under half of the time of encode and
    decode.
    """
    size = weight.abs().unflatten(-1, (-1, GROUP))
    step = (scale.float() * scale_2)[..., None]
    x = size / step
    spacing = torch.where(x < 2, 0.5, torch.where(x < 4, 1.0, 2.0))
    nearest = (x / spacing).round_().mul_(spacing).clamp_(max=MAX_CODE)
    error = nearest.mul_(step).sub_(size).square_()
    return (error if importance is None else error.mul_(importance.unflatten(0, (-1, GROUP)))).sum(-1)


def searched_scales(weight: Tensor, scale_2: Tensor, importance: Tensor | None = None) -> Tensor:
    """The E4M3 scale of least squared error for every block, float8 [N, K/16]; of equal ones the smallest.

    importance: a weight of each input [K], such as the diagonal of the Hessian. Only scales from half to twice that of
    max_scales are tried: below, the largest weight is clipped to less than half, and 2 s has no value that s has not. So on
    Model Optimizer's sweep over all 126 the bits are the same.
    """
    found = []
    for rows in row_chunks(weight):
        part = weight[rows].float()
        first = max_scales(part, scale_2).view(torch.uint8).int()
        best = torch.full(first.shape, torch.inf, device=part.device)
        chosen = first.clone()
        for offset in range(-8, 9):  # an octave is 8 codes of E4M3
            code = (first + offset).clamp(1, 126)
            error = block_errors(part, code.to(torch.uint8).view(torch.float8_e4m3fn), scale_2, importance)
            better = error < best
            best, chosen = torch.where(better, error, best), torch.where(better, code, chosen)
        found.append(chosen.to(torch.uint8).view(torch.float8_e4m3fn))
    return torch.cat([part.view(torch.uint8) for part in found]).view(torch.float8_e4m3fn)
