"""Two drafts, two runs: differences computed by hand, what pairs, what is refused, what is not of like with like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from reporting import answer, pair, piece, run
from typer.testing import CliRunner

from flashdraft.cli import app
from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.eval import difference_display, metrics
from flashdraft.eval.difference import between
from flashdraft.eval.difference_runs import compare, read_run
from flashdraft.eval.run import Arm

GOOD, BAD = [(3, 7), (1, 7)], [(1, 7), (1, 7), (0, 7)]  # 6 tokens in 2 steps, 5 in 3; 7 and 6 tokens with the first
COUNTERS = {"engine": "vllm", "drafts": 10, "accepted": 12, "draft_tokens": 70, "per_position": [8, 4]}


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals of as few conversations as can be computed by hand."""
    monkeypatch.setattr(metrics, "FEWEST", 2)


def rows(*records: dict[str, Any]) -> list[dict[str, Any]]:
    on, off = [r for r in records if r["arm"] == "d"], [r for r in records if r["arm"] != "d"]
    return metrics.conversations(on, on, off)


def two(tmp_path: Path, **changed: Any) -> dict[str, Any]:
    """A run against one whose answers to `p` are drafted better, with other fields in its results."""
    run(tmp_path / "a", [*pair("d", "p", BAD), *pair("d", "q", GOOD, category="coding")])
    run(tmp_path / "b", [*pair("d", "p", GOOD, on=1.0), *pair("d", "q", GOOD, category="coding")], **changed)
    return compare(read_run(tmp_path / "a"), read_run(tmp_path / "b"))


def test_differences_are_of_the_conversations_that_both_answered() -> None:
    first = rows(*pair("d", "p", BAD, tokens=10), *pair("d", "q", GOOD, category="coding"), *pair("d", "only", [(7, 7)]))
    second = rows(*pair("d", "p", GOOD, tokens=10, on=1.0), *pair("d", "q", GOOD, category="coding"), *pair("d", "other", BAD))
    found = between(first, second)
    assert (found["pairs"], found["conversations"]) == (2, [3, 3])
    p, q, better = 5 / 3, 6 / 2, 6 / 2
    mean = found["acceptance"]["request_mean"]
    assert (mean["first"], mean["second"], mean["n"]) == (pytest.approx((p + q) / 2), 3.0, 2)
    assert mean["value"] == pytest.approx((better - p) / 2)
    assert mean["low"] == pytest.approx(0.0)  # twice q
    assert mean["high"] == pytest.approx(better - p)  # twice p
    assert found["acceptance"]["step_pooled"]["value"] == pytest.approx(12 / 4 - 11 / 5)
    assert found["acceptance"]["tokens_over_steps"]["value"] == pytest.approx((10 + 7) / 4 - (10 + 7) / 5)
    assert found["acceptance"]["category_mean"]["value"] == pytest.approx((better - p) / 2)
    assert {name: entry["request_mean"]["value"] for name, entry in found["by_category"].items()} == pytest.approx(
        {"math": better - p, "coding": 0.0}
    )


def test_categories_weigh_alike_in_the_difference_of_their_means() -> None:
    first = rows(*pair("d", "p", BAD), *pair("d", "r", BAD), *pair("d", "q", GOOD, category="coding"))
    second = rows(*pair("d", "p", GOOD), *pair("d", "r", GOOD), *pair("d", "q", GOOD, category="coding"))
    lengths = between(first, second)["acceptance"]
    assert lengths["category_mean"]["value"] == pytest.approx((3 - 5 / 3) / 2)
    assert lengths["category_mean"]["n"] == 2
    assert lengths["request_mean"]["value"] == pytest.approx(2 * (3 - 5 / 3) / 3)


def test_speeds_are_ratios_of_tokens_per_second() -> None:
    first = rows(*pair("d", "p", GOOD, on=2.0, off=4.0), *pair("d", "q", GOOD, on=2.0, off=4.0))
    second = rows(*pair("d", "p", GOOD, on=1.0, off=8.0), *pair("d", "q", GOOD, on=3.0, off=8.0))
    speed = between(first, second)["speed"]
    assert {name: (entry["first"], entry["second"], entry["value"]) for name, entry in speed.items()} == {
        "with": (14 / 4, 14 / 4, 1.0),
        "without": (14 / 8, 14 / 16, 0.5),
        "speedup": (2.0, 4.0, 2.0),
    }
    assert (speed["with"]["low"], speed["with"]["high"]) == (pytest.approx(2 / 3), 2.0)


def test_a_conversation_with_fewer_turns_answered_does_not_pair() -> None:
    whole = rows(*pair("d", "p", GOOD), *pair("d", "p", GOOD, turn=1))
    assert between(whole, whole)["pairs"] == 1
    assert between(whole, rows(*pair("d", "p", GOOD)))["pairs"] == 0


def test_answers_of_one_token_have_speed_and_no_acceptance() -> None:
    found = between(rows(*pair("d", "p", [])), rows(*pair("d", "p", [])))
    assert found["acceptance"] == dict.fromkeys(("request_mean", "step_pooled", "category_mean", "tokens_over_steps"))
    assert found["speed"]["with"]["value"] == 1.0


def test_texts_that_differ_are_counted() -> None:
    found = between(
        rows(*pair("d", "p", GOOD), *pair("d", "q", GOOD)), rows(*pair("d", "p", GOOD, text="x"), *pair("d", "q", GOOD))
    )
    assert found["texts"] == {"compared": 2, "differing": 1}


def test_equal_settings_leave_nothing_to_warn_of(tmp_path: Path) -> None:
    found = two(tmp_path)
    assert (found["warnings"], found["differs"], found["left_out"]) == ([], [], [])
    [entry] = found["drafts"]
    assert (entry["first"], entry["second"], entry["pairs"], entry["note"]) == ("d", "d", 2, None)


@pytest.mark.parametrize(
    ("changed", "warning"),
    [
        ({"settings": {"max_tokens": 32}}, "answers are cut at other lengths"),
        ({"settings": {"temperature": 0.7}}, "other sampling (temperature 0.0 against 0.7)"),
        ({"settings": {"thinking": True}}, "thinking is not set alike"),
        ({"settings": {"concurrency": 1}}, "other numbers of requests at once"),
        ({"suite": {"digest": "other"}}, "not the same prompts"),
        ({"suite": {"limit": 2}}, "not the same prompts"),
        ({"provenance": {"device": "B"}}, "other devices"),
        ({"provenance": {"engine": "vllm"}}, "other engines"),
        ({"complete": False, "left": 2}, "is not complete"),
    ],
)
def test_what_is_not_of_like_with_like_is_warned_of(tmp_path: Path, changed: dict[str, Any], warning: str) -> None:
    found = two(tmp_path, **changed)
    [said] = found["warnings"]
    assert warning in said
    if "complete" not in changed:
        [(part, fields)] = changed.items()
        assert [(item["part"], item["name"], item["second"]) for item in found["differs"]] == [
            (part, *next(iter(fields.items())))
        ]


def test_seeds_matter_only_where_texts_are_drawn(tmp_path: Path) -> None:
    found = two(tmp_path, settings={"seed": 5})
    assert found["warnings"] == []
    assert [item["name"] for item in found["differs"]] == ["seed"]


def test_a_draft_with_an_arm_of_its_own_is_told_from_one_without(tmp_path: Path) -> None:
    run(tmp_path / "a", pair("d", "p", GOOD))
    run(tmp_path / "b", [answer(Arm("d", "pinned"), "p", GOOD), *pair("d", "p", GOOD)])
    found = compare(read_run(tmp_path / "a"), read_run(tmp_path / "b"))
    assert found["warnings"] == [
        "acceptance with all proposals verified in one, with widths that the engine chose in the other"
    ]


def counted(directory: Path, prompts: str, drafts: float = 10) -> Path:
    """A run whose server only counts."""
    records = [answer(Arm("d", "draft"), prompt, None, tokens=11) for prompt in prompts]
    run(directory, [*records, piece(Arm("d", "draft"), len(records), 22, {**COUNTERS, "drafts": drafts})])
    return directory


def test_counters_are_compared_with_counters_over_the_same_prompts_alone(tmp_path: Path) -> None:
    first, second, other = counted(tmp_path / "a", "pq"), counted(tmp_path / "b", "pq", 8), counted(tmp_path / "c", "pr")
    [entry] = compare(read_run(first), read_run(second))["drafts"]
    pooled = entry["acceptance"]["step_pooled"]
    assert pooled == {"first": 2.2, "second": 2.5, "value": pytest.approx(0.3), "low": None, "high": None, "n": None}
    assert "no interval" in entry["note"]
    [entry] = compare(read_run(first), read_run(other))["drafts"]
    assert (entry["pairs"], entry["acceptance"]["step_pooled"]) == (1, None)
    assert "do not have the same ones" in entry["note"]


def test_a_server_that_says_nothing_leaves_the_speeds(tmp_path: Path) -> None:
    run(tmp_path / "a", [answer(Arm("d", "draft"), "p", None, tokens=7)])
    run(tmp_path / "b", pair("d", "p", GOOD, on=1.0))
    [entry] = compare(read_run(tmp_path / "a"), read_run(tmp_path / "b"))["drafts"]
    assert entry["note"] == f"the acceptance length is left out: the server of {tmp_path / 'a'} said nothing of it"
    assert (entry["speed"]["with"]["value"], entry["speed"]["speedup"]) == (2.0, None)


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", pair("d", "p", GOOD)), run(tmp_path / "b", pair("d", "z", GOOD))
    assert a["drafts"][0]["conversations"][0]["prompt"] != b["drafts"][0]["conversations"][0]["prompt"]
    counters = read_run(counted(tmp_path / "c", "p"))
    first, second = read_run(tmp_path / "a"), read_run(tmp_path / "b")
    with pytest.raises(ConfigError, match="have no conversation in common"):
        compare(first, second)
    with pytest.raises(ConfigError, match=f"acceptance of {tmp_path / 'c'} is from its server's counters"):
        compare(first, counters)
    with pytest.raises(ConfigError, match="are the same run: give another one"):
        compare(first, read_run(tmp_path / "a" / "results.json"))
    with pytest.raises(ConfigError, match="has no draft 'x': it has d"):
        compare(first, second, ["x"])
    with pytest.raises(ConfigError, match="once for both runs, or twice"):
        compare(first, second, ["d", "d", "d"])


def test_drafts_are_paired_by_name_by_choice_or_one_with_one(tmp_path: Path) -> None:
    run(tmp_path / "a", [*pair("d", "p", GOOD), *pair("e", "p", BAD)], ("d", "e"))
    run(tmp_path / "b", [*pair("e", "p", GOOD), *pair("f", "p", BAD)], ("e", "f"))
    run(tmp_path / "c", pair("g", "p", GOOD), ("g",))
    run(tmp_path / "h", pair("d", "p", BAD), ("d",))
    a, b, c, h = (read_run(tmp_path / name) for name in "abch")

    def chosen(*given: Any) -> list[tuple[str, str]]:
        return [(entry["first"], entry["second"]) for entry in compare(*given)["drafts"]]

    assert chosen(a, b) == [("e", "e")]
    assert compare(a, b)["left_out"] == ["d", "f"]
    assert chosen(c, h) == [("g", "d")]
    assert chosen(a, b, ["d", "f"]) == [("d", "f")]
    assert chosen(a, b, ["e"]) == [("e", "e")]
    assert chosen(a, a, ["d", "e"]) == [("d", "e")]
    with pytest.raises(ConfigError, match=r"no draft of one name \(.*a: d, e; .*c: g\): name one of each"):
        compare(a, c)
    with pytest.raises(ConfigError, match=r"name two of its drafts with --draft \(d, e\)"):
        compare(a, a)


def test_a_run_is_read_from_its_answers_which_are_left_as_they_are(tmp_path: Path) -> None:
    expected = run(tmp_path / "a", [*pair("d", "p", GOOD), answer(Arm("d", "pinned"), "p", BAD)])
    (tmp_path / "a" / "results.json").unlink()
    answers = tmp_path / "a" / "answers.jsonl"
    with answers.open("a") as file:
        file.write('{"kind": "answ')  # of a run that is under way
    before = answers.read_bytes()
    for place in (tmp_path / "a", answers):
        found = read_run(place)
        assert found.results["drafts"] == expected["drafts"]
    assert answers.read_bytes() == before
    run(tmp_path / "b", pair("d", "p", GOOD))
    said = compare(read_run(answers), read_run(tmp_path / "b"))["warnings"]
    assert f"{answers} was read from its answers, maybe not all: only what both answered is compared" in said


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("results.json", "{", CheckpointError, "is damaged"),
        ("results.json", "[]", CheckpointError, "is damaged"),
        ("results.json", '{"schema": 1, "drafts": []}', CheckpointError, "has not what is needed to compare"),
        ("results.json", '{"schema": 2}', CheckpointError, "has not what is needed to compare"),
        ("answers.jsonl", "no record\n", CheckpointError, "answers.jsonl, line 1: not a record"),
        ("answers.jsonl", "", ConfigError, "holds no answers yet"),
        ("other.txt", "", ConfigError, "is no run: give a directory"),
    ],
)
def test_files_that_are_no_run_are_named(tmp_path: Path, name: str, content: str, error: type[Exception], message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(error, match=message) as raised:
        read_run(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_results_of_an_earlier_version_are_told_from_damaged_ones(tmp_path: Path) -> None:
    found = run(tmp_path / "a", pair("d", "p", GOOD))
    del found["drafts"][0]["conversations"]
    (tmp_path / "a" / "results.json").write_text(json.dumps(found))
    with pytest.raises(CheckpointError, match="earlier version"):
        read_run(tmp_path / "a")


def test_the_command_prints_markdown_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two(tmp_path, settings={"max_tokens": 32}, provenance={"device": "a|\x1b[31mb"})
    given = ["compare", str(tmp_path / "a"), str(tmp_path / "b")]
    shown = CliRunner().invoke(app, [*given, "--json"])
    assert shown.exit_code == 0
    assert json.loads(shown.stdout)["drafts"][0]["acceptance"]["request_mean"]["second"] == 3.0
    difference_display.show(compare(read_run(tmp_path / "a"), read_run(tmp_path / "b")))
    lines = capsys.readouterr().out.splitlines()
    assert "| mean over requests         |  2.33 |   3.00 |      +0.67 | +0.00 to +1.33 | 2 |" in lines
    assert "| with the draft             |  3.25 |   4.67 |  1.44 | 1.00 to 2.33 | 2 |" in lines
    assert "- settings longest answer, tokens: 16; 32" in lines
    assert any(line.startswith("Not like with like: answers are cut at other lengths") for line in lines)
    assert "\x1b" not in "".join(lines)
    assert len({line.count("|") for line in lines if line.startswith("| mean") or line.startswith("|--")}) == 1


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, "The second speed-up is higher or lower by no more than chance explains: the interval holds 1."),
        ({"settings": {"concurrency": 1}}, "This compares speed-ups, each at its own load and machine; not drafts."),
        ({"provenance": {"device": "B"}}, "This compares speed-ups, each at its own load and machine; not drafts."),
    ],
)
def test_a_verdict_on_speed_is_of_what_is_comparable(
    tmp_path: Path, changed: dict[str, Any], verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    difference_display.show(two(tmp_path, **changed))
    shown = capsys.readouterr().out
    assert verdict in shown
    assert "draft is faster" not in shown
    assert not changed or shown.index("Not like with like") < shown.index(verdict)


def test_without_speed_ups_other_loads_and_one_draft_leave_the_verdict_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hashes = {"draft_hashes": {"d": "ab"}}
    for name, given in (("a", {}), ("b", {"load_average": 0.1}), ("c", {"load_average": 3.5}), ("e", hashes), ("f", hashes)):
        seconds = 2.0 if name in "abe" else 1.0
        run(tmp_path / name, [answer(Arm("d", "draft"), p, GOOD, seconds=seconds) for p in "pq"], provenance=given)
    runs = {name: read_run(tmp_path / name) for name in "abcef"}
    assert "not as busy with other programs" in compare(runs["b"], runs["c"])["warnings"][0]
    for first, second, said in (
        ("a", "c", "The second draft is faster: the interval leaves 1 out."),
        ("b", "c", "No verdict on speed:"),
        ("e", "f", "No verdict on speed:"),
        ("e", "f", "- both are the same draft"),
        ("a", "c", "The second acceptance length is the same."),
    ):
        difference_display.show(compare(runs[first], runs[second]))
        assert said in capsys.readouterr().out


def test_hostile_names_break_no_table() -> None:
    shown = difference_display.table(("a", "b"), [["x|y\nz\x1b[0m", "1"], ["数学", "22"]])
    assert shown[2].count("|") == 4  # one of them escaped
    assert "\\|" in shown[2]
    assert "\n" not in shown[2]
    assert "\x1b" not in shown[2]
