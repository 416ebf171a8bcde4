"""Target: one adapter over any transformers causal LM. transformers holds the layers, the caller brings the attention.

The model runs on a flat batch of T tokens with `use_cache=False`; every attention layer calls back with its queries, keys and
values, and forward hooks capture the feature layers. Shape letters: T tokens, H hidden, n captured layers, D head size.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from flashdraft.errors import CheckpointError, ConfigError, UnsupportedModelError
from flashdraft.targets.discovery import (
    ATTENTION,
    Binding,
    LayerSpec,
    TargetAttend,
    decoder_layers,
    discover,
    refuse_unsupported,
    switch_attention,
)
from flashdraft.targets.media import MediaEncoder
from flashdraft.targets.quiet import quiet
from flashdraft.targets.sharding import Group

__all__ = ["LayerSpec", "MediaRows", "Target", "TargetAttend", "packed_attend"]


# Which rows of a batch are media, bool [T], and what they are given in place of their embeddings [T, H].
MediaRows = tuple[Tensor, Tensor]


class Target:
    """A transformers causal LM whose attention and features are in our hands.

    Raises UnsupportedModelError, with the reason, for a model that cannot be run losslessly here, CheckpointError for one whose
    logits are NaN or infinite. `check`: compare the model with itself under its own attention (self_check).
    """

    def __init__(self, model: PreTrainedModel, *, check: bool = True) -> None:
        self.model = model.eval().requires_grad_(False)
        self.config = model.config.get_text_config()
        refuse_unsupported(model.config)
        refuse_unsupported(self.config)
        accepted = inspect.signature(model.forward).parameters
        if "position_ids" not in accepted:
            raise UnsupportedModelError(
                f"{type(model).__name__} takes no position_ids, so its tokens cannot be packed in one batch"
            )
        self._keeps_rows = "logits_to_keep" in accepted
        self._binding = Binding()
        self.decoder = model.get_decoder()
        self.layers = decoder_layers(model)
        self.media = MediaEncoder.of(model)  # None: it takes text alone
        self.group: Group | None = None  # of the processes that hold it together (sharding.py)
        self.weights_hash: str | None = None  # of its whole weights, where this process has a part of them
        self.end: Callable[[Tensor, Tensor | None], Tensor] | None = None  # of a fused target: targets/fused_layer.FusedEnd
        self._captured: dict[int, Tensor] = {}
        self._on_features: Callable[[list[Tensor]], None] | None = None
        self._capture_ids: tuple[int, ...] = ()
        self._hooks: list[Any] = []
        self._media_rows: MediaRows | None = None
        if self.media is not None:
            model.get_input_embeddings().register_forward_hook(self._put_media)
        with quiet():  # transformers warns of models that cannot switch, and discover then refuses them
            self._feature_dims = 3
            self.capture([0])
            self.layer_specs = discover(model, self.layers, self._binding)
            self._feature_dims = self._captured.pop(0).dim()
            self.capture([])
            if check:
                self_check(self)

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.get_input_embeddings().weight.dtype

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def storing_layers(self) -> list[int]:
        """The layers with keys and values of their own; the others read those of their spec's `source`."""
        return [index for index, spec in enumerate(self.layer_specs) if spec.source == index]

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
        return self.model.get_input_embeddings().weight[ids]  # a plain gather, where F.embedding may take 4.4 us for 8 rows

    def head(self, hidden: Tensor) -> Tensor:
        """Output embedding [..., H] -> [..., V], without the logit scale (Cohere, Granite) and the soft cap of the target."""
        return self.model.get_output_embeddings()(hidden)

    @functools.cached_property
    def logit_scale(self) -> float:
        """What multiplies head() before the soft cap: 1 for most families, not for Cohere and Granite. Measured on 8 tokens.

        Raises UnsupportedModelError where logits are something else, for such as need them without the model's own forward.
        """
        raw: list[Tensor] = []
        hook = self.model.get_output_embeddings().register_forward_hook(lambda module, args, out: raw.append(out))
        ids = torch.arange(8, device=self.device)
        try:
            logits = self.forward(ids, ids, packed_attend(torch.zeros_like(ids), ids))[0].double()
        finally:
            hook.remove()
        z, cap = raw[0][0].double(), self.final_logit_softcapping
        if cap is not None:
            steep = logits.abs() < 0.9 * cap  # beyond, tanh is too flat to look through
            logits, z = (logits[steep] / cap).atanh() * cap, z[steep]
        scale = float((logits * z).sum() / z.square().sum())
        if not (logits - scale * z).abs().max() <= 0.05 * z.abs().max() * abs(scale):
            raise UnsupportedModelError(f"{type(self.model).__name__}: its logits are not a multiple of its output embedding's")
        return 1.0 if abs(scale - 1) < 0.01 else scale

    @functools.cached_property
    def _without_placeholders(self) -> Tensor | None:
        """Ids as the decoder takes them [V]: what stands around it puts padding where media go. In one kernel a pass."""
        if self.media is None:
            return None
        ids = torch.arange(self.vocab_size, device=self.device)
        ids[[i for i in self.media.placeholders if i < self.vocab_size]] = self.media.padding
        return ids

    def capture(self, layer_ids: Sequence[int]) -> None:
        """Choose the feature layers (0-based, ascending) whose outputs every forward returns.

        Raises UnsupportedModelError for a model whose layers pass on several streams (Gemma 3n): none of them is the feature.
        """
        if any(not 0 <= i < self.num_layers for i in layer_ids) or list(layer_ids) != sorted(set(layer_ids)):
            raise ConfigError(f"feature layers {list(layer_ids)} must be ascending layers of 0..{self.num_layers - 1}")
        if tuple(layer_ids) == self._capture_ids:
            return
        if layer_ids and self._feature_dims != 3:
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: its layers do not pass on one hidden state a token, so it cannot have a draft"
            )
        for hook in self._hooks:
            hook.remove()
        self._capture_ids = tuple(layer_ids)
        self._hooks = [self.layers[i].register_forward_hook(self._keep(i)) for i in layer_ids]

    def _keep(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._captured[index] = output[0] if isinstance(output, tuple) else output
            if self._on_features is not None and index == self._capture_ids[-1]:
                self._on_features([self._captured.pop(i)[0] for i in self._capture_ids])

        return hook

    @torch.no_grad()
    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: TargetAttend,
        logit_rows: Tensor | None = None,
        out: Tensor | None = None,
        on_features: Callable[[list[Tensor]], None] | None = None,
        media: MediaRows | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """One pass over a flat batch of ids [T] at positions [T], placeholders where `media` has the rows of images and audio.

        Returns logits [len(logit_rows), V] (all rows for None; in `out`, if there is one), soft cap applied, and features
        [T, n*H] of the captured layers. With `on_features` it is that which gets them, [T, H] each in ascending layer order, as
        soon as they are there.
        """
        self._on_features, self._media_rows = on_features, media
        try:
            return self._forward(ids, positions, attend, logit_rows, out)
        finally:
            self._on_features = self._media_rows = None

    def _put_media(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Behind the embedding, which scales some families' text and never their media."""
        if self._media_rows is None:
            return None
        where, rows = self._media_rows
        return torch.where(where[:, None], rows, output)

    def _forward(
        self, ids: Tensor, positions: Tensor, attend: TargetAttend, logit_rows: Tensor | None, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.end is not None:
            if self._without_placeholders is not None:
                ids = self._without_placeholders[ids]
            with self.attending(attend):
                states = self.decoder(input_ids=ids[None], position_ids=positions[None], use_cache=False, return_dict=True)
            hidden = states.last_hidden_state[0]
            return self.end(hidden if logit_rows is None else hidden[logit_rows], out), self.take_features()
        # An index, never a number: for a number Gemma 4 cuts the sequence at its first sharing layer, and features are short.
        keep = {} if logit_rows is None or not self._keeps_rows else {"logits_to_keep": logit_rows}
        with self.attending(attend):
            found = self.model(input_ids=ids[None], position_ids=positions[None], use_cache=False, return_dict=True, **keep)
        logits = found.logits[0] if keep or logit_rows is None else found.logits[0, logit_rows]
        return logits if out is None else out.copy_(logits), self.take_features()

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
        if not self._capture_ids or self._on_features is not None:
            return None
        parts = [self._captured.pop(i)[0] for i in self._capture_ids]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def packed_attend(documents: Tensor, positions: Tensor, reach: Tensor | None = None) -> TargetAttend:
    """Dense causal attention within documents [T] over a flat batch, without pages: self-check, offline features, tests.

    reach [T]: the last position that a row inside an image sees in layers that see whole images, -1 for other rows.
    """
    same = documents[:, None] == documents[None, :]
    distance = positions[:, None] - positions[None, :]

    def attend(layer: int, spec: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        visible = same & (distance >= 0)
        if reach is not None and spec.sees_whole_images:
            visible = same & (positions[None, :] <= torch.maximum(reach, positions)[:, None])
        if spec.window is not None:
            visible = visible & (distance < spec.window)
        group = spec.heads // spec.kv_heads
        q, k, v = (
            q.transpose(0, 1),
            k.transpose(0, 1).repeat_interleave(group, 0),
            v.transpose(0, 1).repeat_interleave(group, 0),
        )
        if spec.softcap is None and spec.sinks is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=spec.scale)
        else:
            scores = (q.float() @ k.float().mT) * spec.scale
            if spec.softcap is not None:
                scores = torch.tanh(scores / spec.softcap) * spec.softcap
            scores = scores.masked_fill(~visible, float("-inf"))
            if spec.sinks is not None:
                scores = torch.cat([scores, spec.sinks.float()[:, None, None].expand(-1, q.shape[1], 1)], -1)
            out = (scores.softmax(-1)[..., : k.shape[1]] @ v.float()).to(q.dtype)
        return out.transpose(0, 1)

    return attend


@torch.no_grad()
def self_check(target: Target) -> None:
    """Two sequences whose rows are shuffled into one batch must give the logits that the model's own attention gives each.

    This finds what discovery cannot see: a model that ignores position_ids or mixes neighbouring rows, and attention that does
    more than its call says. Raises UnsupportedModelError; CheckpointError if logits are not finite.
    """
    model, device, name = target.model, target.device, type(target.model).__name__
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, target.vocab_size, (17,), generator=generator).to(device)
    documents = torch.tensor([0] * 10 + [1] * 7, device=device)
    positions = torch.cat([torch.arange(10), torch.arange(7)]).to(device)
    switch_attention(model, "eager")
    try:
        parts = [model(input_ids=ids[documents == d][None], use_cache=False, return_dict=True).logits[0] for d in (0, 1)]
    finally:
        switch_attention(model, ATTENTION)
    rows = torch.randperm(17, generator=generator).to(device)
    kept = torch.arange(0, 17, 2, device=device)
    got = target.forward(ids[rows], positions[rows], packed_attend(documents[rows], positions[rows]), kept)[0].float()
    expected = torch.cat(parts).float()[rows[kept]]
    error = (got - expected).abs().amax(-1) / expected.abs().max().clamp(min=1e-6)
    # In 16 bits one row may go another way (an expert chosen by a hair), most may not.
    worst, limit = (error.max(), 1e-3) if target.dtype == torch.float32 else (error.median(), 0.1)
    if not (expected.isfinite().all() and got.isfinite().all()):
        _refuse_not_finite(model)
    if not worst <= limit:
        raise UnsupportedModelError(
            f"{name}: rows packed in one batch give other logits than the model itself (relative difference {worst:.1e}); "
            "this family ignores positions, mixes rows, or attends in a way that is not implemented"
        )


def _refuse_not_finite(model: PreTrainedModel) -> None:
    """Say why logits are NaN or infinite: of the weights, the first that is not finite, else the dtype."""
    name = type(model).__name__
    for key, tensor in model.named_parameters():
        if tensor.is_floating_point() and not tensor.float().isfinite().all():
            raise CheckpointError(f"{name}: its weights hold NaN or infinite values ({key}): download them again")
    raise CheckpointError(
        f"{name}: its logits are NaN or infinite in {str(model.dtype).removeprefix('torch.')}, though its weights are not: "
        "load it in another dtype (bfloat16 or float32)"
    )
