"""The command: options that cannot be are one sentence, and a local pair is served and measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from benching import lines, options, results
from saved import saved_pair

from flashdraft.errors import ConfigError
from flashdraft.eval.bench import run_bench

HERE = ["--endpoint", "http://127.0.0.1:9"]  # nothing listens there


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--concurrency", 0], "--concurrency must be more than 0, got 0"),
        (["--concurrency", 1, -2], "-2"),
        (["--request-rate", 0], "--request-rate must be more than 0, got 0"),
        (["--prompt-tokens", 64, 0], "--prompt-tokens must be more than 0, got 0"),
        (["--max-tokens", 0], "--max-tokens must be more than 0, got 0"),
        (["--rounds", 0], "--rounds must be more than 0, got 0"),
        (["--requests", -1], "--requests must be more than 0, got -1"),
        (["--seconds", "nan"], "--seconds must be more than 0, got nan"),
        (["--temperature", -1], "--temperature must be 0 or more, got -1"),
        (["--requests", 4, "--concurrency", 1, 8], "--requests 4 never has 8 at once"),
        (["--requests", 4, "--seconds", 2], "give one of them"),
        (["--sweep", "--concurrency", 2], "leave out --concurrency"),
        (["--concurrency", 1, "--request-rate", 1], "two kinds of load"),
        (["--concurrency", 5000], "more than this program sends at once, 1024"),
        (["--no-compare", "--min-speedup", 2], "leave out --no-compare"),
        (["--draft", "builtin"], "--endpoint names a server that has its pair"),
        (["--prompts", "nope"], "there is no suite 'nope'"),
        (["--concurrency", 2], "does not answer"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    arguments: list[object],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flashdraft: Callable[..., tuple[int, str, str]],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flashdraft.client.random.uniform", lambda low, high: 0.0)
    code, _, err = flashdraft("bench", *HERE, *arguments)
    assert code == 2
    assert said in " ".join(err.split())
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"target": "somewhere"}, "give the draft of somewhere with --draft"),
        ({"max_num_seqs": 1}, "--concurrency 2 is more than the 1 requests that --max-num-seqs lets the server run at once"),
    ],
)
def test_a_local_pair_that_cannot_be_measured(tmp_path: Path, given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_bench(options(tmp_path / "out", None, **given))


@pytest.mark.slow
def test_a_local_pair_is_served_and_measured(tmp_path: Path, flashdraft: Callable[..., tuple[int, str, str]]) -> None:
    pair, out = saved_pair(tmp_path / "pair"), tmp_path / "out"
    arguments = ["--target", pair.target, "--draft", pair.draft, "--output", out, "--device", "cpu", "--max-model-len", 256]
    sizes = ["--concurrency", 1, 3, "--prompt-tokens", 50, 97, "--max-tokens", 8, "--rounds", 1]
    code, printed, _ = flashdraft("bench", *arguments, *sizes)
    assert code == 0
    found = results(out)
    assert {record["prompt_tokens"] for record in lines(out, "request")} == {50, 97}
    assert {record["tokens"] for record in lines(out, "request")} == {8}
    assert all(point["texts"]["differing"] == 0 for w in found["workloads"] for point in w["points"])
    # The draft knows nothing: where the width policy leaves it off throughout, there is no acceptance to tell.
    known = [point["acceptance"] for w in found["workloads"] for point in w["points"]]
    assert all(acceptance is None or acceptance["value"] >= 1 for acceptance in known)
    assert found["provenance"]["serve"][-2:] == ["--max-num-seqs", "3"]
    assert "97 tokens" in printed
    code, _, err = flashdraft("bench", *arguments, "--prompt-tokens", 250, "--max-tokens", 8, "--rounds", 1)
    assert (code, "do not fit into the 256 tokens of context" in " ".join(err.split())) == (2, True)
