"""`flashdraft serve --engine sglang`: the command, every option of it one of SGLang's, and the pairs that are refused."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sglang_cases
from handing import SGLANG, change, read, refused
from saved import Pair as Saved
from sglang_cases import FROZEN

from flashdraft.checkpoint import load_draft, save_draft
from flashdraft.errors import ConfigError
from flashdraft.handover import sglang, vllm
from flashdraft.handover.command import Program
from flashdraft.handover.pair import Pair
from flashdraft.handover.sglang_pair import ALL_BUT_THE_LAST, EVERY_LAYER
from flashdraft.handover.translation import Given
from flashdraft.server.parsers import reasoning, tools

# Targets whose layers it counts otherwise, or that are drafts of other methods.
NOT_TAKEN = {"BeamForCausalLM", "InklingForConditionalGeneration", "KimiK3ForConditionalGeneration", "KimiK3LinearForCausalLM",
             "Lfm2BidirectionalModel", "MuseGlimmerForCausalLM", "MuseGlimmerForConditionalGeneration",
             "MuseSparkForConditionalGeneration"}  # fmt: skip
OF_DRAFTS = ("NextN", "MTP", "Eagle", "Eagle3", "AssistantForCausalLM")


@pytest.fixture
def early(pair: Saved, tmp_path: Path) -> Path:
    return sglang_cases.draft_for_sglang(pair, tmp_path / "early")


def test_the_command_counts_the_anchor(flashdraft, on_path, pair: Saved, early: Path) -> None:
    on_path("sglang", "0.5.23")
    options = ["--max-num-seqs", 4, "--generation-config", "vllm", "--distributed-executor-backend", "ray", "--seed", 3]
    code, out, err = flashdraft("serve", pair.target, "--draft", early, "--engine=sglang", "--dry-run", *options)
    assert (code, err) == (0, "")
    assert shlex.split(out) == [
        *("sglang", "serve", "--model-path", str(pair.target), "--host", "127.0.0.1", "--max-running-requests", "4"),
        *("--random-seed", "3", "--port", "8000", "--served-model-name", str(pair.target), "--dtype", "float32"),
        *("--sampling-defaults", "openai", "--use-ray", "--speculative-algorithm", "DFLASH"),
        *("--speculative-draft-model-path", str(early), "--speculative-num-draft-tokens", "8"),
        *("--speculative-draft-model-quantization", "unquant"),
    ]


def test_every_option_is_one_that_sglang_takes_with_such_a_value(pair: Saved, early: Path) -> None:
    for command in sglang_cases.commands(read(pair.target, early)):
        while command:
            name = command.pop(0)
            option = FROZEN["options"][name]
            if option["values"]:
                value = command.pop(0)
                assert option["choices"] is None or value in option["choices"], (name, value)
    for name in sglang.BEHIND:
        assert name in FROZEN["options"]
    translated = {name for options, _ in sglang_cases.CASES for name in options}
    assert translated == sglang.TABLE.same | sglang.TABLE.renamed.keys() | sglang.TABLE.special


def test_parsers_of_flashdraft_are_found_under_sglangs_names(pair: Saved) -> None:
    alone = read(pair.target, None)
    for name, formats, own in (
        ("reasoning_parser", reasoning.FORMATS, "think"),
        ("tool_call_parser", tools.FORMATS, "json"),
    ):
        option = "--" + name.replace("_", "-")
        for one in formats.keys() - {own}:
            words = sglang.command(SGLANG, alone, Given({name: one}), {}).arguments
            assert words[words.index(option) + 1] in FROZEN["options"][option]["choices"]


def test_the_targets_are_those_that_sglang_has_dflash_for() -> None:
    assert not EVERY_LAYER & ALL_BUT_THE_LAST
    found = {name for name in FROZEN["targets"] if not name.endswith(OF_DRAFTS)}
    assert found == EVERY_LAYER | ALL_BUT_THE_LAST | NOT_TAKEN


OPTIONS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"port": 0}, {}, "asks at the --port it was given"),
    ({"max_waiting": 0}, {}, "--max-waiting 0 refuses all"),
    ({"served_model_name": ["o/n:a"]}, {}, "no colon in the name of a target, as in o/n:a"),
    ({"tensor_parallel_size": 3}, {}, "4 heads .2 for keys. cannot be split over --tensor-parallel-size 3"),
    ({"max_model_len": 513}, {}, "has 512 positions, and SGLang starts no draft with fewer than the 513"),
    ({}, {"attention_backend": "FLASH_ATTN"}, "attention_backend 'FLASH_ATTN' is none of SGLang's for drafts"),
]


@pytest.mark.parametrize(("options", "speculative", "message"), OPTIONS, ids=lambda value: None)
def test_options_that_sglang_would_misread_are_refused(pair: Saved, early: Path, options, speculative, message) -> None:
    with pytest.raises(ConfigError, match=message):
        sglang.command(SGLANG, read(pair.target, early), Given(options), speculative)


# What is changed in config.json, None: taken away; and what SGLang would make of it.
READINGS: list[tuple[dict[str, Any], str]] = [
    ({"is_causal": None}, 'does not say `"is_causal": false` in its config.json'),
    ({"architectures": None}, "does not say that its architecture is DFlashDraftModel"),
    ({"architectures": ["Qwen3DFlashDraftModel"]}, "does not say that its architecture is DFlashDraftModel"),
    ({"model_type": None}, "transformers, with which SGLang reads config.json, does not take it"),
    ({"model_type": "no_such"}, "transformers, with which SGLang reads config.json, does not take it"),
    ({"use_sliding_window": None}, "has its window in other words than layer_types, use_sliding_window and sliding_window"),
    (
        {"layer_types": ["full_attention"] * 2, "dflash_config": {"use_swa": True, "swa_window_size": 16}},
        "has its window in other words than layer_types, use_sliding_window and sliding_window",
    ),
    (
        {"dflash_config": {"target_layer_ids": None}, "eagle_aux_hidden_state_layer_ids": [1, 2]},
        "SGLang would read target_layer_ids as None, and .0, 1. is meant",
    ),
    (
        {"dflash_config": {"mask_token_id": None}, "eagle_config": {"mask_token_id": 2}},
        "SGLang would read mask_token_id as None, and 2 is meant",
    ),
]


@pytest.mark.parametrize(("changes", "message"), READINGS, ids=lambda value: None)
def test_drafts_that_sglang_would_misread_are_refused(pair: Saved, early: Path, changes, message) -> None:
    content = json.loads((early / "config.json").read_text())
    inner = {**content["dflash_config"], **changes.get("dflash_config", {})}
    content |= {**changes, "dflash_config": {key: value for key, value in inner.items() if value is not None}}
    (early / "config.json").write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    if "is_causal" in changes:  # which vLLM reads of dflash_config
        assert "--speculative-config" in vllm.command(SGLANG, read(pair.target, early), Given({}), {}).arguments
    refused(read(pair.target, early), message, sglang)


def test_the_speculators_layout_and_mixed_causality_are_refused(pair: Saved, early: Path, tmp_path: Path) -> None:
    other = save_draft(load_draft(early), tmp_path / "speculators", layout="speculators")
    refused(read(pair.target, other), "has the layout of Speculators, which SGLang does not read", sglang)
    assert "--speculative-config" in vllm.command(SGLANG, read(pair.target, other), Given({}), {}).arguments
    change(early, layer_types=["sliding_attention", "full_attention"])
    assert sglang.command(SGLANG, read(pair.target, early), Given({}), {})  # of windows it takes several
    found = read(pair.target, early)
    assert found.draft is not None
    mixed = replace(found.draft, config=found.draft.config.with_(causal=(True, False)))
    refused(replace(found, draft=mixed), "mixes causal and bidirectional layers, which SGLang cannot be told", sglang)


def of(pair: Pair, architecture: str, scale: float = 1.0) -> Pair:
    assert pair.draft is not None
    config = pair.draft.config.with_(input_embedding_scale=scale)
    return replace(pair, architecture=architecture, draft=replace(pair.draft, config=config))


def test_targets_that_sglang_has_no_dflash_for_are_refused_up_to_the_release_that_was_read(pair: Saved, early: Path) -> None:
    found = of(read(pair.target, early), "Qwen2ForCausalLM")
    refused(found, "SGLang has no DFlash for .*, a Qwen2ForCausalLM, up to its release 0.5.23: use --engine vllm", sglang)
    newer = Program(SGLANG.start, "0.5.24")
    assert "DFLASH" in sglang.command(newer, found, Given({}), {}).arguments
    assert "DFLASH" not in sglang.command(SGLANG, replace(found, draft=None), Given({}), {}).arguments


def test_features_of_the_last_layer_are_refused_where_sglang_does_not_capture_it(pair: Saved) -> None:
    found = read(pair.target, pair.draft)
    refused(found, "reads features of the target's last layer, which SGLang does not hand over of a LlamaForCausalLM", sglang)
    assert sglang.command(SGLANG, of(found, "GptOssForCausalLM"), Given({}), {})


def test_the_scale_of_a_drafts_embeddings_is_that_of_its_target(pair: Saved, early: Path) -> None:
    found = read(pair.target, early)
    refused(of(found, "LlamaForCausalLM", 2.0), "multiplies its embeddings by 2, which SGLang would leave out", sglang)
    scale = found.draft.config.hidden_size**0.5  # type: ignore[union-attr]
    refused(
        of(found, "Gemma4ForCausalLM"), 'multiplies the embeddings by 6.928 .* add `"input_embedding_scale": 6.9282`', sglang
    )
    for rounded in (scale, 6.9375):  # the second in bfloat16
        assert sglang.command(SGLANG, of(found, "Gemma4ForCausalLM", rounded), Given({}), {})


def test_a_draft_with_fewer_positions_than_its_target_needs_a_limit(pair: Saved, early: Path) -> None:
    change(early, max_position_embeddings=256)
    found = read(pair.target, early)
    refused(found, "has 256 positions, and SGLang starts no draft with fewer than the 512 .* give --max-model-len 256", sglang)
    assert sglang.command(SGLANG, found, Given({"max_model_len": 256}), {})


def test_a_draft_that_says_nothing_of_its_rope_base_is_read_as_transformers_does(pair: Saved, early: Path) -> None:
    content = json.loads((early / "config.json").read_text())
    del content["rope_theta"]
    (early / "config.json").write_text(json.dumps(content))
    assert sglang.command(SGLANG, read(pair.target, early), Given({}), {})  # 1e4, here and there


def test_another_file_of_weights_is_no_obstacle(pair: Saved, early: Path) -> None:
    shutil.copy(early / "model.safetensors", early / "other.safetensors")
    assert sglang.command(SGLANG, read(pair.target, early), Given({}), {})
