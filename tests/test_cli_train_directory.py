"""The directory of `flashdraft train`: whose it is, what is damaged in it, and what the draft to start from brings along."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from answers import counting, write_answers

from flashdraft.targets.load import load_target, load_tokenizer
from flashdraft.train.files import locked
from flashdraft.train.identity import target_hash, tokenizer_hash
from flashdraft.train.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("no_gpu")

RECIPE = """
[train]
steps = 3
rows = 2
seq_length = 64
anchors = 8
beta = 0.0
log_every = 1

[eval]
share = 0.2
records = 2
"""
DRAFT = "[draft]\nnum_hidden_layers = 1\nintermediate_size = 32\nblock_size = 4\n"


@pytest.fixture(scope="module")
def tokenizer(pair) -> str:
    return tokenizer_hash(load_tokenizer(pair.target))


@pytest.fixture(scope="module")
def data(tokenizer, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    write_answers(directory, counting(40), tokenizer)
    return directory


@pytest.fixture
def train(flashdraft, pair, data, tmp_path):
    """Run `flashdraft train` in this process; returns (exit code, standard output, standard error)."""

    def call(*options: object, output=tmp_path / "out", data=data, sizes=DRAFT) -> tuple[int, str, str]:
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(sizes + RECIPE)
        places = ("--data", data, "--output", output, "--recipe", recipe)
        return flashdraft("train", pair.target, *places, "--dtype", "float32", *options)

    return call


def refused(result: tuple[int, str, str], message: str) -> bool:
    code, _, err = result
    return code == 2 and err.count("\n") == 1 and message in err


def hashes(directory: Path) -> set[int]:
    return set(np.load(directory / "training_prompts.npy").tolist())


def test_another_ones_draft_is_never_overwritten(train, pair, tmp_path):
    before = (pair.draft / "model.safetensors").read_bytes()
    for options in ([], ["--resume"]):
        assert refused(train(*options, output=pair.draft), "holds a model that is not of a run here: give another --output")
    assert (pair.draft / "model.safetensors").read_bytes() == before
    assert train("--resume")[0] == 0  # a directory that holds nothing yet


def test_two_trainings_in_one_directory_are_refused_until_the_first_has_ended(train, tmp_path):
    (tmp_path / "out").mkdir()
    other = locked(tmp_path / "out", "training in")
    assert refused(train(), f"another process is training in {tmp_path / 'out'}: wait for it")
    assert list((tmp_path / "out").iterdir()) == []
    assert train("--dry-run")[0] == 0  # which writes nothing
    os.close(other)
    assert train()[0] == 0
    assert train("--resume")[0] == 0


def test_a_directory_that_is_none_or_cannot_be_written_is_one_sentence(train, tmp_path, data):
    (tmp_path / "file").write_text("")
    assert refused(train(output=tmp_path / "file"), "is a file: give a directory as --output")
    assert refused(train(output=tmp_path / "file" / "below"), "below cannot be written (Not a directory): mend that")
    assert refused(train(output=Path("/proc/flashdraft")), "/proc/flashdraft cannot be written")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run").write_text("")
    assert refused(train(), "run cannot be written (")
    assert refused(train(output=tmp_path / "new", data=tmp_path), "run `flashdraft synthesize` first")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"3", b"[]", b'{"target": 3}', b"{" * 5000, None])
def test_a_damaged_run_json_is_refused(train, tmp_path, content):
    assert train()[0] == 0
    path = tmp_path / "out" / "run" / "run.json"
    path.unlink() if content is None else path.write_bytes(content)
    assert refused(train("--resume"), "run.json is missing or damaged, so that nobody knows what the run was begun with")


def test_a_damaged_state_can_be_removed_as_it_says_and_the_run_starts_anew(train, tmp_path):
    assert train()[0] == 0
    run = tmp_path / "out" / "run"
    before = hashes(tmp_path / "out")
    (run / "state.pt").write_bytes((run / "state.pt").read_bytes()[:1000])
    (run / "metrics.jsonl").write_bytes(b'\xff\n{"step": "x"}\n')
    code, _, err = train("--resume")
    assert (code, "remove that file and give the same command again" in err) == (2, True)
    (run / "state.pt").unlink()
    assert train("--resume")[0] == 0
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row] == [1, 2, 3]
    assert before == hashes(tmp_path / "out")


def test_what_a_draft_to_start_from_was_trained_on_is_kept_and_never_held_out(train, tmp_path, tokenizer):
    assert train(output=tmp_path / "0")[0] == 0
    write_answers(tmp_path / "data", counting(40), tokenizer)
    write_answers(tmp_path / "data", counting(30, seed=1), tokenizer, shard=1)  # other prompts
    everything = {(i * 0x9E3779B97F4A7C15 + shard) % 2**64 for shard, count in ((0, 40), (1, 30)) for i in range(count)}
    for generation in (1, 2):  # the second knows of both before it
        start, output = tmp_path / str(generation - 1), tmp_path / str(generation)
        assert train("--init", start, output=output, data=tmp_path / "data", sizes="")[0] == 0
        before, now = hashes(start), hashes(output)
        held = everything - now
        assert before <= now < everything
        figures = json.loads((output / "training.json").read_text())
        assert 0 < figures["heldout"]["requests"] <= len(held)
        assert figures["data"]["prompts_trained_on_before"] == len(before)


def test_without_a_prompt_that_is_new_to_the_draft_nothing_is_held_out_and_that_is_said(train, tmp_path, data):
    assert train(output=tmp_path / "first")[0] == 0
    path = tmp_path / "first" / "training_prompts.npy"
    np.save(path, np.array([(i * 0x9E3779B97F4A7C15) % 2**64 for i in range(40)], np.uint64))
    code, out, _ = train("--init", tmp_path / "first", sizes="")
    assert (code, "nothing is held out, for there is no prompt to spare" in out) == (0, True)
    assert len(hashes(tmp_path / "out")) == 40
    path.write_bytes(b"nonsense")
    assert refused(train("--init", tmp_path / "first", output=tmp_path / "b", sizes=""), "does not hold the hashes of prompts")
    path.unlink()
    code, out, _ = train("--init", tmp_path / "first", "--dry-run", sizes="")
    assert (code, "so that held-out prompts may be ones it was trained on" in out) == (0, True)


def test_answers_of_another_target_are_said_in_the_plan_and_kept_with_the_draft(train, tmp_path, pair, tokenizer):
    own = target_hash(load_target(pair.target, dtype="float32"))
    said = "made by another target with the same tokenizer"
    for made_by, noted in ((own, False), ("0" * 32, True), (None, False)):
        write_answers(tmp_path / "data", counting(40), tokenizer, target_hash=made_by)
        code, out, _ = train("--dry-run", data=tmp_path / "data")
        assert (code, said in out) == (0, noted)
    write_answers(tmp_path / "data", counting(40), tokenizer, target_hash="0" * 32)
    assert train(data=tmp_path / "data")[0] == 0
    notes = json.loads((tmp_path / "out" / "training.json").read_text())["data"]["notes"]
    assert any(said in note for note in notes)


def test_a_draft_that_no_memory_holds_is_refused_before_it_is_made(train):
    sizes = "[draft]\nnum_hidden_layers = 128\nintermediate_size = 262144\nnum_attention_heads = 1024\nhead_dim = 1024\n"
    sizes += "num_key_value_heads = 1024\n"
    assert refused(train(sizes=sizes), "lower num_hidden_layers or intermediate_size")


def test_answers_of_one_token_are_left_out_and_counted(train, tmp_path, tokenizer):
    write_answers(tmp_path / "data", [*counting(30), *[([5, 6], [7])] * 5], tokenizer)
    code, out, _ = train(data=tmp_path / "data")
    assert code == 0
    assert "answers of fewer than two tokens: 5, left out" in out
