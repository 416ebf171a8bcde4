"""Differences of two drafts or runs as rows of tables: names, both values, the difference, its interval, pairs."""

from __future__ import annotations

from typing import Any

from flashdraft.eval.display import CONVENTIONS

SPEEDS = {"with": "with the draft", "without": "without it", "speedup": "speed-up"}


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
