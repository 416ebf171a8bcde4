"""Against this project's own server: what it says of each answer, its counters, and the offline acceptance of the engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from evaluating import answers, options, results, write_rows
from saved import saved_pair
from scripted import TEMPLATE, THINKING, serving, tiny_llm

from flashdraft import cli
from flashdraft.client import Client
from flashdraft.engine.request import SamplingParams
from flashdraft.eval.command import run_eval

ROWS = [
    {"category": "a", "turns": ["the quick brown fox", "and then"]},
    {"category": "a", "turns": ["jumps over"]},
    {"category": "b", "turns": ["the lazy dog"]},
]


def test_acceptance_is_that_of_the_engine_to_the_last_step(tmp_path: Path) -> None:
    suite = write_rows(tmp_path / "s.jsonl", ROWS)
    llm = tiny_llm(tmp_path)
    with serving(lambda: llm) as client:
        assert run_eval(options(suite, tmp_path / "out", client.url, concurrency=2)) == 0
        client.wait_idle()
    [draft] = results(tmp_path / "out")["drafts"]
    assert draft["statistics"] == "per_request"
    assert draft["texts"] == {"compared": 4, "differing": 0}
    shape = draft["acceptance"]["positions"]
    assert draft["counters"]["drafts"] == sum(shape["histogram"])
    assert draft["counters"]["accepted"] == sum(k * n for k, n in enumerate(shape["histogram"]))
    recorded = {(r["id"], r["turn"]): r["speculation"] for r in answers(tmp_path / "out") if "not used" not in r["arm"]}
    for number, row in enumerate(ROWS, 1):
        [output] = llm.chat([{"role": "user", "content": row["turns"][0]}], SamplingParams(temperature=0, max_tokens=16))
        engine, said = output.outputs[0], recorded[str(number), 0]
        assert [n - 1 for n in engine.committed_per_step] == said["accepted_per_step"]
        assert engine.drafted_per_step == said["drafted_per_step"]


def test_a_local_pair_is_served_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = saved_pair(tmp_path / "pair", chat_template=TEMPLATE, added=THINKING)
    suite, out = write_rows(tmp_path / "s.jsonl", ROWS), tmp_path / "out"
    arguments = ["eval", suite, "--target", pair.target, "--draft", pair.draft, "--output", out, "--max-tokens", 8]
    arguments += ["--device", "cpu", "--dtype", "float32", "--max-model-len", 256, "--min-al", 1]
    monkeypatch.setenv("FLASHDRAFT_API_KEY", "not for this one")
    monkeypatch.setattr(sys, "argv", ["flashdraft", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    found = results(out)
    assert found["complete"]
    assert found["drafts"][0]["name"] == str(pair.draft)
    assert found["drafts"][0]["arm"] == "pinned", "served with --no-adaptive-width, on a CPU too"
    assert found["drafts"][0]["acceptance"]["places"]["narrower_steps"] == 0
    assert found["provenance"]["draft_hashes"][str(pair.draft)]
    assert found["settings"]["max_tokens"] == 8


def test_the_server_of_a_local_pair_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    pair = saved_pair(tmp_path / "pair", chat_template=TEMPLATE, added=THINKING)
    script = (
        "import sys, time; from pathlib import Path; from flashdraft.eval.local import serving\n"
        "with serving(sys.argv[2:], Path(sys.argv[1])) as client:\n"
        "    print(client.base, flush=True); time.sleep(600)\n"
    )
    arguments = [str(tmp_path / "log"), str(pair.target), "--draft", str(pair.draft), "--device", "cpu"]
    with subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        client = Client(process.stdout.readline().strip())
        assert client.text("/health") is not None
        os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while client.text("/health") is not None:
        assert time.monotonic() < deadline, "the server outlived its reader"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mini", "--endpoint", "http://127.0.0.1:9", "--draft", "builtin"], "--endpoint names a server that has its pair"),
        (["mini", "--model", "x"], "give --endpoint, too"),
        (["mini", "--no-compare", "--min-speedup", "2"], "leave out --no-compare"),
        (["mini", "--target", "somewhere"], "give the draft of somewhere with --draft"),
        (["mini", "--draft", "builtin", "--draft", "builtin"], "names the same draft twice"),
        (["nope", "--device", "cpu"], "there is no suite 'nope'"),
        (["mini", "--endpoint", "http://127.0.0.1:9", "--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["flashdraft", "eval", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_pair_that_cannot_be_served_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    suite = write_rows(tmp_path / "s.jsonl", ROWS)
    arguments = ["eval", suite, "--target", tmp_path / "none", "--draft", tmp_path / "none", "--output", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", ["flashdraft", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "none" in capsys.readouterr().err
