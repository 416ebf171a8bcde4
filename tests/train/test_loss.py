from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from flashdraft.train.loss import LossConfig, block_loss, dpace_weights


def plain(h, teacher, labels, supervised, rows, weight, beta, alpha, cap):  # type: ignore[no-untyped-def]
    """The formula of the loss, with everything held at once and autograd's own gradient."""
    z, zt = h @ weight.T, teacher @ weight.T
    if cap:
        zt = torch.tanh(zt / cap) * cap
    y = labels.flatten()[rows]
    ell = beta * F.cross_entropy(z, zt.softmax(-1), reduction="none") + (1 - beta) * F.cross_entropy(z, y, reduction="none")
    q = torch.zeros(labels.numel(), dtype=h.dtype)
    q[rows] = z.softmax(-1).gather(1, y[:, None])[:, 0].detach()
    s = (1 - alpha) * q.view(labels.shape) + alpha
    w = torch.zeros(labels.shape, dtype=h.dtype)
    for j in range(labels.shape[1]):
        for m in range(j, labels.shape[1]):
            w[:, j] += s[:, : m + 1].prod(-1) * supervised[:, m]
    return (w.flatten()[rows] * ell).sum() / len(rows)


@pytest.mark.parametrize(("beta", "cap", "chunk"), [(1.0, None, 5), (0.0, None, 100), (0.6, 3.0, 7), (0.6, None, 1)])
def test_chunked_loss_and_gradient_equal_autograd_of_the_formula(beta: float, cap: float | None, chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 50, (6, 3), generator=generator)
    supervised = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]]).bool()
    rows = supervised.flatten().nonzero()[:, 0]
    weight, teacher = torch.randn(50, 8, generator=generator), torch.randn(len(rows), 8, generator=generator)
    h = torch.randn(len(rows), 8, generator=generator)
    ours, theirs = h.clone().requires_grad_(), h.clone().requires_grad_()
    result = block_loss(ours, teacher, labels, supervised, rows, weight, LossConfig(beta, 0.5, chunk), cap)
    expected = plain(theirs, teacher, labels, supervised, rows, weight, beta, 0.5, cap)
    torch.testing.assert_close(result.loss, expected)
    (gradient,) = torch.autograd.grad(result.loss * 3, ours)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected * 3, theirs)[0])


def test_dpace_weights_sum_the_chance_to_be_reached() -> None:
    q = torch.tensor([[1.0, 0.0, 0.5]])
    weights = dpace_weights(q, torch.tensor([[True, True, False]]), 0.5)
    torch.testing.assert_close(weights, torch.tensor([[1.0 + 0.5, 0.5, 0.0]]))


def test_measures_count_leading_runs_of_correct_proposals() -> None:
    weight = torch.eye(4)
    labels = torch.tensor([[0, 1, 2], [3, 1, 0]])
    supervised = torch.tensor([[True, True, True], [True, True, False]])
    rows = supervised.flatten().nonzero()[:, 0]
    h = 5 * F.one_hot(torch.tensor([0, 2, 2, 3, 1]), 4).float()
    result = block_loss(h, h, labels, supervised, rows, weight, LossConfig())
    assert result.hits.tolist() == [2, 1, 1]
    assert result.counts.tolist() == [2, 2, 1]
    assert result.expected_al.item() == pytest.approx(1 + (1 + 2) / 2)
    assert result.overlap.item() == pytest.approx(1.0)
