"""Damaged records and reports, servers that count nonsense, options that are no values: a sentence, never a traceback."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import benching
import evaluating
import pytest
import reporting
from evaluating import stream
from servers import serving
from typer.testing import CliRunner

from flashdraft import cli
from flashdraft.cli import app
from flashdraft.client import ServerError
from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.eval import counters, display, figures, results, run
from flashdraft.eval.bench import run_bench
from flashdraft.eval.bench_run import BenchLog
from flashdraft.eval.command import run_eval
from flashdraft.eval.difference_display import show
from flashdraft.eval.difference_runs import compare, read_run
from flashdraft.eval.page import in_markdown, plain
from flashdraft.eval.records import Log
from flashdraft.eval.reply import Reply, from_steps, sglang, vllm
from flashdraft.eval.run import Arm

DRAFT = Arm("d", "draft")
ANSWER = reporting.answer(DRAFT, "p", [(2, 3)])
PIECE = reporting.piece(DRAFT, 1, 4)


def changed(record: dict[str, Any], *path: str, to: Any) -> dict[str, Any]:
    found = deepcopy(record)
    holder = found
    for name in path[:-1]:
        holder = holder[name]
    holder[path[-1]] = to
    return found


BROKEN = [
    {"kind": "answer", "arm": "d", "prompt": "p", "sample": 0, "turn": 0},  # the rest is gone
    changed(ANSWER, "tokens", to="4"),
    changed(ANSWER, "tokens", to=-1),
    changed(ANSWER, "seconds", to=float("nan")),
    changed(ANSWER, "last", to=None),
    changed(ANSWER, "category", to=None),
    changed(ANSWER, "speculation", to=5),
    changed(ANSWER, "speculation", "steps", to=float("inf")),
    changed(ANSWER, "speculation", "drafted_per_step", to=[3, 3]),
    changed(ANSWER, "speculation", "histogram", to=["1"]),
    {"kind": "piece", "arm": "d"},
    changed(PIECE, "seconds", to="3"),
    changed(PIECE, "counters", to={"engine": "vllm", "drafts": 1.0}),
    changed(PIECE, "counters", to={"engine": "another"}),
    [],
]


@pytest.mark.parametrize("record", BROKEN, ids=range(len(BROKEN)))
def test_a_record_with_a_field_gone_or_wrong_is_named_by_its_line(tmp_path: Path, record: Any) -> None:
    (tmp_path / "answers.jsonl").write_text(f"{json.dumps(ANSWER)}\n{json.dumps(record)}\n{json.dumps(PIECE)}\n")
    with pytest.raises(CheckpointError, match=r"answers\.jsonl, line 2: not a record"):
        Log(tmp_path)
    bench = changed(record, "kind", to="request") if record and record["kind"] == "answer" else record
    (tmp_path / "requests.jsonl").write_text(f"{json.dumps(bench)}\n")
    with pytest.raises(CheckpointError, match=r"requests\.jsonl, line 1: not a record"):
        BenchLog(tmp_path)


def test_a_record_with_fields_of_a_later_version_is_one(tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text(f"{json.dumps(ANSWER | {'new': 1})}\n{json.dumps(PIECE | {'new': None})}\n")
    log = Log(tmp_path)
    log.close()
    assert len(log.answers) == len(log.pieces) == 1


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "NaN": lambda found: found["drafts"][0]["conversations"][0].update(committed=float("nan")),
    "no number": lambda found: found["drafts"][0]["conversations"][0].update(committed="3"),
    "too large": lambda found: found["drafts"][0]["conversations"][0].update(committed=10**400),
    "overflows": lambda found: [row.update(committed=1e308) for row in found["drafts"][0]["conversations"]],
    "no texts": lambda found: found["drafts"][0]["conversations"][0].update(category=None),
    "another kind": lambda found: found["drafts"][0].update(conversations={"a": 1}),
    "a name": lambda found: found["drafts"][0].update(name=7),
    "speed": lambda found: found["drafts"][0].update(speed=None),
}


@pytest.mark.parametrize("damage", WRONG.values(), ids=WRONG)
def test_results_with_figures_that_cannot_be_are_refused(tmp_path: Path, damage: Callable[[dict[str, Any]], Any]) -> None:
    records = [record for name in "pq" for record in reporting.pair("d", name, [(2, 3)])]
    found = reporting.run(tmp_path / "a", records)
    damage(found)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "results.json").write_text(json.dumps(found))
    with pytest.raises(CheckpointError, match="by an earlier version or by another program"):
        compare(read_run(tmp_path / "a"), read_run(tmp_path / "b"))


@pytest.mark.parametrize("part", ["suite", "settings", "pair"])
def test_answers_are_compared_beside_a_run_json_of_other_kinds(tmp_path: Path, part: str) -> None:
    for name in "ab":
        reporting.run(tmp_path / name, reporting.pair("d", "p", [(2, 3)]))
    (tmp_path / "b" / "results.json").unlink()
    (tmp_path / "b" / "run.json").write_text(json.dumps({part: [1]}))
    found = compare(read_run(tmp_path / "a"), read_run(tmp_path / "b"))
    show(found)
    assert found["drafts"][0]["acceptance"]["request_mean"]["value"] == 0


IMPOSSIBLE = [
    {"per_step_accepted": [4], "per_step_drafted": [3]},
    {"per_step_accepted": [-1], "per_step_drafted": [3]},
    {"per_step_accepted": [1], "per_step_drafted": [3], "num_spec_tokens": 10**8},  # would be a histogram of a gigabyte
    {"num_spec_steps": -1, "num_accepted_draft_tokens": 3},
    {"num_spec_steps": 10**400, "num_accepted_draft_tokens": 3},
    {"num_spec_steps": float("inf"), "num_accepted_draft_tokens": 3},
    {"num_spec_steps": 1, "num_accepted_draft_tokens": 3, "acceptance_histogram": [-5]},
]


@pytest.mark.parametrize("said", IMPOSSIBLE, ids=range(len(IMPOSSIBLE)))
def test_statistics_that_cannot_be_are_an_error_of_the_server(said: dict[str, Any]) -> None:
    with pytest.raises(ServerError, match="none of a chat completion"):
        Reply().take({"metrics": {"speculative_decoding": said}}, 0.0)


def test_usage_that_cannot_be_is_an_error_of_the_server() -> None:
    for usage in ({"completion_tokens": 10**400}, {"completion_tokens": 2.5}, {"prompt_tokens": -1}):
        with pytest.raises(ServerError, match="none of a chat completion"):
            Reply().take({"usage": usage}, 0.0)


def test_statistics_that_can_be_are_read() -> None:
    assert from_steps([0, 3], [3, 3], 3).histogram == [1, 0, 0, 1]
    found = vllm({"num_spec_steps": 2, "num_accepted_draft_tokens": 3, "acceptance_histogram": [1, 0, 0, 1]})
    assert found is not None
    assert (found.steps, found.accepted, found.histogram) == (2, 3, [1, 0, 0, 1])
    other = sglang({"spec_verify_ct": 2, "spec_accept_token_num": 3, "spec_accept_histogram": [1, 0, 0, 1]})
    assert other is not None
    assert (other.steps, other.accepted, other.histogram) == (2, 3, [1, 0, 0, 1])


def test_counters_without_end_are_no_counters() -> None:
    text = "vllm:spec_decode_num_drafts_total 2\nvllm:spec_decode_num_accepted_tokens_total +Inf\n"
    text += 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="99999999999"} 3\n'
    found = counters.read(text)
    assert found == {"engine": "vllm", "drafts": 2.0, "accepted": 0.0, "draft_tokens": 0.0, "per_position": []}
    assert counters.queued("vllm:num_requests_running +Inf\nvllm:num_requests_waiting 1\n") == (0, 1)


def test_a_run_that_went_on_with_another_engine_counts_the_first_alone(tmp_path: Path) -> None:
    vllm_ = {"engine": "vllm", "drafts": 2.0, "accepted": 3.0, "draft_tokens": 6.0, "per_position": [2.0, 1.0, 0.0]}
    pieces = [
        reporting.piece(DRAFT, 1, 6, vllm_),
        reporting.piece(DRAFT, 1, 6, {"engine": "sglang", "drafts": 1.0, "tokens": 6.0}),
    ]
    found = reporting.run(tmp_path, [*(reporting.answer(DRAFT, name, None, tokens=6) for name in "pq"), *pieces])
    assert found["drafts"][0]["acceptance"]["all"]["step_pooled"]["value"] == 2.5
    assert found["drafts"][0]["note"] == f"{results.COUNTED}; they cover 1 of 2 answers"


@pytest.mark.parametrize("error", [ImportError("no"), AttributeError("_ARRAY_API not found")], ids=["none", "another numpy's"])
def test_without_a_matplotlib_that_works_there_are_no_plots(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(name: str, *others: Any) -> Any:
        if name == "matplotlib.figure":
            raise error
        return whole(name, *others)

    whole = builtins.__import__
    assert figures.available()
    monkeypatch.setattr(builtins, "__import__", refuse)
    assert not figures.available()


NAME = "a|b\n# c <img src=x> `d` [e](f) \x1b[31m\ud800"


def test_names_stay_names_in_markdown_and_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_markdown(NAME) == r"a\|b # c \<img src=x> \`d\` \[e](f) �\[31m�"
    assert plain(NAME) == "a|b # c <img src=x> `d` [e](f) �[31m�"
    found = reporting.run(tmp_path, reporting.pair(NAME, "p", [(2, 3)], category=NAME), [NAME])
    found["provenance"]["model"] = NAME
    text = display.markdown(found)
    assert "<img" not in text.replace("\\<img", "")
    assert "\n# c" not in text
    assert "\x1b" not in text
    assert f"| model | {in_markdown(NAME)} |" in text.splitlines()
    display.show(found)
    assert "\x1b" not in capsys.readouterr().out


def test_a_benchmark_of_a_file_whose_name_is_no_unicode_is_written(tmp_path: Path) -> None:
    suite = tmp_path / "s\udcff.jsonl"
    suite.write_text('{"prompt": "hi"}\n')
    with benching.serving() as server:
        run_bench(benching.options(tmp_path / "out", server.url, prompts=str(suite), prompt_tokens=None, loads=(1,)))
    assert benching.results(tmp_path / "out")["workloads"][0]["name"] == "s?"
    assert "## s�" in (tmp_path / "out" / "bench.md").read_text().splitlines()


@pytest.mark.parametrize("measure", ["eval", "bench"])
def test_a_run_json_of_before_the_start_was_kept_goes_on(tmp_path: Path, measure: str) -> None:
    suite = evaluating.write_rows(tmp_path / "suite.jsonl", [{"prompt": "hi"}])
    with benching.serving() as server:
        for _ in range(2):
            if measure == "eval":
                run_eval(evaluating.options(suite, tmp_path / "out", server.url))
            else:
                run_bench(benching.options(tmp_path / "out", server.url, loads=(1,)))
            begun = json.loads((tmp_path / "out" / "run.json").read_text())
            begun.pop("started", None)
            (tmp_path / "out" / "run.json").write_text(json.dumps(begun))
    found = (tmp_path / "out" / ("results.json" if measure == "eval" else "bench.json")).read_text()
    assert json.loads(found)["provenance"]["started"] is None


REFUSED = [
    ("eval mini --endpoint=", "--endpoint is empty"),
    ("eval mini --target=", "--target is empty"),
    ("eval mini --draft=", "--draft is empty"),
    ("eval mini --endpoint http://localhost:1 --baseline=", "--baseline is empty"),
    ("eval mini --min-al nan", "--min-al must be a number"),
    ("eval mini --temperature inf", "--temperature must be a number"),
    ("eval mini --top-p nan", "--top-p must be a number"),
    ("bench --endpoint=", "--endpoint is empty"),
    ("bench --target=", "--target is empty"),
    ("bench --prompts=", "--prompts is empty"),
    ("bench --min-speedup nan", "--min-speedup must be a number"),
    ("bench --temperature nan", "--temperature must be a number"),
    ("bench --request-rate 1 nan", "--request-rate must be more than 0"),
    ("bench --rounds 1000000000", "--rounds must be at most 1,000"),
    ("bench --requests 1000000000", "--requests must be at most 1,000,000"),
    ("bench --seconds 1e300", "--seconds must be at most 86,400"),
    ("bench --request-rate 1e-300", "--request-rate must be at least 0.001"),
    ("bench --request-rate 1e300", "--request-rate must be at most 10,000"),
    ("card builtin --output=", "--output is empty"),
    ("card=", "the name of the draft is empty"),
]


@pytest.mark.parametrize(("command", "said"), REFUSED, ids=[command for command, _ in REFUSED])
def test_options_that_are_empty_or_no_numbers_are_refused(command: str, said: str) -> None:
    arguments = ["card", ""] if command == "card=" else command.split()
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, ConfigError)
    assert said in str(error)


@pytest.mark.parametrize("command", ["eval", "compare", "card"])
def test_a_name_that_is_too_long_is_one_sentence(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["flashdraft", command, "x" * 10_000, *(["y"] if command == "compare" else [])])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert "File name too long" in said
    assert said.splitlines()[-1].startswith("flashdraft: xxx")


def test_a_server_that_sends_no_usage_and_odd_categories_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PAUSE", 0.001)
    rows = [{"prompt": f"say {i}", "category": f"$c{i}^ <b>|", "id": "same"} for i in range(100)]
    with serving(lambda body: stream(["so "], usage=None)) as server:
        run_eval(evaluating.options(evaluating.write_rows(tmp_path / "s.jsonl", rows), tmp_path / "out", server.url))
    found = evaluating.results(tmp_path / "out")
    assert found["complete"]
    assert found["drafts"][0]["answers"]["count"] == len(found["drafts"][0]["by_category"]) == 100
    assert found["drafts"][0]["acceptance"] is None
    assert "<b>" not in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.filterwarnings("error")
def test_a_benchmark_of_answers_without_usage_has_no_curves_and_no_warnings(tmp_path: Path) -> None:
    event = {"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}
    suite = evaluating.write_rows(tmp_path / "s.jsonl", [{"prompt": "hi"}])
    with benching.serving(lambda body: (200, b"data: " + json.dumps(event).encode() + b"\n\n")) as server:
        run_bench(benching.options(tmp_path / "out", server.url, prompts=str(suite), prompt_tokens=None, loads=(1,)))
    [point] = benching.results(tmp_path / "out")["workloads"][0]["points"]
    assert point["speedup"] is None
    assert point["acceptance"] is None


def test_what_a_server_says_is_no_command_of_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = evaluating.write_rows(tmp_path / "s.jsonl", [{"prompt": "hi"}])
    with serving(lambda body: (400, {"error": {"message": "no \x1b[31mred\ud800"}})) as server:
        arguments = ["eval", str(suite), "--endpoint", server.url, "--output", str(tmp_path / "out")]
        monkeypatch.setattr("sys.argv", ["flashdraft", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert ended.value.code == 2
    assert "every request was refused: no  [31mred?" in capsys.readouterr().err


@pytest.mark.parametrize("measure", ["eval", "bench"])
def test_answers_that_nobody_knows_the_settings_of_are_not_mixed_with_others(tmp_path: Path, measure: str) -> None:
    suite = evaluating.write_rows(tmp_path / "suite.jsonl", [{"prompt": "hi"}])
    name = "answers.jsonl" if measure == "eval" else "requests.jsonl"
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text(json.dumps(PIECE) + "\n")
    again: Callable[[str], int] = {
        "eval": lambda url: run_eval(evaluating.options(suite, tmp_path / "out", url)),
        "bench": lambda url: run_bench(benching.options(tmp_path / "out", url)),
    }[measure]
    with benching.serving() as server, pytest.raises(CheckpointError, match=f"holds {name} without the run.json"):
        again(server.url)
