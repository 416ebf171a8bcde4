"""Linear layers on the CPU whose rows do not depend on each other's number, bit for bit.

oneDNN picks its bf16 matrix kernel by the number of rows. From 2 to 16 rows the choice does not change a row's bits: measured
with torch 2.13 and 1 or 2 threads for AMX and, by ONEDNN_MAX_CPU_ISA, for AVX2 and AVX-512 with and without bf16, and with
torch 2.11 and 1 or 4 threads for AMX. Beyond, torch 2.11's packed product differs from 24 rows on and torch 2.13's from 40 on,
in about 0.01 % of values, and without AMX a single row does too. So one row is computed as two, and more rows 16 at a time, or
32 where those were seen to have the bits of 16 (AMX, torch 2.13; 576 -> 3072 on one core, 16 rows 414 us, 32 rows 471).
Weights are also packed once into oneDNN's own layout, which gives the same bits in 0.5 to 0.8 of the time (576 -> 3072, 8 rows:
391 to 222 us; 576 -> 49152: 4.43 to 2.38 ms; two cores).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STABLE_ROWS = 16
ALL_ROWS = 1 << 40
_AT_ONCE: dict[tuple[int, int, bool], int] = {}  # by inputs, outputs, and whether there is a bias


class RowStableLinear(nn.Module):
    """The product of an nn.Linear in bfloat16, x [..., K] -> [..., N], for inference only; equal to it for 2 to 16 rows.

    Of several linears on the same input, the outputs side by side. at_once: rows of one product, where the bits need not be
    stable.
    """

    def __init__(self, *linears: nn.Linear, at_once: int | None = None) -> None:
        super().__init__()
        self.sizes = [linear.out_features for linear in linears]
        self.in_features, self.out_features = linears[0].in_features, sum(self.sizes)
        biases = [linear.bias for linear in linears]
        self.bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])
        self.packed = can_pack()
        weight = torch.cat([linear.weight.detach() for linear in linears])
        # A plain attribute: a packed tensor is opaque to state_dict, copies and casts.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, STABLE_ROWS) if self.packed else weight
        self.at_once = self._stable_rows() if at_once is None else at_once

    def _stable_rows(self) -> int:
        """Rows of one product: twice STABLE_ROWS where that changed no bit of random rows, 2**19 values or more by N."""
        if not self.packed:
            return STABLE_ROWS
        shape = self.in_features, self.out_features, self.bias is not None
        if shape not in _AT_ONCE:
            generator, most = torch.Generator().manual_seed(0), 2 * STABLE_ROWS
            tries = (
                torch.randn(most, self.in_features, generator=generator, dtype=torch.bfloat16)
                for _ in range(min(32, -(-(1 << 19) // (most * self.out_features))))
            )
            same = all(
                torch.equal(self.product(x), torch.cat([self.product(part) for part in x.split(STABLE_ROWS)])) for x in tries
            )
            _AT_ONCE[shape] = most if same else STABLE_ROWS
        return _AT_ONCE[shape]

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() <= self.at_once * self.in_features:
            return self.product(x)
        rows = x.reshape(-1, self.in_features)
        return torch.cat([self.product(part) for part in rows.split(self.at_once)]).view(*x.shape[:-1], self.out_features)

    def product(self, x: Tensor) -> Tensor:
        """All rows at once: stable up to `at_once`."""
        if x.numel() == self.in_features:
            return self.product(x.reshape(1, -1).repeat(2, 1))[:1].view(*x.shape[:-1], self.out_features)
        if not self.packed:
            return F.linear(x, self._weight, self.bias)
        if x.numel() == 0:
            return x.new_empty((*x.shape[:-1], self.out_features))
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")


class Part(nn.Module):
    """One of several linears that share an input: the first call with an input computes all, the others take their share.

    The model that calls them knows nothing of it. Calls in another order or with other inputs are right too, only slower.
    """

    def __init__(self, product: RowStableLinear, index: int, shared: list[tuple[Tensor, tuple[Tensor, ...]]]) -> None:
        super().__init__()
        self.product, self.index = product, index
        self._shared = shared  # at most one entry, common to all parts: the last input and its outputs
        self.in_features, self.out_features = product.in_features, product.sizes[index]

    def forward(self, x: Tensor) -> Tensor:
        if not self._shared or self._shared[0][0] is not x:
            self._shared[:] = [(x, self.product(x).split(self.product.sizes, -1))]
        out = self._shared[0][1][self.index]
        if self.index == len(self.product.sizes) - 1:
            self._shared.clear()
        return out


def can_pack() -> bool:
    """Whether oneDNN has a bf16 matrix product on this processor."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


QKV = ("q_proj", "k_proj", "v_proj")
KV = ("k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")


def make_rows_stable(
    module: nn.Module, fused: Sequence[tuple[str, ...]] = (QKV, GATE_UP), leave: Sequence[nn.Module] = ()
) -> None:
    """Swap every bfloat16 nn.Linear leaf on the CPU, in place; other leaves and other devices are left alone.

    Children of one module whose names are listed in `fused` and that have equal inputs become one product. `leave`: modules
    that stay as they are.
    """
    _swap(module, fused, leave, None)


def pack_linears(module: nn.Module, fused: Sequence[tuple[str, ...]]) -> None:
    """The same for what need not give a row the same bits: all rows at once, where 128 take 0.2 to 0.35 of the time."""
    _swap(module, fused, (), ALL_ROWS)


def _swap(module: nn.Module, fused: Sequence[tuple[str, ...]], leave: Sequence[nn.Module], at_once: int | None) -> None:
    children = dict(module.named_children())
    for names in fused:
        linears = [children.get(name) for name in names]
        if all(map(_swappable, linears)) and len({(x.in_features, x.bias is None) for x in linears}) == 1:  # type: ignore[union-attr]
            product = RowStableLinear(*linears, at_once=at_once)  # type: ignore[arg-type]
            shared: list[tuple[Tensor, tuple[Tensor, ...]]] = []
            for index, name in enumerate(names):
                setattr(module, name, Part(product, index, shared))
                del children[name]
    for name, child in children.items():
        if _swappable(child):
            setattr(module, name, RowStableLinear(child, at_once=at_once))  # type: ignore[arg-type]
        elif not isinstance(child, RowStableLinear | Part) and child not in leave:
            _swap(child, fused, leave, at_once)


def _swappable(module: nn.Module | None) -> bool:
    return type(module) is nn.Linear and module.weight.dtype == torch.bfloat16 and module.weight.device.type == "cpu"
