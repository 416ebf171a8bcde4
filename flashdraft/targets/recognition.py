"""Which decoder layers are chains of fused products, and of which parts: read from their modules, not from their class names.

Norms and activations are found by running them on a few random rows and comparing bits with those of kernels/fused.py.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from flashdraft.kernels.fused import ACTIVATIONS, Norm
from flashdraft.targets.discovery import LayerSpec

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "v_norm")
_MLP = ("gate_proj", "up_proj", "down_proj", "act_fn")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_FEEDFORWARD_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
_PER_LAYER_INPUT = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
_LAYER = ("self_attn", "mlp", *_NORMS, *_FEEDFORWARD_NORMS, *_PER_LAYER_INPUT, "act_fn", "layer_scalar")


class UnknownLayerError(Exception):
    """Why a layer is not a chain of fused products; caught by `fuse`, which leaves the layer as it is and reports this."""


@dataclass(frozen=True)
class Product:
    """weight [N, K] and bias [N] of one linear layer, or of several on the same input, one below the other."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, *linears: nn.Linear) -> Product:
        """Joined in memory: the parameters of the linears become views of the one tensor."""
        if len(linears) == 1:
            return cls(linears[0].weight, linears[0].bias)
        sizes = [linear.out_features for linear in linears]
        weight = _joined_before(linears)
        if weight is None:
            weight = torch.cat([linear.weight.detach() for linear in linears])
            for linear, part in zip(linears, weight.split(sizes), strict=True):
                linear.weight.data = part
        if all(linear.bias is None for linear in linears):
            return cls(weight, None)
        zeros = [weight.new_zeros(size) for size in sizes]
        return cls(weight, torch.cat([z if x.bias is None else x.bias.detach() for x, z in zip(linears, zeros, strict=True)]))


def _joined_before(linears: Sequence[nn.Linear]) -> Tensor | None:
    """The one tensor whose parts the weights are already, if they lie one behind the other in one piece of memory."""
    first, end = linears[0].weight.detach(), linears[0].weight.data_ptr()
    for linear in linears:
        w = linear.weight
        if w.data_ptr() != end or w.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or not w.is_contiguous():
            return None
        end += w.numel() * w.element_size()
    rows = sum(linear.out_features for linear in linears)
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))


@dataclass(frozen=True)
class PerLayerInput:
    """Gemma 4's third step: x + norm(projection(act(gate(x)) * input of this layer))."""

    gate: Product
    projection: Product
    post_norm: Norm


@dataclass(frozen=True)
class LayerParts:
    """A decoder layer: x + post_norm(attention(norm(x))), the same of the MLP and of the per-layer input, times `scale`."""

    input_norm: Norm
    qkv: Product  # queries, keys, values; queries alone in a layer that reads another's keys and values
    q_norm: Norm | None
    k_norm: Norm | None
    v_norm: Norm | None
    output: Product
    attention_post_norm: Norm | None
    mlp_norm: Norm
    gate_up: Product
    activation: str
    down: Product
    mlp_post_norm: Norm | None
    per_layer_input: PerLayerInput | None
    scale: float
    rotary: bool = True


def parts_of(layer: nn.Module, spec: LayerSpec, *, shares: bool) -> LayerParts:
    """The parts of a decoder layer; `shares`: its attention reads another layer's keys and values.

    Raises UnknownLayerError with the reason. Whether the layer is made of its parts in the usual way remains to be seen by
    running both.
    """
    _only(layer, "", _LAYER, {"self_attn", "mlp", *_NORMS})
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    _only(attention, "self_attn.", _ATTENTION, {"q_proj", "o_proj"} | (set() if shares else {"k_proj"}))
    _only(mlp, "mlp.", _MLP, {"gate_proj", "up_proj", "down_proj"})
    gemma = hasattr(layer, "pre_feedforward_layernorm")
    if gemma:
        _only(layer, "", _LAYER, _FEEDFORWARD_NORMS)
    size, dtype = _linear(attention, "q_proj").in_features, _linear(attention, "q_proj").weight.dtype
    norms = {name: _norm(layer, name, size, dtype) for name in (*_NORMS, *(_FEEDFORWARD_NORMS if gemma else ()))}
    activation = _activation(mlp, dtype)
    linears = _query_key_value(attention, spec, shares)
    _fits("o_proj", _linear(attention, "o_proj"), spec.heads * spec.value_size, size)
    per_layer_input = _per_layer_input(layer, size, dtype, activation)
    gate_up = [_linear(mlp, "gate_proj"), _linear(mlp, "up_proj")]
    _fits("up_proj", gate_up[1], size, gate_up[0].out_features)
    _fits("down_proj", _linear(mlp, "down_proj"), gate_up[0].out_features, size)
    return LayerParts(
        input_norm=norms["input_layernorm"],
        q_norm=_head_norm(attention, "q_norm", spec, dtype),
        k_norm=None if shares else _head_norm(attention, "k_norm", spec, dtype),
        v_norm=None if shares else _head_norm(attention, "v_norm", spec, dtype),
        output=Product.of(_linear(attention, "o_proj")),
        attention_post_norm=norms["post_attention_layernorm"] if gemma else None,
        mlp_norm=norms["pre_feedforward_layernorm" if gemma else "post_attention_layernorm"],
        activation=activation,
        down=Product.of(_linear(mlp, "down_proj")),
        mlp_post_norm=norms.get("post_feedforward_layernorm"),
        per_layer_input=per_layer_input,
        scale=float(layer.get_buffer("layer_scalar")) if hasattr(layer, "layer_scalar") else 1.0,
        qkv=Product.of(*linears),  # last: from here on the layer's weights are joined
        gate_up=Product.of(*gate_up),
    )


def _only(module: nn.Module, where: str, known: Collection[str], needed: Collection[str]) -> None:
    found = {name for name, child in module.named_children()}
    found |= {name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))}
    if odd := sorted(found - set(known)):
        raise UnknownLayerError(f"it has {where}{odd[0]}, which is no known part of a layer")
    if gone := sorted(set(needed) - found):
        raise UnknownLayerError(f"it has no {where}{gone[0]}")


def is_plain(module: nn.Module) -> bool:
    """Whether a module is x W^T + b and nothing else: a quantized one may be an nn.Linear with scales or another forward."""
    return (
        type(module) is nn.Linear
        and isinstance(getattr(module, "weight", None), Tensor)
        and module.weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and {name for name, _ in (*module.named_parameters(), *module.named_buffers())} <= {"weight", "bias"}
        and not isinstance(vars(module).get("forward"), MethodType | FunctionType | functools.partial)
        and not module._forward_pre_hooks
    )


def _linear(module: nn.Module, name: str) -> nn.Linear:
    linear = getattr(module, name)
    if type(linear) is not nn.Linear:
        raise UnknownLayerError(f"{name} is a {type(linear).__name__}, not a plain linear layer")
    if not is_plain(linear):
        raise UnknownLayerError(f"{name} does more than its weight says, as quantized layers do")
    return linear


def _fits(name: str, linear: nn.Linear, inputs: int, outputs: int) -> None:
    if (linear.in_features, linear.out_features) != (inputs, outputs):
        raise UnknownLayerError(f"{name} takes {linear.in_features} values to {linear.out_features}, not {inputs} to {outputs}")


def _query_key_value(attention: nn.Module, spec: LayerSpec, shares: bool) -> list[nn.Linear]:
    linears = [_linear(attention, "q_proj")]
    if not shares:
        key = _linear(attention, "k_proj")
        # Without a projection of its own, a value is the key before its norm and rotation (the large Gemma 4).
        linears += [key, key if getattr(attention, "v_proj", None) is None else _linear(attention, "v_proj")]
    widths = [spec.heads * spec.key_size, spec.kv_heads * spec.key_size, spec.kv_heads * spec.value_size]
    if spec.key_size != spec.value_size or [x.out_features for x in linears] != widths[: len(linears)]:
        raise UnknownLayerError("its queries, keys and values are not projected to equal heads")
    return linears


def _per_layer_input(layer: nn.Module, size: int, dtype: torch.dtype, activation: str) -> PerLayerInput | None:
    if not any(hasattr(layer, name) for name in _PER_LAYER_INPUT):
        return None
    _only(layer, "", _LAYER, {*_PER_LAYER_INPUT, "act_fn"})
    if _activation(layer, dtype) != activation:
        raise UnknownLayerError("its MLP and its per-layer input have different activations")
    gate, projection = (Product.of(_linear(layer, name)) for name in _PER_LAYER_INPUT[:2])
    return PerLayerInput(gate, projection, _norm(layer, _PER_LAYER_INPUT[2], size, dtype))


def _head_norm(attention: nn.Module, name: str, spec: LayerSpec, dtype: torch.dtype) -> Norm | None:
    return None if getattr(attention, name, None) is None else _norm(attention, name, spec.key_size, dtype)


def _norm(parent: nn.Module, name: str, size: int, dtype: torch.dtype) -> Norm:
    norm = norm_of(getattr(parent, name), size, dtype)
    if norm is None:
        raise UnknownLayerError(f"{name} is not an RMSNorm over {size} values")
    return norm


def norm_of(module: nn.Module, size: int, dtype: torch.dtype) -> Norm | None:
    """The `Norm` that has the module's bits on random rows [., size] in float32 and in `dtype`; None if there is none."""
    own = dict(module.named_parameters()) | dict(module.named_buffers())
    eps, weight = getattr(module, "eps", getattr(module, "variance_epsilon", None)), own.get("weight")
    if not isinstance(eps, float) or set(own) - {"weight"} or (weight is not None and weight.shape != (size,)):
        return None
    # On the CPU, whose bits both share, and in small rows too, where eps shows.
    rows = torch.randn((4, size), generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [30.0], [1e-2], [1e-3]])
    copies = [copy.deepcopy(module).cpu().to(kind) for kind in (torch.float32, dtype)]
    cases = [(x := rows.to(kind), _run(twin, x)) for twin, kind in zip(copies, (torch.float32, dtype), strict=True)]
    plain = None if weight is None else weight.detach().float()
    for values in [None] if plain is None else [plain, 1.0 + plain]:
        for round_first in (False, True):
            norm = Norm(None if values is None else values.cpu(), eps, round_first)
            if all(out is not None and torch.equal(norm(x), out) for x, out in cases):
                return Norm(values, eps, round_first)
    return None


def _activation(parent: nn.Module, dtype: torch.dtype) -> str:
    module = getattr(parent, "act_fn", None)
    rows = 4 * torch.randn((4, 256), generator=torch.Generator().manual_seed(0))
    for name, act in ACTIVATIONS.items():
        cases = [(act(x), _run(module, x)) for x in (rows, rows.to(dtype))]
        if all(out is not None and torch.equal(mine, out) for mine, out in cases):
            return name
    raise UnknownLayerError(f"its activation is none of {', '.join(ACTIVATIONS)}")


@torch.no_grad()
def _run(module: Any, x: Tensor) -> Tensor | None:
    """What the module makes of x, if that is one tensor of x's shape and dtype."""
    out = module(x) if callable(module) else None
    return out if isinstance(out, Tensor) and out.shape == x.shape and out.dtype == x.dtype else None
