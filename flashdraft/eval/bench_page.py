"""bench.html and its plots: latency and throughput by load, and the speed-up with the line where the draft stops paying."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashdraft.eval import bench_display as text
from flashdraft.eval import figures
from flashdraft.eval.page import Block, Items, Picture, Section, Table, Text, page
from flashdraft.train.files import write_whole

Read = Callable[[Mapping[str, Any]], float | None]  # of one arm's speed
RATES, TIMES = "Requests, speeds and acceptance.", "Every percentile, times in ms."
WITHOUT_PLOTS = f"Plots need matplotlib: run `{figures.INSTALL}` and give the same command again."


def write(output: Path, found: Mapping[str, Any]) -> None:
    """bench.html and the PNGs that are in it, which stand beside it, too."""
    workloads = [w for w in found["workloads"] if w["points"]]
    pictures: list[Block] = []
    if workloads and figures.available():
        pictures = list(_pictures(output, found, workloads))
    elif workloads:
        pictures = [Text(WITHOUT_PLOTS, "note")]
    first: list[Block] = [Text(text.about(found), "note")]
    if not found["complete"]:
        first.insert(0, Text("Not complete: some rounds are missing. The same command goes on.", "warning"))
    compares = any(p["without"] for w in workloads for p in w["points"])
    sentences = [(w["name"], said) for w in workloads for said in (text.speedups(found, w), text.break_even(w)) if said]
    ends = [f"{name}: {said}" for name, said in sentences]
    first += [Items([*ends, *map(text.gate_line, found["gates"])])] if ends or found["gates"] else []
    sections = [Section("", first), *([Section("Plots", pictures)] if pictures else [])]
    for w in found["workloads"]:
        rows = [text.short_row(p) for p in w["points"]]
        legend = f"Load in {text.axis(found)}; medians, times in ms; {text.ALONE}."
        blocks: list[Block] = [Table(text.short_columns(found, compares), rows, left=0, caption=legend)]
        blocks += [
            Items(text.notes(w, compares)),
            Table(text.RATE_COLUMNS, [row for p in w["points"] for row in text.rate_rows(p)], left=0, caption=RATES),
            Table(text.TIME_COLUMNS, [row for p in w["points"] for row in text.time_rows(p)], left=0, caption=TIMES),
        ]
        sections.append(Section(w["name"], blocks))
    sections.append(Section("How it was measured", [Table(("setting", "value"), text.settings(found), left=2)]))
    write_whole(output / "bench.html", page(f"Speed of {found['draft']}", sections))


def _pictures(output: Path, found: Mapping[str, Any], workloads: Sequence[Mapping[str, Any]]) -> list[Picture]:
    dashed = "Solid with the draft, dashed the target alone. Both axes are logarithmic."
    place = output / "bench-throughput.png"
    _curves(place, found, workloads, {"tokens/s of all requests": lambda arm: arm["output_tokens_per_second"]})
    pictures = [Picture(place, f"Throughput by {text.axis(found)}, by kind of prompt", f"Throughput. {dashed}")]
    place = output / "bench-latency.png"
    reads = {f"{name}, ms": _median(kind) for name, kind in (("TTFT", "ttft"), ("ITL", "itl"), ("whole answer", "latency"))}
    _curves(place, found, workloads, reads)
    alt = f"Time to the first token, between tokens and of whole answers by {text.axis(found)}"
    pictures.append(Picture(place, alt, f"Latency, medians. {dashed}"))
    if any(p["speedup"] for w in workloads for p in w["points"]):
        place = output / "bench-speedup.png"
        _speedup(place, found, workloads)
        alt = f"Speed-up by {text.axis(found)} with the break-even line at 1"
        pictures.append(Picture(place, alt, "Speed-up with its 95 % interval. Below the line at 1 the target alone is faster."))
    return pictures


def _median(kind: str) -> Read:
    return lambda arm: arm[kind] and 1000 * arm[kind]["p50"]


def _curves(place: Path, found: Mapping[str, Any], workloads: Sequence[Mapping[str, Any]], reads: Mapping[str, Read]) -> None:
    names = figures.names([w["name"] for w in workloads])
    with figures.plot(place, panels=len(reads)) as panels:
        for axes, (title, read) in zip(panels, reads.items(), strict=True):
            for number, w in enumerate(workloads):
                for kind, line in (("with", "-"), ("without", "--")):
                    known = [(p["load"], value) for p in w["points"] if p[kind] and (value := read(p[kind]))]
                    if known:
                        named = names[number] if kind == "with" else None
                        axes.plot(*zip(*known, strict=True), line, label=named, **figures.style_of(number))
            axes.set_yscale("log")
            _loads(axes, found, workloads)
            _ticks(axes)
            axes.set_title(title)
        if panels[0].get_legend_handles_labels()[0]:  # of answers of one token, or without usage, there are no curves
            panels[0].legend()


def _speedup(place: Path, found: Mapping[str, Any], workloads: Sequence[Mapping[str, Any]]) -> None:
    names = figures.names([w["name"] for w in workloads])
    with figures.plot(place) as [axes]:
        axes.axhline(1, color=figures.GREY, linestyle="--", linewidth=1.4, label="break-even")
        for number, w in enumerate(workloads):
            known = [(p["load"], p["speedup"]) for p in w["points"] if p["speedup"]]
            if not known:
                continue
            values = [ratio["value"] for _, ratio in known]
            below = [0 if ratio["low"] is None else max(0, ratio["value"] - ratio["low"]) for _, ratio in known]
            above = [0 if ratio["high"] is None else max(0, ratio["high"] - ratio["value"]) for _, ratio in known]
            style = figures.style_of(number)
            axes.errorbar([load for load, _ in known], values, yerr=[below, above], capsize=3, label=names[number], **style)
            if w["break_even"] and (crossing := w["break_even"]["crossing"]):
                axes.axvline(crossing, color=style["color"], linestyle=":", linewidth=1.2)
        axes.set_ylim(bottom=0)
        axes.set_title("Speed-up")
        _loads(axes, found, workloads)
        axes.legend()


def _loads(axes: Any, found: Mapping[str, Any], workloads: Sequence[Mapping[str, Any]]) -> None:
    """Loads double, so that the axis is logarithmic; a tick where there is a point."""
    loads = sorted({p["load"] for w in workloads for p in w["points"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [f"{load:g}" for load in loads])
    axes.minorticks_off()
    axes.set_xlabel(text.axis(found))


def _ticks(axes: Any) -> None:
    """Plain numbers, and enough of them within one decade, too."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    figures.thousands(axes.yaxis)
