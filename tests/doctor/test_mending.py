"""The edits of config.json that doctor names: followed, the file reads as the configuration that was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_config import TINY

from flashdraft.config_json import dump_config, parse_config
from flashdraft.doctor.files import Files, notes
from flashdraft.doctor.mending import edited, edits, mend
from flashdraft.doctor.variations import Variation, changed
from flashdraft.draft import DFlashConfig
from flashdraft.speculators import from_dflash

SLIDING = TINY.with_(windows=(16, 16, 16))
CHANGES: list[dict[str, Any]] = [
    {"target_layer_ids": (0, 3)},
    {"rope_theta": 1e4},
    {"causal": (True, True, True)},
    {"causal": (False, False, False)},
    {"windows": (None, None, None)},
    {"windows": (32, 32, 32)},
    {"input_embedding_scale": 4.0},
    {"target_layer_ids": (0, 3), "windows": (32, 32, 32), "causal": (True, True, True)},
]


def files_of(raw: dict[str, Any], stamp: str | None = None) -> Files:
    return Files(Path("draft"), raw, frozenset({"fc.weight"}), stamp, {})


def plain(config: DFlashConfig) -> dict[str, Any]:
    return dump_config(config, "bfloat16")


def outranked(config: DFlashConfig) -> dict[str, Any]:
    """Spelt in every other way: is_causal, use_swa, and theta in rope_parameters."""
    raw = plain(config)
    window = raw["sliding_window"]
    raw |= {"is_causal": config.causal[0], "layer_types": ["full_attention"] * 3, "use_sliding_window": False}
    raw |= {"rope_parameters": {"rope_type": "default", "rope_theta": raw.pop("rope_theta")}}
    raw["dflash_config"] |= {"use_swa": window is not None} | ({"swa_window_size": window} if window else {})
    return raw


@pytest.mark.parametrize(
    "layout", [plain, outranked, lambda config: from_dflash(plain(config))], ids=["dflash", "other", "spec"]
)
@pytest.mark.parametrize("before", [TINY, SLIDING, SLIDING.with_(causal=(True, True, True))], ids=["full", "sliding", "causal"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: "+".join(change))
def test_followed_edits_read_as_what_was_measured(layout, before, change):
    files, after = files_of(layout(before)), before.with_(**change)
    assert parse_config(files.raw, files.names) == before
    found = edits(files, before, after)
    assert parse_config(edited(files.raw, found), files.names) == after
    assert (found == []) == (before == after)


def test_one_changed_value_is_one_edit():
    assert edits(files_of(plain(TINY)), TINY, TINY.with_(rope_theta=1e4)) == [(("rope_theta",), 1e4)]


def test_two_spellings_of_one_thing_are_changed_together():
    """SGLang reads the one, others the other."""
    found = edits(files_of(plain(TINY)), TINY, TINY.with_(causal=(not TINY.causal[0],) * 3))
    assert sorted(path for path, _ in found) == [("dflash_config", "causal"), ("is_causal",)]


def test_two_spellings_that_contradict_each_other_are_said():
    raw = plain(TINY)
    assert notes(files_of(raw), TINY, TINY.num_target_layers, 16) == []
    raw["is_causal"] = not raw["dflash_config"]["causal"]
    [note] = notes(files_of(raw), TINY, TINY.num_target_layers, 16)
    assert "causal in one place and bidirectional in another" in note


def test_weights_that_carry_a_stamp_of_another_configuration_are_saved_again_by_a_command():
    one = Variation("RoPE theta", "", (("rope_theta", 1e4),))
    [line] = mend(files_of(plain(TINY), stamp="of another"), TINY, [one], one)
    assert line.startswith("python -c")
    assert "rope_theta=10000.0" in line
    assert changed(TINY, [one]).rope_theta == 1e4
