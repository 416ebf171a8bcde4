"""Fusing a loaded target: every decoder layer that is recognised, and proven equal by running it, becomes a FusedLayer.

The model's own loop over its layers, its embeddings and rotary tables stay as they are; the head, the final norm and their like
beside the layers are computed by the same kernels.
"""

from __future__ import annotations

import copy
import inspect
from collections import UserDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from flashdraft.kernels.fused import HOPPER_ROWS, NARROW_ROWS, WIDE_ROWS, FusedOptions
from flashdraft.targets.discovery import LayerSpec
from flashdraft.targets.fused_layer import (
    CachedRotary,
    ChangedStateError,
    FusedEnd,
    FusedLayer,
    FusedNorm,
    FusedProduct,
    Stream,
)
from flashdraft.targets.recognition import UnknownLayerError, is_plain, norm_of, parts_of
from flashdraft.targets.target import Target, packed_attend

_reports: WeakKeyDictionary[Target, tuple[FusedOptions, FusionReport]] = WeakKeyDictionary()
# The proof runs as few rows as a verify step, and more than each of our kernels takes: on CUDA others compute them.
_ROWS = (8, NARROW_ROWS + 8, WIDE_ROWS + 8, HOPPER_ROWS + 8)


@dataclass(frozen=True)
class FusionReport:
    """Which layers were fused; `kept`: the reason for each layer that stays as it was.

    held: what computes the fused layers. Captured graphs point into it, so whoever owns graphs keeps the report.
    """

    fused: tuple[int, ...]
    kept: dict[int, str]
    held: tuple[object, ...] = field(default=(), repr=False, compare=False)

    def __str__(self) -> str:
        by_reason: dict[str, list[int]] = {}  # without the figures in brackets behind a reason
        for index, reason in sorted(self.kept.items()):
            by_reason.setdefault(reason.partition(" (")[0], []).append(index)
        stay = [f"{_ranges(layers)} as in the model, because {self.kept[layers[0]]}" for layers in by_reason.values()]
        return "; ".join([f"{len(self.fused)} of {len(self.fused) + len(self.kept)} layers fused", *stay])


def fuse(target: Target, options: FusedOptions | None = None) -> FusionReport:
    """Replace the forward of every decoder layer that is recognised by a FusedLayer's, in place; joined weights share memory.

    To be called where the model stays: on its device and in its dtype. Feature layers may be chosen before or after. A second
    call with the same options changes nothing. Raises ConfigError for `deterministic` where the kernel for it is missing.
    """
    options = options or FusedOptions()
    if (known := _reports.get(target)) is not None and known[0] == options:
        return known[1]
    _restore(target)  # with other options: start from the model's own forward
    passes = [_Pass(target, rows) for rows in _ROWS]
    kept: dict[int, str] = {}
    candidates = _candidates(target, passes[0], options, kept)
    for one in passes:
        _prove(target, one, candidates, kept)
    if candidates:
        try:
            _install(target, candidates, options)
            reason = _difference(target, passes)
        except Exception:
            _restore(target)
            raise
        if reason:
            kept |= dict.fromkeys(candidates, reason)
            candidates = {}
            _restore(target)
        else:
            _shorten_end(target, passes)
    held = [vars(module).get("forward") for module in (*target.layers, *_beside_layers(target))]
    report = FusionReport(tuple(sorted(candidates)), kept, (*held, target.end))
    _reports[target] = options, report
    return report


def _beside_layers(target: Target) -> list[nn.Module]:
    return [x for x in (*target.decoder.children(), target.model.get_output_embeddings()) if x is not target.layers]


def _fused_leaf(module: nn.Module, dtype: torch.dtype, options: FusedOptions) -> FusedProduct | FusedNorm | None:
    if is_plain(module):
        return FusedProduct(module, options)  # type: ignore[arg-type]
    weight = getattr(module, "weight", None)
    norm = norm_of(module, weight.shape[0], dtype) if isinstance(weight, Tensor) and weight.dim() == 1 else None
    return None if norm is None else FusedNorm(norm, options)


def _is_rotary(module: nn.Module) -> bool:
    """Whether it makes cos and sin from positions alone: (x, position_ids) and what names a kind of layer."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return type(module).__name__.endswith("RotaryEmbedding") and names[:2] == ["x", "position_ids"] and not names[3:]


def _shorten_end(target: Target, passes: Iterable[_Pass]) -> None:
    """Let the target go from its decoder straight to its logits, if that gives the same ones."""
    head = target.model.get_output_embeddings()
    forward = vars(head).get("forward")
    if not isinstance(forward, FusedProduct):
        return
    for one in passes:
        target.end = None
        expected = one.run(target)
        target.end = FusedEnd(head, target.final_logit_softcapping, forward.options)
        try:
            same = torch.allclose(one.run(target), expected, rtol=0, atol=2**-7 * float(expected.abs().max()))
        except Exception:
            target.end = None
            raise
        if not same:  # a scale, say
            target.end = None
            return


def _restore(target: Target) -> None:
    _reports.pop(target, None)
    target.end = None
    for module in (*target.layers, *_beside_layers(target)):
        module.__dict__.pop("forward", None)


class _Pass:
    """What a model hands to each of its layers for a number of random rows, and the logits that come out."""

    def __init__(self, target: Target, rows: int) -> None:
        generator = torch.Generator().manual_seed(rows)
        limit = min(4096, target.max_position_embeddings)
        self.positions = torch.randperm(limit, generator=generator)[:rows].sort().values.to(target.device)
        self.ids = torch.randint(0, target.vocab_size, (rows,), generator=generator).to(target.device)
        self.attend = packed_attend(torch.zeros_like(self.positions), self.positions)
        self.hidden: list[Tensor] = []  # random, as large as what came
        self.given: list[dict[str, Any]] = []  # all else, by name

        def keep(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            names = _names(layer)
            given = dict(zip(names, args, strict=False)) | kwargs
            x = given.pop(names[0])
            self.hidden.append(torch.randn(x.shape, generator=generator).to(x) * x.square().mean().sqrt())
            self.given.append(given)

        hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in target.layers]
        try:
            self.logits = self.run(target)
        finally:
            for hook in hooks:
                hook.remove()
        self.noise = 0.0 if target.dtype == torch.float32 else self._noise(target, generator)

    def _noise(self, target: Target, generator: torch.Generator) -> float:
        """How far logits move, as in `moved`, when every layer's input moves by what its dtype rounds away."""

        def jitter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            name = _names(layer)[0]
            x = args[0] if args else kwargs[name]
            signs = torch.randint(0, 2, x.shape, generator=generator).to(x.device) * 2 - 1
            x = (x.float() * (1 + signs * torch.finfo(x.dtype).eps / 2)).to(x.dtype)
            return ((x, *args[1:]), kwargs) if args else (args, kwargs | {name: x})

        hooks = [layer.register_forward_pre_hook(jitter, with_kwargs=True) for layer in target.layers]
        try:
            return float(self.moved(target).median())
        finally:
            for hook in hooks:
                hook.remove()

    def moved(self, target: Target) -> Tensor:
        """The greatest difference of each row's logits from those of the model itself, over the greatest logit."""
        return (self.run(target) - self.logits).abs().amax(-1) / self.logits.abs().max().clamp(min=1e-6)

    def run(self, target: Target) -> Tensor:
        return target.forward(self.ids, self.positions, self.attend)[0].float()


def _names(layer: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(layer.forward).parameters)


def _candidates(target: Target, one: _Pass, options: FusedOptions, kept: dict[int, str]) -> dict[int, FusedLayer]:
    """A FusedLayer for every layer whose parts are known; the reason in `kept` for every other."""
    candidates, specs, stream = {}, target.layer_specs, Stream()
    for index, (layer, spec) in enumerate(zip(target.layers, specs, strict=True)):
        try:
            parts = parts_of(layer, spec, shares=spec.source != index)
            if parts.per_layer_input is not None and one.given[index].get("per_layer_input") is None:
                raise UnknownLayerError("it is not given its per-layer input")
            slot = layer.get_submodule("self_attn").__dict__.get("_flashdraft_slot")
            if slot is None:
                raise UnknownLayerError("its attention is called by another module than self_attn")
        except UnknownLayerError as reason:
            kept[index] = str(reason)
            continue
        parts = replace(parts, rotary=_has_tables(one.given[index].get("position_embeddings"), one.hidden[index], spec))
        fused = FusedLayer(layer, _names(layer), slot[0], index, spec, parts, stream, options)
        fused.is_read = any(s.source == index for s in specs[index + 1 :])
        candidates[index] = fused
    _drop_torn_groups(specs, candidates, kept)
    return candidates


def _has_tables(tables: Any, x: Tensor, spec: LayerSpec) -> bool:
    """Whether a layer is given cosines and sines [1, T, R] of its hidden states' dtype that fit its heads."""
    if not isinstance(tables, tuple | list) or len(tables) != 2 or not all(isinstance(t, Tensor) for t in tables):
        return False
    return all(
        t.dim() == 3 and t.shape[:2] == x.shape[:2] and t.shape[2] <= spec.key_size and t.dtype == x.dtype for t in tables
    )


def _drop_torn_groups(specs: Sequence[LayerSpec], candidates: dict[int, FusedLayer], kept: dict[int, str]) -> None:
    """Keys and values pass between fused layers in another way than in the model: a source and its readers go together."""
    torn = {spec.source for index, spec in enumerate(specs) if index not in candidates}
    for index in [i for i in candidates if specs[i].source in torn]:
        kept[index] = "it shares keys and values with a layer that stays"
        del candidates[index]


@torch.no_grad()
def _prove(target: Target, one: _Pass, candidates: dict[int, FusedLayer], kept: dict[int, str]) -> None:
    """Run each layer and its replacement on the same random hidden states; those that differ leave `candidates`."""
    twins: dict[int, Any] = {}
    with target.attending(one.attend):
        for index, fused in list(candidates.items()):
            x, given, layer = one.hidden[index], one.given[index], fused.layer
            own = layer.forward(x, **given)
            if not isinstance(own, Tensor) or own.shape != x.shape:
                reason = "it returns more than its hidden state"
            else:
                exact = None if own.dtype == torch.float32 else _in_float32(layer)(x.float(), **_floats(given, twins))
                reason = _unequal(fused, x, given, own, exact)
            if reason:
                kept[index] = reason
                del candidates[index]
    _drop_torn_groups(target.layer_specs, candidates, kept)


def _unequal(fused: FusedLayer, x: Tensor, given: dict[str, Any], own: Tensor, exact: Tensor | None) -> str:
    """Why the fused layer is not the model's own, "" if it is: with RoPE, or else without (some layers of SmolLM3)."""
    errors = []
    for rotary in (True, False) if fused.parts.rotary else (False,):
        fused.parts = replace(fused.parts, rotary=rotary)
        got = fused(x, **given)
        if exact is None:
            error, limit = (got - own).abs().max() / own.abs().max(), 1e-5
        else:  # as near to the float32 result as the model's own rounding
            error, limit = ((y.float() - exact).square().mean().sqrt() for y in (got, own))  # type: ignore[assignment]
            error, limit = error / exact.abs().max(), 1.5 * float(limit / exact.abs().max())
        if error <= limit:
            return ""
        errors.append(float(error))
    return f"it computes something else than such parts usually do (relative difference {min(errors):.0e})"


def _in_float32(layer: nn.Module) -> Callable[..., Tensor]:
    """The forward of a float32 copy of a layer, whose attention stays ours."""
    memo: dict[int, Any] = {}
    for module in layer.modules():
        for name in ("_flashdraft_slot", "config", "_forward_hooks"):
            if name in module.__dict__:
                memo[id(module.__dict__[name])] = module.__dict__[name]
    return copy.deepcopy(layer, memo).float().forward


def _floats(value: Any, twins: dict[int, Any]) -> Any:
    """Arguments in float32; a dictionary that layers pass on to each other has one twin for all of them."""
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_floats(x, twins) for x in value)
    if isinstance(value, dict | UserDict):
        if id(value) not in twins:
            twins[id(value)] = copy.copy(value)
            twins[id(value)].update({key: _floats(x, twins) for key, x in value.items()})
        return twins[id(value)]
    return value


def _install(target: Target, candidates: dict[int, FusedLayer], options: FusedOptions) -> None:
    limit = target.max_position_embeddings
    last_readers = {fused.spec.source: index for index, fused in candidates.items()}
    for index, fused in candidates.items():
        fused.stream.shared.clear()
        fused.before_fused = index + 1 in candidates
        fused.is_last_reader = last_readers[fused.spec.source] == index
        fused.layer.__dict__["forward"] = fused
    for module in _beside_layers(target):
        forward = CachedRotary(module, limit) if _is_rotary(module) else _fused_leaf(module, target.dtype, options)
        if forward is not None:
            module.__dict__["forward"] = forward


def _difference(target: Target, passes: Iterable[_Pass]) -> str:
    """Why the fused model as a whole is not the model, "" if it is: what lies between its layers is seen only so."""
    between = "the model does something between its layers"
    for one in passes:
        try:
            error = one.moved(target)
        except ChangedStateError:
            return between
        # As in self_check; deep random models multiply what is rounded away.
        worst, limit = (error.max(), 1e-3) if target.dtype == torch.float32 else (error.median(), max(0.1, 2 * one.noise))
        if not worst <= limit:
            return f"{between} (fused, its logits differ by {worst:.0e})"
    return ""


def _ranges(layers: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "layers 0-2, 5"."""
    starts = [i for i in layers if i - 1 not in layers]
    ends = [i for i in layers if i + 1 not in layers]
    spans = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"layer{'s' * (len(layers) > 1)} {', '.join(spans)}"
