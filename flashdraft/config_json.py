"""A draft's config.json as vLLM, SGLang and the original code read it, to and from DFlashConfig (docs/draft.md).

What a key means when it is absent follows those readers (Qwen3Config's defaults); what they would misread is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import cast

from flashdraft.draft import DFlashConfig
from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.speculators import Json, is_speculators, to_dflash

# Keys, at the top level or in dflash_config, that would change the equations, with the one value these equations have.
_ONLY: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "is_neox_style": (True,),
    "rope_is_neox_style": (True,),
    "use_gemma_norm": (False,),
    "mlp_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1, 1.0),
    "use_aux_hidden_state": (True,),
    "sample_from_anchor": (False,),
    "shift_label": (False,),
    "projector_type": ("dflash",),
    "markov_rank": (0,),
    "enable_confidence_head": (False,),
    "use_qk_norm": (True,),
    "fc_layernorm": (False,),
    "partial_rotary_factor": (1, 1.0),
    "hc_mult": (1,),
}
# Keys that dflash_config may hold too, where the original code looks first; and such as change nothing.
_EITHER = (
    "mask_token_id", "target_layer_ids", "block_size", "input_embedding_scale", "logit_scale", "output_multiplier",
    "final_logit_softcapping",
)  # fmt: skip
_INNER = {*_EITHER, *_ONLY, "causal", "use_swa", "swa_window_size", "mask_token", "draft_arch", "num_target_layers"}
# NeMo's name for the same model.
_ARCHITECTURES = ("DFlashDraftModel", "Qwen3DFlashDraftModel")


def read_json(file: Path) -> Json:
    """A JSON object from a file. Raises CheckpointError if there is none, or it is something else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} has no {file.name}: give the directory that a draft was saved in") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON ({error}): restore it from where the draft was saved") from error
    except RecursionError:
        raise CheckpointError(f"{file} is nested too deeply to be read: restore it from where the draft was saved") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds no JSON object: restore it from where the draft was saved")
    return value


def is_draft_config(raw: Mapping[str, object]) -> bool:
    """Whether a config.json is a draft's, by its architecture or, without one, by its dflash_config."""
    return (
        is_speculators(raw) or _architecture(raw) in _ARCHITECTURES or ("architectures" not in raw and "dflash_config" in raw)
    )


def resembles_draft(raw: Mapping[str, object]) -> bool:
    """Whether a config.json is a draft's of any kind, also of one that parse_config refuses by name (DFlash2)."""
    return is_draft_config(raw) or "dflash_config" in raw


def _architecture(raw: Mapping[str, object]) -> str:
    names = raw.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else str(raw.get("model_type", "no architecture"))


def parse_config(raw: Mapping[str, object], tensor_names: Collection[str] | None = None) -> DFlashConfig:
    """The configuration that a config.json of either layout describes.

    tensor_names: the names in the weight files, which decide whether the draft has embeddings and a head of its own; without
    them only has_own_lm_head and draft_vocab_size can tell. Raises CheckpointError for another kind of model or an absent
    key, ConfigError for a value that cannot be.
    """
    if not is_draft_config(raw):
        raise CheckpointError(
            f"this config.json describes {_architecture(raw)}, not a DFlash draft (architectures DFlashDraftModel with a "
            "dflash_config, or speculators_model_type dflash): give the draft's directory"
        )
    flat = to_dflash(raw) if is_speculators(raw) else dict(raw)
    inner = {**_mapping(flat, "eagle_config"), **_mapping(flat, "dflash_config")}
    _refuse_other_equations(flat, inner)
    flat |= {key: value for key in _EITHER if (value := _stated(flat, inner, key)) is not None}
    hidden, vocab, layers = (_integer(flat, key) for key in ("hidden_size", "vocab_size", "num_hidden_layers"))
    if (target_hidden := flat.get("target_hidden_size")) not in (None, hidden):
        raise ConfigError(
            f"draft config: target_hidden_size {target_hidden} differs from hidden_size {hidden}, and fc reads features of the "
            "draft's own width: train a draft whose hidden_size is the target's"
        )
    ids = _layer_ids(flat)
    windows, causal = _visibility(flat, inner, layers)
    cap = flat.get("final_logit_softcapping") or None  # 0 is none, too
    draft_vocab = _draft_vocab(flat, vocab)
    own_head, own_embeddings = _own_tensors(flat, draft_vocab, tensor_names)
    return DFlashConfig(
        hidden_size=hidden,
        intermediate_size=_integer(flat, "intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=_integer(flat, "num_attention_heads"),
        num_key_value_heads=_integer(flat, "num_key_value_heads"),
        head_dim=_integer(flat, "head_dim", 128),
        vocab_size=vocab,
        # Speculators does not say how many layers the target has; then it is the least that has the feature layers.
        num_target_layers=_integer(flat, "num_target_layers", max(0, *ids) + 1),
        target_layer_ids=ids,
        mask_token_id=_integer(flat, "mask_token_id"),
        block_size=_integer(flat, "block_size", 8),
        rms_norm_eps=_positive(flat, "rms_norm_eps", 1e-6),
        # Of Speculators' own class vLLM fills it in; of Qwen3Config transformers does, in vLLM and in SGLang.
        rope_theta=_rope_theta(flat) or (1e6 if is_speculators(raw) else 1e4),
        max_position_embeddings=_integer(flat, "max_position_embeddings", 32768),
        windows=windows,
        causal=causal,
        attention_bias=_flag(flat, "attention_bias") or False,
        input_embedding_scale=_positive(flat, "input_embedding_scale", 1.0),
        logit_scale=_logit_scale(flat),
        final_logit_softcapping=_positive({**flat, "final_logit_softcapping": cap}, "final_logit_softcapping", 0.0) or None,
        draft_vocab_size=draft_vocab,
        has_own_lm_head=own_head,
        has_own_embeddings=own_embeddings,
    )


def _refuse_other_equations(flat: Mapping[str, object], inner: Mapping[str, object]) -> None:
    for key, neutral in _ONLY.items():
        for section in (flat, inner):
            value = section.get(key)
            if value is not None and value not in neutral:
                raise ConfigError(
                    f"draft config: {key} {value!r} is not supported: these equations know only {neutral[0]!r}, "
                    "so this draft would be computed wrongly; serve it with the code it was trained by"
                )
    if unknown := sorted(key for key, value in inner.items() if key not in _INNER and value not in (None, False)):
        raise ConfigError(
            f"draft config: dflash_config.{unknown[0]} {str(inner[unknown[0]])[:60]!r} is not known here and may change what "
            "the draft computes: take it out if it does not, otherwise serve the draft with the code it was trained by"
        )


def _stated(flat: Mapping[str, object], inner: Mapping[str, object], key: str) -> object:
    """The value of a key that may stand at the top level and in dflash_config; None where it is nowhere."""
    top, nested = flat.get(key), inner.get(key)
    if top is not None and nested is not None and top != nested:
        raise ConfigError(
            f"draft config: {key} is {top!r} at the top level and {nested!r} in dflash_config: keep the one the draft was "
            "trained with"
        )
    return top if nested is None else nested


def _logit_scale(flat: Mapping[str, object]) -> float:
    """logit_scale, which the original code calls output_multiplier."""
    scales = [_positive(flat, key, 0.0) for key in ("logit_scale", "output_multiplier")]
    if all(scales) and scales[0] != scales[1]:
        raise ConfigError(f"draft config: logit_scale {scales[0]} and output_multiplier {scales[1]} differ: keep the right one")
    return max(scales) or 1.0


def _visibility(
    flat: Mapping[str, object], inner: Mapping[str, object], layers: int
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Window and causality of every layer.

    A layer slides if layer_types says so; without layer_types, from max_window_layers on under use_sliding_window (as
    Qwen3Config has it); use_swa makes every layer slide where none is named sliding. Causal is is_causal, else
    dflash_config.causal, else whether the layer's type is sliding.
    """
    allowed = _flag(flat, "use_sliding_window")
    window = _window(inner, "swa_window_size") or (None if allowed is False else _window(flat, "sliding_window"))
    types = flat.get("layer_types")
    if types is None:
        first = _integer(flat, "max_window_layers", 28, least=0)
        sliding = [bool(allowed) and window is not None and i >= first for i in range(layers)]
    elif not isinstance(types, list) or len(types) != layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise ConfigError(
            f"draft config: layer_types must name full_attention or sliding_attention for each of the {layers} layers, "
            f"got {types!r}"
        )
    else:
        sliding = [kind == "sliding_attention" for kind in types]
    windowed = [True] * layers if _flag(inner, "use_swa") and not any(sliding) else sliding
    if any(windowed) and window is None:
        raise ConfigError(
            "draft config: sliding layers without a window (readers crash on sliding layer_types under use_sliding_window "
            "false): set sliding_window and use_sliding_window true, or dflash_config.swa_window_size with use_swa"
        )
    causal = _flag(flat, "is_causal")
    if causal is None:
        causal = _flag(inner, "causal")
    return (
        tuple(window if slides else None for slides in windowed),
        tuple(sliding if causal is None else [causal] * layers),
    )


def _window(section: Mapping[str, object], key: str) -> int | None:
    return None if section.get(key) is None else _integer(section, key)


def _layer_ids(flat: Mapping[str, object]) -> tuple[int, ...]:
    """target_layer_ids; eagle_aux_hidden_state_layer_ids, which are one more, are taken alone and must agree beside them."""
    ids, aux = flat.get("target_layer_ids"), flat.get("eagle_aux_hidden_state_layer_ids")
    if isinstance(aux, list) and all(type(i) is int for i in aux):
        less_one = [i - 1 for i in aux]
        if isinstance(ids, list) and sorted(map(str, ids)) != sorted(map(str, less_one)):
            raise ConfigError(
                f"draft config: target_layer_ids {ids} and eagle_aux_hidden_state_layer_ids {aux}, which should be one more "
                "each, differ: keep the one the draft was trained with"
            )
        ids = less_one if ids is None else ids
    if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
        raise CheckpointError(
            f"config.json needs dflash_config.target_layer_ids, a list of 0-based target layers, got {ids!r}: "
            "take them from the draft's training configuration"
        )
    return tuple(ids)


def _rope_theta(flat: Mapping[str, object]) -> float | None:
    """The one RoPE base, stated at the top level, in rope_parameters or in rope_scaling; None where it is nowhere."""
    stated = [_positive(flat, "rope_theta", 0.0)]
    for key in ("rope_parameters", "rope_scaling"):
        section = _mapping(flat, key)
        nested: list[Mapping[str, object]] = [
            p for p in section.values() if isinstance(p, dict)
        ]  # a section for each layer type
        for part in nested or [section]:
            kind = part.get("rope_type", part.get("type"))
            if kind not in (None, "default"):
                raise ConfigError(
                    f"draft config: {key} asks for RoPE of type {kind!r}, but a draft's RoPE is unscaled and one-dimensional: "
                    "only type 'default' (or null) is supported"
                )
            turned = part.get("rope_dim") in (None, flat.get("head_dim", 128))
            if not turned or part.get("partial_rotary_factor") not in (None, 1, 1.0):
                raise ConfigError(f"draft config: {key} rotates only a part of each head; drafts rotate all of it")
            stated.append(_positive(part, "rope_theta", 0.0))
    bases = sorted({theta for theta in stated if theta})
    if len(bases) > 1:
        raise ConfigError(f"draft config: rope_theta is stated as {bases}: keep the one the draft was trained with")
    return bases[0] if bases else None


def _draft_vocab(flat: Mapping[str, object], vocab: int) -> int | None:
    size = _window(flat, "draft_vocab_size")
    if size is not None and size > vocab:
        raise ConfigError(f"draft config: draft_vocab_size {size} exceeds vocab_size {vocab}; d2t maps into the vocabulary")
    return None if size == vocab else size


def _own_tensors(flat: Mapping[str, object], draft_vocab: int | None, names: Collection[str] | None) -> tuple[bool, bool]:
    """(own head, own embeddings). A tied head is the draft's own where the embeddings are; else both are the target's."""
    flag, tied = _flag(flat, "has_own_lm_head"), _flag(flat, "tie_word_embeddings")
    embeddings = names is not None and "embed_tokens.weight" in names
    if flag is not None or draft_vocab is not None:
        return bool(flag) or draft_vocab is not None, embeddings
    return (names is not None and "lm_head.weight" in names) or bool(tied and embeddings), embeddings


def dump_config(config: DFlashConfig, dtype: str) -> Json:
    """The config.json of the dflash layout, every key that a reader could misread spelt out.

    Raises ConfigError where the format has no words for the configuration: several windows, or causality by layer that does
    not follow the windows.
    """
    windows = {w for w in config.windows if w is not None}
    sliding = tuple(w is not None for w in config.windows)
    if len(windows) > 1:
        raise ConfigError(f"a draft's files hold one window, not {sorted(windows)}: give every sliding layer the same one")
    causal: Json = {}
    inner: Json = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
    if len(set(config.causal)) == 1:
        inner["causal"] = config.causal[0]
        causal = {"is_causal": config.causal[0]}  # what SGLang reads, and nothing in dflash_config
    elif config.causal != sliding:  # where it follows the sliding layers, an absent key says just that
        raise ConfigError(f"a draft's files cannot say that layers are causal {config.causal} and sliding {sliding}")
    optional = {
        "input_embedding_scale": (config.input_embedding_scale, 1.0),
        "logit_scale": (config.logit_scale, 1.0),
        "final_logit_softcapping": (config.final_logit_softcapping, None),
        "draft_vocab_size": (config.draft_vocab_size, None),
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": False,
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "use_sliding_window": any(sliding),
        "sliding_window": max(windows, default=None),
        "max_window_layers": 0 if any(sliding) else config.num_hidden_layers,
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in sliding],
        "has_own_lm_head": config.has_own_lm_head,
        "dtype": dtype,
        **causal,
        **{key: value for key, (value, default) in optional.items() if value != default},
        "dflash_config": inner,
    }


def config_sha256(config: DFlashConfig) -> str:
    """A hash of a parsed configuration: the layout, order and spelling of its config.json do not matter.

    Fields at their default are left out, so that a field added later, with a default, changes no hash already in a file.
    """
    values = {f.name: getattr(config, f.name) for f in fields(config) if getattr(config, f.name) != f.default}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _mapping(section: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = section.get(key)
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"draft config: {key} must be an object, got {value!r}")
    return cast("Mapping[str, object]", value or {})


def _integer(section: Mapping[str, object], key: str, default: int | None = None, least: int = 1) -> int:
    value = section.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"config.json lacks {key}, which every draft must state: add it")
    if type(value) is not int or value < (0 if key == "mask_token_id" else least):
        raise ConfigError(f"draft config: {key} must be {'a positive' if least else 'a'} whole number, got {value!r}")
    return value


def _positive(section: Mapping[str, object], key: str, default: float) -> float:
    value = section.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"draft config: {key} must be a positive number, got {value!r}")
    return float(value)


def _flag(section: Mapping[str, object], key: str) -> bool | None:
    value = section.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"draft config: {key} must be true or false, got {value!r}")
    return value
