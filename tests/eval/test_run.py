"""Runs against a scripted server: what is asked, what is kept, what a kill or a dying server leaves."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import killing
import pytest
from evaluating import PROMPTS, answers, evaluate, options, results, stream, write_rows
from reporting import answer, piece
from servers import Say, serving

from flashdraft.client import ServerError
from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.eval import run
from flashdraft.eval.command import run_eval
from flashdraft.eval.local import weight_bytes
from flashdraft.eval.readable import readable
from flashdraft.eval.records import Log, identity

OURS = b"flashdraft:engine_steps_total 1.0\n"
TURNS = sum(len(row["turns"]) for row in PROMPTS)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PAUSE", 0.001)


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "suite.jsonl")


def good(body: dict[str, Any]) -> tuple[int, Any]:
    words = ["<think>hm</think>\n\n", f"{body['messages'][-1]['content']} ", "and ", "so ", "on"]
    return stream(words, *([(2, 3)] if body.get("speculation", {}).get("enabled", True) else [(0, 0)] * 3))


def test_every_turn_is_asked_once_an_arm_and_the_second_sees_the_first_answer_alone(tmp_path: Path, suite: Path) -> None:
    with serving(good) as server:
        server.pages["/metrics"] = OURS
        assert run_eval(options(suite, tmp_path / "out", server.url, concurrency=2, settings={"thinking": True})) == 0
        asked = [body for body in server.bodies if body["max_tokens"] == 16]
        assert len(server.bodies) == len(asked) + 2  # the warm-up of both arms
    keys = Counter(identity(record) for record in answers(tmp_path / "out"))
    assert len(keys) == len(asked) == 2 * TURNS
    assert set(keys.values()) == {1}
    assert {body["chat_template_kwargs"]["enable_thinking"] for body in asked} == {True}
    seconds = [body["messages"] for body in asked if len(body["messages"]) == 3 and body["messages"][0]["content"] == "one"]
    assert [messages[1] for messages in seconds] == [{"role": "assistant", "content": "one and so on"}] * 2
    by_arm = [{b["seed"] for b in asked if b["speculation"]["enabled"] is on} for on in (True, False)]
    assert by_arm[0] == by_arm[1]
    found = results(tmp_path / "out")
    [draft] = found["drafts"]
    assert found["complete"]
    assert draft["acceptance"]["all"]["request_mean"]["value"] == 3.0
    assert draft["acceptance"]["positions"]["joint"][:3] == [1.0, 1.0, 0.0]
    assert (draft["texts"], draft["answers"]["count"]) == ({"compared": TURNS, "differing": 0}, TURNS)
    assert set(draft["by_category"]) == {"math", "coding"}
    assert "| all | 6 | 0 | 30 | 3.00 |" in (tmp_path / "out" / "results.md").read_text()


@pytest.mark.parametrize("at", [1, 2, 4, 7, 9, 11])
def test_a_kill_loses_nothing_that_was_kept_and_counts_nothing_twice(tmp_path: Path, suite: Path, at: int) -> None:
    pids: list[int] = []

    def say(body: dict[str, Any]) -> tuple[int, Any]:
        if body["max_tokens"] == 16 and len([b for b in server.bodies if b["max_tokens"] == 16]) == at and pids:
            os.kill(pids.pop(), signal.SIGKILL)
        return good(body)

    out = tmp_path / "out"
    with serving(say) as server:
        server.pages["/metrics"] = OURS
        process = killing.FORKS.Process(target=evaluate, args=(str(suite), str(out), server.url))
        process.start()
        assert process.pid is not None
        pids.append(process.pid)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        kept = [identity(record) for record in answers(out)]
        server.bodies.clear()
        assert run_eval(options(suite, out, server.url, concurrency=2)) == 0
        assert len([body for body in server.bodies if body["max_tokens"] == 16]) == 2 * TURNS - len(kept)
    keys = [identity(record) for record in answers(out)]
    assert keys[: len(kept)] == kept
    assert len(keys) == len(set(keys)) == 2 * TURNS
    found = results(out)
    timed = {json.loads(line)["piece"] for line in (out / "answers.jsonl").read_text().splitlines() if '"piece", ' in line[:20]}
    assert found["complete"]
    assert found["drafts"][0]["speed"]["interrupted"] == sum(record["piece"] not in timed for record in answers(out))


def test_a_busy_machine_is_looked_at_only_where_something_is_left_to_ask(tmp_path: Path, suite: Path) -> None:
    asked: list[str] = []
    with serving(good) as server:
        given = options(suite, tmp_path / "out", server.url)
        for _ in range(2):
            assert run_eval(given, before=lambda: asked.append("looked")) == 0
    assert asked == ["looked"]


def test_only_weights_that_are_loaded_are_counted(tmp_path: Path) -> None:
    for name, size in (("model.safetensors", 10), ("other.safetensors", 3), ("a-1.safetensors", 5), ("a-2.safetensors", 6)):
        (tmp_path / name).write_bytes(b"x" * size)
    index = {"weight_map": {"x": "a-1.safetensors", "y": "a-2.safetensors", "z": "a-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_bytes(str(tmp_path)) == 10
    assert weight_bytes(str(tmp_path / "other.safetensors")) == 3
    (tmp_path / "model.safetensors").unlink()
    assert weight_bytes(str(tmp_path)) == 11
    assert weight_bytes("org/name") is None


def test_settings_are_shown_in_words() -> None:
    given = {"thinking": None, "top_p": None, "max_tokens": 4096, "temperature": 0.0, "sweep": False, "seed": 1234567}
    given |= {"serve": ["--lora", "a b"], "draft_hashes": {"d": "ab"}, "draft_bytes": {"d": 2_000_000, "e": None}}
    given |= {"started": "2026-11-30T15:16:54+0000", "device": "a GPU", "by_rate": True}
    assert dict(readable(given)) == {
        "thinking": "as the chat template has it",
        "longest answer, tokens": "4,096",
        "temperature": "0 (greedy)",
        "sweep of the concurrency": "no",
        "seed": "1234567",
        "options of the server": "--lora 'a b'",
        "hash of each draft's files": "d: ab",
        "weights of each draft": "d: 2.0 MB",
        "started": "2026-11-30 15:16, UTC+0000",
        "device": "a GPU",
        "load in requests a second": "yes",
    }


def test_a_half_line_is_dropped_wherever_it_was_cut(tmp_path: Path) -> None:
    record = answer(run.Arm("a", "draft"), "p", [(0, 1)], id="é", text="")
    log = Log(tmp_path)
    for turn in range(3):
        log.add({**record, "turn": turn})
    log.close()
    content = log.path.read_bytes()
    for cut in range(len(content)):
        log.path.write_bytes(content[:cut])
        log = Log(tmp_path)
        whole = content[:cut].count(b"\n")
        assert [key[3] for key in log.answers] == list(range(whole))
        log.add({**record, "turn": 7})
        log.close()
        assert [json.loads(line)["turn"] for line in log.path.read_text().splitlines()] == [*range(whole), 7]


def test_a_broken_line_before_the_last_is_named(tmp_path: Path) -> None:
    line = json.dumps(piece(run.Arm("a", "draft"), 1, 1))
    (tmp_path / "answers.jsonl").write_text(f'{line}\n{{"kind"\n{line}\n')
    with pytest.raises(CheckpointError, match=r"answers\.jsonl, line 2: not a record"):
        Log(tmp_path)


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [{"delta": {"content": 5}}]},
        {"choices": [7]},
        {"usage": {"completion_tokens": "many"}},
        {"metrics": {"speculative_decoding": {"per_step_accepted": [1, 2], "per_step_drafted": [3]}}},
        {"choices": [], "metrics": {"speculative_decoding": {"num_spec_steps": 2, "num_accepted_draft_tokens": "x"}}},
    ],
)
def test_an_event_that_makes_no_sense_is_an_error_of_the_server(tmp_path: Path, suite: Path, event: Any) -> None:
    content = b"data: " + json.dumps(event).encode() + b"\n\n" + stream(["a"])[1]
    with serving(lambda body: (200, content)) as server, pytest.raises(ServerError, match="none of a chat completion"):
        run_eval(options(suite, tmp_path / "out", server.url))


def test_half_a_character_is_kept_as_it_came(tmp_path: Path, suite: Path) -> None:
    with serving(lambda body: stream(["\ud800", "b"])) as server:
        assert run_eval(options(suite, tmp_path / "out", server.url)) == 0
    assert {record["text"] for record in answers(tmp_path / "out")} == {"\ud800b"}


def broken(body: dict[str, Any]) -> tuple[int, Any]:
    return stream(["half"], finish=None)


@pytest.mark.parametrize("end", [lambda body: (500, {"error": {"message": "out of memory"}}), broken, lambda body: (401, {})])
def test_a_server_that_dies_half_way_leaves_what_it_said_and_exit_code_3(
    tmp_path: Path, suite: Path, end: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with serving(lambda body: good(body) if len(server.bodies) < 5 else end(body)) as server:
        assert run_eval(options(suite, out, server.url)) == 3
    assert len(answers(out)) == 3  # and the warm-up
    found = results(out)
    assert (found["complete"], found["left"], found["drafts"][0]["answers"]["count"]) == (False, TURNS - 3, 3)
    assert f"{TURNS - 3} answers are missing" in " ".join(capsys.readouterr().err.split())
    assert "Not complete" in (out / "results.md").read_text()
    with serving(good) as server:
        with pytest.raises(ConfigError, match=r"begun with other settings \(settings\)"):
            run_eval(options(suite, out, server.url, settings={"temperature": 0.5}))
        assert run_eval(options(suite, out, server.url)) == 0
        assert len(server.bodies) == TURNS - 3 + 1
    assert results(out)["complete"]


def test_a_server_that_was_never_there_is_an_error_of_the_command(tmp_path: Path, suite: Path) -> None:
    with serving(lambda body: (503, {"error": "loading"})) as server, pytest.raises(ServerError, match="503"):
        run_eval(options(suite, tmp_path / "out", server.url))


def test_what_may_pass_is_asked_again(tmp_path: Path, suite: Path) -> None:
    with serving(lambda body: good(body) if len(server.bodies) % 3 else (429, {"error": "busy"})) as server:
        assert run_eval(options(suite, tmp_path / "out", server.url)) == 0
    assert len(answers(tmp_path / "out")) == TURNS


def test_a_refused_prompt_is_counted_and_asked_again_by_the_next_start(tmp_path: Path, suite: Path) -> None:
    def say(body: dict[str, Any]) -> tuple[int, Any]:
        return (400, {"error": {"message": "too long"}}) if body["messages"][-1]["content"] == "one" and tight else good(body)

    out, tight = tmp_path / "out", True
    with serving(say) as server:
        assert run_eval(options(suite, out, server.url)) == 0
        [draft] = results(out)["drafts"]
        assert (draft["answers"]["refused"], draft["answers"]["count"]) == (1, TURNS - 2)  # its second turn has no first
        assert draft["refusals"] == [{"id": "a", "turn": 0, "reason": "too long"}]
        tight = False
        assert run_eval(options(suite, out, server.url)) == 0
    [draft] = results(out)["drafts"]
    assert (draft["answers"]["refused"], draft["answers"]["count"]) == (0, TURNS)


def test_a_server_that_refuses_everything_is_an_error(tmp_path: Path, suite: Path) -> None:
    with (
        serving(lambda body: (400, {"error": {"message": "no such field"}})) as server,
        pytest.raises(ConfigError, match="every request was refused: no such field"),
    ):
        run_eval(options(suite, tmp_path / "out", server.url))


def test_token_ids_are_not_asked_for_where_they_are_refused(tmp_path: Path, suite: Path) -> None:
    def say(body: dict[str, Any]) -> tuple[int, Any]:
        return (400, {"error": {"message": "unknown field return_token_ids"}}) if "return_token_ids" in body else good(body)

    with serving(say) as server:
        assert run_eval(options(suite, tmp_path / "out", server.url)) == 0
        assert sum("return_token_ids" in body for body in server.bodies) == 1


def test_equal_prompts_are_samples_of_one(tmp_path: Path) -> None:
    suite = write_rows(tmp_path / "s.jsonl", [{"turns": ["Same"]}, {"turns": ["same "]}, {"turns": ["other"]}])
    with serving(good) as server:
        assert run_eval(options(suite, tmp_path / "out", server.url, settings={"samples": 2})) == 0
        seeds = [body["seed"] for body in server.bodies if body["max_tokens"] == 16]
    found = [identity(record) for record in answers(tmp_path / "out")]
    assert Counter(sample for _, _, sample, _ in found) == {0: 2, 1: 2, 2: 1, 3: 1}
    assert len(set(seeds)) == 6
