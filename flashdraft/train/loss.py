"""The loss of a draft under the target's frozen head, in chunks of rows: [R, V] never exists at once.

    ell_r = beta * CE(softmax(zt_r), z_r) + (1 - beta) * CE(label_r, z_r)
    loss  = sum_r w_r ell_r / R,   w the D-PACE weights,   z = h W^T,   zt = (target's hidden) W^T with its soft cap

The head is frozen, so one pass over a chunk gives ell and its gradient dX with three matrix products. Measures of the draft
(accuracy, overlap, expected AL) come from the same pass. Symbols: R supervised rows, H hidden, V vocabulary, K proposals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Chunk = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def chunk_loss(h: Tensor, teacher: Tensor, labels: Tensor, weight: Tensor, beta: float, softcap: float | None) -> Chunk:
    """One chunk of rows: ell, draft probability of the label, correct, overlap sum(min(p, q)), and dell/dh [rows, H].

    h and teacher [rows, H] in the type of weight [V, H]; beta 0 never looks at the teacher.
    """
    z = (h @ weight.T).float()
    log_norm = z.logsumexp(-1, keepdim=True)
    q = (z - log_norm).exp()
    z_label = z.gather(1, labels[:, None])[:, 0]
    ell = (1.0 - beta) * (log_norm[:, 0] - z_label)
    hit = torch.arange(z.shape[1], device=z.device) == labels[:, None]
    grad = q - (1.0 - beta) * hit
    overlap = torch.zeros_like(ell)
    if beta > 0:
        zt = (teacher @ weight.T).float()
        p = (zt if softcap is None else torch.tanh(zt / softcap) * softcap).softmax(-1)
        ell = ell + beta * (log_norm[:, 0] - (p * z).sum(-1))
        grad = grad - beta * p
        overlap = torch.minimum(p, q).sum(-1)
    correct = z.argmax(-1) == labels
    return ell, (z_label - log_norm[:, 0]).exp(), correct, overlap, grad.to(weight.dtype) @ weight


@functools.cache
def _compiled_chunk() -> Callable[..., Chunk]:
    return torch.compile(chunk_loss, dynamic=False)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        teacher: Tensor,
        labels: Tensor,
        weight: Tensor,
        beta: float,
        softcap: float | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        function = _compiled_chunk() if hidden.is_cuda else chunk_loss
        h, t = hidden.to(weight.dtype), teacher.to(weight.dtype)
        parts = []
        for start in range(0, max(len(h), 1), chunk):
            rows = slice(start, start + chunk)
            short = chunk - len(h[rows]) if hidden.is_cuda else 0  # a compiled chunk has one fixed shape
            padded = (F.pad(h[rows], (0, 0, 0, short)), F.pad(t[rows], (0, 0, 0, short)), F.pad(labels[rows], (0, short)))
            out = function(*padded, weight, beta, softcap)
            parts.append([x[: len(h[rows])] for x in out])
        ell, q, correct, overlap, grad = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(grad)
        ctx.dtype = hidden.dtype  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(q, correct, overlap)
        return ell, q, correct, overlap

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, d_ell: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return (grad * d_ell[:, None]).to(ctx.dtype), None, None, None, None, None, None  # type: ignore[attr-defined]


def dpace_weights(q: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """w_j = sum_{m >= j} prod_{i <= m} s_i with s = (1 - alpha) q + alpha, over the supervised slots of blocks [.., K]."""
    reach = ((1.0 - alpha) * q + alpha).cumprod(-1) * supervised
    return reach.flip(-1).cumsum(-1).flip(-1)


@dataclass(frozen=True)
class LossConfig:
    beta: float = 1.0  # 1: distillation alone; 0: the labels alone
    alpha: float = 0.5  # D-PACE
    chunk: int = 4096


@dataclass(frozen=True)
class BlockLoss:
    loss: Tensor  # scalar, differentiable
    hits: Tensor  # [K] correct proposals by position
    counts: Tensor  # [K] supervised slots by position
    overlap: Tensor  # scalar: mean of sum(min(p, q))
    expected_al: Tensor  # scalar: mean leading run of correct proposals, plus 1


def block_loss(
    hidden: Tensor,
    teacher: Tensor,
    labels: Tensor,
    supervised: Tensor,
    rows: Tensor,
    weight: Tensor,
    config: LossConfig,
    softcap: float | None = None,
) -> BlockLoss:
    """hidden and teacher [R, H] of the supervised slots `rows` of labels, supervised [.., K]."""
    ell, q, correct, overlap = _HeadLoss.apply(
        hidden, teacher, labels.flatten()[rows], weight, config.beta, softcap, config.chunk
    )
    shape = (-1, labels.shape[-1])
    block_q = torch.zeros(labels.numel(), device=q.device).index_put((rows,), q).view(shape)
    block_correct = torch.zeros(labels.numel(), device=q.device).index_put((rows,), correct.float()).view(shape)
    mask = supervised.view(shape)
    weights = dpace_weights(block_q, mask, config.alpha).flatten()[rows]
    run = block_correct.cumprod(-1).sum(-1)
    blocks = mask[:, 0].sum().clamp(min=1)
    return BlockLoss(
        loss=(weights * ell).sum() / max(len(rows), 1),
        hits=block_correct.sum(0),
        counts=mask.sum(0),
        overlap=overlap.sum() / max(len(rows), 1),
        expected_al=1.0 + run.sum() / blocks,
    )
