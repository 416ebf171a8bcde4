"""What may be wrong with a draft's files, as forms of the draft in which it would be right: each is measured beside it."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from flashdraft.draft import DFlashConfig, DFlashDraft, RMSNorm, default_layer_ids
from flashdraft.errors import ConfigError
from flashdraft.quantize.proposing import target_head
from flashdraft.targets.target import Target

LAYERS, CAUSAL, WINDOW, THETA, SCALE = "layer ids", "causal flag", "window", "RoPE theta", "embedding scale"
HEAD, EMBEDDINGS, NORM, OVERFLOW = "head", "embeddings", "norm", "16-bit overflow"
THETAS = (1e6, 1e4, 5e5, 1e5, 5e6, 1e7)  # of released models, the usual one of drafts first
WINDOWS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # where config.json names none

Weights = Literal["target head", "embeddings as head", "target embeddings", "ones for zeros", "float32"]


@dataclass(frozen=True)
class Variation:
    """One thing done otherwise. Of one cause at most one variation holds at a time."""

    cause: str
    says: str  # what is wrong, if the draft is better so
    config: tuple[tuple[str, object], ...] = ()  # fields of DFlashConfig
    weights: Weights | None = None


def changed(config: DFlashConfig, variations: Iterable[Variation]) -> DFlashConfig:
    """The configuration with the variations' fields."""
    return config.with_(**{name: value for v in variations for name, value in v.config})


def apply(draft: DFlashDraft, variations: Sequence[Variation], target: Target) -> DFlashDraft:
    """The draft so changed; it shares the weights that are the same."""
    made = copy.copy(draft)
    made._modules = dict(draft._modules)
    made.config = changed(draft.config, variations)
    for kind in (v.weights for v in variations):
        if kind == "target head":
            made.lm_head = None
        elif kind == "embeddings as head":
            made.lm_head = torch.nn.Linear(1, 1, bias=False, device="meta")
            made.lm_head.weight = torch.nn.Parameter(target.model.get_input_embeddings().weight.detach(), requires_grad=False)
        elif kind == "target embeddings":
            made.embed_tokens = None
        elif kind == "ones for zeros":
            made = copy.deepcopy(made)
            for norm in norms(made).values():
                if not norm.weight.any():
                    torch.nn.init.ones_(norm.weight)
    return copy.deepcopy(made).float() if any(v.weights == "float32" for v in variations) else made


def norms(draft: DFlashDraft) -> dict[str, RMSNorm]:
    return {name: module for name, module in draft.named_modules() if isinstance(module, RMSNorm)}


def candidates(draft: DFlashDraft, target: Target, stated: Sequence[int], longest: int) -> list[Variation]:
    """All that may be wrong with this draft, for each cause the likeliest first.

    stated: the windows that config.json names, in force or not. longest: tokens of the longest answer, prompt included; wider
    windows than this make no difference.
    """
    c = draft.config
    found = [*_layer_ids(c, target.num_layers), *_scales(c), *_thetas(c, target)]
    found += [*_causal(c), *_windows(c, stated, longest), *_tables(draft, target)]
    if zero := [name for name, norm in norms(draft).items() if not norm.weight.any()]:
        found.append(
            Variation(NORM, f"{', '.join(zero)}: all weights are 0, a norm that was never loaded", (), "ones for zeros")
        )
    return found


def _layer_ids(c: DFlashConfig, layers: int) -> Iterator[Variation]:
    own, seen = list(c.target_layer_ids), [c.target_layer_ids]
    choices = {tuple(i + shift for i in own): "the feature layers are shifted by one" for shift in (-1, 1)}
    with contextlib.suppress(ConfigError):
        choices.setdefault(
            tuple(sorted(default_layer_ids(layers, c.num_features))), "the feature layers are not those it was trained on"
        )
    for ids, what in choices.items():
        if ids[0] >= 0 and ids[-1] < layers and ids not in seen:
            sizes = ("num_target_layers", max(c.num_target_layers, ids[-1] + 1))
            yield Variation(LAYERS, f"{what}: {own} instead of {list(ids)}", (("target_layer_ids", ids), sizes))


def _scales(c: DFlashConfig) -> Iterator[Variation]:
    root = math.sqrt(c.hidden_size)
    for scale, name in ((1.0, "1"), (root, f"{root:g}, the root of the hidden size"), (1 / root, f"{1 / root:g}")):
        if not math.isclose(scale, c.input_embedding_scale, rel_tol=1e-3):
            own = f"embeddings are multiplied by {c.input_embedding_scale:g} instead of {name}"
            yield Variation(SCALE, own, (("input_embedding_scale", scale),))


def target_theta(target: Target) -> float | None:
    """The RoPE base that a target's configuration names, if it is one number."""
    section = getattr(target.config, "rope_parameters", None)
    named = section.get("rope_theta") if isinstance(section, Mapping) else getattr(target.config, "rope_theta", None)
    return float(named) if isinstance(named, int | float) else None


def _thetas(c: DFlashConfig, target: Target) -> Iterator[Variation]:
    theirs = target_theta(target)
    for theta in dict.fromkeys((THETAS[0], *([theirs] if theirs else []), *THETAS[1:])):
        if theta != c.rope_theta:
            whose = ", the target's" if theta == theirs else ""
            says = f"RoPE turns with theta {c.rope_theta:g} instead of {theta:g}{whose}"
            yield Variation(THETA, says, (("rope_theta", theta),))


def _causal(c: DFlashConfig) -> Iterator[Variation]:
    n, sliding = c.num_hidden_layers, tuple(w is not None for w in c.windows)
    words = {(False,) * n: "bidirectional", (True,) * n: "causal"}
    words.setdefault(sliding, "causal in the sliding layers only")
    for flags, what in words.items():
        if flags != c.causal:
            own = words.get(c.causal, "causal in some layers")
            yield Variation(CAUSAL, f"the draft is {own} and should be {what}", (("causal", flags),))


def _windows(c: DFlashConfig, stated: Sequence[int], longest: int) -> Iterator[Variation]:
    n, own = c.num_hidden_layers, sorted({w for w in c.windows if w is not None})
    if own and own[0] < longest:
        yield Variation(WINDOW, f"a window of {own[0]:,} hides what the draft looks at", (("windows", (None,) * n),))
    for window in dict.fromkeys((*stated, *(() if own else WINDOWS))):
        if window < longest and c.windows != (window,) * n:
            where = f"of {window:,} in config.json is ignored" if window in stated else f"(about {window:,}) is missing"
            yield Variation(WINDOW, f"the window {where}", (("windows", (window,) * n),))


def _tables(draft: DFlashDraft, target: Target) -> Iterator[Variation]:
    if draft.lm_head is not None and draft.config.draft_vocab_size is None:
        says = "the draft's own output head is not the one it was trained with (random, or another model's)"
        yield Variation(HEAD, says, (("has_own_lm_head", False),), "target head")
    if target_head(target).data_ptr() != target.model.get_input_embeddings().weight.data_ptr():
        says = "the draft was trained with the embedding table as its output head, which is not the target's (wrong tying)"
        yield Variation(HEAD, says, (("has_own_lm_head", True),), "embeddings as head")
    if draft.embed_tokens is not None:
        says = "the draft's own embeddings are not those it was trained with"
        yield Variation(EMBEDDINGS, says, (("has_own_embeddings", False),), "target embeddings")


def overflow(draft: DFlashDraft, share: float) -> Variation:
    """For a draft of which a share of the hidden states or logits is not finite."""
    dtype = str(draft.norm.weight.dtype).removeprefix("torch.")
    return Variation(OVERFLOW, f"{share:.0%} of its hidden states or logits are not finite in {dtype}", (), "float32")
