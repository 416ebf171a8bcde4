"""The plots of a run's report, out of results.json. What was not measured is not drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flashdraft.eval import figures
from flashdraft.eval.figures import GREY, label, plot, style_of, thousands
from flashdraft.eval.metrics import PLACES

MOST_CATEGORIES = 40  # of one plot; the tables have all
LENGTH = "acceptance length (tokens per step)"
DARK = "#1c2024"
Results = dict[str, Any]


def draw(results: Results, directory: Path) -> dict[str, Path]:
    """The PNGs that there is something to draw for, by their names. What an earlier report left there is taken away."""
    found = {}
    for name, function in PLOTS.items():
        path = directory / f"{name}.png"
        path.unlink(missing_ok=True)
        directory.mkdir(exist_ok=True)
        if function(results, path):
            found[name] = path
    return found


def categories(results: Results) -> list[str]:
    """Of all drafts, those with the most answers where there are too many for one plot."""
    count: dict[str, int] = {}
    for draft in results["drafts"]:
        for name, entry in draft["by_category"].items():
            count[name] = max(count.get(name, 0), entry["answers"]["count"])
    return sorted(sorted(count, key=lambda name: (-count[name], name))[:MOST_CATEGORIES])


def _series(results: Results) -> Iterator[tuple[int, dict[str, Any], str]]:
    """Number, entry and label of each draft."""
    drafts = results["drafts"]
    yield from zip(range(len(drafts)), drafts, figures.names([draft["name"] for draft in drafts]), strict=True)


def _legend(axes: Any, count: int, **where: Any) -> None:
    if count > 1:
        axes.legend(**({"loc": "best"} | where))


def _rows(axes: Any, labels: Sequence[str]) -> None:
    """Names down the left side, the first at the top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.45, -0.55)
    axes.grid(visible=False, axis="y")


def by_category(results: Results, path: Path) -> bool:
    """Bars of the acceptance length, conversations as dots, its interval as a line."""
    names = categories(results)
    drafts = [entry for entry in _series(results) if any(row["request_mean"] for row in entry[1]["by_category"].values())]
    if not drafts:
        return False
    height = 0.8 / len(drafts)
    size = 1.3 + len(names) * max(0.32, 0.2 * len(drafts))
    with plot(path, height=size) as [axes]:
        for place, (number, draft, name) in enumerate(drafts):
            colour = style_of(number)["color"]
            for row, category in enumerate(names):
                length = (draft["by_category"].get(category) or {}).get("request_mean")
                if length is None:
                    continue
                y = row - 0.4 + height * (place + 0.5)
                axes.barh(y, length["value"], height * 0.9, color=colour, alpha=0.55, label=name if name else None)
                name = ""  # one entry of the legend
                spread = [
                    r["committed"] / r["steps"] for r in draft["conversations"] if r["category"] == category and r["steps"]
                ]
                shift = height * 0.3 * np.sin(2.4 * np.arange(len(spread)))  # so that equal ones are seen apart
                axes.plot(spread, y + shift, ".", color=colour, markersize=4, alpha=0.7)
                if length["low"] is not None:
                    axes.plot((length["low"], length["high"]), (y, y), color=DARK, linewidth=1.6)
                at = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": 8 if len(drafts) > 1 else 9}
                axes.annotate(f" {length['value']:.2f}", (1.0, y), **at)
        _rows(axes, [f"{label(name)} ({_conversations(drafts, name)})" for name in names])
        axes.axvline(1, color=GREY, linewidth=1)
        axes.set_xlim(left=0)
        axes.set_xlabel(LENGTH)
        _legend(axes, len(drafts), loc="upper center", bbox_to_anchor=(0.5, -0.7 / size), ncols=3)
    return True


def _conversations(drafts: Sequence[tuple[int, dict[str, Any], str]], category: str) -> int:
    lengths = [(draft["by_category"].get(category) or {}).get("request_mean") for _, draft, _ in drafts]
    return max((length["n"] for length in lengths if length), default=0)


def steps(results: Results, path: Path) -> bool:
    """How long steps are, and which proposals are accepted."""
    known = [(n, draft["acceptance"] or {}, name) for n, draft, name in _series(results)]
    shapes = [(n, found["positions"], name) for n, found, name in known if found.get("positions")]
    if not shapes:
        return False
    with plot(path, panels=3, width=11) as [histogram, joint, conditional]:
        width = 0.8 / len(shapes)
        most = 1
        for place, (number, shape, name) in enumerate(shapes):
            counts, style = np.array(shape["histogram"]), style_of(number)
            at = np.arange(1, len(counts) + 1)
            most = max(most, len(counts))
            histogram.bar(
                at - 0.4 + width * (place + 0.5), 100 * counts / counts.sum(), width * 0.92, color=style["color"], label=name
            )
            joint.plot(at[:-1], shape["joint"], label=name, **style)
            reached = [np.nan if value is None else value for value in shape["conditional"]]
            conditional.plot(at[:-1], reached, label=name, **style)
        histogram.set(title="Length of steps", xlabel="tokens committed", ylabel="% of steps", xticks=range(1, most + 1))
        joint.set(title="Accepted up to proposal k", ylabel="share of steps")
        conditional.set(title="Accepted if those before were", ylabel="share of steps that come so far")
        for axes in (joint, conditional):
            axes.set(xlabel="proposal k", ylim=(0, 1.03), xticks=range(1, max(most, 2)))
        histogram.grid(visible=False, axis="x")
        _legend(histogram, len(shapes))
    return True


def answer_length(results: Results, path: Path) -> bool:
    """Acceptance length against the length of the answers, a mark a conversation."""
    series = [(n, [r for r in draft["conversations"] if r["steps"]], name) for n, draft, name in _series(results)]
    series = [entry for entry in series if entry[1]]
    if not series:
        return False
    with plot(path, height=4.2) as [axes]:
        marks = {"alpha": 0.75, "markersize": 6 if sum(len(rows) for _, rows, _ in series) < 200 else 4}
        rings = []
        for number, rows, name in series:
            at = [(r["tokens"], r["committed"] / r["steps"]) for r in rows]
            axes.plot(*zip(*at, strict=True), linestyle="", label=name, **marks, **style_of(number))
            rings += [point for point, r in zip(at, rows, strict=True) if r["loops"]]
        if rings:
            ring = {"markersize": 11, "markerfacecolor": "none", "markeredgecolor": DARK}
            axes.plot(*zip(*rings, strict=True), "o", label="loops", **ring)
        counts = [r["tokens"] for _, rows, _ in series for r in rows]
        if max(counts) > 30 * max(min(counts), 1):
            axes.set_xscale("log")
        else:
            axes.set_xlim(0, 1.05 * max(counts) + 1)
        thousands(axes.xaxis)
        axes.set_ylim(bottom=0)
        axes.set(xlabel="tokens of the answers", ylabel=LENGTH, title="Conversations by the length of their answers")
        _legend(axes, len(series) + bool(rings))
    return True


def where(results: Results, path: Path) -> bool:
    """Acceptance length by place in the answer, length of the prompt, thinking and answer."""
    known = [(n, draft["acceptance"] or {}, name) for n, draft, name in _series(results)]
    places = [(n, _binned(found["places"]["by_place"]), name) for n, found, name in known if found.get("places")]
    prompts = [(n, _binned(found["by_prompt_length"]), name) for n, found, name in known if found.get("by_prompt_length")]
    parts = [(n, _parts(found["places"]["by_part"]), name) for n, found, name in known if found.get("places")]
    panels = [
        ("Place in the answer", "tokens before the step, from", places),
        ("Length of the prompt", "tokens of the prompt, from", prompts),
        ("Thinking and answer", "", [entry for entry in parts if len(entry[1]) > 1]),
    ]
    # One bar alone tells nothing that the table does not.
    panels = [panel for panel in panels if len({tick for _, values, _ in panel[2] for tick in values}) > 1]
    if not panels:
        return False
    with plot(path, panels=len(panels), width=max(8.6, 3.8 * len(panels))) as panes:
        for axes, (title, below, series) in zip(panes, panels, strict=True):
            ticks = sorted({tick for _, values, _ in series for tick in values})
            width = 0.7 / len(series)
            for place, (number, values, name) in enumerate(series):
                at = np.array([ticks.index(tick) for tick in values]) - 0.35 + width * (place + 0.5)
                axes.bar(at, list(values.values()), width * 0.92, color=style_of(number)["color"], label=name)
            axes.set_xticks(range(len(ticks)), [text for _, text in ticks])
            axes.set_xlim(-0.7, len(ticks) - 0.3)
            axes.set(title=title, xlabel=below)
            axes.grid(visible=False, axis="x")
        panes[0].set_ylabel(LENGTH)
        if len(results["drafts"]) > 1:
            panes[0].figure.legend(*panes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return True


def _binned(rows: Sequence[dict[str, Any]]) -> dict[tuple[int, str], float]:
    """Lengths by the order and the first token of their bin."""
    return {(row["from"], f"{row['from']:,}"): row["length"] for row in rows}


def _parts(parts: dict[str, dict[str, Any]]) -> dict[tuple[int, str], float]:
    order = ("thinking", "answer")
    return {(at, name): parts[name]["length"] for at, name in enumerate(order) if name in parts}


def bin_name(start: int) -> str:
    """Of a bin of metrics.PLACES: "128-511", "8,192 on"."""
    end = next((place for place in PLACES if place > start), None)
    return f"{start:,} on" if end is None else f"{start:,}-{end - 1:,}"


def latency(results: Results, path: Path) -> bool:
    """Percentiles of the times that a reader waits, with each draft, and without (of the first that was compared)."""
    arms = [(style_of(n)["color"], draft["speed"]["with"], name) for n, draft, name in _series(results)]
    plain = next((draft["speed"]["without"] for draft in results["drafts"] if draft["speed"]["without"]), None)
    arms += [("#a9b1ba", plain, "without a draft")] if plain else []
    panels = (("ttft", "First token", "ms", 1000), ("itl", "Between tokens", "ms", 1000), ("latency", "Whole answer", "s", 1))
    known = [panel for panel in panels if any(speed[panel[0]] for _, speed, _ in arms)]
    if not known:
        return False
    with plot(path, panels=len(known), width=11 if len(known) > 1 else 8.6, height=3.9) as panes:
        for axes, (name, title, unit, scale) in zip(panes, known, strict=True):
            width = 0.8 / len(arms)
            for place, (colour, speed, arm) in enumerate(arms):
                values = [scale * speed[name][p] for p in PERCENTILES] if speed[name] else [np.nan] * len(PERCENTILES)
                at = np.arange(len(PERCENTILES)) - 0.4 + width * (place + 0.5)
                axes.bar(at, values, width * 0.92, color=colour, label=arm)
            axes.set(title=title, ylabel=unit)
            axes.set_xticks(range(len(PERCENTILES)), [PERCENTILES[p] for p in PERCENTILES])
            axes.grid(visible=False, axis="x")
            thousands(axes.yaxis)
        figure = panes[0].figure
        if len(arms) > 1:
            figure.legend(*panes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return True


PERCENTILES = {"p50": "median", "p90": "90 %", "p99": "99 %"}


def speedup(results: Results, path: Path) -> bool:
    """Speed-up by category and over all, with its interval; the line at 1 is where a draft begins to pay."""
    names: list[str | None] = [*categories(results), None]
    drafts = [entry for entry in _series(results) if entry[1]["speed"]["speedup"]]
    if not drafts:
        return False
    size = 1.3 + len(names) * max(0.3, 0.17 * len(drafts))
    with plot(path, height=size) as [axes]:
        for place, (number, draft, name) in enumerate(drafts):
            points = []
            for row, category in enumerate(names):
                entry = draft["speed"] if category is None else draft["by_category"].get(category) or {}
                if found := entry.get("speedup"):
                    points.append((found, row + 0.7 * ((place + 0.5) / len(drafts) - 0.5)))
            _forest(axes, points, name, number)
        _rows(axes, [*(label(name) for name in names if name is not None), "all"])
        axes.axhline(len(names) - 1.5, color=GREY, linewidth=0.8)
        axes.axvline(1, color=DARK, linewidth=1.2, linestyle="--")
        low, high = axes.get_xlim()
        axes.set_xlim(min(low, 0.9), max(high, 1.1))
        axes.set_xlabel("times as fast as without the draft; 1 is break-even")
        _legend(axes, len(drafts), loc="upper center", bbox_to_anchor=(0.5, -0.7 / size), ncols=3)
    return True


def _forest(axes: Any, points: Sequence[tuple[dict[str, Any], float]], name: str, number: int) -> None:
    """Values with their intervals, at heights."""
    style = style_of(number)
    axes.plot([found["value"] for found, _ in points], [y for _, y in points], linestyle="", label=name, **style)
    for found, y in points:
        if found["low"] is not None:
            axes.plot((found["low"], found["high"]), (y, y), color=style["color"], linewidth=1.6)


def cost(results: Results, path: Path) -> bool:
    """Each further draft against the first: difference of acceptance length, ratio of speed."""
    rows = results["costs"]
    labels = [name for number, _, name in _series(results) if number]
    drawn = [
        ("Difference of acceptance length", "tokens per step", 0, [row["acceptance"]["request_mean"] for row in rows]),
        ("Tokens/s with the draft", "times that of the first draft", 1, [row["speed"]["with"] for row in rows]),
    ]
    drawn = [entry for entry in drawn if any(entry[3])]
    if not drawn:
        return False
    with plot(path, panels=len(drawn), width=8.6, height=1.3 + 0.45 * len(rows)) as panes:
        for axes, (title, below, neutral, values) in zip(panes, drawn, strict=True):
            for row, found in enumerate(values):
                _forest(axes, [(found, float(row))] if found else [], labels[row], row + 1)
            _rows(axes, labels if axes is panes[0] else [""] * len(labels))
            axes.axvline(neutral, color=DARK, linewidth=1.2, linestyle="--")
            axes.margins(x=0.15)
            axes.set(title=title, xlabel=below)
    return True


PLOTS: dict[str, Callable[[Results, Path], bool]] = {
    "acceptance-by-category": by_category,
    "steps": steps,
    "answer-length": answer_length,
    "where": where,
    "latency": latency,
    "speed-up": speedup,
    "cost": cost,
}
