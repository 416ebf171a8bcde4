"""`flashdraft eval prepare speed-bench`: counts, what is written, what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from preparing import Letters, hub_of, web_of

from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.eval import prepare as preparing
from flashdraft.eval.prepare import prepare
from flashdraft.eval.prepare_rows import LIVECODEBENCH, PLACEHOLDER
from flashdraft.eval.suites import load_suite

CATEGORIES = (
    "coding",
    "humanities",
    "math",
    "multilingual",
    "qa",
    "rag",
    "reasoning",
    "roleplay",
    "stem",
    "summarization",
    "writing",
)
Rows = list[dict[str, Any]]
Call = Callable[..., tuple[int, str, str]]


def published(count: int = 80, categories: tuple[str, ...] = CATEGORIES) -> Rows:
    """Rows as they are published: those of `math` are placeholders of HLE, the first of `coding` is one of a file."""
    rows: Rows = []
    for category in categories:
        for number in range(count):
            identity = f"{category}-{number}"
            row = {"question_id": identity, "category": category, "sub_category": None, "turns": [f"Say {identity}"]}
            row |= {"source": "own", "src_id": str(number), "difficulty": None, "multiturn": False}
            if category == "math":
                row |= {"turns": [PLACEHOLDER], "source": "cais/hle"}
            if identity == "coding-0":
                row |= {"turns": [f"{PLACEHOLDER}\n\n{{question}}"], "source": "livecodebench/code_generation_lite"}
            rows.append(row)
    return rows


def hub(rows: Rows, hle: int = 80, name: str = "qualitative") -> Callable[..., Any]:
    return hub_of(
        {
            ("nvidia/SPEED-Bench", name): rows,
            ("cais/hle", None): [{"id": str(i), "question": f"How {i}?"} for i in range(hle)],
        }
    )


CODE = json.dumps({"question_id": "0", "question_content": "Add ä.", "starter_code": ""}).encode()
WEB = web_of({f"{LIVECODEBENCH}test.jsonl": CODE})


def test_every_placeholder_is_filled_and_the_file_is_a_suite(tmp_path: Path) -> None:
    path = tmp_path / "new" / "speed.jsonl"
    suite = prepare("qualitative", path, load=hub(published()), fetch=WEB)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 880
    mark = {"suite": "speed-bench:qualitative", "suite_digest": suite.digest}
    assert rows[0] == published()[0] | {"turns": ["Add ä."]} | mark
    assert rows[1] == published()[1] | mark, "what was no placeholder stays"
    assert [row["turns"] for row in rows if row["category"] == "math"] == [[f"How {i}?"] for i in range(80)]
    found = load_suite(str(path))
    assert found == suite
    assert str(suite) == "speed-bench:qualitative: 880 prompts, 880 turns, 11 categories"
    assert [p.name for p in path.parent.iterdir()] == ["speed.jsonl"]


def test_a_prepared_file_that_was_changed_or_is_only_named_so_is_no_suite_that_others_know(tmp_path: Path) -> None:
    path = tmp_path / "speed-bench-qualitative.jsonl"
    prepare("qualitative", path, load=hub(published()), fetch=WEB)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for changed in (lines[1:], [lines[0].replace("Add", "Sub"), *lines[1:]], [*lines[:-1], '{"prompt": "x", "category": "y"}']):
        path.write_text("".join(changed), encoding="utf-8")
        assert load_suite(str(path)).name == "speed-bench-qualitative"
    alike = tmp_path / "mt-bench.jsonl"
    alike.write_text('{"prompt": "x", "suite": ["mt-bench"]}')
    assert load_suite(str(alike)).name == "./mt-bench.jsonl"


def test_throughput_rows_are_three_tiers_of_512(tmp_path: Path) -> None:
    rows = published(512, ("low_entropy", "mixed", "high_entropy"))
    suite = prepare("throughput_2k", tmp_path / "s.jsonl", load=hub(rows, name="throughput_2k"), encoding=Letters())
    assert suite.categories == {"high_entropy": 512, "low_entropy": 512, "mixed": 512}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (published()[:-1], "should hold 880 rows, 80 of each of 11 categories, but holds 879 .*writing 79"),
        (published() + published()[:1], "but holds 881 .coding 81"),
        (published(88, CATEGORIES[:10]), "but holds 880 .coding 88"),
        ([], "but holds 0 .none"),
    ],
)
def test_a_wrong_count_is_an_error(tmp_path: Path, rows: Rows, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        prepare("qualitative", tmp_path / "s.jsonl", load=hub(rows), fetch=WEB)
    assert list(tmp_path.iterdir()) == []


def test_rows_that_cannot_be_resolved_are_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    rows = published()
    rows[5] |= {"turns": [PLACEHOLDER], "source": "new/source"}
    (tmp_path / "s.jsonl").write_text("as it was")
    with pytest.raises(CheckpointError) as raised:
        prepare("qualitative", tmp_path / "s.jsonl", load=hub(rows, hle=78), fetch=web_of({}, asked))
    said = str(raised.value)
    assert said.startswith(
        "3 rows of nvidia/SPEED-Bench (qualitative) cannot be resolved, nothing was written: row 6 (coding-5, new/"
    )
    assert "row 239 (math-78, cais/hle): its source has another layout than is known (no id is '78')" in said
    assert "run `hf auth login`" in said
    assert "row 240 (math-79, cais/hle): " in capsys.readouterr().err
    assert (tmp_path / "s.jsonl").read_text() == "as it was"
    assert asked == [], "files of gigabytes are not read in vain"


def test_a_source_that_cannot_be_opened_is_tried_once_and_names_all_its_rows(tmp_path: Path) -> None:
    tables = {("nvidia/SPEED-Bench", "qualitative"): published()}
    with pytest.raises(
        CheckpointError, match=r"80 rows .* row 161 \(math-0, cais/hle\): cais/hle, split 'test': cannot be loaded"
    ):
        prepare("qualitative", tmp_path / "s.jsonl", load=hub_of(tables), fetch=WEB)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"1 row of .*row 1 \(coding-0, livecodebench.*test.jsonl cannot be read \(404\)"):
        prepare("qualitative", tmp_path / "s.jsonl", load=hub(published()), fetch=web_of({}))


def test_a_placeholder_that_is_left_is_refused(tmp_path: Path) -> None:
    rows = published()
    rows[3]["turns"] = ["Why?", PLACEHOLDER]  # not at the beginning, where they are published
    with pytest.raises(CheckpointError, match="row 4 holds a placeholder"):
        prepare("qualitative", tmp_path / "s.jsonl", load=hub(rows), fetch=WEB)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        prepare("qualitative", tmp_path / "file" / "s.jsonl", load=hub(published()), fetch=WEB)


def test_the_command_says_what_it_wrote_and_the_licence(
    flashdraft: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preparing, "load_dataset", lambda extra: hub(published()))
    monkeypatch.setattr("flashdraft.eval.sources.fetch_lines", WEB)
    code, out, _ = flashdraft("eval", "prepare", "speed-bench")
    assert code == 0
    assert "880 prompts, 880 turns, 11 categories, in speed-bench-qualitative.jsonl" in out
    assert "licensed for evaluation only" in out
    assert (tmp_path / "speed-bench-qualitative.jsonl").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("mt-bench",), "nothing to prepare for 'mt-bench': only speed-bench"),
        (
            ("speed-bench", "--config", "throughput_4k"),
            "--config must be one of qualitative, throughput_1k, .*got 'throughput_4k'",
        ),
        (("speed-bench", "--output", ""), "--output names no file: give the name of the JSONL file"),
        ((), r"eval prepare \[OPTIONS\](.|\n)*Missing argument"),
    ],
)
def test_what_can_be_mended_is_exit_code_2(flashdraft: Call, arguments: tuple[str, ...], said: str) -> None:
    code, out, err = flashdraft("eval", "prepare", *arguments)
    assert (code, out) == (2, "")
    assert re.search(said, err)


def test_both_commands_have_their_help(flashdraft: Call) -> None:
    code, out, _ = flashdraft("eval", "--help")
    assert (code, "flashdraft eval [OPTIONS]" in out, "--min-speedup" in out) == (0, True, True)
    assert "flashdraft eval prepare --help" in " ".join(out.split())
    code, out, _ = flashdraft("eval", "prepare", "--help")
    assert (code, "flashdraft eval prepare [OPTIONS]" in out, "--config" in out) == (0, True, True)
    assert "--min-speedup" not in out


def test_a_suite_in_a_file_named_prepare_is_reached_by_its_path(
    flashdraft: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prepare").write_text("{}")
    code, _, err = flashdraft("eval", "./prepare", "--endpoint", "http://localhost:1")
    assert (code, "prepare, line 1: not a JSON object with `turns`" in err) == (2, True)
