"""Linear layers fused with residual, norm and activation: what the reference computes, and which kernel is asked."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from flashdraft.errors import ConfigError
from flashdraft.kernels import fused
from flashdraft.kernels.fused import (
    HOPPER_ROWS,
    NARROW_ROWS,
    WIDE_ROWS,
    FusedOptions,
    Norm,
    add_norm,
    add_norm_reference,
    argmax_linear,
    argmax_rows,
    argmax_rows_reference,
    fused_linear,
    fused_linear_reference,
)

K, N = 48, 20


def rows(count: int, size: int = K, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, size).to(dtype)


def norm(size: int = K, round_first: bool = False) -> Norm:
    return Norm(1 + 0.1 * torch.randn(size), 1e-6, round_first)


def parts(count: int, dtype: torch.dtype = torch.float32) -> dict[str, object]:
    """Everything that may stand before and after a product."""
    before = dict(add=rows(count, dtype=dtype), post_norm=norm(), scale=0.37, norm=norm())
    return before | dict(bias=rows(1, 2 * N, dtype)[0], activation="gelu_tanh", gated=True)


def test_the_parts_of_a_fused_linear_follow_one_another() -> None:
    x, weight, own = rows(5), rows(2 * N), parts(5)
    z, r = fused_linear_reference(weight, x, **own)
    residual = (x + own["post_norm"](own["add"])) * 0.37
    gate, up = F.linear(own["norm"](residual), weight, own["bias"]).chunk(2, -1)
    assert torch.equal(r, residual)
    assert torch.equal(z, F.gelu(gate, approximate="tanh") * up)


def test_a_bare_product_leaves_the_stream_alone() -> None:
    x, weight = rows(3), rows(N)
    z, r = fused_linear_reference(weight, x)
    assert r is x
    assert torch.equal(z, x @ weight.T)


def test_a_norm_rounds_before_or_after_its_weight() -> None:
    x, weight = rows(200, dtype=torch.bfloat16), 1 + 0.1 * torch.randn(K)
    y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    after, before = (Norm(weight, 1e-6, first)(x) for first in (False, True))
    assert torch.equal(after, (y * weight).bfloat16())
    assert torch.equal(before, (y.bfloat16().float() * weight).bfloat16())
    assert not torch.equal(after, before)
    assert torch.equal(Norm(None, 1e-6, False)(x), y.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_cpu_the_reference_is_used_whatever_the_options(dtype) -> None:
    x, weight, own = rows(5, dtype=dtype), rows(2 * N, dtype=dtype), parts(5, dtype)
    for options in (FusedOptions(), FusedOptions(deterministic=True, pdl=True)):
        got, expected = fused_linear(weight, x, **own, options=options), fused_linear_reference(weight, x, **own)
        assert all(map(torch.equal, got, expected))
        before = [own[name] for name in ("add", "post_norm", "scale", "norm")]
        assert all(map(torch.equal, add_norm(x, *before, options=options), add_norm_reference(x, *before)))


def test_argmax_takes_the_lowest_of_equals_and_minus_one_where_the_maximum_is_not_finite() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[0.0, 2, 2], [nan, 1, 0], [1, nan, 0], [1, inf, 0], [-inf] * 3, [-inf, -5, -7]])
    assert argmax_rows(logits).tolist() == [1, -1, -1, -1, -1, 1]
    assert argmax_rows(logits.bfloat16()).tolist() == [1, -1, -1, -1, -1, 1]


class Kernels:
    """Stands for both kernel modules on a machine without CUDA: notes who is asked for how many rows, answers by reference."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, supports: bool = True, hopper: bool = False) -> None:
        self.calls: list[tuple[str, int]] = []
        narrow_module = SimpleNamespace(
            supports=lambda weight: supports,
            is_one_slice=lambda weight: True,
            narrow_linear=self._product("narrow"),
            narrow_argmax=self._narrow_argmax,
            NarrowOptions=SimpleNamespace,
        )
        triton = SimpleNamespace(
            add_norm=self._noted("add_norm", fused.add_norm_reference),
            gated_activation=self._noted("gated", fused.gated_activation_reference),
            activation_multiply=self._noted("multiply", fused.activation_multiply_reference),
            argmax_rows=self._noted("argmax", fused.argmax_rows_reference),
        )
        monkeypatch.setattr(fused, "_has_kernels", lambda x: True)
        monkeypatch.setattr(fused, "_triton", lambda: triton)
        monkeypatch.setattr(fused, "narrow", narrow_module)
        wide_module = SimpleNamespace(wide_linear=self._product("wide"), WideOptions=SimpleNamespace)
        monkeypatch.setattr(fused, "wide", wide_module)
        hopper_module = SimpleNamespace(
            supports=lambda weight: hopper, hopper_linear=self._product("hopper"), HopperOptions=SimpleNamespace
        )
        monkeypatch.setattr(fused, "hopper", hopper_module)

    def _product(self, name: str):
        def call(weight: Tensor, x: Tensor, *, options: SimpleNamespace, **parts: object) -> Tensor:
            assert options.pdl
            self.calls.append((name, x.shape[0]))
            return fused_linear_reference(weight, x, **parts)[0]

        return call

    def _narrow_argmax(self, weight: Tensor, x: Tensor, *, options: SimpleNamespace) -> Tensor:
        self.calls.append(("narrow argmax", x.shape[0]))
        return fused.argmax_rows_reference(x @ weight.T)

    def _noted(self, name, reference):
        def call(x, *args, pdl):
            assert pdl
            self.calls.append((name, x.shape[0]))
            return reference(x, *args)

        return call


def check(count: int, options: FusedOptions, **changes: object) -> None:
    x, weight, own = rows(count), rows(2 * N), parts(count) | changes
    for got, expected in zip(
        fused_linear(weight, x, **own, options=options), fused_linear_reference(weight, x, **own), strict=True
    ):
        torch.testing.assert_close(got, expected)


def test_few_rows_go_to_the_narrow_kernel_more_to_the_wide_one_and_many_to_three_kernels(monkeypatch) -> None:
    kernels = Kernels(monkeypatch)
    for count, name in ((NARROW_ROWS, "narrow"), (NARROW_ROWS + 1, "wide"), (WIDE_ROWS, "wide")):
        check(count, FusedOptions())
        assert kernels.calls == [("add_norm", count), (name, count)]
        kernels.calls.clear()
    check(WIDE_ROWS + 1, FusedOptions())
    assert [name for name, _ in kernels.calls] == ["add_norm", "gated"]
    kernels.calls.clear()
    check(WIDE_ROWS + 1, FusedOptions(), gated=False, multiply=rows(WIDE_ROWS + 1, 2 * N))
    assert [name for name, _ in kernels.calls] == ["add_norm", "multiply"]


def test_on_hopper_more_than_few_rows_go_to_its_own_kernel(monkeypatch) -> None:
    kernels = Kernels(monkeypatch, hopper=True)
    for count, name in ((NARROW_ROWS, "narrow"), (NARROW_ROWS + 1, "hopper"), (HOPPER_ROWS, "hopper")):
        check(count, FusedOptions())
        assert kernels.calls == [("add_norm", count), (name, count)]
        kernels.calls.clear()
    check(HOPPER_ROWS + 1, FusedOptions())
    assert [name for name, _ in kernels.calls] == ["add_norm", "gated"]


@pytest.mark.parametrize("count", [1, 8, NARROW_ROWS + 1, HOPPER_ROWS + 1])
def test_on_hopper_deterministic_products_all_go_to_one_kernel(monkeypatch, count) -> None:
    kernels = Kernels(monkeypatch, hopper=True)
    check(count, FusedOptions(deterministic=True))
    assert kernels.calls == [("add_norm", count), ("hopper", count)]
    kernels.calls.clear()
    weight, x = rows(300), rows(count)
    assert torch.equal(argmax_linear(weight, x, options=FusedOptions(deterministic=True)), argmax_rows_reference(x @ weight.T))
    assert kernels.calls == [("hopper", count), ("argmax", count)]


@pytest.mark.parametrize("case", ["turned off", "not supported"])
def test_few_rows_without_the_narrow_kernel(monkeypatch, case) -> None:
    kernels = Kernels(monkeypatch, supports=case != "not supported")
    check(8, FusedOptions(narrow=case != "turned off"))
    assert [name for name, _ in kernels.calls] == ["add_norm", "gated"]


def test_argmax_of_few_rows_is_taken_inside_the_product(monkeypatch) -> None:
    kernels = Kernels(monkeypatch)
    weight, x = rows(300), rows(NARROW_ROWS + 1)
    assert torch.equal(argmax_linear(weight, x[:8]), argmax_rows_reference(x[:8] @ weight.T))
    assert kernels.calls == [("narrow argmax", 8)]
    kernels.calls.clear()
    assert torch.equal(argmax_linear(weight, x), argmax_rows_reference(x @ weight.T))
    assert kernels.calls == [("wide", NARROW_ROWS + 1), ("argmax", NARROW_ROWS + 1)]


def test_a_bare_product_launches_nothing_beside_it(monkeypatch) -> None:
    kernels = Kernels(monkeypatch)
    bare = dict(add=None, post_norm=None, scale=1.0, norm=None, activation=None, gated=False)
    check(WIDE_ROWS + 1, FusedOptions(), **bare)
    assert kernels.calls == []


@pytest.mark.parametrize("count", [1, 8, NARROW_ROWS + 1, WIDE_ROWS + 1, 131])
def test_deterministic_products_all_go_to_our_own_kernels(monkeypatch, count) -> None:
    kernels = Kernels(monkeypatch)
    check(count, FusedOptions(narrow=False, deterministic=True))
    check(count, FusedOptions(deterministic=True), gated=False, multiply=rows(count, 2 * N))
    assert kernels.calls == 2 * [("add_norm", count), ("narrow" if count <= NARROW_ROWS else "wide", count)]


def test_deterministic_says_so_where_the_narrow_kernel_cannot(monkeypatch) -> None:
    Kernels(monkeypatch, supports=False)
    with pytest.raises(ConfigError, match=r"float32 product of 48 inputs and 40 outputs.*turn `deterministic` off"):
        check(3, FusedOptions(deterministic=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [FusedOptions(), FusedOptions(narrow=False, pdl=False), FusedOptions(deterministic=True)])
def test_on_cuda_the_kernels_equal_the_reference(dtype, options) -> None:
    weight = (rows(96, 128) / 12).cuda().to(dtype)
    norms = [Norm(norm(128, first).weight.cuda(), 1e-6, first) for first in (False, True)]
    x, add, multiply = (rows(HOPPER_ROWS + 1, size).cuda().to(dtype) for size in (128, 128, 96))
    everything = dict(post_norm=norms[0], scale=0.37, norm=norms[1], bias=multiply[0], activation="gelu_tanh")
    for count in (1, 8, NARROW_ROWS, NARROW_ROWS + 1, WIDE_ROWS, WIDE_ROWS + 1, HOPPER_ROWS, HOPPER_ROWS + 1):
        for own in (dict(gated=True), dict(multiply=multiply[:count])):
            parts = everything | dict(add=add[:count]) | own
            got, expected = (
                fused_linear(weight, x[:count], **parts, options=options),
                fused_linear_reference(weight, x[:count], **parts),
            )
            for mine, theirs in zip(got, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_deterministic_bits_of_a_row_do_not_depend_on_the_others() -> None:
    weight, x = (rows(count, 128).cuda().bfloat16() for count in (96, 130))
    options = FusedOptions(deterministic=True)
    whole = fused_linear(weight, x, norm=Norm(None, 1e-6, False), options=options)[0]
    for start, stop in ((0, 1), (3, 11), (60, 77), (1, 130)):
        part = fused_linear(weight, x[start:stop], norm=Norm(None, 1e-6, False), options=options)[0]
        assert torch.equal(part, whole[start:stop])
