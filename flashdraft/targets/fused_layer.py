"""A decoder layer as a chain of fused products around the caller's attention: the same numbers, a third of the kernels.

Shape letters: T rows, H hidden, D head size, R <= D the part of a head that RoPE turns.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flashdraft.kernels.fused import FusedOptions, Norm, add_norm, fused_linear, soft_cap
from flashdraft.kernels.paged import Projection
from flashdraft.targets.discovery import Binding, LayerSpec
from flashdraft.targets.recognition import LayerParts


def separate(p: Projection) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, heads, D], keys and values [T, kv_heads, D], normed and turned, rounded where transformers' layers round.

    For an attention without an attribute `projected(layer, spec, projection) -> [T, heads, D]`, which does that itself: it
    stores the keys and values, and for a projection with kv_heads 0 reads those of the layer's source.
    """
    heads = p.qkv.unflatten(-1, (-1, p.head_dim)).split([p.heads, p.kv_heads, p.kv_heads], 1)
    q, k, v = (x if norm is None else norm(x) for x, norm in zip(heads, p.norms, strict=True))
    return _turn(q, p), _turn(k, p), v


def _turn(x: Tensor, p: Projection) -> Tensor:
    if p.cos is None or p.sin is None:
        return x
    turned, rest = x.split([p.cos.shape[-1], p.head_dim - p.cos.shape[-1]], -1)
    left, right = turned.chunk(2, -1)
    turned = turned * p.cos[:, None] + torch.cat((-right, left), -1) * p.sin[:, None]
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), -1)


class ChangedStateError(RuntimeError):
    """A model changed a hidden state between two layers, the second of which was to finish it."""


@dataclass(frozen=True)
class Deferred:
    """The end of layer `index`, r = (x + post_norm(add)) * scale, left to the first product of the next layer.

    That product adds and norms anyway, so it is one launch less a layer. `version` tells whether x was written to since.
    """

    index: int
    x: Tensor
    parts: dict[str, Any]
    version: int


@dataclass
class Stream:
    """What the fused layers of a model hand on beside the hidden state."""

    deferred: Deferred | None = None
    shared: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # keys and values that other layers read

    def take(self, index: int, x: Tensor) -> dict[str, Any]:
        """What the layer before `index` left to do; x [T, H] is what the model handed on."""
        left, self.deferred = self.deferred, None
        if left is None or left.index != index - 1:
            return {}
        if left.x.data_ptr() != x.data_ptr() or left.x.shape != x.shape or left.version != _version(x):
            raise ChangedStateError(f"the model changed the hidden state between layers {index - 1} and {index}")
        return left.parts


def _version(x: Tensor) -> int:
    """The number of times x was written to; inference tensors do not count."""
    return 0 if x.is_inference() else x._version


class FusedLayer:
    """Takes the place of a decoder layer's `forward`; the module itself, its hooks and its parameters stay where they are.

    before_fused: the next layer is a FusedLayer too, so that the last addition may be left to it.
    """

    def __init__(
        self,
        layer: nn.Module,
        names: tuple[str, ...],
        binding: Binding,
        index: int,
        spec: LayerSpec,
        parts: LayerParts,
        stream: Stream,
        options: FusedOptions,
    ) -> None:
        self.layer, self.names, self.binding, self.index, self.spec = layer, names, binding, index, spec
        self.parts, self.stream = parts, stream
        self.linear = functools.partial(fused_linear, options=options)
        self.add_norm = functools.partial(add_norm, options=options)
        self.before_fused = False
        self.is_read = False  # by another layer, which wants its keys and values
        self.is_last_reader = False

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Hidden states [1, T, H] and whatever the model hands to its layers -> [1, T, H]."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        x, p = given[self.names[0]][0], self.parts
        deferred = self.stream.take(self.index, x)
        qkv, x = self.linear(p.qkv.weight, x, **deferred, norm=p.input_norm, bias=p.qkv.bias)
        y, _ = self.linear(p.output.weight, self._attend(qkv, given.get("position_embeddings")), bias=p.output.bias)
        z, x = self.linear(
            p.gate_up.weight,
            x,
            add=y,
            post_norm=p.attention_post_norm,
            norm=p.mlp_norm,
            bias=p.gate_up.bias,
            activation=p.activation,
            gated=True,
        )
        y, _ = self.linear(p.down.weight, z, bias=p.down.bias)
        post_norm = p.mlp_post_norm
        if (third := p.per_layer_input) is not None:
            z, x = self.linear(
                third.gate.weight,
                x,
                add=y,
                post_norm=post_norm,
                bias=third.gate.bias,
                activation=p.activation,
                multiply=given["per_layer_input"][0],
            )
            y, _ = self.linear(third.projection.weight, z, bias=third.projection.bias)
            post_norm = third.post_norm
        return self._end(x, y, post_norm)[None]

    def _end(self, x: Tensor, add: Tensor, post_norm: Norm | None) -> Tensor:
        """r = (x + post_norm(add)) * scale, at once if anybody looks at this layer's output, else by the next layer."""
        if self.before_fused and not self.layer._forward_hooks:
            parts = dict(add=add, post_norm=post_norm, scale=self.parts.scale)
            self.stream.deferred = Deferred(self.index, x, parts, _version(x))
            return x
        return self.add_norm(x, add, post_norm, self.parts.scale, None)[0]

    def _attend(self, qkv: Tensor, tables: Any) -> Tensor:
        """Attention [T, heads * D] over the product's queries, keys and values."""
        p, spec, attend = self.parts, self.spec, self.binding.attend
        if attend is None:
            raise RuntimeError("this model's attention belongs to flashdraft: call Target.forward, not the model")
        cos, sin = (tables[0][0], tables[1][0]) if p.rotary else (None, None)
        shares = spec.source != self.index
        kv_heads = 0 if shares else spec.kv_heads
        projection = Projection(qkv, spec.heads, kv_heads, spec.key_size, p.q_norm, p.k_norm, p.v_norm, cos, sin)
        projected = getattr(attend, "projected", None)
        if projected is not None:
            return projected(self.index, spec, projection).flatten(-2)
        q, k, v = separate(projection)
        shared = self.stream.shared
        if shares:
            k, v = shared.pop(spec.source) if self.is_last_reader else shared[spec.source]
        elif self.is_read:
            shared[self.index] = k, v
        return attend(self.index, spec, q, k, v).flatten(-2)


class FusedProduct:
    """Takes the place of a linear layer's `forward` outside the decoder layers (the head): [..., K] -> [..., N]."""

    def __init__(self, linear: nn.Linear, options: FusedOptions) -> None:
        self.own, self.options = linear, options

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.own.weight, self.own.bias
        z, _ = fused_linear(weight, x.reshape(-1, weight.shape[1]), bias=bias, options=self.options)
        return z.view(*x.shape[:-1], weight.shape[0])


class FusedEnd:
    """What a model does behind its decoder, where that is the output embedding and at most a soft cap: hidden states [T, H] ->
    logits [T, V], into `out` if there is one.
    """

    def __init__(self, head: nn.Module, cap: float | None, options: FusedOptions) -> None:
        self.head, self.cap, self.options = head, cap, options

    def __call__(self, hidden: Tensor, out: Tensor | None) -> Tensor:
        z = self.head(hidden[None])[0]
        if self.cap is not None:
            return soft_cap(z, self.cap, torch.empty_like(z) if out is None else out, options=self.options)
        return z if out is None else out.copy_(z)


class CachedRotary:
    """Takes the place of a rotary embedding's `forward`: cos and sin of every position, computed once by that forward itself.

    Kinds of RoPE whose factors change with the batch are refused when a target is loaded, so a position's row never changes.
    """

    def __init__(self, module: nn.Module, limit: int) -> None:
        self.module, self.limit = module, limit
        self.tables: dict[Hashable, Tensor] = {}  # [limit, 2 R]: side by side, so that one launch looks both up

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if position_ids.dim() != 2:  # several positions a token, of images
            return type(self.module).forward(self.module, x, position_ids, *args, **kwargs)
        key = x.dtype, args, tuple(sorted(kwargs.items()))
        if key not in self.tables:
            every = torch.arange(self.limit, device=x.device)[None]
            cos, sin = type(self.module).forward(self.module, x[:, :1], every, *args, **kwargs)
            self.tables[key] = torch.cat((cos[0], sin[0]), -1)
        cos, sin = self.tables[key][position_ids].chunk(2, -1)
        return cos, sin


class FusedNorm:
    """Takes the place of a norm's `forward` outside the decoder layers (the final one): [..., K] -> [..., K]."""

    def __init__(self, norm: Norm, options: FusedOptions) -> None:
        self.norm, self.options = norm, options

    def __call__(self, x: Tensor) -> Tensor:
        return add_norm(x.reshape(-1, x.shape[-1]), None, None, 1.0, self.norm, options=self.options)[1].view(x.shape)
