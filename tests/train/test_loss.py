from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from flashdraft.train.loss import LossConfig, Shared, block_loss, chunk_loss, chunk_rows, decay_weights, dpace_weights


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
    weight, positions = torch.randn(50, 8, generator=generator), torch.randn(9, 8, generator=generator)
    places = np.array([2, 3, 4, 3, 4, 7, 8, 0, 7, 0, 1, 2])  # as blocks that overlap, and out of order
    teacher = positions[torch.from_numpy(places)]
    h = torch.randn(len(rows), 8, generator=generator)
    ours, theirs = h.clone().requires_grad_(), h.clone().requires_grad_()
    result = block_loss(ours, positions, places, labels, supervised, rows, weight, LossConfig(beta=beta, chunk=chunk), cap)
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
    result = block_loss(h, h, np.arange(5), labels, supervised, rows, weight, LossConfig())
    assert result.hits.tolist() == [2, 1, 1]
    assert result.counts.tolist() == [2, 2, 1]
    assert result.expected_al.item() == pytest.approx(1 + (1 + 2) / 2)
    assert result.overlap.item() == pytest.approx(5.0)


def test_dpace_weights_are_the_gradient_of_the_expected_accepted_length() -> None:
    q = torch.rand(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    supervised = torch.arange(7) < torch.tensor([7, 5, 3, 1, 0])[:, None]
    log_s = (0.5 * q + 0.5).log().requires_grad_()
    expected_length = (log_s.cumsum(-1).exp() * supervised).sum()  # sum over m of s_1 ... s_m
    (gradient,) = torch.autograd.grad(expected_length, log_s)
    torch.testing.assert_close(dpace_weights(q, supervised, 0.5), gradient)


def test_decay_weights_fall_by_slot_and_stop_where_supervision_does() -> None:
    weights = decay_weights(torch.tensor([[True, True, True], [True, False, False]]), 2.0)
    expected = torch.tensor([[1.0, math.exp(-0.5), math.exp(-1.0)], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("weighting", ["dpace", "decay", "none"])
def test_the_total_is_the_weighted_sum_of_what_each_slot_loses(weighting: Literal["dpace", "decay", "none"]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, h = torch.randn(20, 8, generator=generator), torch.randn(6, 8, generator=generator)
    labels, supervised = torch.randint(0, 20, (2, 3), generator=generator), torch.ones(2, 3, dtype=torch.bool)
    config = LossConfig(beta=0.0, weighting=weighting, gamma=3.0)
    result = block_loss(h, h, np.arange(6), labels, supervised, torch.arange(6), weight, config)
    ell = F.cross_entropy(h @ weight.T, labels.flatten(), reduction="none")
    weights = {
        "dpace": dpace_weights((-ell).exp().view(2, 3), supervised, 0.5),
        "decay": decay_weights(supervised, 3.0),
        "none": torch.ones(2, 3),
    }[weighting]
    torch.testing.assert_close(result.total, (weights.flatten() * ell).sum())
    torch.testing.assert_close(result.loss, result.total / 6)


def test_the_head_is_never_applied_to_more_rows_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def counted(h: Tensor, *rest: Any) -> Any:
        seen.append(len(h))
        return chunk_loss(h, *rest)

    monkeypatch.setattr("flashdraft.train.loss.chunk_loss", counted)
    h = torch.randn(1000, 8)
    labels, supervised = torch.zeros(1000, 1, dtype=torch.long), torch.ones(1000, 1, dtype=torch.bool)
    block_loss(h, h, np.arange(1000), labels, supervised, torch.arange(1000), torch.randn(50, 8), LossConfig(chunk=128))
    assert seen == [128] * 7 + [104]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_a_batch_without_anchors_has_a_loss_of_zero() -> None:
    h, teacher = torch.empty(0, 8, device="cuda", requires_grad=True), torch.randn(5, 8, device="cuda")
    labels, none = torch.zeros(4, 3, dtype=torch.long, device="cuda"), torch.empty(0, dtype=torch.long, device="cuda")
    weight = torch.randn(50, 8, device="cuda")
    result = block_loss(h, teacher, none.cpu().numpy(), labels, labels.bool(), none, weight, LossConfig())
    result.total.backward()
    assert result.loss.item() == 0


def test_a_hidden_state_of_the_target_that_rows_of_a_chunk_share_is_there_once() -> None:
    places = np.array([4, 5, 6, 5, 6, 7, 6, 7, 8, 90])
    shared = Shared.of(places, 6, torch.device("cpu"))
    assert [positions.tolist() for positions in shared.positions] == [[4, 5, 6, 7], [6, 7, 8, 90]]
    assert shared.index.tolist() == [0, 1, 2, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_chunks_are_given_equally_many_positions() -> None:
    places = np.concatenate([np.arange(40).repeat(7), np.arange(1000, 1020).repeat(7)])
    shared = Shared.of(places, 280, torch.device("cuda"))
    assert [len(positions) for positions in shared.positions] == [70, 70]
    picked = [positions.cpu()[index.cpu()] for positions, index in zip(shared.positions, shared.index.split(280), strict=True)]
    assert torch.cat(picked).tolist() == places.tolist()


def test_a_chunk_of_logits_takes_half_a_gigabyte_at_most() -> None:
    assert chunk_rows(262_144) == 512
    assert chunk_rows(49_152) == 2048
    assert chunk_rows(1000) == 4096
    assert all(4 * chunk_rows(v) * v <= 2**29 for v in (32_000, 49_152, 128_256, 151_936, 262_144))


def test_a_batch_without_anchors_has_a_loss_and_a_gradient_of_zero() -> None:
    h, weight = torch.empty(0, 8, requires_grad=True), torch.randn(50, 8)
    labels, supervised = torch.zeros(4, 3, dtype=torch.long), torch.zeros(4, 3, dtype=torch.bool)
    none = torch.empty(0, dtype=torch.long)
    result = block_loss(h, h.detach(), none.numpy(), labels, supervised, none, weight, LossConfig())
    result.total.backward()
    assert result.loss.item() == 0
    assert h.grad is not None
    assert result.expected_al.item() == 1
