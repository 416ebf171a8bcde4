"""config.json: what every key means, absent or present, and what is refused."""

from __future__ import annotations

import pytest
from tiny_config import TINY

from flashdraft.config_json import config_sha256, dump_config, parse_config
from flashdraft.draft import DFlashConfig
from flashdraft.errors import CheckpointError, ConfigError


def test_the_reference_configuration_is_written_as_documented() -> None:
    config = DFlashConfig.for_target(
        hidden_size=2560,
        vocab_size=262144,
        num_target_layers=42,
        mask_token_id=4,
        target_layer_ids=(5, 11, 17, 23, 35),
        has_own_lm_head=True,
    )
    assert dump_config(config, "bfloat16") == {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 5120,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 262144,
        "rms_norm_eps": 1e-06,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "block_size": 8,
        "num_target_layers": 42,
        "use_sliding_window": True,
        "sliding_window": 1024,
        "max_window_layers": 0,
        "layer_types": ["sliding_attention"] * 5,
        "has_own_lm_head": True,
        "dtype": "bfloat16",
        "is_causal": False,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": [5, 11, 17, 23, 35], "causal": False},
    }


BASE = {key: value for key, value in dump_config(TINY, "bfloat16").items() if key != "is_causal"}
SLIDING, FULL = "sliding_attention", "full_attention"
WINDOWED = {"use_sliding_window": True, "sliding_window": 9, "layer_types": [SLIDING] * 3, "max_window_layers": 0}


def parsed(inner: dict[str, object] | None = None, **top: object) -> DFlashConfig:
    """BASE with keys replaced; ... removes one. `causal` is absent unless it is given."""
    raw = {key: value for key, value in {**BASE, **top}.items() if value is not ...}
    raw["dflash_config"] = {"mask_token_id": 3, "target_layer_ids": [1, 4], **(inner or {})}
    return parse_config(raw)


@pytest.mark.parametrize(
    ("top", "inner", "windows", "causal"),
    [
        (WINDOWED, {}, (9, 9, 9), (True, True, True)),
        (WINDOWED, {"causal": False}, (9, 9, 9), (False, False, False)),
        ({**WINDOWED, "is_causal": True}, {"causal": False}, (9, 9, 9), (True, True, True)),
        ({**WINDOWED, "is_causal": False}, {"causal": True}, (9, 9, 9), (False, False, False)),
        ({**WINDOWED, "layer_types": [SLIDING, FULL, SLIDING]}, {}, (9, None, 9), (True, False, True)),
        ({**WINDOWED, "layer_types": [SLIDING, FULL, SLIDING]}, {"causal": True}, (9, None, 9), (True, True, True)),
        ({**WINDOWED, "use_sliding_window": ...}, {}, (9, 9, 9), (True, True, True)),
        ({**WINDOWED, "layer_types": None}, {}, (9, 9, 9), (True, True, True)),
        ({**WINDOWED, "layer_types": ..., "max_window_layers": 2}, {}, (None, None, 9), (False, False, True)),
        ({**WINDOWED, "layer_types": ..., "max_window_layers": ...}, {}, (None,) * 3, (False,) * 3),  # Qwen3's default is 28
        ({**WINDOWED, "layer_types": ..., "use_sliding_window": False}, {}, (None,) * 3, (False,) * 3),
        ({"sliding_window": 9, "layer_types": [FULL] * 3}, {}, (None,) * 3, (False,) * 3),
        ({}, {"use_swa": True, "swa_window_size": 5, "causal": False}, (5, 5, 5), (False,) * 3),
        ({}, {"use_swa": True, "swa_window_size": 5}, (5, 5, 5), (False,) * 3),
        ({"layer_types": ...}, {"use_swa": True, "swa_window_size": 5}, (5, 5, 5), (False,) * 3),
        ({"sliding_window": 9, "use_sliding_window": True}, {"use_swa": True}, (9, 9, 9), (False,) * 3),
        (
            {"layer_types": [FULL, SLIDING, FULL]},
            {"use_swa": True, "swa_window_size": 5},
            (None, 5, None),
            (False, True, False),
        ),
        ({}, {"use_swa": False, "swa_window_size": 5}, (None,) * 3, (False,) * 3),
    ],
)
def test_windows_and_causality_follow_the_rules_of_the_readers(
    top: dict[str, object], inner: dict[str, object], windows: tuple[int | None, ...], causal: tuple[bool, ...]
) -> None:
    config = parsed(inner, **top)
    assert (config.windows, config.causal) == (windows, causal)


@pytest.mark.parametrize(
    "top",
    [
        {"rope_theta": 2e4},
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 2e4, "rope_type": "default"}},
        {"rope_theta": ..., "rope_scaling": {"type": "default", "rope_theta": 20000}},
        {"rope_theta": 2e4, "rope_parameters": {"rope_theta": 2e4, "rope_type": None}},
        {"rope_theta": ..., "rope_parameters": {FULL: {"rope_theta": 2e4}, SLIDING: {"rope_theta": 2e4}}},
    ],
)
def test_rope_theta_is_read_where_it_stands(top: dict[str, object]) -> None:
    assert parsed(**top).rope_theta == 2e4


def test_absent_keys_mean_what_they_mean_to_the_readers() -> None:
    config = parsed(
        **dict.fromkeys(
            ("rope_theta", "rope_scaling", "head_dim", "block_size", "rms_norm_eps", "max_position_embeddings", "hidden_act"),
            ...,
        )
    )
    assert (config.rope_theta, config.head_dim, config.block_size, config.rms_norm_eps) == (1e4, 128, 8, 1e-6)
    assert config.max_position_embeddings == 32768
    assert parsed(num_target_layers=...).num_target_layers == 5  # the least that has feature layer 4


def test_keys_are_found_under_their_other_names() -> None:
    raw = {key: value for key, value in BASE.items() if key not in ("architectures", "block_size")}
    raw["dflash_config"] = {"block_size": 6}
    config = parse_config({**raw, "mask_token_id": 5, "target_layer_ids": [4, 0]})
    assert (config.mask_token_id, config.target_layer_ids, config.block_size) == (5, (0, 4), 6)


def test_optional_keys_are_honoured() -> None:
    config = parsed(
        input_embedding_scale=4, logit_scale=0.5, final_logit_softcapping=15.0, attention_bias=True, target_hidden_size=16
    )
    assert (config.input_embedding_scale, config.logit_scale, config.final_logit_softcapping) == (4.0, 0.5, 15.0)
    assert config.attention_bias
    assert parsed(draft_vocab_size=40).draft_vocab_size is None
    reduced = parsed(draft_vocab_size=12)
    assert (reduced.draft_vocab_size, reduced.has_own_lm_head) == (12, True)


@pytest.mark.parametrize(
    ("top", "inner", "message"),
    [
        ({"target_hidden_size": 32}, {}, "target_hidden_size 32 differs from hidden_size 16"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {}, "RoPE of type 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {}, "RoPE of type 'linear'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, {}, "rotates only a part"),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_dim": 2}}, {}, "rotates only a part"),
        ({"rope_parameters": {"rope_theta": 1e4}}, {}, r"rope_theta is stated as \[10000.0, 500000.0\]"),
        ({"rope_theta": -1}, {}, "rope_theta must be a positive number"),
        ({"rope_scaling": "yarn"}, {}, "rope_scaling must be an object"),
        ({"hidden_act": "gelu"}, {}, "hidden_act 'gelu' is not supported"),
        ({"use_gemma_norm": True}, {}, "use_gemma_norm True is not supported"),
        ({"rope_is_neox_style": False}, {}, "rope_is_neox_style False is not supported"),
        ({"sample_from_anchor": True}, {}, "sample_from_anchor True is not supported"),
        ({}, {"attention_value_scale": 0.5}, "attention_value_scale 0.5 is not supported"),
        ({}, {"attention_sink_bias": True}, "attention_sink_bias True is not supported"),
        ({}, {"target_layer_ids": [1, 1]}, "must be distinct layers"),
        ({}, {"target_layer_ids": [-1, 1]}, "must be distinct layers"),
        ({}, {"target_layer_ids": [1, 6]}, "must be distinct layers"),
        ({}, {"target_layer_ids": []}, "needs dflash_config.target_layer_ids"),
        ({}, {"target_layer_ids": "1,2"}, "needs dflash_config.target_layer_ids"),
        ({}, {"mask_token_id": None}, "lacks mask_token_id"),
        ({}, {"mask_token_id": 40}, "outside the vocabulary"),
        ({}, {"causal": "no"}, "causal must be true or false"),
        ({"hidden_size": ...}, {}, "lacks hidden_size"),
        ({"num_hidden_layers": 0}, {}, "num_hidden_layers must be a positive whole number"),
        ({"layer_types": [FULL]}, {}, "for each of the 3 layers"),
        ({"layer_types": [FULL, FULL, "linear_attention"]}, {}, "must name full_attention or sliding_attention"),
        (
            {"layer_types": [SLIDING] * 3, "sliding_window": 9, "use_sliding_window": False},
            {},
            "sliding layers without a window",
        ),
        ({"layer_types": [SLIDING] * 3}, {}, "sliding layers without a window"),
        ({}, {"use_swa": True}, "sliding layers without a window"),
        ({"draft_vocab_size": 41}, {}, "draft_vocab_size 41 exceeds vocab_size 40"),
        ({"logit_scale": float("nan")}, {}, "logit_scale must be a positive number"),
        ({"attention_bias": 1}, {}, "attention_bias must be true or false"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(top: dict[str, object], inner: dict[str, object], message: str) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=message):
        parsed(inner, **top)


def test_the_hash_of_a_configuration_is_of_what_differs_from_the_defaults() -> None:
    # Drafts on disk carry it: a field added to DFlashConfig, with a default, must not change it.
    assert config_sha256(TINY) == "41fe9799dd14022753674551b3cfe64769ed239c0fc6023da7ce7aa0e5aed37c"
    changed = [
        TINY.with_(block_size=4),
        TINY.with_(rope_theta=1e4),
        TINY.with_(causal=(True,) * 3),
        TINY.with_(windows=(9,) * 3),
    ]
    assert len({config_sha256(config) for config in (TINY, *changed)}) == 5
    assert config_sha256(TINY.with_(block_size=8)) == config_sha256(TINY)
