"""Differences of two drafts or runs as rows of tables: names, both values, the difference, its interval, pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len

from flashdraft.errors import counted
from flashdraft.eval.difference_runs import short
from flashdraft.eval.display import ALONE, CONVENTIONS
from flashdraft.eval.metrics import FEWEST
from flashdraft.eval.page import in_markdown, plain
from flashdraft.eval.readable import name_of
from flashdraft.train.display import out

SPEEDS = {"with": "with the draft", "without": ALONE, "speedup": "speed-up"}
REQUESTS = "tokens/s of whole requests"


def acceptance_rows(found: dict[str, Any]) -> list[list[str]]:
    """A row a convention, then one a category, of `difference.between`. What was not measured has none."""
    rows = [(text, found["acceptance"][name]) for name, text in CONVENTIONS.items()]
    rows += [(name, entry["request_mean"]) for name, entry in found["by_category"].items()]
    return [_row(name, entry, "+") for name, entry in rows if entry]


def speed_rows(found: dict[str, Any]) -> list[list[str]]:
    """A row a speed, then the speed-up of each category."""
    rows = [(text, found["speed"][name]) for name, text in SPEEDS.items()]
    rows += [(f"speed-up, {name}", entry["speedup"]) for name, entry in found["by_category"].items()]
    return [_row(name, entry, "") for name, entry in rows if entry]


def _row(name: str, entry: dict[str, Any], sign: str) -> list[str]:
    low, high = entry["low"], entry["high"]
    span = "-" if low is None else f"{low:{sign}.2f} to {high:{sign}.2f}"
    count = "-" if entry["n"] is None else f"{entry['n']:,}"
    return [name, f"{entry['first']:.2f}", f"{entry['second']:.2f}", f"{entry['value']:{sign}.2f}", span, count]


def show(found: dict[str, Any]) -> None:
    """The comparison of two runs in the terminal, as Markdown."""
    names = " and ".join(found["runs"])
    out.print(f"# {plain(names)}\n", markup=False, style="bold")
    for warning in found["warnings"]:
        out.print(f"Not like with like: {plain(warning)}\n", markup=False, style="yellow")
    for entry in found["drafts"]:
        for line in _draft(entry, found["runs"], found["other_loads"]):
            out.print(line, markup=False)
    if found["left_out"]:
        out.print(f"Only in one run, left out: {plain(', '.join(found['left_out']))}\n", markup=False)
    if found["differs"]:
        out.print("What differs (first; second):\n", markup=False)
    for item in found["differs"]:
        text = f"- {item['part']} {name_of(item['name'])}: {short(item['first'])}; {short(item['second'])}"
        out.print(plain(text), markup=False)


def _draft(entry: dict[str, Any], runs: list[str], other_loads: bool) -> list[str]:
    both = zip(("first", "second"), runs, (entry["first"], entry["second"]), strict=True)
    found = [f"- {side}: {plain(draft)} of {plain(run)}" for side, run, draft in both]
    a, b = entry["conversations"]
    found.append(f"- {counted(entry['pairs'], 'conversation')} that both answered, of {a:,} and {b:,}")
    texts = entry["texts"]
    found.append(f"- texts differ in {texts['differing']:,} of them")
    found += [*(["- both are the same draft: what differs is how it was run"] if entry["same_draft"] else []), ""]
    if rows := acceptance_rows(entry):
        found += [*table(("acceptance length", "first", "second", "difference", "95 %", "n"), rows), ""]
    if entry["note"]:
        found += [f"{entry['note'][0].upper()}{entry['note'][1:]}.", ""]
    elif length := entry["acceptance"]["request_mean"]:
        found += [_verdict("acceptance length", length, 0.0, "longer", "shorter"), ""]
    elif not rows:
        found += ["No step drafted anything in both: no acceptance length.", ""]
    if rows := speed_rows(entry):
        found += [*table((REQUESTS, "first", "second", "ratio", "95 %", "n"), rows), ""]
    if verdict := _of_speed(entry, other_loads):
        found += [verdict, ""]
    return found


def _of_speed(entry: dict[str, Any], other_loads: bool) -> str | None:
    """On the speed-up, which is measured within a run; on tokens/s alone only where both ran under the same load."""
    rate, ratio = entry["speed"]["with"], entry["speed"]["speedup"]
    if ratio:
        where = " This compares speed-ups, each at its own load and machine; not drafts." if other_loads else ""
        return _verdict("speed-up", ratio, 1.0, "higher", "lower") + where
    if rate and (other_loads or entry["same_draft"]):
        return "No verdict on speed: no speed-up was measured in both runs, and tokens/s differ by load and machine, too."
    return _verdict("draft", rate, 1.0, "faster", "slower") if rate else None


def _verdict(what: str, entry: dict[str, Any], neutral: float, more: str, less: str) -> str:
    if entry["value"] == neutral and entry["low"] in (None, neutral) and entry["high"] in (None, neutral):
        return f"The second {what} is the same."
    if entry["low"] is None:
        return f"The second {what}: fewer than {FEWEST} conversations do not tell a difference from chance."
    if entry["low"] <= neutral <= entry["high"]:
        return f"The second {what} is {more} or {less} by no more than chance explains: the interval holds {neutral:g}."
    return f"The second {what} is {more if entry['low'] > neutral else less}: the interval leaves {neutral:g} out."


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Markdown that can be read as it is: the first column at the left, figures at the right."""
    cells = [[in_markdown(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(cell_len(row[at]) for row in cells) for at in range(len(columns))]

    def line(row: Sequence[str]) -> str:
        gaps = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        return (
            "| "
            + " | ".join(f"{gap}{cell}" if at else f"{cell}{gap}" for at, (cell, gap) in enumerate(zip(row, gaps, strict=True)))
            + " |"
        )

    rule = "|" + "|".join("-" * (width + 1) + (":" if at else "-") for at, width in enumerate(widths)) + "|"
    return [line(cells[0]), rule, *map(line, cells[1:])]
