"""The loss of a draft under the target's frozen head, in chunks of rows: [R, V] never exists at once.

    ell_r = beta * CE(softmax(zt_r), z_r) + (1 - beta) * CE(label_r, z_r)
    loss  = sum_r w_r ell_r / R,   w by slot: D-PACE or a decay,   z = h W^T,   zt = (target's hidden) W^T with its soft cap

The head is frozen, so one pass over a chunk gives ell and its gradient dX with three matrix products. Blocks overlap, so rows
of a chunk share hidden states of the target: zt of each is made once (with an anchor for 1.6 tokens, of 2,048 rows some 600).
Measures of the draft (accuracy, overlap, expected AL) come from the same pass. Symbols: R supervised rows, P positions, H
hidden, V vocabulary, K proposals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Chunk = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
# Logits of one chunk in float32: 0.5 GB. Eagerly about eight such tensors live at once, compiled about three.
CHUNK_LOGITS = 1 << 27


def chunk_rows(vocab_size: int) -> int:
    """Rows of one chunk: a power of two between 128 and 4,096 whose logits are at most CHUNK_LOGITS."""
    return max(128, min(4096, 1 << (CHUNK_LOGITS // vocab_size).bit_length() - 1))


@dataclass(frozen=True)
class Shared:
    """Which positions the rows of every chunk need, each once."""

    positions: tuple[Tensor, ...]  # of a chunk, long
    index: Tensor  # [R] long: of each row among those of its chunk

    @classmethod
    def of(cls, places: np.ndarray, chunk: int, device: torch.device) -> Shared:
        """places int64 [R]: the position of each row. On CUDA, where every shape compiles once more, chunks are given equally
        many positions, a multiple of an eighth of a chunk: some twice.
        """
        found = [np.unique(places[start : start + chunk], return_inverse=True) for start in range(0, len(places), chunk)]
        if not found:
            return cls((), torch.zeros(0, dtype=torch.long, device=device))
        index = torch.from_numpy(np.concatenate([inverse for _, inverse in found]))
        counts = [len(positions) for positions, _ in found]
        if device.type == "cuda":
            step = max(1, chunk // 8)
            counts = [min(chunk, -(-max(counts) // step) * step)] * len(found)
        padded = [
            np.pad(positions, (0, n - len(positions)), mode="edge") for n, (positions, _) in zip(counts, found, strict=True)
        ]
        together = torch.from_numpy(np.concatenate(padded)).to(device)
        return cls(together.split(counts), index.to(device))


def chunk_loss(
    h: Tensor, teacher: Tensor, index: Tensor, labels: Tensor, weight: Tensor, beta: float, softcap: float | None
) -> Chunk:
    """One chunk of rows: ell, draft probability of the label, correct, overlap sum(min(p, q)), and dell/dh [rows, H].

    h [rows, H] and teacher [P, H] in the type of weight [V, H], of which a row has the one at its `index` [rows]; beta 0 never
    looks at the teacher.
    """
    z = (h @ weight.T).float()
    q = z.softmax(-1)
    best = z.argmax(-1)
    # By the largest logit: logsumexp and exp of all of them took 3.0 s for 661 rows of 49,152 on one core, this 1.5 s.
    log_norm = z.gather(1, best[:, None]) - q.gather(1, best[:, None]).log()
    z_label = z.gather(1, labels[:, None])[:, 0]
    ell = (1.0 - beta) * (log_norm[:, 0] - z_label)
    hit = torch.arange(z.shape[1], device=z.device) == labels[:, None]
    grad = q - (1.0 - beta) * hit
    overlap = torch.zeros_like(ell)
    if beta > 0:
        zt = (teacher @ weight.T).float()
        p = (zt if softcap is None else torch.tanh(zt / softcap) * softcap).softmax(-1)[index]
        ell = ell + beta * (log_norm[:, 0] - (p * z).sum(-1))
        grad = grad - beta * p
        overlap = torch.minimum(p, q).sum(-1)
    return ell, (z_label - log_norm[:, 0]).exp(), best == labels, overlap, grad.to(weight.dtype) @ weight


@functools.cache
def _compiled_chunk() -> Callable[..., Chunk]:
    return torch.compile(chunk_loss, dynamic=False)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        teacher: Tensor,
        shared: Shared,
        labels: Tensor,
        weight: Tensor,
        beta: float,
        softcap: float | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        function = _compiled_chunk() if hidden.is_cuda else chunk_loss
        h, t = hidden.to(weight.dtype), teacher.to(weight.dtype)
        parts = []
        for number, start in enumerate(range(0, max(len(h), 1), chunk)):
            rows = slice(start, start + chunk)
            short = chunk - len(h[rows]) if hidden.is_cuda else 0  # a compiled chunk has fixed shapes
            index, mine = F.pad(shared.index[rows], (0, short)), F.pad(labels[rows], (0, short))
            of_chunk = t[shared.positions[number]] if shared.positions else t[:1]  # padding, too, has an index
            out = function(F.pad(h[rows], (0, 0, 0, short)), of_chunk, index, mine, weight, beta, softcap)
            parts.append([x[: len(h[rows])] for x in out])
        ell, q, correct, overlap, grad = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(grad)
        ctx.dtype = hidden.dtype  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(q, correct, overlap)
        return ell, q, correct, overlap

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, d_ell: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return (grad * d_ell[:, None]).to(ctx.dtype), *[None] * 7  # type: ignore[attr-defined]


def dpace_weights(q: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """w_j = sum_{m >= j} prod_{i <= m} s_i with s = (1 - alpha) q + alpha, over the supervised slots of blocks [.., K]."""
    reach = ((1.0 - alpha) * q + alpha).cumprod(-1) * supervised
    return reach.flip(-1).cumsum(-1).flip(-1)


def decay_weights(supervised: Tensor, gamma: float) -> Tensor:
    """w_k = exp(-(k - 1) / gamma) for slots k = 1..K of blocks [.., K]."""
    slots = torch.arange(supervised.shape[-1], device=supervised.device)
    return torch.exp(-slots / gamma) * supervised


@dataclass(frozen=True)
class LossConfig:
    beta: float = 1.0  # 1: distillation alone; 0: the labels alone
    weighting: Literal["dpace", "decay", "none"] = "dpace"
    alpha: float = 0.5  # D-PACE
    gamma: float = 4.0  # decay
    chunk: int | None = None  # rows of one pass under the head; None: chunk_rows


@dataclass(frozen=True)
class BlockLoss:
    total: Tensor  # scalar, differentiable: sum_r w_r ell_r, to be divided by the rows of all batches of an update
    hits: Tensor  # [K] correct proposals by position
    counts: Tensor  # [K] supervised slots by position
    overlap: Tensor  # scalar: sum over rows of sum(min(p, q)); 0 for beta 0
    run: Tensor  # scalar: sum over blocks of the leading run of correct proposals

    @property
    def loss(self) -> Tensor:
        """Of this batch alone, differentiable."""
        return self.total / self.counts.sum().clamp(min=1)

    @property
    def expected_al(self) -> Tensor:
        """Mean leading run of correct proposals, plus 1."""
        return 1.0 + self.run / self.counts[0].clamp(min=1)


def block_loss(
    hidden: Tensor,
    teacher: Tensor,
    places: np.ndarray,
    labels: Tensor,
    supervised: Tensor,
    rows: Tensor,
    weight: Tensor,
    config: LossConfig,
    softcap: float | None = None,
) -> BlockLoss:
    """hidden [R, H] of the supervised slots `rows` of labels, supervised [.., K]; teacher [P, H], of which slots have those at
    `places` int64 [R]."""
    chunk, of_rows = config.chunk or chunk_rows(len(weight)), labels.flatten()[rows]
    shared = Shared.of(places, chunk, hidden.device)
    ell, q, correct, overlap = _HeadLoss.apply(hidden, teacher, shared, of_rows, weight, config.beta, softcap, chunk)
    shape = (-1, labels.shape[-1])
    block_q = torch.zeros(labels.numel(), device=q.device).index_put((rows,), q).view(shape)
    block_correct = torch.zeros(labels.numel(), device=q.device).index_put((rows,), correct.float()).view(shape)
    mask = supervised.view(shape)
    if config.weighting == "dpace":
        weights = dpace_weights(block_q, mask, config.alpha)
    else:
        weights = decay_weights(mask, config.gamma) if config.weighting == "decay" else mask.float()
    return BlockLoss(
        total=(weights.flatten()[rows] * ell).sum(),
        hits=block_correct.sum(0),
        counts=mask.sum(0),
        overlap=overlap.sum(),
        run=block_correct.cumprod(-1).sum(),
    )
