"""What a transformers model asks of attention, layer by layer, found by running two tokens through it.

We register one attention function and one mask function with transformers. During the probe the mask function notes which rule
each mask stands for, and the attention function notes every call, so windows come from the masks that the model itself would
use: some families (Qwen2-MoE, PhiMoE) never name their window in the attention call. Whatever a call or a mask would ask beyond
that is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AttentionMaskInterface, PreTrainedModel

from flashdraft.errors import UnsupportedModelError

# transformers takes any name with "flash" in it for a flash-attention kernel of the hub.
ATTENTION = "draft_engine"
# The same with a mask function, while a model is probed. Without one transformers makes no masks: 16 kernels less a pass.
PROBE = "draft_engine_probe"
# Arguments of attention calls that our attention honours (the window through its mask), and those that carry nothing to honour.
_HONOURED = {"scaling", "dropout", "sliding_window", "softcap", "s_aux", "attention_mask"}
_HARMLESS = {
    "position_ids",
    "use_cache",
    "output_attentions",
    "output_router_logits",
    "cache_position",
    "is_causal",
    "return_shared_kv_states",
}
_ATTENDING = ("full_attention", "sliding_attention")
# Parts of the names that transformers gives to layers with a state: linear attention, state space models, convolutions.
_RECURRENT = ("linear", "mamba", "conv", "hybrid", "recurrent", "ssm", "lstm", "delta")
# Masks are compared with ours over this many positions at most (a row of the mask each: 8 rows of 262,144 take 10 ms).
_MASK_POSITIONS = 1 << 18

# A mask as transformers states it: (batch, head, query position, key position) -> visible, for tensors that broadcast.
MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LayerSpec:
    """What one attention layer needs. `source` is the layer whose keys and values it reads (itself, unless it shares)."""

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    window: int | None
    scale: float
    softcap: float | None
    source: int
    sinks: Tensor | None = field(default=None, compare=False)  # [heads]: the score of one more key, whose value is zero
    sees_whole_images: bool = False  # from a position inside an image the keys up to the image's end are visible too


# attend(layer, spec, q [T, heads, D], k [T, kv heads, D], v [T, kv heads, Dv]) -> [T, heads, Dv]; a layer that shares gets its
# source's k and v again and must not store them twice.
TargetAttend = Callable[[int, LayerSpec, Tensor, Tensor, Tensor], Tensor]


class Binding:
    """Shared by a model's attention modules: where the current forward's attention comes from."""

    attend: TargetAttend | None = None


@dataclass(frozen=True)
class _Call:
    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    arguments: dict[str, Any]

    @property
    def address(self) -> tuple[int, int, int, int]:
        """Where keys and values lie: storage and offset, which tensors on the meta device have too."""
        return _storage(self.k), int(self.k.storage_offset()), _storage(self.v), int(self.v.storage_offset())


def _storage(tensor: Tensor) -> int:
    """Of its memory, whether there is any or not."""
    return int(tensor.untyped_storage()._cdata)


@dataclass
class _Probe:
    calls: list[_Call] = field(default_factory=list)
    # By the storage of the mask handed out, which views of it keep; the mask is held so that its storage is not used again.
    masks: dict[int, tuple[Tensor, MaskRule]] = field(default_factory=dict)


_probing: _Probe | None = None


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Registered with transformers' AttentionInterface: query [1, heads, T, D], key and value [1, kv heads, T, D]."""
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    if _probing is not None:
        _probing.calls.append(_Call(module, q, k, v, attention_mask, kwargs))
        return q.new_zeros((1, q.shape[0], q.shape[1], v.shape[-1])), None
    slot = module.__dict__.get("_flashdraft_slot")
    if slot is None or slot[0].attend is None:
        raise RuntimeError("this model's attention belongs to flashdraft: call Target.forward, not the model")
    binding, index, spec = slot
    return binding.attend(index, spec, q, k, v)[None], None


def _mask(*, q_length: int, kv_length: int, mask_function: MaskRule, **kwargs: Any) -> Tensor:
    """The probe's mask function. Our attention makes its own masks; the probe only learns what they have to be."""
    assert _probing is not None
    mask = torch.ones((1, 1, q_length, kv_length), dtype=torch.bool, device=kwargs.get("device")).tril()
    _probing.masks[_storage(mask)] = (mask, mask_function)
    return mask


AttentionInterface.register(ATTENTION, _attention)
AttentionInterface.register(PROBE, _attention)
AttentionMaskInterface.register(PROBE, _mask)


def switch_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention of the language model; encoders of other media, whose attention is not ours, keep theirs."""
    config, text = model.config, model.config.get_text_config()
    key = next((key for key in config.sub_configs if getattr(config, key, None) is text), None)
    model.set_attn_implementation(name if key is None else {"": name, key: name})


def discover(
    model: PreTrainedModel, layers: nn.ModuleList, binding: Binding, within: AbstractContextManager[Any] | None = None
) -> list[LayerSpec]:
    """Specs of all layers, whose attention calls `binding.attend` from now on. Raises UnsupportedModelError with the reason.

    within: what the forward pass runs in, such as the mode of a model without weights.
    """
    global _probing
    name = type(model).__name__
    probe = _probing = _Probe()
    switch_attention(model, PROBE)
    try:
        with torch.no_grad(), within or nullcontext():
            positions = torch.arange(2, device=model.device)[None]
            model(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False, return_dict=True)
    except Exception as error:
        raise UnsupportedModelError(f"{name}: a forward of two tokens fails: {shorten(str(error), 200)}") from error
    finally:
        _probing = None
        switch_attention(model, ATTENTION)
    calls = probe.calls
    if len(calls) != len(layers) or any(c.module not in set(layer.modules()) for c, layer in zip(calls, layers, strict=True)):
        raise UnsupportedModelError(
            f"{name}: its {len(layers)} layers call transformers' attention interface {len(calls)} times, not once each; those "
            "with attention code of their own (ALiBi, cross attention) or another mixer (state space) are not supported"
        )
    limit = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 4096)
    # Gemma 4 alone is served with images: there full layers never see them whole.
    sees_images = getattr(model.config.get_text_config(), "use_bidirectional_attention", None) == "vision"
    specs: list[LayerSpec] = []
    for index, call in enumerate(calls):
        # Sharing layers are handed their source's own keys and values, not copies.
        source = next((j for j in range(index) if calls[j].address == call.address), index)
        specs.append(_layer_spec(name, call, _window(name, call, probe, limit), source, sees_images))
    for index, (call, spec) in enumerate(zip(calls, specs, strict=True)):
        call.module.__dict__["_flashdraft_slot"] = (binding, index, spec)
    return specs


def _layer_spec(name: str, call: _Call, window: int | None, source: int, sees_images: bool) -> LayerSpec:
    arguments = call.arguments
    if not getattr(call.module, "is_causal", True) or arguments.get("is_causal") is False:
        raise UnsupportedModelError(f"{name}: a layer is not causal, so it cannot generate token by token")
    if unknown := [key for key, value in arguments.items() if key not in _HONOURED | _HARMLESS and value is not None]:
        raise UnsupportedModelError(
            f"{name}: its attention passes {', '.join(sorted(unknown))}, which our attention does not implement"
        )
    scale, q, k = arguments.get("scaling"), call.q, call.k
    return LayerSpec(
        heads=q.shape[1],
        kv_heads=k.shape[1],
        key_size=k.shape[2],
        value_size=call.v.shape[2],
        window=window,
        scale=float(scale) if scale is not None else q.shape[2] ** -0.5,
        softcap=arguments.get("softcap"),
        source=source,
        sinks=arguments.get("s_aux"),
        sees_whole_images=sees_images and window is not None,
    )


def _window(name: str, call: _Call, probe: _Probe, positions: int) -> int | None:
    """The window of a layer's own mask, None for all of the past; what it says itself if it made no mask."""
    if call.mask is None:
        return call.arguments.get("sliding_window")
    known = probe.masks.get(_storage(call.mask))
    if known is None:
        raise UnsupportedModelError(
            f"{name}: it computes attention masks of its own (ALiBi or another bias), which our attention does not implement"
        )
    try:
        return window_of(known[1], min(positions, _MASK_POSITIONS))
    except (ValueError, IndexError) as error:
        raise UnsupportedModelError(
            f"{name}: its attention mask is neither causal nor a causal sliding window, so it is not implemented"
        ) from error


def window_of(rule: MaskRule, positions: int) -> int | None:
    """The window W for which a query sees the keys at distance 0..W-1, None if all before it; ValueError for another rule."""
    zero, keys, last = torch.zeros((), dtype=torch.long), torch.arange(positions), positions - 1
    seen = int(rule(zero, zero, torch.tensor([[last]]), keys[None]).expand(1, positions).sum())
    queries = {0, 1, seen - 1, seen, seen + 1, 2 * seen + 3, last // 2, last}
    rows = torch.tensor(sorted(q for q in queries if 0 <= q <= last))[:, None]
    distance = rows - keys[None]
    if not torch.equal(rule(zero, zero, rows, keys[None]).expand_as(distance), (distance >= 0) & (distance < seen)):
        raise ValueError("another mask")
    return seen if seen < positions else None


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder's layers (those of the language model inside a multimodal one)."""
    decoder = model.get_decoder()
    found = [layers for name in ("layers", "h") if isinstance(layers := getattr(decoder, name, None), nn.ModuleList)]
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} keeps its decoder layers in an unknown place ({type(decoder).__name__} has no `layers`); "
            "only decoder-only causal LMs of transformers are supported"
        )
    return found[0]


def is_recurrent(config: Any) -> bool:
    """Whether any layer of a model carries a state from token to token: by the kinds of its layers, or by its class."""
    if any(word in kind for kind in getattr(config, "layer_types", None) or () for word in _RECURRENT):
        return True
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return bool(getattr(model, "_is_stateful", False))


def refuse_unsupported(config: Any) -> None:
    """Refuse, by name, what would be run wrongly without an error: mixers, masks and RoPE kinds we do not honour."""
    name = getattr(config, "model_type", "?")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; only decoder-only causal LMs are supported")
    kinds = set(getattr(config, "layer_types", None) or ())
    if is_recurrent(config):
        which = ", ".join(sorted(kinds - {*_ATTENDING, "chunked_attention"})) or "recurrent"
        raise UnsupportedModelError(
            f"{name}: its {which} layers keep a state that every token changes, and a rejected guess cannot be taken out of it "
            "again, so no draft would be lossless: use a target all of whose layers attend (Qwen3 for Qwen3.5, for example)"
        )
    if odd := kinds - set(_ATTENDING):
        raise UnsupportedModelError(
            f"{name}: layers of type {', '.join(sorted(odd))} are not supported; only full and sliding attention layers are"
        )
    if getattr(config, "use_bidirectional_attention", None) in ("all", True):
        raise UnsupportedModelError(f"{name}: bidirectional attention over text cannot generate token by token")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for entry in [rope, *(v for v in rope.values() if isinstance(v, dict))]:
        kind = str(entry.get("rope_type", entry.get("type")))
        if "dynamic" in kind or kind == "longrope":
            raise UnsupportedModelError(
                f"{name}: RoPE type {kind!r} changes with the longest position of a batch, so a token's value would depend on "
                "its neighbours; set a fixed rope_type (or none) in config.json"
            )
