"""The card of every kind of draft: its figures are those of the files, its commands work, its metadata is what hubs read."""

from __future__ import annotations

import json
import re
import shlex
import struct
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import typer
from carding import TRAINING, benched, card_of, commands_of, front_of, results, shape_of, tiny_draft, tokens_of, written
from quantized_drafts import quantized

from flashdraft import builtin
from flashdraft.card.subject import Subject
from flashdraft.checkpoint import read_config, save_draft
from flashdraft.cli import app
from flashdraft.cli_serve import speculative_options
from flashdraft.draft import DFlashDraft

SECTIONS = """Description|License / terms of use|Deployment geography|Use case|Release date|References|Model architecture
Input|Output|Software integration|Model versions|Training data|Testing data|Evaluation data|Inference|Usage|Evaluation
Limitations|Ethical considerations|Explainability|Bias|Safety & security|Privacy""".replace("\n", "|").split("|")

REFERENCE = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 2560,
    "intermediate_size": 5120,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 262144,
    "block_size": 8,
    "num_target_layers": 42,
    "use_sliding_window": True,
    "sliding_window": 1024,
    "layer_types": ["sliding_attention"] * 5,
    "has_own_lm_head": True,
    "dflash_config": {"mask_token_id": 4, "target_layer_ids": [5, 11, 17, 23, 35], "causal": False},
}


def quantized_draft(folder: Path) -> Path:
    save_draft(quantized(), folder, target="org/name")
    save_draft(quantized(True, ("fc",)), folder / "w4a4", target="org/name")
    layers = [{"name": "fc", "error": 0.0029, "flushed_share": 0.0}, {"name": "lm_head", "error": 0.001, "flushed_share": 0.25}]
    report = {
        "draft": "org/draft",
        "target": "org/name",
        "method": "gptq",
        "calibration": "480 answers, 30,000 tokens",
        "held out": "480 answers, 29,000 answer tokens",
        "bytes": {"before": 1000, "main": 400, "w4a4": 450},
        "acceptance": [
            {"name": "unquantized", "answers": 480, "acceptance_length": 3.034, "loss": None, "loss_at_most": None},
            {"name": "W4A16, own head", "answers": 480, "acceptance_length": 2.988, "loss": 0.0151, "loss_at_most": 0.0205},
        ],
        "layers": {"main": layers, "w4a4": layers[1:]},
    }
    (folder / "quantization.json").write_text(json.dumps(report))
    return folder


def reference_draft(folder: Path) -> Path:
    """Files of the reference draft's size whose weights take no room on the disk."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(REFERENCE))
    with torch.device("meta"):
        draft = DFlashDraft(read_config(folder))
    header, end = {}, 0
    for name, tensor in draft.state_dict().items():
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end := end + 2 * tensor.numel()]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


@pytest.fixture(params=["plain", "fit", "speculators", "quantized", "builtin", "lora"])
def draft(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "builtin":
        return builtin.NAME
    folder = tmp_path / "draft"
    if request.param == "quantized":
        return str(quantized_draft(folder))
    if request.param == "speculators":
        return str(tiny_draft(folder, layout="speculators", target="org/name"))
    more = {"lora": {"name": "org/adapter", "hash": "ab"}, "target_revision": "v1"} if request.param == "lora" else {}
    return str(tiny_draft(folder, None if request.param == "plain" else TRAINING | more))


def parse(command: str) -> None:
    """As our command line would, without running anything. Raises for an option or argument that there is not."""
    program, name, *arguments = shlex.split(command)
    assert program == "flashdraft"
    found = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    options = found.make_context(name, arguments).params
    speculative_options(options.get("speculative_config"), options.get("draft"), options.get("no_draft", False))


@pytest.mark.parametrize("repo", [None, "me/it"])
def test_every_card_has_the_sections_and_commands_that_work(draft: str, repo: str | None, tmp_path: Path) -> None:
    card = card_of(draft, {"repo": repo} if repo else {})
    headings = [after.content for before, after in pairwise(tokens_of(card.text)) if before.type == "heading_open"]
    assert [name for name in SECTIONS if name not in headings] == []
    commands = commands_of(card.text)
    ours = [command for command in commands if command.startswith("flashdraft ")]
    assert [shlex.split(c)[1] for c in ours[:4]] == ["chat", "serve", "generate", "inspect"]
    for command in ours:
        parse(command)
    for how in card.todo.values():
        if how.startswith("flashdraft "):
            parse(how.partition(", ")[0])
    proposals = Subject.read(draft).proposals
    for command in commands:
        words = shlex.split(command)
        if words[0] == "vllm":
            config = json.loads(words[words.index("--speculative-config") + 1])
            assert (config["method"], config["num_speculative_tokens"]) == ("dflash", proposals)
        elif words[0] == "python":
            assert words[-2:] == ["--speculative-num-draft-tokens", str(proposals + 1)], "SGLang counts the anchor"
    assert front_of(card.text)["library_name"] == "flashdraft"
    assert set(re.findall(r"TODO\((\w+)\)", card.text)) == card.todo.keys()


def test_sglang_is_named_for_drafts_that_it_reads_alone(draft: str) -> None:
    text, main = card_of(draft).text, Subject.read(draft).main
    reads = main.layout == "dflash" and not main.quantization and not main.config["has_own_lm_head"]
    assert ("--speculative-draft-model-quantization unquant" in text) == ("--engine sglang" in text) == reads
    engines = next(line for line in text.splitlines() if line.startswith("**Runtime engines:**"))
    assert ("SGLang" in engines) == reads


@pytest.mark.parametrize("kind", ["plain", "quantized"])
def test_every_line_of_a_table_is_a_row_of_it(tmp_path: Path, kind: str) -> None:
    draft = quantized_draft(tmp_path / "d") if kind == "quantized" else tiny_draft(tmp_path / "d", TRAINING)
    text = card_of(draft, None, written(tmp_path / "run", results(draft))).text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [part for part in shape_of(text) if part.startswith("row of ")]
    assert len(rows) == len(lines) - sum(set(line) <= set("|-: ") for line in lines)
    bars = [len(re.findall(r"(?<!\\)\|", line)) - 1 for line in lines if not set(line) <= set("|-: ")]
    assert [f"row of {count}" for count in bars] == rows


def test_parameters_of_the_reference_draft_are_exact(tmp_path: Path) -> None:
    text = card_of(reference_draft(tmp_path / "reference")).text
    for row in (
        "| feature projection (fc), 12,800 to 2,560 | 32,768,000 |",
        "| layers, 5 of 65,541,376 | 327,706,880 |",
        "| norms of context and output | 5,120 |",
        "| own output head, 262,144 x 2,560 | 671,088,640 |",
        "| **all** | **1,031,568,640** |",
        "| target layers whose outputs it reads | 5, 11, 17, 23, 35 of 42 (from 0) |",
        "| attention by layer | window of 1,024 tokens, bidirectional |",
    ):
        assert row in text


def test_a_card_of_a_fit_has_its_figures(tmp_path: Path) -> None:
    text = card_of(tiny_draft(tmp_path / "DRAFT", TRAINING)).text
    for words in (
        "# DRAFT\n",
        "DRAFT is a DFlash draft for [org/name](https://huggingface.co/org/name)",
        "guesses the next 7 tokens",
        "| category (none) | 12 | 2.12 |",
        "| category code | 12 | 3.50 |",
        "All answers: language en, thinking on.",
        "Share of all steps (2.00 tokens a step, where long answers weigh more than in the table) that accept at least 1, 2, "
        "... proposals: 50 %, 25 %.",
        "**44.0 tokens/s** with this draft, 2.25 tokens a step, 22.0 without, ratio 2.00; 8 of 8 texts identical.",
        "a CPU, bfloat16, torch 2.13.0.",
        "flashdraft generate --target org/name --draft DIR --compare",
        """vllm serve org/name --speculative-config '{"method": "dflash", "model": "DIR", "num_speculative_tokens": 7}'""",
        'llm = LLM("org/name", draft="DIR")',
        TRAINING["command"],
        "1,000 answers, 980 of them trained on, 123,456 answer tokens",
        "1,100 prompts were asked (hash `0123456789abcdef0123456789abcdef`)",
        "temperature 0.6, 1.",
        "400 steps, 3.1 epochs",
        "took 2 h 00 min in all",
    ):
        assert words in text
    assert front_of(text)["base_model"] == "org/name"
    assert "base_model_relation" not in front_of(text), "the hub has no word for a draft"


def test_a_quantized_draft_says_what_that_cost_and_how_each_revision_is_used(tmp_path: Path) -> None:
    card = card_of(quantized_draft(tmp_path / "d"), {"repo": "me/it"})
    for words in (
        "| W4A16, own head | 480 | 2.988 | 1.51 % | 2.05 % |",
        "| unquantized | 480 | 3.034 | - | - |",
        "| `main` | 400 | 2 | 0.290 % | 25.00 % |",
        "| before | 1,000 | - | - | - |",
        "NVFP4 by `gptq` from `org/draft`.",
        "480 answers, 30,000 tokens",
        "`w4a4` rounds its inputs to four bits too.",
        "| `w4a4` | NVFP4 |",
        "flashdraft chat --target org/name --draft me/it --draft-revision w4a4",
        """--speculative-config '{"model": "me/it", "revision": "w4a4"}'""",
        '"num_speculative_tokens": 7, "revision": "w4a4"}',
        "SGLang takes no draft in four bits",
        'draft="me/it", draft_revision="w4a4")',
        "NVIDIA Blackwell alone",
    ):
        assert words in card.text
    front = front_of(card.text)
    assert (front["base_model"], front["base_model_relation"]) == ("org/draft", "quantized")
    assert "nvfp4" in front["tags"]


def test_a_local_revision_is_a_directory_for_other_engines(tmp_path: Path) -> None:
    text = card_of(quantized_draft(tmp_path / "d")).text
    assert '"model": "DIR/w4a4", "num_speculative_tokens": 7}' in text
    assert "flashdraft chat --target org/name --draft DIR --draft-revision w4a4" in text


def test_the_builtin_draft_is_used_by_its_name_and_known_by_its_target() -> None:
    card = card_of(builtin.NAME)
    assert commands_of(card.text)[:2] == ["flashdraft chat", "flashdraft serve"]
    assert front_of(card.text)["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "| **all** | **11,950,208** |" in card.text
    assert "45,677,200 answer tokens" in card.text


def test_where_a_target_lay_is_not_told(tmp_path: Path) -> None:
    card = card_of(tiny_draft(tmp_path / "d", {"target": "/home/somebody/secret/Target-4B"}))
    assert "somebody" not in card.text
    assert "DFlash draft for Target-4B:" in card.text
    assert "flashdraft chat --target TARGET --draft DIR" in card.text
    assert "base_model" not in front_of(card.text)
    assert "base_model" in card.todo
    assert front_of(card_of(tmp_path / "d", {"base_model": "org/t"}).text)["base_model"] == "org/t"


def test_results_stand_by_category_with_their_intervals_and_in_the_metadata(tmp_path: Path) -> None:
    draft = tiny_draft(tmp_path / "d", TRAINING)
    speed = results(draft, "speed-bench:throughput_1k")
    card = card_of(draft, {}, written(tmp_path / "a", results(draft)), written(tmp_path / "b", speed) / "results.json")
    for words in (
        "| MT-Bench | `main` | greedy, 16 at once | 3.21 | 3.01 to 3.40 | 20 | 2.50 | 2.25 to 2.75 |",
        "#### SPEED-Bench throughput\\_1k, revision `main`",
        "80 prompts of 160 turns in all, greedy, at most 512 tokens an answer, 16 at once.",
        "flashdraft 0.1.0, an H200, torch 2.11.0. On 2026-11-30.",
        "| coding | 20 | 1 | 4.00 | 3.90 to 4.10 | 2.50 | 2.25 to 2.75 |",
        "| **all** | 20 | 1 | 3.21 | 3.01 to 3.40 | 2.50 | 2.25 to 2.75 |",
        "| step_pooled: over all steps (vLLM) | 3.00 | 2.80 to 3.20 | 20 | 3.00 |",
        "| MT-Bench | `HuggingFaceH4/mt_bench_prompts` | 80 prompts, 160 turns | Human |",
        "Of the categories of MT-Bench, writing has the lowest acceptance length: 2.00.",
        "accept at least 1, 2, ... proposals: 75 %, 50 %.",
        "0 of 160 differ.",
        "**Test hardware:** flashdraft 0.1.0, an H200",
    ):
        assert words in card.text.replace("throughput_1k,", "throughput\\_1k,")
    assert {"mt_bench", "speed_bench", "test_hardware"}.isdisjoint(card.todo)
    [entry] = front_of(card.text)["model-index"]
    first, second = entry["results"]
    assert first["dataset"] == {"name": "MT-Bench", "type": "HuggingFaceH4/mt_bench_prompts"}
    assert second["dataset"]["config"] == "throughput_1k"
    assert [(m["type"], m["value"]) for m in first["metrics"]] == [("acceptance_length", 3.21), ("speedup", 2.5)]


def test_a_part_of_a_suite_is_said_to_be_one_and_stays_out_of_the_metadata(tmp_path: Path) -> None:
    draft = tiny_draft(tmp_path / "d", TRAINING)
    found = results(draft)
    found["suite"] |= {"limit": 8, "prompts": 8, "turns": 16}
    card = card_of(draft, {}, written(tmp_path / "a", found))
    assert "| MT-Bench (limited to 8 prompts) | `main` | greedy, 16 at once | 3.21 |" in card.text
    assert f"| {'ab' * 16}" not in card.text.replace("`", ""), "the hash is of all prompts"
    assert "TODO(mt_bench): MT-Bench was measured in part alone" in card.text
    assert "model-index" not in front_of(card.text)
    found["suite"] |= {"limit": 100, "prompts": 80}  # more than there are
    assert "model-index" in front_of(card_of(draft, {}, written(tmp_path / "b", found)).text)


def test_few_conversations_have_no_interval_and_stay_out_of_the_metadata(tmp_path: Path) -> None:
    draft = tiny_draft(tmp_path / "d", TRAINING)
    found = results(draft)
    found["drafts"][0]["acceptance"]["all"]["request_mean"]["n"] = 4
    text = card_of(draft, {}, written(tmp_path / "a", found)).text
    assert "| MT-Bench | `main` | greedy, 16 at once | 3.21 | - | 4 | 2.50 | 2.25 to 2.75 |" in text
    assert "model-index" not in front_of(text)


def test_runs_of_one_suite_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    draft = tiny_draft(tmp_path / "d", TRAINING)
    warm = results(draft)
    warm["settings"] |= {"temperature": 0.7, "thinking": True}
    runs = [written(tmp_path / name, found) for name, found in (("a", results(draft)), ("b", warm), ("c", warm))]
    text = card_of(draft, {}, *runs).text
    assert "| MT-Bench | `main` | temperature 0.7, thinking on, 16 at once | 3.21 |" in text
    assert "#### MT-Bench, revision `main`, temperature 0.7, thinking on\n" in text
    [entry] = front_of(text)["model-index"]
    assert [result["metrics"][0]["name"].partition(", mean over requests, ")[2] for result in entry["results"]] == [
        "greedy, thinking not set",
        "temperature 0.7, thinking on",
        "temperature 0.7, thinking on, run 2",
    ]


def test_a_file_that_is_named_as_a_suite_is_none(tmp_path: Path) -> None:
    draft = tiny_draft(tmp_path / "d", TRAINING)
    for name in ("./mt-bench.jsonl", "mt_bench", "speed-bench-qualitative"):
        card = card_of(draft, {}, written(tmp_path / "a", results(draft, name)))
        assert {"mt_bench", "speed_bench"} <= card.todo.keys()
    assert "speed_bench" not in card_of(draft, {}, written(tmp_path / "a", results(draft, "speed-bench:qualitative"))).todo
    assert card.todo["speed_bench"] == (
        "flashdraft eval prepare speed-bench, then flashdraft eval speed-bench-qualitative.jsonl --target org/name --draft DIR "
        "--output RUN, then --results RUN"
    )


def test_what_training_measured_of_suites_stands_in_the_card() -> None:
    card = card_of(builtin.NAME)
    for words in (
        "TODO(mt_bench): MT-Bench was measured in training (below)",
        "TODO(speed_bench): SPEED-Bench was not measured",
        "| MT-Bench | temperature 0 | 123 | 39 % | 3.61 | 0.121 |",
        "| GSM8K | temperature 0 | 164 | 24 % | 4.14 | 0.054 |",
        "| HumanEval | temperature 0 | 164 | 13 % | 4.12 | 0.070 |",
        "looping answers left out and counted",
        "`self/...`: prompts that the target wrote itself",
        "| language fr | 7 | 1.65 |",
    ):
        assert words in card.text
    assert "category fr" not in card.text
    assert "thinking off |" not in card.text


def test_the_metadata_is_what_the_hub_reads(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    draft = tiny_draft(tmp_path / "d", TRAINING)
    text = card_of(draft, {"license": "mit"}, written(tmp_path / "a", results(draft))).text
    data = hub.ModelCard(text).data
    assert (data.base_model, data.license, data.pipeline_tag) == ("org/name", "mit", "text-generation")
    assert [(r.dataset_name, r.metric_type, r.metric_value) for r in data.eval_results] == [
        ("MT-Bench", "acceptance_length", 3.21),
        ("MT-Bench", "speedup", 2.5),
    ]


def test_a_result_of_a_revision_is_named_by_it(tmp_path: Path) -> None:
    draft = quantized_draft(tmp_path / "d")
    both = results(draft)
    other = json.loads(json.dumps(both["drafts"][0])) | {"name": "w4a4 of it"}
    both["drafts"].append(other)
    both["provenance"]["draft_hashes"]["w4a4 of it"] = results(draft / "w4a4")["provenance"]["draft_hashes"]["DRAFT"]
    text = card_of(draft, {}, written(tmp_path / "run", both)).text
    assert "#### MT-Bench, revision `main`" in text
    assert "#### MT-Bench, revision `w4a4`" in text


def test_speed_over_load_stands_by_kind_of_prompt_with_its_break_even(tmp_path: Path) -> None:
    draft = tiny_draft(tmp_path / "d", TRAINING)
    run = written(tmp_path / "run", benched(draft), "bench.json")
    card = card_of(draft, bench=[run])
    for words in (
        "## Speed over load",
        "### 1024 tokens, revision `main`",
        "Prompts of random words, exactly 1,024 tokens each: they show what length costs",
        "Load average of the machine: 0.5. On 2026-11-30.",
        "At most 64 tokens an answer. 2 rounds.",
        "| 1 | 48 | 3.50 | 12.5 | 12.5 | 12.5 | 12.5 | 1,234.5 | 800.0 | 2.00 | 1.90 to 2.10 |",
        "| 16 | 48 | 3.50 | 12.5 | 12.5 | 12.5 | 12.5 | 1,234.5 | 800.0 | 0.90 | 0.80 to 1.00 |",
        "The draft stops paying near 13.2 requests at once (break-even); up to 16 the difference may be chance",
    ):
        assert words in card.text
    assert "test_hardware" not in card.todo
