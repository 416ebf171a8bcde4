"""Linear layers on the CPU whose rows do not depend on each other's number, bit for bit.

oneDNN picks its bf16 matrix kernel by the number of rows; up to 32 rows the choice does not change a row's bits (measured
with torch 2.13 on an AMX processor, 1 to 32 rows and 1 or 2 threads; from 40 rows on about 0.01 % of values differ in the
last bit). So more rows are computed 32 at a time: weights stay in the cache meanwhile. They are also packed once into
oneDNN's own layout, which gives the same bits in 0.5 to 0.8 of the time (576 -> 3072, 8 rows: 391 to 222 us; 576 -> 49152:
4.43 to 2.38 ms; two cores).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STABLE_ROWS = 32


class RowStableLinear(nn.Module):
    """The product of an nn.Linear in bfloat16, x [..., K] -> [..., N], for inference only; equal to it for up to 32 rows."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.packed = can_pack()
        weight = linear.weight.detach()
        # A plain attribute: a packed tensor is opaque to state_dict, copies and casts.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, STABLE_ROWS) if self.packed else weight

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() <= STABLE_ROWS * self.in_features:
            return self._product(x)
        rows = x.reshape(-1, self.in_features)
        return torch.cat([self._product(part) for part in rows.split(STABLE_ROWS)]).view(*x.shape[:-1], self.out_features)

    def _product(self, x: Tensor) -> Tensor:
        if not self.packed:
            return F.linear(x, self._weight, self.bias)
        if x.numel() == 0:
            return x.new_empty((*x.shape[:-1], self.out_features))
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")


def can_pack() -> bool:
    """Whether oneDNN has a bf16 matrix product on this processor."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def make_rows_stable(module: nn.Module) -> None:
    """Swap every bfloat16 nn.Linear leaf on the CPU, in place; other leaves and other devices are left alone."""
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16 and child.weight.device.type == "cpu":
            setattr(module, name, RowStableLinear(child))
        else:
            make_rows_stable(child)
