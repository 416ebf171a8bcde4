"""`flashdraft synthesize` as a user runs it: what it prints, that it goes on, and one sentence for what the user can mend."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console
from saved import saved_pair
from servers import completion, serving
from synthesizing import THINKING_TEMPLATE, rows_of

from flashdraft.cli_options import LISTS, spread
from flashdraft.errors import counted
from flashdraft.train import hub, synthesis_report
from flashdraft.train.synthesis_report import Display, Progress

pytestmark = pytest.mark.usefixtures("no_gpu")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"the quick fox {i}", "category": "de/chat"}) + "\n" for i in range(6)))
    return path


FAST = ("--max-tokens", 8, "--dtype", "float32", "--max-num-seqs", 4)


def test_prompts_become_records_and_the_same_command_goes_on(flashdraft, pair, prompts, tmp_path):
    out_dir = tmp_path / "out"
    command = ("synthesize", pair.target, "--prompts", prompts, "--output", out_dir, *FAST)
    code, out, err = flashdraft(*command)
    assert code == 0
    assert err.startswith("6 prompts (0 duplicate, 0 excluded), one answer each; temperature 0.7\n")
    assert "by the engine without a draft, 4 at once; answers of up to 8 tokens" in err
    rows = rows_of(out_dir)
    assert f"{len(rows):,} answers, " in out
    assert f"next: flashdraft train {pair.target} --data {out_dir} --output DRAFT" in out
    assert {row["lang"] for row in rows.values()} == {"de"}
    code, _, err = flashdraft(*command)
    assert code == 0
    assert "6 of 6 conversations there already: going on" in err
    assert rows_of(out_dir) == rows
    assert not list(out_dir.glob("*.partial"))


def test_several_files_options_and_a_draft(flashdraft, pair, prompts, tmp_path):
    more, excluded = tmp_path / "more.jsonl", tmp_path / "excluded.jsonl"
    more.write_text(json.dumps({"turns": ["lazy dog", "and then"]}) + "\n" + json.dumps({"prompt": "The quick fox 0"}) + "\n")
    excluded.write_text(json.dumps({"prompt": "the quick fox 1"}) + "\n")
    code, out, err = flashdraft(
        "synthesize", pair.target, "--draft", pair.draft, "--prompts", prompts, more, "--exclude", excluded,
        "--output", tmp_path / "out", "--temperature", 0.5, 1.0, "--samples", 2, "--top-p", 0.9, "--top-k", 20,
        "--greedy-share", 0.25, *FAST,
    )  # fmt: skip
    assert code == 0
    settings = "temperature 0.5, 1, top-p 0.9, top-k 20, greedy 25%"
    assert f"6 prompts (1 duplicate, 1 excluded), 2 answers each; {settings}" in err
    assert "by the engine with a draft" in err
    assert "left out: 1 duplicate; 1 excluded" in out


def test_records_with_the_mask_token_are_counted(flashdraft, pair, prompts, tmp_path):
    command = ("synthesize", pair.target, "--prompts", prompts, "--output", tmp_path / "out", *FAST)
    assert "records that hold the mask token <mask>: " in flashdraft(*command, "--mask-token", "<mask>")[1]
    assert flashdraft(*command, "--mask-token", "<gone>")[0] == 2


def test_a_template_that_ignores_the_switch_is_said_once(flashdraft, pair, prompts, tmp_path):
    _, _, err = flashdraft(
        "synthesize", pair.target, "--prompts", prompts, "--output", tmp_path / "1", "--thinking", "mixed", *FAST
    )
    assert err.count("this target's chat template ignores enable_thinking: --thinking has no effect") == 1
    thinking = saved_pair(tmp_path / "thinking", chat_template=THINKING_TEMPLATE)
    command = ("synthesize", thinking.target, "--prompts", prompts, "--output", tmp_path / "2", "--thinking", "mixed", *FAST)
    assert "enable_thinking" not in flashdraft(*command)[2]
    assert {row["thinking"] for row in rows_of(tmp_path / "2").values()} == {True, False}


def test_sampling_is_the_target_s_own_where_it_names_some(flashdraft, prompts, tmp_path):
    pair = saved_pair(tmp_path / "pair")
    own = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
    (pair.target / "generation_config.json").write_text(json.dumps(own))
    command = ("synthesize", pair.target, "--prompts", prompts, "--output", tmp_path / "out", *FAST)
    assert "temperature 0.6, top-p 0.95, top-k 20\n" in flashdraft(*command)[2]


@pytest.mark.parametrize("own", [{"temperature": "hot"}, {"top_p": [0.9]}, {"top_k": 2.5}, {"top_k": True}])
def test_sampling_of_the_target_that_is_no_number_is_named(flashdraft, prompts, tmp_path, own):
    pair = saved_pair(tmp_path / "pair")
    (pair.target / "generation_config.json").write_text(json.dumps({"do_sample": True, **own}))
    code, _, err = flashdraft("synthesize", pair.target, "--prompts", prompts, "--output", tmp_path / "out", *FAST)
    (name,) = own
    assert code == 2
    assert f"generation_config.json: {name} is " in err.splitlines()[-1]


def test_answers_by_a_server(flashdraft, pair, prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("KEY_OF_TEST", "secret")
    with serving(lambda body: (200, completion("over the dog"))) as server:
        command = ("synthesize", pair.target, "--prompts", prompts, "--output", tmp_path / "out", "--endpoint", server.url)
        code, out, err = flashdraft(*command, "--api-key-env", "KEY_OF_TEST")
    assert code == 0
    assert "6 answers, " in out
    assert f"by target at {server.url}/v1, 64 requests at once" in err
    assert set(server.keys) == {"Bearer secret"}


def test_prompts_of_a_data_set(flashdraft, pair, tmp_path, monkeypatch):
    rows = [
        {"messages": [{"role": "user", "content": f"the fox {i}"}, {"role": "assistant", "content": "x"}]} for i in range(9)
    ]
    monkeypatch.setattr(hub, "load_dataset", lambda: lambda *_, **__: iter(rows))
    command = ("synthesize", pair.target, "--dataset", "owner/name", "--split", "chat,math", "--limit", 4)
    code, _, err = flashdraft(*command, "--output", tmp_path / "out", *FAST)
    assert code == 0
    assert "2 prompts (2 duplicate, 0 excluded)" in err
    assert len(list((tmp_path / "out").glob("prompts-owner-name-*.jsonl"))) == 2


BAD = {
    "no prompts at all": ([], "give --prompts FILES or --dataset NAME"),
    "a missing file": (["--prompts", "/nowhere/x.jsonl"], "cannot read the prompts"),
    "an empty file": (["--prompts", "{empty}"], "holds no prompts"),
    "a bad line": (["--prompts", "{bad}"], "bad.jsonl, line 2: not a JSON object"),
    "a bad line of the exclusions": (["--prompts", "{good}", "--exclude", "{bad}"], "bad.jsonl, line 2"),
    "everything excluded": (["--prompts", "{good}", "--exclude", "{good}"], "no prompts are left to answer: 6 are excluded"),
    "a temperature out of range": (["--prompts", "{good}", "--temperature", "7"], "temperatures must be numbers from 0 to 2"),
    "an unknown mode": (["--prompts", "{good}", "--thinking", "maybe"], "on, off or mixed"),
    "an unknown generator": (["--prompts", "{good}", "--generator", "gpu"], "auto, engine or rollout"),
    "a draft for a server": (["--prompts", "{good}", "--endpoint", "http://x", "--draft", "y"], "the server runs the target"),
    "a revision of no draft": (["--prompts", "{good}", "--draft-revision", "w4a4"], "--draft-revision belongs to --draft"),
    "a model without a server": (["--prompts", "{good}", "--model", "x"], "belong to --endpoint"),
    "requests at once to no server": (["--prompts", "{good}", "--concurrency", "8"], "--concurrency belong to --endpoint"),
    "a key that is not set": (["--prompts", "{good}", "--endpoint", "http://x", "--api-key-env", "NO_KEY"], "no such variable"),
    "a rollout with a draft": (["--prompts", "{good}", "--generator", "rollout", "--draft", "builtin"], "uses no draft"),
    "an output that is a file": (["--prompts", "{good}", "--output", "{good}"], "is a file: give a directory"),
    "half a character in a category": (["--prompts", "{half}"], "half.jsonl, line 2: its text holds half a character"),
    "hours that are none": (["--prompts", "{good}", "--hours", "nan"], "--hours must be a time above 0, got nan"),
    "no split": (["--dataset", "x", "--split", " ,", "--limit", "1"], "--split names no split"),
    "a mask token beyond the vocabulary": (["--prompts", "{good}", "--mask-token", "999999"], "is no token of this target"),
    "a pipe": (["--prompts", "{pipe}"], "pipe is no regular file, and prompts are read more than once"),
    "an address that is none": (["--prompts", "{good}", "--endpoint", "http://[::1"], "is not the address of a server"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(flashdraft, pair, prompts, tmp_path, name):
    files = {"good": prompts, "empty": tmp_path / "empty.jsonl", "bad": tmp_path / "bad.jsonl"}
    files["empty"].write_text("")
    files["bad"].write_text('{"prompt": "fine"}\nwrong\n')
    files |= {"half": tmp_path / "half.jsonl", "pipe": tmp_path / "pipe"}
    files["half"].write_text('{"prompt": "fine"}\n{"prompt": "fine", "category": "\\ud800"}\n')
    os.mkfifo(files["pipe"])
    arguments, message = BAD[name]
    given = [argument.format(**files) for argument in arguments]
    code, out, err = flashdraft("synthesize", pair.target, "--output", tmp_path / "out", *given, *FAST[:2])
    assert code == 2, err
    *_, line = err.splitlines()
    assert line.startswith("flashdraft: ")
    assert message in line
    assert out == ""


@pytest.mark.parametrize("target", ["{folder}", "owner/name", "model.gguf"])
def test_a_target_behind_the_prompt_files_is_not_taken_for_one_of_them(flashdraft, pair, prompts, tmp_path, target):
    target = target.format(folder=pair.target)
    code, out, err = flashdraft("synthesize", "--prompts", prompts, target, "--output", tmp_path / "out")
    assert (code, out) == (2, "")
    assert err.startswith(f"flashdraft: {target} is no prompt file: if it is the target, give it before --prompts")
    assert err.count("\n") == 1


def test_without_answers_nothing_is_said_to_come_next(flashdraft, pair, prompts, tmp_path):
    command = ("synthesize", pair.target, "--prompts", prompts, "--output", tmp_path / "out", "--max-prompt-tokens", 1, *FAST)
    code, out, _ = flashdraft(*command)
    assert (code, "6 too long" in out) == (0, True)
    assert "next:" not in out


def test_values_of_an_option_end_at_the_next_one():
    given = ["T", "--prompts", "a", "b", "--output", "o", "--exclude", "c", "--temperature", "0.1", "1"]
    spread_out = ["T", "--prompts", "a", "--prompts", "b", "--output", "o", "--exclude", "c"]
    assert spread(given, LISTS) == [*spread_out, "--temperature", "0.1", "--temperature", "1"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_stopped_says_how_it_goes_on(pair, prompts, tmp_path, number, code):
    command = [
        sys.executable,
        "-m",
        "flashdraft",
        "synthesize",
        pair.target,
        "--prompts",
        prompts,
        "--output",
        tmp_path / "out",
    ]
    command += ["--samples", "5000", "--max-tokens", "40", "--dtype", "float32", "--device", "cpu"]
    process = subprocess.Popen(
        [*map(str, command)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # ignored where the tests run under nohup
    )
    journal, begun = tmp_path / "out" / "journal.jsonl", time.monotonic()
    while not (journal.exists() and journal.stat().st_size) and time.monotonic() - begun < 60:
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    kept = len(rows_of(tmp_path / "out"))
    assert kept > 0
    assert f"stopped: {counted(kept, 'answer')} in {tmp_path / 'out'}; the same command goes on" in err.replace("\n", " ")
    assert "Traceback" not in err


def test_without_a_terminal_a_plain_line_comes_now_and_then(monkeypatch):
    monkeypatch.setattr(synthesis_report, "PLAIN_SECONDS", 0.0)
    console = Console(file=io.StringIO(), record=True, width=120)
    display, progress = Display(console), Progress(0, 10)
    display(progress)
    progress.done, progress.tokens = 5, 1000
    progress.counts.update({"answers kept": 4, "answers dropped: repetition": 1})
    display(progress)
    text = console.export_text()
    assert text.startswith("5/10 4 answers, 1 left out, ")
    assert " tokens/s, 0:00:00 left" in text


def test_on_a_terminal_a_bar_shows_figures_and_goes_away():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    display, progress = Display(console), Progress(2, 10)
    display(progress)
    progress.done, progress.tokens = 5, 1000
    display(progress)
    assert display._bar is not None
    assert display._bar.tasks[0].completed == 5
    display.close()
