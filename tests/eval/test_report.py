"""The report of a run: what it says and draws of whole runs and of poor ones, and that nothing in it can break the page."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from reporting import answer, pair, piece, run

from flashdraft.eval import figures, figures_eval, metrics, page, report
from flashdraft.eval.run import Arm

GOOD, BAD = [(3, 7), (1, 7)], [(1, 7), (0, 7)]
COUNTERS = {"engine": "vllm", "drafts": 10, "accepted": 12, "draft_tokens": 70, "per_position": [8, 4]}
VOID = {"meta", "img"}


class Reader(HTMLParser):
    """Texts of cells and paragraphs; asserts that every element is closed where it was opened."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.pictures: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.pictures.append(dict(attrs)["src"] or "")
        if tag not in VOID:
            self.open.append(tag)
        assert tag not in ("script", "b")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += f"{data}\n"


def written(tmp_path: Path, results: dict[str, Any]) -> tuple[Reader, set[str]]:
    """The report, read, and the names of its plots."""
    assert report.write(results, tmp_path) is True
    reader = Reader((tmp_path / "report.html").read_text(encoding="utf-8"))
    plots = {path.stem for path in (tmp_path / "plots").glob("*")}
    assert len(reader.pictures) == len(plots)
    assert all(picture.startswith("data:image/png;base64,iVBOR") for picture in reader.pictures)
    return reader, plots


def table_row(reader: Reader, first: str, after: str = "") -> list[str]:
    """The cells of the first row that begins with this one, behind a text."""
    lines = [line.strip() for line in reader.text[reader.text.index(after) :].split("\n") if line.strip()]
    at = lines.index(first)
    return lines[at : at + 6]


def test_a_whole_run_has_every_plot_and_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "FEWEST", 2)
    pytest.importorskip("matplotlib")
    records = [
        record
        for draft, steps in (("/m/draft", GOOD), ("/m/draft-w4", BAD))
        for prompt, category in (("p", "math"), ("q", "coding"), ("r", "coding"))
        for record in pair(
            draft, prompt, steps * 20, category=category, thinking_tokens=20, repetition=0.5 if prompt == "r" else 0.0
        )
    ]
    results = run(tmp_path, records, ("/m/draft", "/m/draft-w4"), provenance={"draft_bytes": {"/m/draft": 2_000_000}})
    reader, plots = written(tmp_path, results)
    assert plots == {*figures_eval.PLOTS}
    assert table_row(reader, "mean over requests", "by convention")[:3] == ["mean over requests", "3.00", "3.00-3.00"]
    assert table_row(reader, "mean over requests", "/m/draft-w4 against /m/draft")[:5] == [
        "mean over requests",
        "3.00",
        "1.50",
        "-1.50",
        "-1.50 to -1.50",
    ]
    assert table_row(reader, "speed-up", "/m/draft-w4 against /m/draft")[:4] == ["speed-up", "2.00", "2.00", "1.00"]
    assert "/m/draft: looping answers (1)." in reader.text
    assert "2.0" in table_row(reader, "/m/draft", "weights on disk")


def test_counters_alone_make_a_report_without_categories_of_acceptance(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = [answer(Arm("d", "draft"), prompt, None, tokens=11) for prompt in "pq"]
    reader, plots = written(tmp_path, run(tmp_path, [*records, piece(Arm("d", "draft"), 2, 22, COUNTERS)]))
    assert plots == {"steps", "latency"}
    assert table_row(reader, "d")[:4] == ["d", "over all steps (vLLM)", "2", "2.20"]
    assert "Acceptance is from the server's counters" in reader.text
    assert "Not measured: answers without the draft, and so no speed-up." in reader.text
    assert "Not measured by place in the answer" in reader.text


def test_a_server_that_says_nothing_has_no_acceptance_drawn_or_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    reader, plots = written(tmp_path, run(tmp_path, [answer(Arm("d", "draft"), "p", None, tokens=11)]))
    assert plots == {"latency"}
    assert "The server says nothing of its speculation" in reader.text
    assert "Not measured: the acceptance length." in reader.text


def test_one_conversation_has_no_interval(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    reader, plots = written(tmp_path, run(tmp_path, pair("d", "p", GOOD)))
    assert plots == {"acceptance-by-category", "steps", "answer-length", "latency", "speed-up"}
    assert table_row(reader, "math")[:6] == ["math", "1", "0", "7", "3.00", "-"]


def test_answers_of_one_token_have_a_latency_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = [record | {"first": 0.5, "last": 0.5} for prompt in "pq" for record in pair("d", prompt, [])]
    reader, plots = written(tmp_path, run(tmp_path, records))
    assert plots == {"latency", "speed-up"}
    assert "Not measured: the server does not say how many proposals each step accepted." in reader.text


def test_an_incomplete_run_and_one_without_answers_say_so(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    reader, _ = written(tmp_path, run(tmp_path, pair("d", "p", GOOD), complete=False, left=3))
    assert "Not complete: 3 answers missing. The same command goes on." in reader.text
    (tmp_path / "none").mkdir()
    reader, plots = written(tmp_path / "none", run(tmp_path / "none", [], complete=False, left=9))
    assert plots == set()
    assert "Not complete: 9 answers missing." in reader.text


def test_several_drafts_of_which_one_has_no_answers_yet(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    reader, plots = written(tmp_path, run(tmp_path, pair("a", "p", GOOD), ("a", "b"), complete=False, left=2))
    assert "cost" not in plots
    assert "b against a, 0 conversations: nothing to compare yet" in reader.text


HOSTILE = [
    "<script>alert(1)</script>",
    "</td><b>\"'&amp;",
    "$\\frac{1$_^",
    "数学 ру العربية 🦜",
    "x" * 3000,
    "\x1b[31m\u202e\udc80\x00",
    " ",
]


@pytest.mark.parametrize("name", HOSTILE, ids=["script", "quotes", "mathtext", "unicode", "long", "control", "space"])
def test_names_are_text_and_no_markup(tmp_path: Path, name: str) -> None:
    records = pair(name, "p", GOOD, category=name, id=name, repetition=0.9) + pair("other", "p", BAD, category=name, id=name)
    results = run(tmp_path, records, (name, "other"), suite={"name": name})
    results["drafts"][0]["refusals"] = [{"id": name, "turn": 0, "reason": name}]
    reader = Reader(report.html(results, {}))
    assert reader.text.count(page.printable(name).strip()) >= 8
    assert not re.search(r"[\x00\x1b\u202e\ud800-\udfff]", reader.text)


def test_any_names_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = [r for name in HOSTILE for r in pair(HOSTILE[2], name, GOOD, category=name, repetition=0.9)]
    results = run(tmp_path, [*records, *pair(HOSTILE[5], HOSTILE[0], BAD, category=HOSTILE[0])], (HOSTILE[2], HOSTILE[5]))
    drawn = figures_eval.draw(results, tmp_path / "plots")
    assert drawn.keys() == {*figures_eval.PLOTS} - {"where"}
    assert all(path.stat().st_size > 5000 for path in drawn.values())


def test_many_categories_are_drawn_as_far_as_they_can_be_read_and_said(tmp_path: Path) -> None:
    results = run(tmp_path, [record for n in range(45) for record in pair("d", str(n), GOOD, category=f"c{n:02}")])
    assert len(figures_eval.categories(results)) == 40
    assert "5 categories with fewer answers are in the table alone" in report.html(results, {"speed-up": Path(page.__file__)})


def test_without_matplotlib_the_report_has_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = run(tmp_path, pair("d", "p", GOOD))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert report.write(results, tmp_path) is False
    reader = Reader((tmp_path / "report.html").read_text())
    assert reader.pictures == []
    assert "pip install 'flashdraft[eval]'" in reader.text
    assert table_row(reader, "math")[:6] == ["math", "1", "0", "7", "3.00", "-"]
    assert not (tmp_path / "plots").exists()


def test_plots_of_an_earlier_report_are_taken_away(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "steps.png").write_bytes(b"old")
    _, plots = written(tmp_path, run(tmp_path, [answer(Arm("d", "draft"), "p", None, tokens=11)]))
    assert plots == {"latency"}


def test_names_in_plots_are_short_and_told_apart() -> None:
    assert figures.names(["/a/draft", "/a/draft-w4", "/a/draft/w4"]) == ["draft", "draft-w4", "draft/w4"]
    assert figures.names(["/a/b/draft/"]) == ["draft"]
    assert figures.names(["x" * 99, "x" * 99 + "y" + "x" * 99]) == [f"{'x' * 14}…{'x' * 15} ({n})" for n in (1, 2)]
    assert figures.label("a\n b\x1b") == "a b"


def test_a_page_is_one_file_that_loads_nothing() -> None:
    html = page.page("T", [page.Section("", [page.Text("a < b", "warning")]), page.Section("S", [page.Items(["x"])])])
    assert html.startswith("<!doctype html>")
    assert '<p class="warning">a &lt; b</p>' in html
    assert not re.search(r"(src|href)=\"(?!#|data:)", html)
    total = page.page("T", [page.Section("", [page.Table(("n", "v"), [["a", "1"], ["all", "2"]], total=True)])])
    assert '<tr class="total"><td class="left">all</td><td>2</td></tr>' in total
