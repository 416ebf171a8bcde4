"""The linear leaves of a module in NVFP4, by rounding, by a search for better scales, or by GPTQ."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from flashdraft.errors import ConfigError
from flashdraft.quant.calibrate import Statistics
from flashdraft.quant.gptq import DAMPING, gptq_codes, inverse_factor, proxy_loss
from flashdraft.quant.groups import fused_groups, runtime_name
from flashdraft.quant.linear import QuantizedLinear, linears
from flashdraft.quant.nvfp4 import (
    Packed,
    amax,
    block_amax,
    check_weight,
    encode,
    max_scales,
    pack,
    static_scales,
    tensor_scale,
)
from flashdraft.quant.scales import searched_scales

Method = Literal["gptq", "max", "search"]
KEPT_OUT_OF_W4A4 = ("fc",)  # it reads raw features, whose few huge values leave four bits nothing for the others
HEAD_ROOM = 2.0  # of an input's range over the largest one seen: clipping costs all acceptance, too wide a range almost none


@dataclass(frozen=True)
class Settings:
    """max: round to nearest. search: the block scales of least error first. gptq: then column by column, by the Hessian."""

    method: Method = "gptq"
    damping: float = DAMPING
    ordered: bool = True  # the columns of the largest inputs first
    search: bool = (
        True  # for gptq: scales of least error, each input weighed by its mean square, instead of the largest weight's
    )

    def __post_init__(self) -> None:
        if self.method not in ("gptq", "max", "search"):
            raise ConfigError(f"method is gptq, max or search, got {self.method!r}")
        if not 0 < self.damping < 1:
            raise ConfigError(f"damping is a share of the mean diagonal, above 0 and below 1, got {self.damping:g}")


@dataclass(frozen=True)
class LinearReport:
    """How one linear came out."""

    name: str
    shape: tuple[int, int]
    error: float  # mean squared error of its outputs over their mean square, on the calibration set
    flushed_share: float  # of block scales below 2^-6
    largest_scale: float  # at most 448
    note: str = ""


def input_scales(statistics: Mapping[str, Statistics], head_room: float = HEAD_ROOM) -> dict[str, Tensor]:
    """input_scale of every linear: the largest input seen in its fused group, with head-room."""
    groups = fused_groups(statistics)
    return {
        name: tensor_scale(head_room * torch.stack([statistics[n].amax for n in names]).max())
        for names in groups.values()
        for name in names
    }


def check_quantizable(module: nn.Module, ignore: Collection[str]) -> dict[str, Tensor]:
    """The weights to quantize, by linear: all but those that `ignore` names. Raises ConfigError where there are none, for what
    cannot be quantized, and as check_ignored does.
    """
    left = check_ignored(module, ignore)
    todo = {name: leaf.weight.detach() for name, leaf in linears(module).items() if name not in left}
    if not todo:
        raise ConfigError("all linears are to stay as they are, so that nothing is left to quantize: ignore fewer")
    for name, weight in todo.items():
        check_weight(weight, f"{name}.weight")
    return todo


def check_ignored(module: nn.Module, ignore: Collection[str]) -> set[str]:
    """The linear leaves that `ignore` names, by their own or their fused group's name.

    Raises ConfigError for a name that is no linear, and for a part of a fused group.
    """
    names = list(linears(module))
    groups = fused_groups(names)
    if unknown := sorted(set(ignore) - set(names) - set(groups)):
        raise ConfigError(f"{', '.join(unknown)} is no linear of this draft: choose from {', '.join(groups)}")
    left = {name for name in names if name in ignore or runtime_name(name) in ignore}
    for fused, members in groups.items():
        if 0 < len(left & set(members)) < len(members):
            raise ConfigError(
                f"only a part of {fused} ({', '.join(sorted(left & set(members)))}) is to stay as it is, but readers run it as "
                f"one product: ignore {fused} or nothing of it"
            )
    return left


def quantize_linears(
    module: nn.Module,
    statistics: Mapping[str, Statistics],
    settings: Settings,
    *,
    ignore: Collection[str] = (),
    scales_of_inputs: Mapping[str, Tensor] | None = None,
    report: Callable[[str], None] = lambda name: None,
) -> tuple[dict[str, QuantizedLinear], list[LinearReport]]:
    """NVFP4 layers for all linear leaves of `module` but those in `ignore`; the module is left as it is.

    statistics: of rounded inputs where `scales_of_inputs` has an input_scale for each, which makes it W4A4. `report` is given
    the name of every linear that is done. Raises ConfigError for weights that cannot be quantized, before any is.
    """
    todo, leaves = check_quantizable(module, ignore), linears(module)
    made, reports = {}, []
    for members in fused_groups(todo).values():
        largest = amax([todo[name] for name in members])
        for name in members:
            packed, note = _quantize(todo[name], largest, statistics[name], settings)
            reports.append(_report(name, todo[name], packed, statistics[name], note))
            if scales_of_inputs is not None:
                packed = packed.with_input_scale(scales_of_inputs[name])
            made[name] = QuantizedLinear(packed, leaves[name].bias)
            report(name)
    return made, reports


def _quantize(weight: Tensor, largest: Tensor, seen: Statistics, settings: Settings) -> tuple[Packed, str]:
    """One weight, of a group with this largest magnitude, and a note where it did not go as asked."""
    scale_2 = tensor_scale(largest)
    if settings.method == "max":
        scale = max_scales(weight, scale_2)
        return Packed(pack(encode(weight, scale, scale_2)), scale, scale_2), ""
    if settings.method == "search":
        scale = searched_scales(weight, scale_2)
        return Packed(pack(encode(weight, scale, scale_2)), scale, scale_2), ""
    hessian = seen.hessian
    diagonal = hessian.diagonal()
    frozen = static_scales(block_amax(weight), largest)
    scale = searched_scales(weight, scale_2, diagonal) if settings.search else frozen
    order = diagonal.argsort(descending=True, stable=True) if settings.ordered else None
    dead = ~weight.any(0)
    if order is not None:
        hessian, dead = hessian[order][:, order], dead[order]
    upper = inverse_factor(hessian, dead, settings.damping)
    if upper is None:
        note = "the Hessian is not positive definite: rounded to nearest instead of GPTQ; give more damping or more prompts"
        return Packed(pack(encode(weight, scale, scale_2)), scale, scale_2), note
    return Packed(pack(gptq_codes(weight, scale, scale_2, upper, order)), scale, scale_2), ""


def _report(name: str, weight: Tensor, packed: Packed, seen: Statistics, note: str) -> LinearReport:
    hessian = seen.hessian
    size = proxy_loss(weight, torch.zeros_like(weight), hessian)
    error = proxy_loss(weight, packed.dequantize(), hessian)
    return LinearReport(
        name=name,
        shape=(weight.shape[0], weight.shape[1]),
        error=error / size if size else 0.0,
        flushed_share=packed.flushed_share,
        largest_scale=float(packed.scale.float().max()),
        note=note or ("" if size else "its weights or its inputs are all zero"),
    )
