"""The Triton kernel of a rollout against its reference: on CUDA, or on the CPU under TRITON_INTERPRET=1."""

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
