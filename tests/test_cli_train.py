"""`flashdraft train` as a user runs it: what it prints and leaves, and one sentence for what the user can mend."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from answers import counting, write_answers
from killing import command, run_until
from safetensors.torch import load_file
from saved import saved_pair
from tiny_config import TINY_RECIPE

from flashdraft.builtin import trained_on
from flashdraft.checkpoint import load_draft
from flashdraft.targets.load import load_tokenizer
from flashdraft.train import curves
from flashdraft.train.identity import tokenizer_hash
from flashdraft.train.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("no_gpu")

TESTS = Path(__file__).parent
RECIPE = f"""{TINY_RECIPE}steps = 40
beta = 0.0
log_every = 10

[eval]
share = 0.2
records = 2
"""


@pytest.fixture(scope="module")
def data(pair, tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    write_answers(directory, counting(60), tokenizer_hash(load_tokenizer(pair.target)))
    return directory


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def train(flashdraft, pair, data, recipe, tmp_path):
    """Run `flashdraft train` in this process; returns (exit code, standard output, standard error)."""

    def call(*options: object, target=pair.target, data=data, recipe=recipe, output=tmp_path / "out") -> tuple[int, str, str]:
        places = ("--data", data, "--output", output, "--recipe", recipe)
        return flashdraft("train", target, *places, "--dtype", "float32", *options)

    return call


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def test_a_run_leaves_a_draft_with_its_provenance_and_says_what_it_reached(train, tmp_path, pair, monkeypatch):
    code, out, err = train()
    assert (code, [line for line in err.splitlines() if "Traceback" in line]) == (0, [])
    draft = load_draft(tmp_path / "out")
    assert (draft.config.block_size, draft.config.windows, draft.config.mask_token_id) == (4, (16,), 2)
    figures = json.loads((tmp_path / "out" / "training.json").read_text())
    held = figures["heldout"]
    assert figures["training"]["steps"] == 40
    assert figures["data"]["records"] == 60
    assert figures["data"]["records_trained_on"] + held["requests"] >= 54
    assert held["over_steps"] > 1.15  # counting: 1.29 after these 40 updates
    assert set(held["by_language"]) == {"all", "en", "fr"}
    assert set(held["by_thinking"]) == {"all", "on", "off"}
    assert len(held["by_position"]) == 3
    assert figures["command"].startswith("flashdraft train ")
    rows = read_metrics(tmp_path / "out" / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [10, 20, 30, 40]
    assert [row["step"] for row in rows if "heldout" in row] == [10, 20, 30, 40]
    for words in ("mask token", "<mask> (id 2)", "held out", "acceptance length (AL)", "language fr", "thinking on"):
        assert words in out
    assert re.search(r"step 10/40 .* loss \d+\.\d+ .* tokens/s", err)
    assert f"flashdraft generate --compare --target {pair.target} --draft {tmp_path / 'out'}" in out


def test_a_dry_run_prints_the_plan_and_times_and_writes_nothing(train, tmp_path):
    code, out, _ = train("--dry-run")
    assert code == 0
    for words in ("parameters", "60 answers of 60 prompts", "40 steps", "MB", "tokens/s", "the run", "context tokens, about"):
        assert words in out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("length", "shown"), [(["--hours", 0.5], "30 min, muon"), (["--steps", 70], "70 steps (5.4 epochs), muon")]
)
def test_the_figures_of_a_plan_fit_together(train, length, shown):
    code, out, _ = train("--dry-run", *length)
    assert code == 0
    assert re.search(rf"training +{re.escape(shown)}", out)
    seconds, a_step = re.search(r"a step +([\d.]+) s, ([\d,]+) context tokens", out).groups()
    steps, epochs, tokens = (
        float(x.replace(",", ""))
        for x in re.search(r"the run +([\d,]+) steps, ([\d,.]+) epochs, ([\d,]+) context", out).groups()
    )
    assert tokens == steps * float(a_step.replace(",", ""))
    rows, an_update = map(int, re.search(r"rows +(\d+) of 64 tokens.*; (\d+) an update", out).groups())
    assert epochs == pytest.approx(steps / (rows // an_update), abs=0.06)
    if "--hours" in length:
        assert "about 30 min" in out
        assert steps == pytest.approx(1800 / float(seconds), rel=0.01)


def test_a_finished_run_is_not_overwritten_but_can_be_made_longer(train, tmp_path):
    assert train("--steps", 6)[0] == 0
    before = weights(tmp_path / "out")
    code, _, err = train("--steps", 6)
    assert (code, err.count("\n")) == (2, 1)
    assert "holds a run already: give --resume" in err
    code, _, err = train("--steps", 9, "--resume")
    assert code == 0
    assert "resumed after step 6" in err
    assert json.loads((tmp_path / "out" / "training.json").read_text())["training"]["steps"] == 9
    assert not torch.equal(before["fc.weight"], weights(tmp_path / "out")["fc.weight"])


def test_resuming_with_other_settings_names_what_differs(train, tmp_path, recipe):
    assert train("--steps", 4)[0] == 0
    recipe.write_text(RECIPE.replace("beta = 0.0", "beta = 0.5").replace("anchors = 24", "anchors = 20"))
    code, _, err = train("--steps", 4, "--resume")
    assert code == 2
    assert "was begun with other settings (train loss, train anchors)" in err


def test_an_interrupt_saves_the_state_and_a_resumed_run_ends_as_if_nothing_had_been(train, tmp_path, monkeypatch):
    assert train(output=tmp_path / "whole")[0] == 0

    def interrupt() -> None:
        while not (tmp_path / "out" / "run" / "metrics.jsonl").exists():
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Thread(target=interrupt)
    timer.start()
    code, _, err = train()
    timer.join()
    assert code == 130
    assert "stopping after this step" in err
    assert "the same command with --resume goes on" in err
    assert train("--resume")[0] == 0
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(value, weights(tmp_path / "out")[name]), name


def test_cached_features_give_the_same_draft_and_their_size_is_said_first(train, tmp_path, data, pair):
    assert train(output=tmp_path / "online")[0] == 0
    own = tmp_path / "data"
    write_answers(own, counting(60), tokenizer_hash(load_tokenizer(pair.target)))
    code, out, err = train("--features", "offline", data=own)
    assert code == 0
    assert re.search(r"features +[\d,]+ tokens x 0\.6 kB = \d MB in", out)
    assert "1 of 1 shards to write" in err
    held = [json.loads((tmp_path / name / "training.json").read_text())["heldout"] for name in ("online", "out")]
    assert held[0]["over_steps"] == pytest.approx(held[1]["over_steps"], rel=0.05)
    assert "complete" in train("--features", "offline", data=own, output=tmp_path / "again")[2]


def test_a_draft_can_be_the_start_of_another(train, tmp_path, recipe, pair):
    assert train(output=tmp_path / "first")[0] == 0
    recipe.write_text(RECIPE.split("[train]")[0] + "[train]\nsteps = 2")
    code, _, err = train("--init", tmp_path / "first")
    assert (code, "--init brings the sizes of the draft" in err) == (2, True)
    recipe.write_text("[train]" + RECIPE.split("[train]")[1].replace("5e-3", "1e-5"))
    assert train("--init", tmp_path / "first", "--steps", 2)[0] == 0
    first, second = (json.loads((tmp_path / name / "training.json").read_text()) for name in ("first", "out"))
    assert second["heldout"]["over_steps"] == pytest.approx(first["heldout"]["over_steps"], rel=0.1)
    assert second["started_from"] == str(tmp_path / "first")
    other = saved_pair(tmp_path / "other", hidden_size=32)
    code, _, err = train("--init", other.draft, output=tmp_path / "misfit")
    assert (code, "hidden size is 32, the target's 48" in err) == (2, True)


def test_the_prompts_trained_on_are_known_and_the_held_out_ones_are_not(train, tmp_path):
    assert train("--steps", 2)[0] == 0
    hashes = set(load_file_hashes(tmp_path / "out"))
    everything = {(i * 0x9E3779B97F4A7C15) % 2**64 for i in range(60)}
    assert hashes < everything
    assert 40 <= len(hashes) <= 56
    assert trained_on([], tmp_path / "out") == []


def load_file_hashes(directory: Path) -> list[int]:
    return np.load(directory / "training_prompts.npy").tolist()


def test_answers_made_for_another_tokenizer_are_refused(train, tmp_path):
    write_answers(tmp_path / "data", counting(60), "0123456789abcdef" * 2)
    code, _, err = train(data=tmp_path / "data")
    assert (code, err.count("\n")) == (2, 1)
    assert "was made for another tokenizer (hash 0123456789ab" in err


def test_answers_that_do_not_say_their_tokenizer_are_noted_and_foreign_tokens_refused(train, tmp_path):
    write_answers(tmp_path / "data", counting(60))
    assert "do not say which tokenizer made them" in train("--dry-run", data=tmp_path / "data")[1]
    write_answers(tmp_path / "data", [([5], [6, 10**6])], shard=1)
    code, _, err = train(data=tmp_path / "data")
    assert (code, "holds token 1,000,000 and the target's vocabulary ends at" in err) == (2, True)


def test_a_mask_token_that_occurs_is_exchanged_or_refused_where_the_recipe_names_it(train, tmp_path, pair, recipe):
    marked = [(prompt, [*answer[:5], 2, *answer[5:]]) for prompt, answer in counting(60)]
    write_answers(tmp_path / "data", marked, tokenizer_hash(load_tokenizer(pair.target)))
    assert train("--steps", 1, data=tmp_path / "data")[0] == 0
    assert load_draft(tmp_path / "out").config.mask_token_id != 2
    recipe.write_text(RECIPE.replace("block_size = 4", 'block_size = 4\nmask_token = "<mask>"'))
    code, _, err = train(data=tmp_path / "data", output=tmp_path / "named")
    assert (code, "mask_token '<mask>' occurs 60 times in the data: leave out mask_token" in err) == (2, True)


def test_answers_longer_than_a_row_are_cut_and_counted(train, recipe):
    recipe.write_text(RECIPE.replace("seq_length = 64", "seq_length = 24"))
    code, out, _ = train("--steps", 1)
    assert code == 0
    assert re.search(r"answers longer than 24 tokens \(seq_length\): \d+, cut there; 0 of them left out", out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--features", "cached"], "--features must be online or offline"),
        (["--steps", "3", "--hours", "1"], "steps or after hours: give one"),
        (["--recipe", "absent.toml"], "absent.toml: cannot read the recipe"),
        (["--data", "."], "no answers-*.parquet in .: run `flashdraft synthesize` first"),
    ],
)
def test_options_that_cannot_work_are_one_sentence(train, options, message):
    code, _, err = train(*options)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err


def test_an_unknown_key_names_the_nearest(train, recipe):
    recipe.write_text("[train]\nlearning_rates = 1e-3\n")
    code, _, err = train()
    assert code == 2
    assert "unknown key 'learning_rates' in [train]: did you mean 'learning_rate'?" in err


def test_without_tensorboard_the_option_names_the_extra(train, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    code, _, err = train("--tensorboard")
    assert code == 2
    assert "--tensorboard needs the package tensorboard: pip install 'flashdraft[train]', or leave it out" in err


def test_without_matplotlib_the_missing_curves_are_said(train, monkeypatch, tmp_path):
    monkeypatch.setattr(curves, "draw_curves", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = train("--steps", 2)
    assert code == 0
    assert "no curves.png: it takes matplotlib (pip install 'flashdraft[train]')" in err
    assert not (tmp_path / "out" / "curves.png").exists()


@pytest.mark.slow
def test_runs_killed_at_random_points_end_bitwise_as_an_uninterrupted_one(train, tmp_path, pair, data, recipe):
    recipe.write_text(
        RECIPE.replace("log_every = 10", "log_every = 3\nsave_seconds = 0.05").replace("steps = 40", "steps = 60")
    )
    assert train(output=tmp_path / "whole")[0] == 0
    own = ["train", pair.target, "--data", data, "--output", tmp_path / "killed", "--recipe", recipe]
    arguments, draw, kills, code = [*map(str, own), "--dtype", "float32", "--device", "cpu"], random.Random(0), 0, -1
    while code:
        events = draw.randrange(1, 20) if kills < 9 else 0
        resume = ["--resume"] if kills else []
        code = run_until(events, signal.SIGKILL, tmp_path / "killed", command, arguments + resume)
        assert code in (0, -signal.SIGKILL)
        kills += code != 0
    assert kills >= 5
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(value, weights(tmp_path / "killed")[name]), name
    kept = [
        [row["step"] for row in read_metrics(tmp_path / name / "run" / "metrics.jsonl") if "loss" in row]
        for name in ("whole", "killed")
    ]
    assert kept[0] == kept[1]


@pytest.mark.slow
def test_two_processes_of_torchrun_make_one_draft(train, tmp_path, pair, data, recipe):
    assert train("--steps", 5, output=tmp_path / "alone")[0] == 0
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "flashdraft"]
    arguments = ["train", pair.target, "--data", data, "--output", tmp_path / "both", "--recipe", recipe, "--dtype", "float32"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    command = list(map(str, [*launcher, *arguments, "--steps", 5, "--device", "cpu"]))
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "2 processes" in ended.stdout
    assert ended.stdout.count("acceptance length (AL)") == 1
    for name, value in weights(tmp_path / "alone").items():
        torch.testing.assert_close(weights(tmp_path / "both")[name], value, atol=1e-2, rtol=2e-2)
