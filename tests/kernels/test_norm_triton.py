"""The Triton kernels around linear layers against their references: on CUDA, or on the CPU under TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from flashdraft.kernels.fused import (
    Norm,
    activation_multiply_reference,
    add_norm_reference,
    argmax_rows_reference,
    gated_activation_reference,
    soft_cap_reference,
)

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs CUDA, or TRITON_INTERPRET=1", allow_module_level=True)

from flashdraft.kernels import norm_triton

# exp overflows to infinity, as meant, and the interpreter's NumPy says so.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE = 80
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def close(got: Tensor, expected: Tensor) -> None:
    """Within a step of the dtype: sums go in another order. The interpreter cuts bfloat16 off instead of rounding it."""
    step = 2e-6 if expected.dtype == torch.float32 else torch.finfo(expected.dtype).eps
    if expected.dtype == torch.bfloat16 and DEVICE == "cpu":
        step *= 3
    torch.testing.assert_close(got, expected, rtol=step, atol=step)


def weight(size: int = SIZE) -> Tensor:
    return 1 + 0.1 * torch.randn(size, device=DEVICE)


NORMS = {
    "none": lambda: None,
    "scale-free": lambda: Norm(None, 1e-6, False),
    "round first": lambda: Norm(weight(), 1e-5, True),
    "weight first": lambda: Norm(weight(), 1e-6, False),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("post", [None, *NORMS])
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_add_norm_equals_the_reference_with_any_part_absent(dtype, norm, post, scale) -> None:
    x, add = torch.randn(2, 5, SIZE, device=DEVICE).to(dtype)
    parts = (None if post is None else add, None if post is None else NORMS[post](), scale, NORMS[norm]())
    got, expected = norm_triton.add_norm(x, *parts), add_norm_reference(x, *parts)
    close(got[0], expected[0])
    close(got[1], expected[1])


@pytest.mark.parametrize("size", [1, 64, 96, 576, 2560, 5376])
def test_add_norm_of_any_size_and_of_one_row(size) -> None:
    x, add = torch.randn(2, 1, size, device=DEVICE)
    norm, post = Norm(weight(size), 1e-6, False), Norm(weight(size), 1e-3, True)
    got, expected = norm_triton.add_norm(x, add, post, 1.0, norm), add_norm_reference(x, add, post, 1.0, norm)
    close(got[0], expected[0])
    close(got[1], expected[1])


def test_add_norm_reads_rows_of_a_wider_tensor_and_nothing_behind_them() -> None:
    wide = torch.full((4, 3 * SIZE), float("nan"), device=DEVICE)
    wide[:, :SIZE], wide[:, 2 * SIZE :] = torch.randn(2, 4, SIZE, device=DEVICE)
    x, add = wide[:, :SIZE], wide[:, 2 * SIZE :]
    got, expected = norm_triton.add_norm(x, add, None, 1.0, None), add_norm_reference(x, add, None, 1.0, None)
    assert torch.equal(got[0], expected[0])


def test_without_anything_to_add_the_residual_is_the_input_itself() -> None:
    x = torch.randn(3, SIZE, device=DEVICE)
    assert norm_triton.add_norm(x, None, None, 1.0, Norm(None, 1e-6, False))[0] is x
    assert norm_triton.add_norm(x, None, None, 1.0, None)[1] is x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "size"), [(1, 8), (3, 100), (2, 2100)])
def test_gated_activation_equals_the_reference(dtype, activation, rows, size) -> None:
    y = (3 * torch.randn(rows, 2 * size, device=DEVICE)).to(dtype)
    close(norm_triton.gated_activation(y, activation), gated_activation_reference(y, activation))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activation_multiply_equals_the_reference_where_the_factor_is_a_slice_or_absent(activation) -> None:
    y, wide = torch.randn(4, 24, device=DEVICE), torch.randn(4, 6, 24, device=DEVICE)
    for multiply in (None, wide[:, 2]):
        got = norm_triton.activation_multiply(y, activation, multiply)
        close(got, activation_multiply_reference(y, activation, multiply))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_far_from_zero_are_the_identity_or_nothing(activation) -> None:
    y = torch.tensor([[-3e4, -100.0, 100.0, 3e4]], device=DEVICE)
    close(norm_triton.activation_multiply(y, activation, None), activation_multiply_reference(y, activation, None))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 300, norm_triton.SEGMENT, 3 * norm_triton.SEGMENT + 17])
def test_argmax_takes_the_lowest_of_equals(dtype, vocab) -> None:
    logits = torch.randn(6, vocab, device=DEVICE).to(dtype)
    logits[0, [vocab // 3, vocab - 1]] = 20
    logits[1] = -3  # all equal
    logits[2, -1] = 20
    assert norm_triton.argmax_rows(logits).tolist() == argmax_rows_reference(logits).tolist()
    assert norm_triton.argmax_rows(logits)[:3].tolist() == [vocab // 3, 0, vocab - 1]


def test_argmax_is_minus_one_where_the_maximum_is_not_finite() -> None:
    logits = torch.randn(6, norm_triton.SEGMENT + 40, device=DEVICE)
    logits[0, 7] = float("nan")
    logits[1, -1] = float("nan")
    logits[2, -2] = float("inf")
    logits[3] = float("-inf")
    logits[4, ::2] = float("-inf")
    chosen = norm_triton.argmax_rows(logits)
    assert chosen[:4].tolist() == [-1] * 4
    assert chosen.tolist() == argmax_rows_reference(logits).tolist()
    assert chosen.dtype == torch.int32


def test_argmax_of_rows_of_a_wider_tensor() -> None:
    wide = torch.full((3, 128), float("inf"), device=DEVICE)
    wide[:, :100] = torch.randn(3, 100, device=DEVICE)
    assert norm_triton.argmax_rows(wide[:, :100]).tolist() == wide[:, :100].argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_soft_cap_equals_the_reference_for_logits_of_every_size(dtype) -> None:
    z = (torch.randn(3, 5000) * torch.logspace(-6, 3, 5000)).to(dtype).to(DEVICE)
    got, expected = norm_triton.soft_cap(z, 30.0, torch.full_like(z, torch.nan)), soft_cap_reference(z, 30.0)
    step = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        step *= 3  # as in `close`
    torch.testing.assert_close(got, expected, rtol=step, atol=4e-6 if dtype == torch.float16 else 0)
