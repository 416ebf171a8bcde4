"""What is concluded from records: statistics or none, loops, one-token answers, gates, baselines."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from evaluating import PROMPTS, options, results, stream, write_rows
from servers import serving

from flashdraft.errors import ConfigError
from flashdraft.eval.command import Options, _of_pair, run_eval
from flashdraft.eval.records import Log
from flashdraft.eval.reply import from_steps
from flashdraft.eval.results import gather
from flashdraft.eval.run import Settings
from flashdraft.eval.suites import load_suite

TURNS = sum(len(row["turns"]) for row in PROMPTS)
WORDS = ["a ", "b ", "c ", "d"]
VLLM = (
    "vllm:spec_decode_num_drafts_total %d\nvllm:spec_decode_num_draft_tokens_total %d\n"
    "vllm:spec_decode_num_accepted_tokens_total %d\n"
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} %d\n'
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"} %d\n'
)


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "suite.jsonl")


def test_a_server_without_statistics_has_no_acceptance_length_however_its_chunks_come(
    tmp_path: Path, suite: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(lambda body: stream(["a b c d e f"], usage={"completion_tokens": 6})) as server:
        assert run_eval(options(suite, tmp_path / "out", server.url)) == 0
        [draft] = results(tmp_path / "out")["drafts"]
        assert (draft["statistics"], draft["acceptance"]) == (None, None)
        assert "says nothing of its speculation" in draft["note"]
        assert draft["by_category"]["math"]["request_mean"] is None
        assert "says nothing of its speculation" in capsys.readouterr().out
        with pytest.raises(ConfigError, match="--min-al 2 cannot be judged"):
            run_eval(options(suite, tmp_path / "out", server.url, min_al=2.0))
        with pytest.raises(ConfigError, match="give --baseline"):
            run_eval(options(suite, tmp_path / "out", server.url, min_speedup=1.0))


def test_counters_stand_in_where_requests_say_nothing(tmp_path: Path, suite: Path) -> None:
    def say(body: dict[str, Any]) -> tuple[int, Any]:
        n = len(server.bodies)  # each answer: two drafts of two proposals, both accepted in one of them
        server.pages["/metrics"] = (VLLM % (2 * n, 4 * n, 2 * n, n, n)).encode()
        return stream(WORDS)

    with serving(say) as server:
        server.pages["/metrics"] = (VLLM % (0, 0, 0, 0, 0)).encode()
        assert run_eval(options(suite, tmp_path / "out", server.url, min_al=2.1)) == 1
    found = results(tmp_path / "out")
    [draft] = found["drafts"]
    assert draft["statistics"] == "counters"
    assert draft["counters"]["drafts"] == 2 * TURNS  # not those of the warm-up
    assert draft["acceptance"]["all"]["step_pooled"]["value"] == 2.0
    assert draft["acceptance"]["all"]["tokens_over_steps"]["value"] == 4 * TURNS / (2 * TURNS)
    assert draft["acceptance"]["all"]["request_mean"] is None
    assert draft["acceptance"]["positions"]["joint"] == [0.5, 0.5]
    assert found["gates"] == [{"draft": "target", "gate": "min_al", "bound": 2.1, "value": 2.0, "passed": False}]


def test_loops_and_answers_of_one_token_are_counted_and_told_apart(tmp_path: Path, suite: Path) -> None:
    def say(body: dict[str, Any]) -> tuple[int, Any]:
        text = body["messages"][-1]["content"]
        if text == "three":
            return stream(["again "] * 41, *[(7, 7)] * 5)  # the first token, and five steps of eight
        if text == "six":
            return stream([], usage={"completion_tokens": 1})
        return stream(WORDS, (1, 7), (0, 7))

    with serving(say) as server:
        assert run_eval(options(suite, tmp_path / "out", server.url)) == 0
    [draft] = results(tmp_path / "out")["drafts"]
    count = draft["answers"]
    assert (count["count"], count["looping"], count["one_token"]) == (TURNS, 1, 1)
    assert [row["id"] for row in draft["looping"]] == ["b"]
    lengths = draft["acceptance"]
    assert lengths["all"]["request_mean"]["value"] == pytest.approx((1.5 + 1.5 + 8) / 3)
    assert lengths["without_loops"]["request_mean"]["value"] == 1.5
    assert draft["by_category"]["math"]["answers"]["looping"] == 1


@pytest.mark.parametrize(("bound", "code"), [(2.9, 0), (3.1, 1)])
def test_a_gate_decides_the_exit_code(tmp_path: Path, suite: Path, bound: float, code: int) -> None:
    with serving(lambda body: stream(WORDS, (2, 7))) as server:
        assert run_eval(options(suite, tmp_path / "out", server.url, min_al=bound)) == code


def test_a_baseline_is_the_other_arm(tmp_path: Path, suite: Path) -> None:
    with (
        serving(lambda body: stream(WORDS, (2, 7)), models=("with",)) as server,
        serving(lambda body: stream([*WORDS, "e"]), models=("without",)) as plain,
    ):
        assert run_eval(options(suite, tmp_path / "out", server.url, baseline=plain.url)) == 0
        assert {body["model"] for body in plain.bodies} == {"without"}
        assert len(plain.bodies) == len(server.bodies) == TURNS + 1
    [draft] = results(tmp_path / "out")["drafts"]
    assert draft["speed"]["without"]["tokens"] == 5 * TURNS
    assert draft["speed"]["speedup"]["n"] == len(PROMPTS)
    assert draft["texts"] == {"compared": len(PROMPTS), "differing": len(PROMPTS)}


def test_acceptance_of_a_local_pair_has_an_arm_of_its_own(tmp_path: Path) -> None:
    given = Options("mini", Settings(16, concurrency=4), tmp_path, target="t", drafts=("a", "b"))
    stages = _of_pair(given, load_suite("mini"))
    assert [[(arm.draft, arm.kind) for arm in stage.arms] for stage in stages] == [
        [("a", "pinned")],
        [("a", "draft"), ("a", "none")],
        [("b", "pinned")],
        [("b", "draft"), ("b", "none")],
    ]
    common = ("t", "--draft", "a", "--max-num-seqs", "4")
    assert [stage.arguments for stage in stages[:2]] == [(*common, "--no-adaptive-width"), common]
    log = Log(tmp_path)
    for number, arm in enumerate(arm for stage in stages[:2] for arm in stage.arms):
        fields = {"prompt": "p", "sample": 0, "turn": 0, "id": "1", "category": "c", "tokens": 9, "seconds": 1.0 + number}
        fields |= {
            "first": 0.5,
            "last": 1.0,
            "repetition": 0.0,
            "finish_reason": "stop",
            "prompt_tokens": 3,
            "text": "t",
            "piece": "x",
        }
        fields |= {"thinking_tokens": None, "speculation": asdict(from_steps([3 - number], [7], 7))}
        log.add({"kind": "answer", "arm": arm.name, **fields})
    log.close()
    [draft] = gather(log, [arm for stage in stages[:2] for arm in stage.arms])
    assert draft["acceptance"]["all"]["request_mean"]["value"] == 4.0  # of the pinned arm
    assert draft["speed"]["speedup"]["value"] == pytest.approx(3.0 / 2.0)  # of the other two
