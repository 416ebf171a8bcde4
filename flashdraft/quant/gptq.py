"""GPTQ: weights rounded column by column, each column's error made up for by those after it (Frantar et al., 2022).

H is the mean of 2 x x^T over the inputs x of a linear, U the upper Cholesky factor of its inverse. Given U, rows do not
depend on each other, so a large head is done in chunks of rows. Shape letters: N outputs, K inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashdraft.quant.nvfp4 import GROUP, code_values, nearest_codes
from flashdraft.quant.scales import row_chunks

BLOCK = 128  # columns between two updates of all that follow
DAMPING = 0.01  # of the mean diagonal, as Model Optimizer


def inverse_factor(hessian: Tensor, dead: Tensor, damping: float = DAMPING) -> Tensor | None:
    """U [K, K] with U^T U = (damped H)^-1, or None where H is not positive definite.

    dead: bool [K], columns whose weights are all zero; they neither give nor take errors. Model Optimizer inverts H and takes
    the factor of that; the inverse of H's own factor, from the last column backwards, is the same for half the work.
    """
    h = hessian.double().clone()
    h[dead], h[:, dead] = 0, 0
    h[dead, dead] = 1
    h.diagonal().add_(damping * h.diagonal().mean())
    lower, failed = torch.linalg.cholesky_ex(h.flip(0, 1))
    if failed or not lower.isfinite().all():
        return None
    eye = torch.eye(len(h), dtype=h.dtype, device=h.device)
    return torch.linalg.solve_triangular(lower.flip(0, 1), eye, upper=True).float()


def gptq_codes(
    weight: Tensor,
    scale: Tensor,
    scale_2: Tensor,
    upper: Tensor,
    order: Tensor | None = None,
    block: int = BLOCK,
    elements: int | None = None,
) -> Tensor:
    """Codes uint8 [N, K] of a weight under frozen scales.

    upper: `inverse_factor`, of a Hessian whose columns are in `order` [K], where that is given. elements: of the weight
    done at once.
    """
    elements = elements or (1 << 28 if weight.is_cuda else 1 << 24)
    columns = torch.arange(weight.shape[1], device=weight.device) if order is None else order
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    for rows in row_chunks(weight, elements):
        # Transposed: a column of weights is then contiguous.
        steps = (scale[rows].float() * scale_2).t().contiguous()
        codes[rows] = _one_chunk(weight[rows].float().t()[columns], steps, columns // GROUP, upper, block)[
            columns.argsort()
        ].t()
    return codes


def _one_chunk(w: Tensor, steps: Tensor, groups: Tensor, upper: Tensor, block: int) -> Tensor:
    """Codes [K, n] of weights w [K, n], overwritten; steps [K/16, n] are the scales of the group of each column [K]."""
    codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    group_of = groups.tolist()
    for start in range(0, len(w), block):
        end = min(start + block, len(w))
        part, errors, u = w[start:end], torch.empty_like(w[start:end]), upper[start:end, start:end]
        diagonal = u.diagonal().tolist()
        for i in range(end - start):
            step = steps[group_of[start + i]]
            code = nearest_codes(part[i] / step)
            value = code_values(code) * step
            # A negative number that is rounded to nothing is code 0, as of the rounded weight.
            codes[start + i] = torch.where(code == 8, 0, code)
            errors[i] = (part[i] - value) / diagonal[i]
            part[i + 1 :].addr_(u[i, i + 1 :], errors[i], alpha=-1)
        w[end:].addmm_(upper[start:end, end:].t(), errors, alpha=-1)
    return codes


def proxy_loss(weight: Tensor, quantized: Tensor, hessian: Tensor) -> float:
    """Mean squared error of the outputs, of all rows: tr((W - Q) H (W - Q)^T) / 2N, as H is twice the inputs' mean square."""
    total = 0.0
    for rows in row_chunks(weight):
        error = weight[rows].float() - quantized[rows].float()
        total += float((error @ hessian * error).sum())
    return total / (2 * len(weight))
