"""RowStableLinear is nn.Linear for 2 to 16 rows, bit for bit, and a row's bits never depend on how many rows there are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flashdraft.kernels import linear as linear_module
from flashdraft.kernels.linear import STABLE_ROWS, Part, RowStableLinear, can_pack, make_rows_stable, pack_linears

SHAPES = [(64, 96), (576, 192), (17, 33), (1, 5), (96, 1), (130, 515), (1536, 576)]
ROWS = [2, 3, 7, 8, 9, 15, 16]


def linear(k: int, n: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(k, n, bias=bias).to(torch.bfloat16).requires_grad_(False)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_2_to_16_rows_equal_nn_linear_bitwise(shape, bias):
    plain = linear(*shape, bias)
    stable, x = RowStableLinear(plain), torch.randn(STABLE_ROWS, shape[0]).to(torch.bfloat16)
    for rows in ROWS:
        assert torch.equal(stable(x[:rows]), plain(x[:rows]))
    assert torch.equal(stable(x[:1]), plain(x[:2])[:1])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(shape, bias):
    stable, x = RowStableLinear(linear(*shape, bias)), torch.randn(500, shape[0]).to(torch.bfloat16)
    all_rows = stable(x)
    for start, stop in ((0, 1), (3, 11), (0, 33), (31, 33), (100, 165), (250, 499), (499, 500)):
        assert torch.equal(stable(x[start:stop]), all_rows[start:stop])


@pytest.mark.skipif(not can_pack(), reason="oneDNN has no bf16 product here")
@pytest.mark.parametrize(("limit", "at_once"), [(16, 16), (24, 16), (32, 32), (999, 32)])
def test_as_many_rows_make_a_product_as_were_seen_to_be_stable(monkeypatch, limit, at_once):
    """A product whose bits change beyond `limit` rows, as those of other versions and processors do."""
    right = RowStableLinear.product
    other = lambda self, x: right(self, x) if len(x) <= limit else right(self, x).nextafter(x.new_tensor(9.0))  # noqa: E731
    monkeypatch.setattr(linear_module, "_AT_ONCE", {})
    monkeypatch.setattr(RowStableLinear, "product", other)
    stable, x = RowStableLinear(linear(64, 96)), torch.randn(150, 64).to(torch.bfloat16)
    assert stable.at_once == at_once
    assert torch.equal(stable(x[40:47]), stable(x)[40:47])


def test_what_need_not_be_stable_is_one_product():
    tree = nn.Sequential(linear(64, 96), nn.ReLU(), linear(96, 64))
    x = torch.randn(300, 64).to(torch.bfloat16)
    before = tree(x)
    pack_linears(tree, ())
    assert [m.at_once > 1 << 30 for m in tree if isinstance(m, RowStableLinear)] == [True, True]
    torch.testing.assert_close(tree(x), before, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("rows", [1, 33, 300])
def test_the_product_is_right(rows):
    plain = linear(130, 65, bias=True)
    x = torch.randn(rows, 130).to(torch.bfloat16)
    exact = x.double() @ plain.weight.double().T + plain.bias.double()
    torch.testing.assert_close(RowStableLinear(plain)(x).double(), exact, atol=0.02, rtol=0.01)


def test_leading_dimensions_empty_inputs_and_strided_inputs():
    stable = RowStableLinear(linear(64, 48))
    x = torch.randn(3, 50, 64).to(torch.bfloat16)
    assert torch.equal(stable(x), stable(x.flatten(0, 1)).view(3, 50, 48))
    assert stable(x[0, 0]).shape == (48,)
    assert stable(x[:0]).shape == (0, 50, 48)
    assert stable(x[0, :0]).shape == (0, 48)
    wide = torch.randn(50, 128).to(torch.bfloat16)
    assert torch.equal(stable(wide[:, ::2]), stable(wide[:, ::2].contiguous()))
    assert torch.equal(stable(wide.T[:64].T), stable(wide[:, :64].contiguous()))


class Projections(nn.Module):
    """Children by the names that are fused; gate_proj and up_proj read inputs of unequal sizes, so they stay alone."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (linear(96, n, bias) for n in (128, 40, 33))
        self.gate_proj, self.up_proj = linear(96, 50), linear(64, 50)


@pytest.mark.parametrize("bias", [False, True])
def test_linears_that_share_an_input_are_one_product_with_the_bits_of_each(bias):
    module = Projections(bias)
    plain = dict(module.named_children())
    make_rows_stable(module)
    assert type(module.q_proj) is type(module.v_proj) is Part
    assert module.q_proj.product is module.k_proj.product
    assert type(module.gate_proj) is type(module.up_proj) is RowStableLinear
    for rows in (1, 2, 8, 15, 16, 17, 32, 33, 100):
        x, y = (torch.randn(rows, 96).to(torch.bfloat16) for _ in range(2))
        # In the usual order, in another, and with two inputs by turns.
        for name, value in [("q", x), ("k", x), ("v", x), ("v", y), ("q", x), ("k", y), ("k", x), ("v", y), ("q", y)]:
            alone = RowStableLinear(plain[f"{name}_proj"])
            assert torch.equal(getattr(module, f"{name}_proj")(value), alone(value))


class Tree(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8, bias=False))
        self.embedding = nn.Embedding(4, 8)
        self.own = OwnLinear(8, 8)
        self.to(dtype)


class OwnLinear(nn.Linear):
    """A family's own layer: its forward is not ours to replace."""


def test_only_plain_bfloat16_leaves_are_swapped():
    tree = Tree(torch.bfloat16)
    make_rows_stable(tree)
    kinds = {name: type(module) for name, module in tree.named_modules()}
    assert kinds["inner.0"] is kinds["inner.2"] is RowStableLinear
    assert kinds["own"] is OwnLinear
    assert kinds["embedding"] is nn.Embedding
    for dtype in (torch.float32, torch.float16):
        plain = Tree(dtype)
        make_rows_stable(plain)
        assert type(plain.inner[0]) is nn.Linear


def test_swapping_twice_changes_nothing_more():
    tree = Tree(torch.bfloat16)
    make_rows_stable(tree)
    first = tree.inner[0]
    make_rows_stable(tree)
    assert tree.inner[0] is first


def test_a_tied_head_leaves_the_embedding_alone():
    model = nn.ModuleDict({"embedding": nn.Embedding(40, 16), "head": nn.Linear(16, 40, bias=False)}).to(torch.bfloat16)
    model["head"].weight = model["embedding"].weight
    before, x = model["head"](torch.ones(5, 16).to(torch.bfloat16)), torch.ones(5, 16).to(torch.bfloat16)
    make_rows_stable(model)
    assert torch.equal(model["head"](x), before)
    assert model["embedding"].weight.shape == (40, 16)


def test_weights_are_packed_where_onednn_can():
    stable = RowStableLinear(linear(64, 48))
    assert stable.packed == can_pack()
    assert stable._weight.is_mkldnn == can_pack()


def test_without_onednn_rows_are_still_stable(monkeypatch):
    monkeypatch.setattr("flashdraft.kernels.linear.can_pack", lambda: False)
    plain = linear(130, 65)
    stable, x = RowStableLinear(plain), torch.randn(90, 130).to(torch.bfloat16)
    assert not stable._weight.is_mkldnn
    assert torch.equal(stable(x)[40:50], stable(x[40:50]))
    assert torch.equal(stable(x[:32]), plain(x[:32]))
