"""The Speculators layout of a draft's config.json, translated to and from the layout of config_json.py.

Speculators nests the decoder under `transformer_layer_config`, counts feature layers from the embedding (id + 1) and says
`sliding_window_non_causal` for the sliding layers where the other layout says `causal`. Source: docs/draft.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashdraft.errors import CheckpointError, ConfigError

Json = dict[str, object]

# Decoder keys that some files carry at the top level; a value inside transformer_layer_config that is not null outranks them.
_HOISTED = (
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "has_own_lm_head",
    "num_target_layers",
    "target_hidden_size",
    "draft_vocab_size",
    "input_embedding_scale",
    "logit_scale",
    "final_logit_softcapping",
    "is_causal",
    "quantization_config",
    "dtype",
    "torch_dtype",
    "projector_type",
    "shift_label",
    "sample_from_anchor",
    "markov_rank",
    "enable_confidence_head",
    "output_multiplier",
)


def is_speculators(raw: Mapping[str, object]) -> bool:
    return "speculators_model_type" in raw


def to_dflash(raw: Mapping[str, object]) -> Json:
    """A Speculators config as one of the dflash layout.

    Raises CheckpointError for another algorithm or a missing section, ConfigError for values that cannot be.
    """
    kind = raw["speculators_model_type"]
    if kind != "dflash":
        raise CheckpointError(f"this is a Speculators model of type {kind!r}, not 'dflash': give a DFlash draft")
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise CheckpointError(
            "config.json lacks transformer_layer_config, which a Speculators draft must have: export it again"
        )
    flat: Json = {key: raw[key] for key in _HOISTED if raw.get(key) is not None}
    flat |= {key: value for key, value in layer.items() if value is not None}
    flat["architectures"] = ["DFlashDraftModel"]
    flat["block_size"] = _block_size(raw)
    aux = raw.get("aux_hidden_state_layer_ids")
    if not isinstance(aux, list) or any(type(i) is not int for i in aux):
        raise CheckpointError("config.json needs aux_hidden_state_layer_ids, a list of layer numbers (feature layer + 1)")
    inner: Json = {"mask_token_id": raw.get("mask_token_id"), "target_layer_ids": [i - 1 for i in aux]}
    non_causal = raw.get("sliding_window_non_causal")
    if non_causal is not None and not isinstance(non_causal, bool):
        raise ConfigError(f"draft config: sliding_window_non_causal must be true or false, got {non_causal!r}")
    if non_causal is not False:
        inner["causal"] = False  # else the default of the format holds: causal in the sliding layers, and only there
    flat["dflash_config"] = inner
    return flat


def _block_size(raw: Mapping[str, object]) -> object:
    """block_size, or one more than the proposal method's tokens; the anchor's own slot never proposes."""
    section = raw.get("speculators_config")
    methods = section.get("proposal_methods") if isinstance(section, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    tokens = first.get("speculative_tokens") if isinstance(first, dict) else None
    size = raw.get("block_size")
    if type(tokens) is not int:
        return 8 if size is None else size
    if type(size) is int and tokens >= size:
        raise ConfigError(
            f"draft config: {tokens} speculative_tokens do not fit a block of {size} slots, whose first is the anchor: "
            f"a draft that samples from its anchor cannot be used here, otherwise set speculative_tokens to {size - 1}"
        )
    return tokens + 1 if size is None else size


# Keys of the dflash layout that Speculators keeps at the top level (or spells otherwise).
_NOT_IN_LAYER = frozenset(
    {
        "architectures",
        "block_size",
        "dflash_config",
        "dtype",
        "is_causal",  # there, sliding_window_non_causal says it
        "rope_scaling",
        "draft_vocab_size",
        "quantization_config",
    }
)


def from_dflash(flat: Mapping[str, object], target: str | None = None) -> Json:
    """The Speculators config of a complete dflash config (`dump_config`); `target`: name or path of the target it is for."""
    inner = flat["dflash_config"]
    types, block_size = flat["layer_types"], flat["block_size"]
    assert isinstance(inner, dict)
    assert isinstance(types, list)
    assert isinstance(block_size, int)
    layer = {key: value for key, value in flat.items() if key not in _NOT_IN_LAYER}
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": flat["rope_theta"]}
    causal = inner.get("causal", True)  # absent: causal in the sliding layers, which is what sliding_window_non_causal says
    if causal and "causal" in inner and "full_attention" in types:
        layer["is_causal"] = True  # sliding_window_non_causal alone would leave the full layers bidirectional
    method = {"proposal_type": "greedy", "speculative_tokens": block_size - 1}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "block_size": block_size,
        "mask_token_id": inner["mask_token_id"],
        "aux_hidden_state_layer_ids": [i + 1 for i in inner["target_layer_ids"]],
        "draft_vocab_size": flat.get("draft_vocab_size", flat["vocab_size"]),
        "sliding_window_non_causal": not causal,
        "sample_from_anchor": False,
        "dtype": flat["dtype"],
        **({"quantization_config": flat["quantization_config"]} if "quantization_config" in flat else {}),
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "transformer_layer_config": layer,
    }
