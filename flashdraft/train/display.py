"""What `flashdraft train` shows: the plan, one live line (plain lines where there is no terminal), the table at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

out = Console(highlight=False, soft_wrap=True, emoji=False)
err = Console(stderr=True, highlight=False, emoji=False)

PLAIN_SECONDS = 10.0  # between plain lines
MOST_GROUPS = 16  # categories of one table, those with the most answers


def gigabytes(count: float) -> str:
    if count < 1e6:
        return "less than 1 MB"
    return f"{count / 1e9:,.1f} GB" if count >= 0.95e9 else f"{count / 1e6:,.0f} MB"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def show_facts(title: str, facts: Mapping[str, str]) -> None:
    """Names and values, two columns."""
    out.print(escape(title), style="bold")
    if not out.is_terminal:  # nothing is wrapped where it will be searched
        for name, value in facts.items():
            out.print(f"  {name:<{max(map(len, facts))}}  {value}", markup=False)
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(escape(name), escape(value))
    Console(highlight=False, emoji=False).print(table)  # without soft wrap: long values stay inside their column


def positions(values: list[float]) -> str:
    return " ".join(f"{value:.2f}".removeprefix("0") for value in values)


class Live(AbstractContextManager["Live"]):
    """The progress of training on standard error."""

    def __init__(self, progress: float, steps: int | None, quiet: bool = False) -> None:
        self.steps, self.quiet = steps, quiet
        self.first: tuple[float, float] | None = None  # time and progress of the first row
        self.last_line, self.values, self.held = float("-inf"), "", ""
        self.bar: Progress | None = None
        if err.is_terminal and not quiet:
            columns = (BarColumn(bar_width=20), TextColumn("{task.percentage:>3.0f} %"), TextColumn("{task.description}"))
            self.bar = Progress(*columns, console=err, transient=True)
            self.task = self.bar.add_task("the first step", total=1.0)
            self.bar.update(self.task, completed=progress)

    def __enter__(self) -> Live:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def say(self, text: str) -> None:
        if not self.quiet:
            err.print(text, style="dim", markup=False, soft_wrap=True)

    def row(self, row: dict[str, Any]) -> None:
        """A row of metrics."""
        if self.quiet:
            return
        if held := row.get("heldout"):
            self.held = f"  held-out AL {held['over_steps']:.2f}"
            if self.bar is None and not row["final"]:
                self._print(row, f"held-out AL {held['over_steps']:.2f}  accepted {positions(held['by_position'])}")
        else:
            self.values = (
                f"loss {row['loss']:.3f}  AL {row['expected_al']:.2f}  accuracy {positions(row['accuracy'])}  "
                f"{row['tokens_per_second']:,} tokens/s"
            )
            if self.bar is None and (time.monotonic() - self.last_line >= PLAIN_SECONDS or row["progress"] >= 1):
                self.last_line = time.monotonic()
                self._print(row, f"{self.values}  {self._left(row['progress'])}".rstrip())
        if self.bar is not None:
            short = self.values.split("  accuracy")[0] + "  " + self.values.rpartition("  ")[2] if self.values else ""
            text = f"{self._step(row)}  {short}{self.held}  {self._left(row['progress'])}"
            self.bar.update(self.task, completed=row["progress"], description=escape(text))

    def _print(self, row: dict[str, Any], text: str) -> None:
        err.print(f"{self._step(row)}  {100 * row['progress']:3.0f} %  {text}", markup=False, soft_wrap=True)

    def _step(self, row: dict[str, Any]) -> str:
        return f"step {row['step']:,}" + (f"/{self.steps:,}" if self.steps else "")

    def _left(self, progress: float) -> str:
        """By the pace since the first row, before which a GPU's kernels are compiled."""
        now = time.monotonic()
        self.first = self.first or (now, progress)
        done = progress - self.first[1]
        return f"{duration((now - self.first[0]) * (1 - progress) / done)} left" if done > 0 and progress < 1 else ""


def show_report(report: Mapping[str, Any]) -> None:
    """The held-out AL of a finished run."""
    table = Table(title="acceptance length (AL) on held-out answers", title_justify="left")
    table.add_column("answers of")
    for name in ("answers", "AL", "over steps"):
        table.add_column(name, justify="right")

    def rows(kind: str, label: str) -> None:
        groups = {name: g for name, g in report[kind].items() if name != "all"}
        ranked = sorted(groups, key=lambda name: -groups[name]["requests"])
        for name in sorted(ranked[:MOST_GROUPS]):
            group = groups[name]
            cells = (f"{group['requests']:,}", f"{group['acceptance_length']:.2f}", f"{group['over_steps']:.2f}")
            table.add_row(escape(f"{label} {name or '(none)'}"), *cells)
        if rest := ranked[MOST_GROUPS:]:
            table.add_row(f"{len(rest)} more, in training.json", f"{sum(groups[n]['requests'] for n in rest):,}", "", "")
        table.add_section()

    rows("by_category", "category")
    rows("by_language", "language")
    rows("by_thinking", "thinking")
    table.add_row(
        "all", f"{report['requests']:,}", f"{report['acceptance_length']:.2f}", f"{report['over_steps']:.2f}", style="bold"
    )
    out.print(table)
    out.print(f"accepted by position: {positions(report['by_position'])}")
    without = report.get("by_depth_without_window", {})
    for name, group in report["by_depth"].items():
        other = f", {without[name]['acceptance_length']:.2f} without the draft's window" if name in without else ""
        out.print(f"anchors at {name}: AL {group['acceptance_length']:.2f} over {group['steps']:,} steps{other}")
