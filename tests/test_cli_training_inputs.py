"""What the training and quantization commands are given: no option without a value, no file of hashes that is none."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from flashdraft import builtin
from flashdraft.errors import CheckpointError
from flashdraft.train import commands_train
from flashdraft.train.prepare import Options, trained_prompts


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["synthesize", "--output", "o", "--dataset", ""], "--dataset"),
        (["synthesize", "--output", "o", "--prompts", "p.jsonl", "--draft="], "--draft"),
        (["synthesize", "--output", "o", "--prompts", "p.jsonl", " "], "--prompts"),
        (["train", "--output", "o", "--data", ""], "--data"),
        (["train", "--output", "o", "--data", "d", "--recipe", ""], "--recipe"),
        (["fit", "--output", "o", "--prompts", "p.jsonl", "--hours", "1", "--init", ""], "--init"),
        (["quantize", "builtin", "--output", "o", "--calibration", ""], "--calibration"),
    ],
)
def test_an_option_without_a_value_is_not_as_if_it_were_left_out(flashdraft, tmp_path, monkeypatch, command, option):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n')
    code, _, err = flashdraft(*command)
    assert (code, err) == (2, f"flashdraft: {option} is empty: give it a value, or leave it out\n")
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("hashes", [np.zeros((2, 2), np.uint64), np.array([1.0, 2.0**63]), np.array(["a"]), np.uint64(3)])
def test_a_file_of_hashes_that_holds_another_thing_is_refused_and_not_rounded(tmp_path, hashes):
    np.save(tmp_path / "training_prompts.npy", hashes)
    for read in (lambda: trained_prompts(str(tmp_path), []), lambda: builtin.trained_on([], tmp_path)):
        with pytest.raises(CheckpointError, match=r"training_prompts\.npy does not hold the hashes of prompts"):
            read()


def test_the_command_that_training_ends_with_runs_as_printed_whatever_the_names(capsys):
    options = Options(data=Path("d"), output=Path("a draft; of mine" + "e" * 90), target="my target", lora="it's")
    commands_train._say_what_next(options, SimpleNamespace(step=1, elapsed=1.0))
    (line,) = capsys.readouterr().out.splitlines()[-1:]
    given = ["--target", "my target", "--lora", "it's", "--draft", str(options.output)]
    assert shlex.split(line) == ["flashdraft", "generate", "--compare", *given]
