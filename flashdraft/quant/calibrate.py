"""What the inputs of linears are like on real data: their Hessians and their largest magnitude.

The module is run as it is, unfused, by a callable; hooks on its linear leaves see every input, so a linear that is used for two
streams (k and v: the block's hidden states and the context) has both in its statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flashdraft.errors import ConfigError
from flashdraft.quant.linear import linears
from flashdraft.quant.nvfp4 import round_input


@dataclass
class Statistics:
    """Of the inputs x [K] of one linear, over all tokens it saw."""

    total: Tensor  # float32 [K, K]: the sum of x x^T
    amax: Tensor  # float32 scalar
    tokens: int = 0

    @property
    def hessian(self) -> Tensor:
        """The mean of 2 x x^T."""
        return 2 * self.total / self.tokens

    def add(self, x: Tensor, input_scale: Tensor | None) -> None:
        """x [T, K]; the Hessian is that of rounded inputs where there is an input_scale."""
        if not len(x):
            return
        self.amax = torch.maximum(self.amax, torch.stack(torch.aminmax(x)).abs().max().float())
        x = x.float() if input_scale is None else round_input(x, input_scale)
        self.total.addmm_(x.t(), x)
        self.tokens += len(x)


class Calibration:
    """Statistics by the name of the linear. `only` says which rows of the inputs are real."""

    def __init__(self, input_scales: Mapping[str, Tensor] | None = None) -> None:
        self.found: dict[str, Statistics] = {}
        self._input_scales = input_scales or {}
        self._kept: dict[int, Tensor] = {}

    @contextmanager
    def only(self, kept: Mapping[int, Tensor]) -> Iterator[None]:
        """Inputs of so many rows count only where the mask, bool [rows], says so: the rest is padding."""
        self._kept = dict(kept)
        try:
            yield
        finally:
            self._kept = {}

    def see(self, name: str, x: Tensor) -> None:
        """An input [..., K] of the linear of that name."""
        rows = x.detach().flatten(0, -2)
        if (mask := self._kept.get(len(rows))) is not None:
            rows = rows[mask]
        if name not in self.found:
            size = rows.shape[1]
            zeros = torch.zeros(size, size, device=rows.device)
            self.found[name] = Statistics(zeros, torch.zeros((), device=rows.device))
        self.found[name].add(rows, self._input_scales.get(name))


def calibrate(
    module: nn.Module, run: Callable[[Calibration], None], input_scales: Mapping[str, Tensor] | None = None
) -> dict[str, Statistics]:
    """Statistics of every linear leaf of `module` while `run` runs it.

    input_scales: of the linears whose inputs will be rounded. Raises ConfigError naming the linears that no token reached, and
    those whose inputs were not finite.
    """
    calibration = Calibration(input_scales)
    leaves = linears(module)
    hooks = [
        leaf.register_forward_pre_hook(lambda _, args, name=name: calibration.see(name, args[0]))
        for name, leaf in leaves.items()
    ]
    try:
        with torch.no_grad():
            run(calibration)
    finally:
        for hook in hooks:
            hook.remove()
    found = calibration.found
    if unseen := [name for name in leaves if name not in found or not found[name].tokens]:
        raise ConfigError(f"no token of the calibration set reaches {', '.join(unseen)}: give more or longer prompts")
    if odd := [name for name, s in found.items() if not s.amax.isfinite() or not s.total.isfinite().all()]:
        raise ConfigError(f"the inputs of {', '.join(odd)} are NaN or infinite on the calibration set: the draft is broken")
    return found
