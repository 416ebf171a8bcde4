"""`flashdraft quantize` on a tiny pair: what it writes, serves and says, and what it refuses before anything is loaded."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from answers import counting, write_answers
from saved import Pair
from typer.testing import CliRunner

from flashdraft.checkpoint import load_draft, save_draft
from flashdraft.cli import app
from flashdraft.draft import DFlashDraft
from flashdraft.engine.request import SamplingParams
from flashdraft.errors import FlashdraftError
from flashdraft.llm import LLM
from flashdraft.quant.linear import QuantizedLinear
from flashdraft.quantize import writing
from flashdraft.quantize.measure import arm
from flashdraft.targets.load import load_tokenizer
from flashdraft.train import files
from flashdraft.train.identity import tokenizer_hash

LINEARS = ["fc", *(f"layers.{i}.{name}" for i in range(2) for name in ("self_attn.qkv_proj", "self_attn.o_proj"))]
LINEARS += [f"layers.{i}.mlp.{name}" for i in range(2) for name in ("gate_up_proj", "down_proj")]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"prompt": f"the {word} fox jumps over {n}"} for n, word in enumerate(["quick", "brown", "lazy", "dog"] * 3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["quantize", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


@pytest.fixture(scope="module")
def made(pair: Pair, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    output = tmp_path_factory.mktemp("made") / "draft"
    options = ("--target", pair.target, "--calibration", prompts, "--output", output, "--max-tokens", 12, "--heldout", 5)
    return output, invoke(pair.draft, *options, "--w4a4", "--own-head", "--device", "cpu")


def test_both_revisions_load_with_a_quantized_head_of_their_own(made: tuple[Path, str], pair: Pair) -> None:
    output, _ = made
    main, other = load_draft(output, packed=True), load_draft(output, revision="w4a4", packed=True)
    for draft in (main, other):
        assert isinstance(draft.lm_head, QuantizedLinear)
        assert draft.config.has_own_lm_head
        assert draft.norm.weight.dtype == load_draft(pair.draft).norm.weight.dtype
    assert main.fc.input_scale is None
    assert type(other.fc) is torch.nn.Linear, "raw features are not rounded"
    assert other.layers[0].self_attn.k_proj.input_scale == other.layers[0].self_attn.q_proj.input_scale
    head = LLM(pair.target, False).target.model.get_output_embeddings().weight
    torch.testing.assert_close(main.lm_head.packed.dequantize(), head.float(), rtol=0, atol=0.2 * float(head.abs().max()))


@pytest.mark.parametrize("revision", [None, "w4a4"])
def test_it_serves_with_the_targets_own_text(made: tuple[Path, str], pair: Pair, revision: str | None) -> None:
    options = {"max_model_len": 64, "max_num_seqs": 1, "kv_cache_memory_bytes": 4 << 20, "dtype": "float32", "device": "cpu"}

    def text(draft: Path | bool, revision: str | None = None) -> list[int]:
        llm = LLM(pair.target, draft, draft_revision=revision, **options)
        return llm.generate("the quick brown fox", SamplingParams(seed=3))[0].outputs[0].token_ids

    assert text(made[0], revision) == text(False)


def test_the_report_has_every_arm_and_every_layer(made: tuple[Path, str]) -> None:
    output, said = made
    report = json.loads((output / "quantization.json").read_text())
    names = ["unquantized", *(f"{form}, {head}" for form in ("W4A16", "W4A4") for head in ("target's head", "own head"))]
    assert [one["name"] for one in report["acceptance"]] == names
    assert {one["answers"] for one in report["acceptance"]} == {5}
    assert [layer["name"] for layer in report["layers"]["main"]][::15] == ["fc", "lm_head"]
    assert len(report["layers"]["w4a4"]) == len(report["layers"]["main"]) - 1 == 15
    assert all(0 <= layer["error"] < 0.05 for layers in report["layers"].values() for layer in layers)
    assert "acceptance length on held-out prompts" in said
    assert "W4A4, own head" in said
    assert f"{report['bytes']['before']:,} before" in said
    text = (output / "README.md").read_text()
    assert "| W4A16, own head |" in text
    assert "`w4a4` rounds its inputs" in text


def test_answers_that_are_there_are_taken_as_they_are(made: tuple[Path, str], pair: Pair, tmp_path: Path) -> None:
    rest = ("--calibration", made[0] / "work", "--output", tmp_path / "max", "--method", "max", "--heldout", 0)
    said = invoke(pair.draft, "--target", pair.target, *rest, "--ignore", "fc", "layers.1.mlp.gate_up_proj", "--device", "cpu")
    assert "acceptance length" not in said
    draft = load_draft(tmp_path / "max", packed=True)
    assert type(draft.fc) is type(draft.layers[1].mlp.up_proj) is torch.nn.Linear
    assert isinstance(draft.layers[0].mlp.up_proj, QuantizedLinear)
    assert draft.lm_head is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ignore", "layers.0.self_attn.q_proj"], "only a part of layers.0.self_attn.qkv_proj"),
        (["--ignore", "lm_head"], "lm_head is no linear of this draft"),
        (["--ignore", *LINEARS], "nothing is left to quantize"),
        (["--w4a4", "--ignore", *LINEARS[1:]], "nothing is left to quantize"),
        (["--method", "awq"], "method is gptq, max or search"),
        (["--damping", "0"], "damping is a share"),
        (["--calibration", "none.jsonl"], "none.jsonl"),
        (["--output", "{draft}"], "holds a model already"),
        (["--output", "{prompts}"], "is a file"),
        (["--calibration", "{draft}", "{prompts}"], "directory of answers, which goes alone"),
        (["--calibration", "{draft}"], r"no answers-\*.parquet"),
    ],
)
def test_what_cannot_be_is_refused(pair: Pair, prompts: Path, tmp_path: Path, options: list[str], message: str) -> None:
    places = {"draft": str(pair.draft), "prompts": str(prompts)}
    given = {"--calibration": [str(prompts)], "--output": [str(tmp_path / "out")]}
    given[options[0]] = [text.format(**places) for text in options[1:]]
    arguments = [part for name, values in given.items() for part in (name, *values)]
    with pytest.raises(FlashdraftError, match=message):
        invoke(pair.draft, "--target", pair.target, *arguments)


def test_a_quantized_draft_or_one_with_a_head_is_refused(
    made: tuple[Path, str], pair: Pair, prompts: Path, tmp_path: Path
) -> None:
    rest = ("--target", pair.target, "--calibration", prompts, "--output", tmp_path / "out")
    with pytest.raises(FlashdraftError, match=r"is quantized already \(W4A16_NVFP4\)"):
        invoke(made[0], *rest)
    draft = DFlashDraft(load_draft(pair.draft).config.with_(has_own_lm_head=True))
    with pytest.raises(FlashdraftError, match="has an output head of its own"):
        invoke(save_draft(draft, tmp_path / "own"), *rest, "--own-head")


@pytest.mark.parametrize(
    ("changes", "value", "message"),
    [({}, float("nan"), "hold NaN or infinite"), ({"intermediate_size": 40}, 0.1, r"down_proj.weight has shape \[48, 40\]")],
)
def test_a_draft_that_cannot_be_quantized_is_refused_before_anything_is_answered(
    pair: Pair, prompts: Path, tmp_path: Path, changes: dict[str, int], value: float, message: str
) -> None:
    draft = DFlashDraft(load_draft(pair.draft).config.with_(**changes))
    torch.nn.init.constant_(draft.fc.weight, value)
    save_draft(draft, tmp_path / "draft")
    with pytest.raises(FlashdraftError, match=message):
        invoke(tmp_path / "draft", "--target", pair.target, "--calibration", prompts, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_answers_of_others_are_refused_or_noted(pair: Pair, tmp_path: Path) -> None:
    def on(name: str, tokenizer: str, token: int = 1) -> str:
        write_answers(tmp_path / name, [*counting(20), ([1, 3], [token, 1])], tokenizer, target_hash="0" * 32)
        rest = ("--calibration", tmp_path / name, "--output", tmp_path / f"of-{name}", "--heldout", 0, "--device", "cpu")
        return invoke(pair.draft, "--target", pair.target, *rest)

    own = tokenizer_hash(load_tokenizer(pair.target))
    with pytest.raises(FlashdraftError, match="was made for another tokenizer"):
        on("another", "0" * 32)
    with pytest.raises(FlashdraftError, match="holds token 5,000 and the target's vocabulary ends at"):
        on("beyond", own, 5000)
    assert "answers were made by another target with the same tokenizer" in on("tuned", own)


@pytest.mark.parametrize("moved", [0, 3, 6, 9])
def test_what_is_stopped_while_files_are_put_in_place_is_made_again_by_the_same_command(
    pair: Pair, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    output = tmp_path / "out"
    shutil.copytree(pair.draft, tmp_path / "draft")
    (tmp_path / "draft" / "training.json").write_text("{}")
    np.save(tmp_path / "draft" / "training_prompts.npy", np.zeros(0, np.uint64))
    options = (tmp_path / "draft", "--target", pair.target, "--calibration", prompts, "--output", output, "--max-tokens", 12)
    replace, count = os.replace, [0]

    def stopped(source: Path, place: Path) -> None:
        if Path(source).is_relative_to(writing.stage_of(output)) and not Path(place).is_relative_to(output / "work"):
            count[0] += 1
            if count[0] > moved:
                raise KeyboardInterrupt
        replace(source, place)

    with monkeypatch.context() as patch:
        patch.setattr(writing.os, "replace", stopped)
        CliRunner().invoke(app, ["quantize", *map(str, options), "--w4a4", "--device", "cpu"])
    assert count[0] == moved + 1
    assert not (output / "config.json").exists(), "what stands there is no draft yet"
    if moved:
        assert list(output.rglob("model.safetensors"))
    if (output / "w4a4").exists():
        with pytest.raises(FlashdraftError, match="w4a4 is there already and would be taken for a revision of this draft"):
            invoke(*options, "--device", "cpu")
    invoke(*options, "--w4a4", "--device", "cpu")
    for revision in (None, "w4a4"):
        assert load_draft(output, revision=revision, packed=True).config == load_draft(pair.draft).config
    assert sorted(path.name for path in output.iterdir()) == [
        *("README.md", "config.json", "model.safetensors", "quantization.json", "training.json", "training_prompts.npy"),
        *("w4a4", "work"),
    ]
    assert not writing.stage_of(output).exists()


def test_one_process_at_a_time_writes_a_directory_and_nothing_of_others_is_taken(
    pair: Pair, prompts: Path, tmp_path: Path
) -> None:
    options = (pair.draft, "--target", pair.target, "--calibration", prompts, "--output")
    refused = pytest.raises(FlashdraftError, match=r"another process is quantizing into .*busy: wait")
    with files.alone(tmp_path / "busy", "quantizing into"), refused:
        invoke(*options, tmp_path / "busy")
    assert not (tmp_path / "busy").exists()
    for name in ("model.safetensors", "model.safetensors.index.json"):
        (tmp_path / name[-10:]).mkdir()
        (tmp_path / name[-10:] / name).write_bytes(b"of others")
        with pytest.raises(FlashdraftError, match="holds a model already"):
            invoke(*options, tmp_path / name[-10:])
    (tmp_path / "out" / "w4a4").mkdir(parents=True)
    for more in ((), ("--w4a4",)):
        with pytest.raises(FlashdraftError, match="w4a4 is there already"):
            invoke(*options, tmp_path / "out", *more)


def test_a_damaged_training_json_is_said_before_anything_is_answered(pair: Pair, prompts: Path, tmp_path: Path) -> None:
    shutil.copytree(pair.draft, tmp_path / "draft")
    (tmp_path / "draft" / "training.json").write_text("[")
    with pytest.raises(FlashdraftError, match=r"training\.json cannot be read as JSON"):
        invoke(tmp_path / "draft", "--target", pair.target, "--calibration", prompts, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_losses_are_paired_and_bounded() -> None:
    reference = [[3, 3], [1, 1], [2], []]
    same = arm("same", reference, reference)
    assert (same.loss, same.loss_at_most, same.answers) == (0.0, 0.0, 3)
    worse = arm("worse", [[3, 2], [1, 1], [1], []], reference)
    assert worse.acceptance_length == pytest.approx((3.5 + 2 + 2) / 3)
    assert worse.loss == pytest.approx(0.5 / 3)
    assert worse.loss_at_most == pytest.approx((0.5 + 1.6449 * 0.5 / 3**0.5) / 3, rel=1e-3)
    assert arm("reference", reference).loss is None
