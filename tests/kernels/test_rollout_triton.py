"""The Triton kernels of a rollout against their references: on CUDA, or on the CPU under TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from flashdraft.kernels.rollout import decode_attention_reference

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs CUDA, or TRITON_INTERPRET=1", allow_module_level=True)

from triton_interpreting import mended

from flashdraft.kernels import rollout_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    with mended():
        yield


@pytest.mark.parametrize(("slots", "kv_heads", "groups", "length", "size"), [(5, 3, 3, 200, 64), (3, 2, 1, 70, 32)])
def test_decode_attention_equals_the_reference(slots: int, kv_heads: int, groups: int, length: int, size: int) -> None:
    torch.manual_seed(0)
    caches = torch.randn(2, slots, kv_heads, length, size, device=DEVICE)
    ours, theirs = caches.clone(), caches.clone()
    rows = torch.randn(slots, kv_heads * (groups + 2), size, device=DEVICE)
    q, k, v = rows.split([kv_heads * groups, kv_heads, kv_heads], 1)
    positions = torch.randint(0, length, (slots,), dtype=torch.int32, device=DEVICE)
    positions[0], positions[1] = 0, 64
    active = torch.ones(slots, dtype=torch.bool, device=DEVICE)
    active[-1] = False
    got = rollout_triton.decode_attention(q, k, v, *ours, positions, active, 0.125)
    torch.testing.assert_close(got, decode_attention_reference(q, k, v, *theirs, positions, active, 0.125))
    assert torch.equal(ours, theirs)


def test_temperature_0_takes_the_largest_logit_and_the_lowest_id_of_a_tie() -> None:
    logits = torch.randn(4, 5000, device=DEVICE)
    logits[1, [70, 4000]] = 9.0
    step = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    chosen = rollout_triton.sample(logits, torch.zeros(4, device=DEVICE), step, 7)
    assert chosen.tolist() == logits.argmax(-1).tolist()
    assert chosen[1] == 70


def test_sampling_follows_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0], device=DEVICE).expand(600, 4).contiguous()
    step = torch.ones(1, dtype=torch.int32, device=DEVICE)
    chosen = rollout_triton.sample(logits, torch.full((600,), 0.7, device=DEVICE), step, 7)
    shares = torch.bincount(chosen.long(), minlength=4) / 600
    torch.testing.assert_close(shares, (logits[0] / 0.7).softmax(-1), atol=0.06, rtol=0)
