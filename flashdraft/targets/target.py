"""Target: one adapter over any transformers causal LM. transformers holds the layers, the caller brings the attention.

The model runs on a flat batch of T tokens with `use_cache=False`; every attention layer calls back with its queries, keys and
values, and forward hooks capture the feature layers. Shape letters: T tokens, H hidden, n captured layers, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from flashdraft.errors import ConfigError, UnsupportedModelError

# transformers takes any name with "flash" in it for a flash-attention kernel of the hub.
ATTENTION = "draft_engine"
# Arguments of attention calls that carry nothing our attention would have to honour.
_HARMLESS = {"position_ids", "use_cache", "output_attentions", "cache_position", "is_causal", "return_shared_kv_states"}


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


# attend(layer, spec, q [T, heads, D], k [T, kv heads, D], v [T, kv heads, Dv]) -> [T, heads, Dv]; a layer that shares gets its
# source's k and v again and must not store them twice.
TargetAttend = Callable[[int, LayerSpec, Tensor, Tensor, Tensor], Tensor]


class _Binding:
    """Shared by a model's attention modules: where the current forward's attention comes from."""

    attend: TargetAttend | None = None
    probe: list[tuple[nn.Module, Tensor, Tensor, Tensor, dict[str, Any]]] | None = None


_probing: _Binding | None = None


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The function registered with transformers' AttentionInterface: query [1, heads, T, D], key and value [1, kv heads, T, D]."""
    slot = module.__dict__.get("_flashdraft_slot")
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    if slot is None:
        return _probe(module, q, k, v, {**kwargs, "attention_mask": attention_mask}), None
    binding, index, spec = slot
    if binding.attend is None:
        raise RuntimeError("this model's attention belongs to flashdraft: call Target.forward, not the model")
    return binding.attend(index, spec, q, k, v)[None], None


def _probe(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any]) -> Tensor:
    if _probing is None or _probing.probe is None:
        raise RuntimeError("a model with flashdraft's attention was run outside a Target")
    _probing.probe.append((module, q, k, v, kwargs))
    return q.new_zeros((1, q.shape[0], q.shape[1], v.shape[-1]))


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


class Target:
    """A transformers causal LM whose attention and features are in our hands.

    Raises UnsupportedModelError, with the reason, for a model that cannot be run losslessly here.
    """

    def __init__(self, model: PreTrainedModel, *, check: bool = True) -> None:
        self.model = model.eval().requires_grad_(False)
        self.config = model.config.get_text_config()
        refuse_unsupported(self.config)
        self._binding = _Binding()
        if model.config._attn_implementation != ATTENTION:
            model.set_attn_implementation(ATTENTION)
        self.decoder = _decoder(model)
        self.layer_specs = self._discover()
        self._captured: dict[int, Tensor] = {}
        self._capture_ids: tuple[int, ...] = ()
        self._hooks: list[Any] = []
        if check:
            self._self_check()

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        return self.model.get_input_embeddings().weight.dtype  # type: ignore[return-value]

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])  # type: ignore[arg-type, union-attr]

    @property
    def num_layers(self) -> int:
        return len(self.decoder.layers)  # type: ignore[arg-type]

    @property
    def max_position_embeddings(self) -> int:
        return int(self.config.max_position_embeddings)

    @property
    def final_logit_softcapping(self) -> float | None:
        return getattr(self.config, "final_logit_softcapping", None)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end an answer, by the generation configuration and the configuration."""
        ids: set[int] = set()
        for source in (getattr(self.model, "generation_config", None), self.config):
            eos = getattr(source, "eos_token_id", None)
            ids.update([eos] if isinstance(eos, int) else eos or [])
        return frozenset(ids)

    def embed_rows(self, ids: Tensor) -> Tensor:
        """Raw rows of the embedding table [..., H]: never scaled, which is what drafts are trained on."""
        return F.embedding(ids, self.model.get_input_embeddings().weight)  # type: ignore[arg-type]

    def head(self, hidden: Tensor) -> Tensor:
        """Output embedding [..., H] -> [..., V], without the soft cap."""
        return self.model.get_output_embeddings()(hidden)  # type: ignore[misc]

    def capture(self, layer_ids: Sequence[int]) -> None:
        """Choose the feature layers (0-based, ascending) whose outputs every forward returns."""
        if any(not 0 <= i < self.num_layers for i in layer_ids) or list(layer_ids) != sorted(set(layer_ids)):
            raise ConfigError(f"feature layers {list(layer_ids)} must be ascending layers of 0..{self.num_layers - 1}")
        if tuple(layer_ids) == self._capture_ids:
            return
        for hook in self._hooks:
            hook.remove()
        self._capture_ids = tuple(layer_ids)
        self._hooks = [self.decoder.layers[i].register_forward_hook(self._keep(i)) for i in layer_ids]  # type: ignore[index]

    def _keep(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._captured[index] = output[0] if isinstance(output, tuple) else output

        return hook

    @torch.no_grad()
    def forward(
        self, ids: Tensor, positions: Tensor, attend: TargetAttend, logit_rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """One pass over a flat batch of ids [T] at positions [T].

        Returns logits [len(logit_rows), V] (all rows for None), soft cap applied, and features [T, n*H] of the captured layers.
        """
        rows = torch.arange(ids.shape[0], device=ids.device) if logit_rows is None else logit_rows
        with self.attending(attend):
            out = self.model(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows, return_dict=True
            )
        return out.logits[0], self.take_features()

    @contextmanager
    def attending(self, attend: TargetAttend) -> Iterator[None]:
        """Within this context the model's attention layers call `attend`."""
        self._binding.attend = attend
        try:
            yield
        finally:
            self._binding.attend = None

    def take_features(self) -> Tensor | None:
        """Features [T, n*H] of the forward just run, concatenated in ascending layer order; None if none are captured."""
        if not self._capture_ids:
            return None
        parts = [self._captured.pop(i)[0] for i in self._capture_ids]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _discover(self) -> list[LayerSpec]:
        """Run two tokens through the model and read every layer's heads, sizes and window off its attention call."""
        global _probing
        ids = torch.zeros((1, 2), dtype=torch.long, device=self.device)
        positions = torch.arange(2, device=self.device)[None]
        self._binding.probe = calls = []
        _probing = self._binding
        try:
            with torch.no_grad():
                self.model(input_ids=ids, position_ids=positions, use_cache=False, return_dict=True)
        finally:
            _probing, self._binding.probe = None, None
        if len(calls) != self.num_layers:
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: {len(calls)} of {self.num_layers} layers call the attention interface; "
                "layers with another mixer (linear attention, state space, convolution) cannot be served"
            )
        specs: list[LayerSpec] = []
        for index, (module, q, k, v, kwargs) in enumerate(calls):
            source = next((j for j in range(index) if calls[j][2].data_ptr() == k.data_ptr()), index)
            spec = _layer_spec(self.model, module, q, k, v, kwargs, source)
            specs.append(spec)
            module.__dict__["_flashdraft_slot"] = (self._binding, index, spec)
        return specs

    def _self_check(self) -> None:
        """Two sequences packed in one batch must give the logits of two separate forwards, or the model mixes rows."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.vocab_size, (7,), generator=generator).to(self.device)
        positions = torch.tensor([0, 1, 2, 3, 0, 1, 2], device=self.device)
        documents = torch.tensor([0, 0, 0, 0, 1, 1, 1], device=self.device)
        packed = self.forward(ids, positions, packed_attend(documents, positions))[0]
        parts = [
            self.forward(ids[d], positions[d], packed_attend(documents[d], positions[d]))[0]
            for d in (documents == 0, documents == 1)
        ]
        apart = torch.cat(parts).float()
        limit = 1e-3 if self.dtype == torch.float32 else 0.1
        error = (packed.float() - apart).abs().max() / apart.abs().max().clamp(min=1e-6)
        if not error <= limit:
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: two sequences in one batch disturb each other (relative difference {error:.1e}); "
                "this family cannot be run on packed batches"
            )


def packed_attend(documents: Tensor, positions: Tensor) -> TargetAttend:
    """Dense causal attention within documents [T] over a flat batch, without pages: self-check, offline features, small tests."""
    same = documents[:, None] == documents[None, :]
    distance = positions[:, None] - positions[None, :]

    def attend(layer: int, spec: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        visible = same & (distance >= 0)
        if spec.window is not None:
            visible = visible & (distance < spec.window)
        group = spec.heads // spec.kv_heads
        q, k, v = q.transpose(0, 1), k.transpose(0, 1).repeat_interleave(group, 0), v.transpose(0, 1).repeat_interleave(group, 0)
        if spec.softcap is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=spec.scale)
        else:
            scores = torch.tanh((q.float() @ k.float().mT) * spec.scale / spec.softcap) * spec.softcap
            out = (scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v.float()).to(q.dtype)
        return out.transpose(0, 1)

    return attend


def _decoder(model: PreTrainedModel) -> nn.Module:
    """The module that holds the decoder layers (the language model inside a multimodal one)."""
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UnsupportedModelError(
            f"{type(model).__name__} keeps its decoder layers in an unknown place ({type(decoder).__name__} has no `layers`); "
            "only decoder-only causal LMs of transformers are supported"
        )
    return decoder


def refuse_unsupported(config: Any) -> None:
    """Refuse, by name, what would be run wrongly without an error: mixers, masks and RoPE kinds we do not honour."""
    name = getattr(config, "model_type", "?")
    kinds = set(getattr(config, "layer_types", None) or ())
    if odd := kinds - {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(
            f"{name}: layers of type {', '.join(sorted(odd))} are not supported; only full and sliding attention layers are"
        )
    if getattr(config, "use_bidirectional_attention", None) in ("all", True):
        raise UnsupportedModelError(f"{name}: bidirectional attention over text cannot generate token by token")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for entry in [rope, *(v for v in rope.values() if isinstance(v, dict))]:
        kind = entry.get("rope_type", entry.get("type"))
        if kind in ("dynamic", "longrope"):
            raise UnsupportedModelError(
                f"{name}: RoPE type {kind!r} changes with the longest position of a batch, so a token's value would depend on "
                "its neighbours; set a fixed rope_type (or none) in config.json"
            )


def _layer_spec(
    model: PreTrainedModel, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any], source: int
) -> LayerSpec:
    name = type(model).__name__
    if not getattr(module, "is_causal", True):
        raise UnsupportedModelError(f"{name}: a layer is not causal, so it cannot generate token by token")
    known = {"scaling", "dropout", "sliding_window", "softcap"} | _HARMLESS
    if unknown := [key for key, value in kwargs.items() if key not in known and value is not None]:
        raise UnsupportedModelError(
            f"{name}: its attention passes {', '.join(sorted(unknown))}, which our attention does not implement"
        )
    scale = kwargs.get("scaling")
    return LayerSpec(
        heads=q.shape[1],
        kv_heads=k.shape[1],
        key_size=k.shape[2],
        value_size=v.shape[2],
        window=kwargs.get("sliding_window"),
        scale=float(scale) if scale is not None else q.shape[2] ** -0.5,
        softcap=kwargs.get("softcap"),
        source=source,
    )

