"""`flashdraft fit` as a user runs it: one command to a draft ready to serve, in its time, however often it is killed."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from killing import command, run_until
from saved import ending_pair, saved_pair
from synthesizing import rows_of
from tiny_fit import RECIPE, shrink, write_prompts

from flashdraft import LLM, SamplingParams
from flashdraft.builtin import trained_on
from flashdraft.prompts import read_prompts

HOURS = 16 / 3600


@pytest.fixture(autouse=True)
def small(monkeypatch):
    shrink(monkeypatch)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return ending_pair(tmp_path_factory.mktemp("pair")).target


@pytest.fixture
def arguments(target, tmp_path):
    """The command line of a fit into tmp_path/out."""
    recipe, prompts = tmp_path / "recipe.toml", write_prompts(tmp_path / "prompts.jsonl")
    recipe.write_text(RECIPE)

    def build(*options: object, hours: float = HOURS, prompts=prompts) -> list[str]:
        own = ["fit", target, "--prompts", prompts, "--output", tmp_path / "out", "--hours", hours, "--recipe", recipe]
        return [*map(str, own), "--dtype", "float32", "--max-tokens", "40", *map(str, options)]

    return build


def check_ready(output: Path, target: Path) -> dict:
    """The directory is a draft that decodes, and says what made it; returns its training.json."""
    names = {"config.json", "model.safetensors", "training.json", "training_prompts.npy", "README.md", "work"}
    assert {path.name for path in output.iterdir()} - {"curves.png"} == names
    figures = json.loads((output / "training.json").read_text())
    rows = rows_of(output / "work" / "answers")
    assert figures["data"]["records"] == len(rows) == figures["answers"]["counts"]["answers kept"]
    assert (output / "work" / "answers" / "journal.jsonl").read_bytes() == b"", "nothing was half written when training began"
    assert figures["heldout"]["requests"] >= 1
    assert len(figures["heldout"]["by_language"]) >= 2
    assert figures["speed"]["all"]["identical"] == figures["speed"]["all"]["answers"] >= 1
    assert len(figures["prompts"]["hash"]) == 32
    assert len(figures["curves"]["loss"]) >= 2
    llm = LLM(target, output, dtype="float32", device="cpu")
    [answer] = llm.chat([{"role": "user", "content": "the fox"}], SamplingParams(temperature=0, max_tokens=8))
    assert answer.outputs[0].acceptance_length is not None
    return figures


def test_one_command_makes_a_draft_that_is_ready_to_serve_and_says_what_it_is_worth(flashdraft, arguments, target, tmp_path):
    start, hours = time.monotonic(), 2 * HOURS
    code, out, err = flashdraft(*arguments(hours=hours))
    assert (code, "Traceback" in err) == (0, False), err
    assert time.monotonic() - start < 3600 * hours
    figures = check_ready(tmp_path / "out", target)
    stages = [line for line in out.splitlines() if " of 4: " in line]
    assert [line.split(":")[0] for line in stages] == ["1 of 4", "2 of 4", "3 of 4", "4 of 4"]
    for words in (
        "tokens/s, 36 at once",
        "a step of 2 rows of 64 tokens",
        "acceptance length (AL)",
        "language ",
        "identical",
    ):
        assert words in out
    assert f"flashdraft chat --target {target} --draft {tmp_path / 'out'}" in out
    held = trained_on(read_prompts(tmp_path / "prompts.jsonl"), tmp_path / "out")
    assert 0 < len(held) < 36, "some prompts were held out"
    card = (tmp_path / "out" / "README.md").read_text()
    for words in (
        figures["prompts"]["hash"],
        "vllm serve",
        '"method": "dflash"',
        '"num_speculative_tokens": 3',
        "| language ",
    ):
        assert words in card
    code, again, _ = flashdraft(*arguments(hours=hours))
    assert (code, again.splitlines()[0].startswith("ready in")) == (0, True), "what is finished is not done again"


def fit(arguments: list[str]) -> None:
    shrink(pytest.MonkeyPatch())
    command(arguments)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_killed_at_any_point_the_same_command_goes_on_and_ends_with_the_same_things(arguments, target, tmp_path, seed):
    draws, kills, code = random.Random(seed), 0, -1
    while code:
        number = draws.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
        events = draws.randrange(1, draws.choice([12, 60, 300])) if kills < 12 else 0
        code = run_until(events, number, tmp_path / "out", fit, arguments(hours=60 / 3600))
        assert code in (0, -signal.SIGKILL, 130, 143)
        kills += code != 0
    assert kills >= 3
    figures = check_ready(tmp_path / "out", target)
    assert sum(figures["fit"]["seconds"].values()) < 60, "what killed processes had spent was taken off the budget"


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_says_how_to_go_on(flashdraft, arguments, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr("flashdraft.fit.run.train_job", interrupted)
        code, _, err = flashdraft(*arguments())
    assert code == 130
    assert "stopped after" in err
    assert "the same command goes on" in err
    answers = rows_of(tmp_path / "out" / "work" / "answers")
    code, out, _ = flashdraft(*arguments())
    assert code == 0
    assert "finished so far: answers" in out
    assert "2 of 4" not in out
    assert rows_of(tmp_path / "out" / "work" / "answers") == answers


def test_too_little_time_is_said_before_anything_is_begun(flashdraft, arguments, tmp_path):
    code, _, err = flashdraft(*arguments(hours=0.1 / 3600))
    assert (code, err.count("\n")) == (2, 1)
    assert "is too little here: loading takes" in err
    assert not list((tmp_path / "out").glob("work/answers/*.parquet"))
    book = json.loads((tmp_path / "out" / "work" / "fit.json").read_text())
    assert (book["seconds"], book["found"]) == ({}, {}), "the next start, with more hours, has all of them"


def test_time_that_was_spent_is_not_given_twice(flashdraft, arguments, tmp_path):
    book = tmp_path / "out" / "work" / "fit.json"
    assert flashdraft(*arguments(hours=0.1 / 3600))[0] == 2
    content = json.loads(book.read_text())
    book.write_text(json.dumps({**content, "seconds": {"answers": 100.0}, "found": {"begun": {"spent": 3.0}}}))
    code, _, err = flashdraft(*arguments())
    assert (code, err.count("\n")) == (2, 1)
    assert f"2 min are spent and --hours {HOURS:g} is no more" in err


def test_another_fit_in_the_same_directory_is_refused(flashdraft, arguments, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("flashdraft.fit.run.make_answers", interrupted)
        assert flashdraft(*arguments())[0] == 130
    for options, what in ((["--temperature", "0.5"], "sampling"), (["--limit", "30"], "prompts")):
        code, _, err = flashdraft(*arguments(*options))
        assert (code, err.count("\n")) == (2, 1)
        assert f"was begun with other {what}: give the same, or another --output" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hours", "0"], "--hours must be a time above 0 and below a year, got 0"),
        (["--hours", "nan"], "--hours must be a time above 0 and below a year, got nan"),
        (["--hours", "inf"], "--hours must be a time above 0 and below a year, got inf"),
        (["--output", "a" * 5000], "cannot be written (File name too long"),
        (["--output", "/dev/null"], "cannot be written (Not a directory)"),
        (["--recipe", "absent.toml"], "absent.toml: cannot read the recipe"),
        (["--thinking", "perhaps"], "thinking is on, off or mixed"),
        (["--temperature", "3"], "temperatures must be numbers from 0 to 2"),
        (["--prompts", "absent.jsonl"], "absent.jsonl: cannot read the prompts"),
        (["--limit", "4"], "too few prompts, 4: a draft takes"),
        (["--init", "builtin"], "--init brings the sizes of the draft"),
    ],
)
def test_options_that_cannot_work_are_one_sentence(flashdraft, arguments, options, message):
    code, _, err = flashdraft(*arguments(*options))
    assert (code, err.count("\n")) == (2, 1)
    assert message in err


def test_a_bad_line_is_named_and_a_model_is_not_overwritten(flashdraft, arguments, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "one"}\n{"turns": 3}\n')
    code, _, err = flashdraft(*arguments(prompts=bad))
    assert (code, f"{bad}, line 2: `turns` must be a list" in err) == (2, True)
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "config.json").write_text("{}")
    code, _, err = flashdraft(*arguments())
    assert (code, "holds a model already: give another --output" in err) == (2, True)


def test_a_target_without_a_chat_template_is_refused_before_anything_is_timed(flashdraft, arguments, tmp_path):
    command = arguments()
    command[1] = str(saved_pair(tmp_path, chat_template=None).target)
    code, _, err = flashdraft(*command)
    assert (code, err.count("\n"), "has no chat template" in err) == (2, 1, True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["README.md", "model.safetensors", "curves.png"])
def test_what_others_have_in_the_directory_is_not_written_over(flashdraft, arguments, tmp_path, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    code, _, err = flashdraft(*arguments())
    assert (code, f"holds {name}, which would be written over: give another --output" in err) == (2, True)
    assert [path.read_text() for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_recipe_that_holds_nothing_out_is_refused_before_anything_is_begun(flashdraft, arguments, tmp_path):
    command = arguments()
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.replace("share = 0.3", "share = 0.0"))
    code, _, err = flashdraft(*command)
    assert (code, "[eval] share 0 leaves nothing to measure on" in err) == (2, True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("answers/synthesis.json", None),
        ("answers/synthesis.json", b"\xff"),
        ("training/training.json", None),
        ("training/training.json", b"{"),
        ("training/run/metrics.jsonl", None),
    ],
)
def test_a_file_that_is_gone_or_damaged_at_the_end_is_named(flashdraft, arguments, monkeypatch, tmp_path, name, content):
    with monkeypatch.context() as patch:
        patch.setattr("flashdraft.fit.run.publish", interrupted)
        assert flashdraft(*arguments())[0] == 130
    file = tmp_path / "out" / "work" / name
    whole = file.read_bytes()
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    code, _, err = flashdraft(*arguments())
    assert (code, err.count("\n")) == (2, 1)
    assert "work is gone or damaged" in err
    file.write_bytes(whole)
    assert flashdraft(*arguments())[0] == 0


def test_answers_of_other_weights_are_not_trained_on(flashdraft, arguments, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("flashdraft.fit.run.train_job", interrupted)
        assert flashdraft(*arguments())[0] == 130
    code, _, err = flashdraft(*arguments(), "--dtype", "bfloat16")
    assert (code, err.splitlines()[-1].count("holds answers of other weights than this target's")) == (2, 1)
    assert flashdraft(*arguments())[0] == 0


def test_a_draft_that_was_lost_after_it_was_ready_is_written_again(flashdraft, arguments, target, tmp_path):
    assert flashdraft(*arguments())[0] == 0
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    (tmp_path / "out" / "model.safetensors").unlink()
    assert flashdraft(*arguments())[0] == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    check_ready(tmp_path / "out", target)


def test_answers_that_all_loop_and_prompts_that_are_all_too_long_are_counted(flashdraft, arguments, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr("flashdraft.train.synthesize.repetition", lambda tokens: 1.0)
        code, _, err = flashdraft(*arguments())
    assert (code, "too few answers to train on, 0 (left out: repetition " in err) == (2, True)
    assert "give another --temperature, or other prompts, with another --output" in err
    long = tmp_path / "long.jsonl"
    long.write_text("".join(json.dumps({"prompt": f"{i} " + "the fox " * 400}) + "\n" for i in range(12)))
    shutil.rmtree(tmp_path / "out")
    code, _, err = flashdraft(*arguments(prompts=long))
    assert (code, "left out: prompts too long " in err) == (2, True)


@pytest.mark.parametrize(
    ("kind", "room"), [("write_text", 0), ("write_text", 3), ("write", 40), ("save", 0), ("copyfile", 0), ("copyfile", 1)]
)
def test_a_full_disk_is_one_sentence_and_costs_nothing(flashdraft, arguments, monkeypatch, target, tmp_path, kind, room):
    """`room`: how many writes of this kind succeed before the disk is full."""
    writes = itertools.count()

    def filling(function):
        def call(*args, **options):
            if next(writes) >= room:
                raise OSError(errno.ENOSPC, "No space left on device")
            return function(*args, **options)

        return call

    with monkeypatch.context() as patch:
        owner = {"write_text": Path, "write": os, "copyfile": shutil, "save": torch}[kind]
        patch.setattr(owner, kind, filling(getattr(owner, kind)))
        code, _, err = flashdraft(*arguments())
    assert code == 2
    assert "No space left on device" in err
    assert flashdraft(*arguments())[0] == 0
    check_ready(tmp_path / "out", target)
