"""Benchmarks of a scripted server: what is asked, what is kept, what a kill, a dying or a full server leaves."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import benching
import killing
import pytest
from benching import LENGTH, card, good, lines, measure, options, results, serving, silent, tokens
from evaluating import PROMPTS, stream, write_rows
from servers import Say

from flashdraft.client import ServerError
from flashdraft.errors import ConfigError
from flashdraft.eval import bench_options, bench_run, figures
from flashdraft.eval.bench import Measured, _enough, run_bench
from flashdraft.eval.bench_prompts import Workload, Writer
from flashdraft.eval.run import Arm, Served

ROUND = 8  # requests


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than the rest; tests/eval/test_bench_results.py draws them."""
    monkeypatch.setattr(figures, "available", lambda: False)


def test_each_load_asks_both_arms_the_same_new_prompts_of_exact_length(tmp_path: Path) -> None:
    with serving() as server:
        assert run_bench(options(tmp_path / "out", server.url)) == 0
        bodies = server.bodies
    requests = lines(tmp_path / "out", "request")
    assert len(requests) == 2 * 2 * 2 * ROUND  # loads, rounds, arms
    assert len(bodies) == len(requests) + 2 * (1 + 2)  # the warm-up of each arm, as many at once as the load
    assert {tokens(body) for body in bodies} == {40}
    assert {(body["ignore_eos"], body["max_tokens"], body["temperature"]) for body in bodies} == {(True, LENGTH, 0.0)}
    asked = Counter((body["messages"][-1]["content"], body["speculation"]["enabled"]) for body in bodies)
    assert len({text for text, _ in asked}) == 2 * 2 * ROUND + 1 + 2
    assert len({text.split()[0] + text.split()[1] for text, _ in asked}) > 30  # no cache of prefixes helps
    turns = [(piece["load"], piece["round"], piece["arm"]) for piece in lines(tmp_path / "out", "piece")]
    on, off = "target", "target, not used"
    assert turns == [(n, r, arm) for n in (1, 2) for r in (0, 1) for arm in ((on, off), (off, on))[r]]
    found = results(tmp_path / "out")
    [workload] = found["workloads"]
    assert (found["complete"], found["left"], workload["name"]) == (True, 0, "40 tokens")
    for point in workload["points"]:
        assert point["acceptance"]["value"] == 3.0
        assert (point["prompt_tokens"], point["rounds"], point["stopped"], point["refused"]) == (40.0, 2, 0, 0)
        assert point["with"]["answers"] == point["without"]["answers"] == 2 * ROUND
        assert point["with"]["tokens"] == 2 * ROUND * LENGTH
        assert point["speedup"]["n"] == 2 * ROUND
        assert point["texts"] == {"compared": 2 * ROUND, "differing": 0}
    assert (workload["break_even"]["measured_to"], [p["load"] for p in workload["points"]]) == (2.0, [1, 2])
    assert "| 2 | alone | 16 | 40 |" in (tmp_path / "out" / "bench.md").read_text()


def test_what_is_there_is_not_asked_again_and_other_loads_join_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with serving() as server:
        assert run_bench(options(out, server.url)) == 0
        count = len(server.bodies)
        assert run_bench(options(out, server.url)) == 0
        assert len(server.bodies) == count
        assert run_bench(options(out, server.url, loads=(1, 2, 4))) == 0
        assert {piece["load"] for piece in lines(out, "piece")} == {1, 2, 4}
        assert len(server.bodies) == count + 2 * 4 + 2 * 2 * ROUND
        with pytest.raises(ConfigError, match=r"begun with other settings \(bench\)"):
            run_bench(options(out, server.url, settings={"max_tokens": 2}))


@pytest.mark.parametrize("at", [1, 12, 47])
def test_a_kill_keeps_the_rounds_that_were_whole(tmp_path: Path, at: int) -> None:
    pids: list[int] = []

    def say(body: dict[str, Any]) -> tuple[int, Any]:
        if len(server.bodies) == at and pids:
            os.kill(pids.pop(), signal.SIGKILL)
        return good(body)

    out = tmp_path / "out"
    with serving(say) as server:
        process = killing.FORKS.Process(target=measure, args=(str(out), server.url))
        process.start()
        assert process.pid is not None
        pids.append(process.pid)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        before = [piece["piece"] for piece in lines(out, "piece")]
        assert run_bench(options(out, server.url)) == 0
    pieces = lines(out, "piece")
    assert [piece["piece"] for piece in pieces][: len(before)] == before
    assert len(pieces) == len({(p["load"], p["arm"], p["round"]) for p in pieces}) == 8
    sizes = Counter(record["piece"] for record in lines(out, "request"))
    assert {sizes[piece["piece"]] for piece in pieces} == {ROUND}
    assert [p["with"]["answers"] for p in results(out)["workloads"][0]["points"]] == [2 * ROUND] * 2


@pytest.mark.parametrize(
    "end", [lambda body: (500, {"error": {"message": "out of memory"}}), lambda body: stream(["a"], finish=None)]
)
def test_a_server_that_dies_half_way_leaves_whole_rounds_and_exit_code_3(
    tmp_path: Path, end: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with serving(lambda body: good(body) if len(server.bodies) < 30 else end(body)) as server:
        assert run_bench(options(out, server.url)) == 3
    found = results(out)
    assert (found["complete"], found["left"]) == (False, 5)
    assert [p["with"]["answers"] for p in found["workloads"][0]["points"]] == [ROUND]
    assert "5 rounds missing" in " ".join(capsys.readouterr().err.split())
    assert "Not complete" in (out / "bench.md").read_text()
    with serving() as server:
        assert run_bench(options(out, server.url)) == 0
    assert results(out)["complete"]


def full(at: int) -> Say:
    """Of a server that takes fewer requests at once than `at`, by the warm-up's count."""

    def say(body: dict[str, Any]) -> tuple[int, Any]:
        seen.append(1)
        return good(body) if len(seen) < at else (429, {"error": {"message": "too many wait"}})

    seen: list[int] = []
    return say


def test_a_server_that_takes_no_more_is_named_and_what_there_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with serving(full(at=36)) as server, pytest.raises(ConfigError, match=r"no more requests at load 2 \(too many wait\)"):
        run_bench(options(out, server.url))
    assert [p["load"] for p in results(out)["workloads"][0]["points"]] == [1]


def test_a_sweep_ends_where_the_server_takes_no_more(tmp_path: Path) -> None:
    with serving(full(at=36)) as server:
        assert run_bench(options(tmp_path / "out", server.url, loads=None, sweep=True)) == 0
    [workload] = results(tmp_path / "out")["workloads"]
    assert workload["ended"] == "the server takes no more requests at 2 at once"
    assert [p["load"] for p in workload["points"]] == [1]


def test_a_sweep_ends_where_requests_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_run, "LOOK", 0.0001)
    monkeypatch.setattr("flashdraft.eval.bench.GROWTH", 0.0)  # as a busy machine may not let it grow
    queued = b"vllm:num_requests_running 2\nvllm:num_requests_waiting 1\n"
    with serving() as server:
        server.pages["/metrics"] = benching.OURS + queued
        assert run_bench(options(tmp_path / "out", server.url, loads=None, sweep=True, settings={"requests": 64})) == 0
    [workload] = results(tmp_path / "out")["workloads"]
    assert workload["ended"] == "the server runs 2 requests at once, the others wait"
    assert workload["points"][-1] | {"load": 4, "at_once": 2} == workload["points"][-1]
    assert "at load 4 the server ran 2 at once" in (tmp_path / "out" / "bench.md").read_text()


@pytest.mark.parametrize(
    ("rates", "limit", "said"),
    [
        ([100, 200, 205], None, "tokens/s grew by less than 5 % from 2 to 4 at once"),
        ([100, 200, 400], 4, "the server runs 4 requests at once"),
        ([100, 200, 400], 8, None),
        ([100], None, None),
    ],
)
def test_a_sweep_goes_on_while_either_arm_gains(tmp_path: Path, rates: list[int], limit: int | None, said: str | None) -> None:
    arms, log = [Arm("d", "draft"), Arm("d", "none")], bench_run.BenchLog(tmp_path)
    for power, rate in enumerate(rates):
        for arm in arms:
            piece = {
                "kind": "piece",
                "piece": f"{power}",
                "workload": "40 tokens",
                "load": 2**power,
                "arm": arm.name,
                "round": 0,
            }
            log.add(piece | {"tokens": rate, "seconds": 1.0, "running": None, "waiting": None})
    m = Measured([Workload(40)], arms, log, limit)
    assert _enough(options(tmp_path, None), m, Workload(40), 2 ** (len(rates) - 1)) == said
    assert _enough(options(tmp_path, None), m, Workload(40), 64) == ""  # not measured yet


def test_a_server_without_statistics_has_no_acceptance_and_it_is_said(tmp_path: Path) -> None:
    with serving(silent) as server:
        assert run_bench(options(tmp_path / "out", server.url)) == 0
    assert [p["acceptance"] for p in results(tmp_path / "out")["workloads"][0]["points"]] == [None, None]
    assert "the server says nothing of its speculation" in (tmp_path / "out" / "bench.md").read_text()


def test_a_server_that_does_not_count_tokens_gets_lengths_that_are_near(tmp_path: Path) -> None:
    with serving(counts=False) as server:
        assert run_bench(options(tmp_path / "out", server.url, prompt_tokens=(200,))) == 0
    for point in results(tmp_path / "out")["workloads"][0]["points"]:
        assert 180 < point["prompt_tokens"] < 220
    assert "prompts had" in (tmp_path / "out" / "bench.md").read_text()


def test_a_suite_is_asked_by_its_first_turns_and_a_refused_prompt_is_counted(tmp_path: Path) -> None:
    suite = write_rows(tmp_path / "s.jsonl")

    def say(body: dict[str, Any]) -> tuple[int, Any]:
        return (400, {"error": {"message": "no"}}) if body["messages"][-1]["content"] == "six" else good(body)

    with serving(say) as server:
        given = options(tmp_path / "out", server.url, prompts=str(suite), prompt_tokens=None, loads=(1,))
        assert run_bench(given) == 0
        assert not any("ignore_eos" in body for body in server.bodies)
        assert {body["messages"][-1]["content"] for body in server.bodies} == {row["turns"][0] for row in PROMPTS}
    [point] = results(tmp_path / "out")["workloads"][0]["points"]
    assert (point["refused"], point["with"]["answers"]) == (2 * 2 * ROUND // len(PROMPTS), 2 * ROUND * 3 // 4)


@pytest.mark.parametrize("settings", [{"seconds": 0.3}, {"by_rate": True, "requests": 5}])
def test_rounds_of_a_time_and_at_a_rate(tmp_path: Path, settings: dict[str, Any]) -> None:
    with serving() as server:
        given = options(tmp_path / "out", server.url, loads=(50.0 if "by_rate" in settings else 2,), settings=settings)
        assert run_bench(given) == 0
    pieces = lines(tmp_path / "out", "piece")
    [workload] = results(tmp_path / "out")["workloads"]
    assert len(pieces) == 4
    if "by_rate" in settings:
        assert [piece["answers"] for piece in pieces] == [5] * 4
        assert workload["break_even"] is None
    else:
        assert all(piece["answers"] and piece["seconds"] >= 0.25 for piece in pieces)


def test_random_arrivals_are_the_same_for_all_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(bench_run.time, "sleep", slept.append)
    monkeypatch.setattr(bench_run.time, "perf_counter", lambda: 0.0)
    bench = bench_run.Bench(None, bench_run.Settings(4, by_rate=True), print)  # type: ignore[arg-type]
    questions: list[Any] = list(range(2000))
    assert list(bench._paced(questions, 4.0, 0)) == questions
    first, slept[:] = list(slept), []
    list(bench._paced(questions, 4.0, 0))
    assert first == slept
    assert first[-1] / 1999 == pytest.approx(1 / 4, rel=0.1)


@pytest.mark.parametrize("share", ["404", "400"])
def test_a_model_or_length_that_the_server_refuses_is_one_sentence(tmp_path: Path, share: str) -> None:
    with (
        serving(lambda body: (int(share), {"error": {"message": "there is no such thing"}})) as server,
        pytest.raises((ServerError, ConfigError), match="there is no such thing"),
    ):
        run_bench(options(tmp_path / "out", server.url, model="other"))


@pytest.mark.parametrize(
    ("page", "given", "said"),
    [
        (
            card(max_model_len=100),
            {"prompt_tokens": (97,)},
            "--prompt-tokens 97 and --max-tokens 4 do not fit into the 100 tokens",
        ),
        (card(max_model_len=4), {"prompts": "mini", "prompt_tokens": None}, "--max-tokens 4 do not fit into the 4 tokens"),
        (card(num_speculative_tokens=0), {}, "serves its target without a draft, so that there is nothing to compare"),
        (card(), {"prompt_tokens": (10,)}, "too short: the chat template alone takes 10 tokens"),
    ],
)
def test_what_cannot_be_measured_there_is_said(tmp_path: Path, page: bytes, given: dict[str, Any], said: str) -> None:
    with serving() as server:
        server.pages["/v1/models"] = page
        with pytest.raises(ConfigError, match=said):
            run_bench(options(tmp_path / "out", server.url, **given))
        assert server.bodies == []


def test_a_sweep_leaves_out_lengths_that_nobody_asked_for_and_that_do_not_fit() -> None:
    given = options(Path("x"), "http://localhost", prompt_tokens=None, loads=None, sweep=True)
    usual = bench_options.workloads_of(given, None)
    with serving() as server:
        server.pages["/v1/models"] = card(max_model_len=2048)
        served = Served.at(bench_options.Client(server.url), None)
        assert [w.name for w in bench_options.fitting(given, usual, [served])] == ["mini", "128 tokens", "1024 tokens"]
    assert [w.name for w in usual][-1] == "4096 tokens"


def test_a_server_that_cannot_leave_its_draft_out_needs_a_baseline(tmp_path: Path) -> None:
    with serving(ours=False) as server, serving(ours=False) as other:
        with pytest.raises(ConfigError, match=r"cannot leave its draft out for a request: give --baseline .*--no-compare"):
            run_bench(options(tmp_path / "out", server.url))
        with pytest.raises(ConfigError, match="the same server"):
            run_bench(options(tmp_path / "out", server.url, baseline=f"{server.url}/v1/"))
        assert run_bench(options(tmp_path / "with", server.url, baseline=other.url)) == 0
        assert len(server.bodies) == len(other.bodies) == 2 * 2 * ROUND + 1 + 2
        assert run_bench(options(tmp_path / "one", server.url, compare=False)) == 0
    assert results(tmp_path / "with")["workloads"][0]["points"][0]["speedup"]["n"] == 2 * ROUND
    assert results(tmp_path / "one")["workloads"][0]["points"][0]["without"] is None


@pytest.mark.parametrize(("bound", "code"), [(0.0001, 0), (1000.0, 1)])
def test_a_gate_decides_the_exit_code(tmp_path: Path, bound: float, code: int) -> None:
    with serving() as server:
        assert run_bench(options(tmp_path / "out", server.url, loads=(1,), min_speedup=bound)) == code
    assert [gate["passed"] for gate in results(tmp_path / "out")["gates"]] == [not code]


@pytest.mark.parametrize("length", [17, 64, 333])
def test_random_prompts_have_the_length_asked_for_and_another_seed_other_words(length: int) -> None:
    with serving() as server:
        served = Served.at(bench_options.Client(server.url), None)
        texts = [Writer(served, seed).text(length, "0") for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert [tokens({"messages": [{"content": text}]}) for text in texts] == [length] * 3
