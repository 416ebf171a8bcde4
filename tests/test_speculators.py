"""The Speculators layout: what it is called there, and what it means here."""

from __future__ import annotations

import pytest
from tiny_config import TINY

from flashdraft.config_json import dump_config, parse_config
from flashdraft.draft import DFlashConfig
from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.speculators import from_dflash, to_dflash

SLIDING = "sliding_attention"


def test_the_speculators_layout_is_written_as_documented() -> None:
    raw = from_dflash(dump_config(TINY.with_(windows=(9,) * 3, has_own_lm_head=True), "bfloat16"), "owner/target")
    layer = raw.pop("transformer_layer_config")
    assert raw == {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "block_size": 8,
        "mask_token_id": 3,
        "aux_hidden_state_layer_ids": [2, 5],
        "draft_vocab_size": 40,
        "sliding_window_non_causal": True,
        "sample_from_anchor": False,
        "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
            "verifier": {"name_or_path": "owner/target", "architectures": []},
        },
    }
    assert layer["has_own_lm_head"] is True
    assert layer["rope_theta"] == layer["rope_parameters"]["rope_theta"] == 5e5
    assert (layer["sliding_window"], layer["layer_types"]) == (9, ["sliding_attention"] * 3)
    assert "dflash_config" not in layer


SPECULATORS = from_dflash(dump_config(TINY.with_(windows=(9, None, 9)), "bfloat16"))


def speculators(layer: dict[str, object] | None = None, **top: object) -> DFlashConfig:
    raw = {key: value for key, value in {**SPECULATORS, **top}.items() if value is not ...}
    merged = {**SPECULATORS["transformer_layer_config"], **(layer or {})}
    raw["transformer_layer_config"] = {key: value for key, value in merged.items() if value is not ...}
    return parse_config(raw)


def test_speculators_counts_feature_layers_from_the_embedding() -> None:
    assert speculators(aux_hidden_state_layer_ids=[6, 1]).target_layer_ids == (0, 5)
    with pytest.raises(ConfigError, match="must be distinct layers"):
        speculators(aux_hidden_state_layer_ids=[0, 3])


def test_sliding_layers_of_speculators_are_causal_only_if_it_says_so() -> None:
    assert speculators(sliding_window_non_causal=...).causal == (False, False, False)
    assert speculators(sliding_window_non_causal=True).causal == (False, False, False)
    assert speculators(sliding_window_non_causal=False).causal == (True, False, True)
    assert speculators({"is_causal": True}, sliding_window_non_causal=True).causal == (True, True, True)


def test_speculators_keys_may_stand_at_the_top_level() -> None:
    layer = dict.fromkeys(("layer_types", "sliding_window", "use_sliding_window", "num_target_layers"), ...)
    config = speculators(
        layer, layer_types=[SLIDING] * 3, sliding_window=7, use_sliding_window=True, num_target_layers=9, has_own_lm_head=True
    )
    assert (config.windows, config.num_target_layers, config.has_own_lm_head) == ((7, 7, 7), 9, False)
    assert speculators({"has_own_lm_head": True}).has_own_lm_head


def test_the_block_of_a_speculators_draft_has_one_slot_more_than_it_proposes() -> None:
    methods = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}]}
    assert speculators(block_size=..., speculators_config=methods).block_size == 6
    assert speculators(block_size=16, speculators_config=methods).block_size == 16
    assert speculators(block_size=..., speculators_config=...).block_size == 8
    with pytest.raises(ConfigError, match="5 speculative_tokens do not fit a block of 5"):
        speculators(block_size=5, speculators_config=methods)


@pytest.mark.parametrize(
    ("top", "message"),
    [
        ({"speculators_model_type": "eagle3"}, "type 'eagle3', not 'dflash'"),
        ({"aux_hidden_state_layer_ids": ...}, "needs aux_hidden_state_layer_ids"),
        ({"mask_token_id": ...}, "lacks mask_token_id"),
        ({"sample_from_anchor": True}, "sample_from_anchor True is not supported"),
        ({"projector_type": "domino"}, "projector_type 'domino' is not supported"),
        ({"sliding_window_non_causal": 1}, "sliding_window_non_causal must be true or false"),
    ],
)
def test_a_speculators_model_of_another_kind_is_refused(top: dict[str, object], message: str) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=message):
        speculators(**top)
    with pytest.raises(CheckpointError, match="lacks transformer_layer_config"):
        to_dflash({"speculators_model_type": "dflash"})
