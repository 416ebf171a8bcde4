"""What `flashdraft bench` shows: a table of each kind of prompt in the terminal, and more of it as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from flashdraft.errors import counted
from flashdraft.eval.display import ALL, READER
from flashdraft.eval.metrics import FEWEST
from flashdraft.eval.page import in_markdown, plain
from flashdraft.eval.readable import readable
from flashdraft.eval.results import COUNTED, SILENT
from flashdraft.train.display import out

Point = Mapping[str, Any]
ALONE = "alone: the target without the draft"
RANDOM_WORDS = (
    "prompts are random words: they show what length costs, and acceptance and speed-up only of answers to nonsense; measure "
    "those with --prompts"
)
PERCENTILES = ("p50", "p90", "p99")


def axis(found: Mapping[str, Any]) -> str:
    return "requests at once" if found["load"] == "concurrency" else "requests per second"


def short_columns(found: Mapping[str, Any], compares: bool) -> list[str]:
    """80 columns wide. Times in ms and medians, tokens/s of all requests together."""
    names = ["TTFT", "ITL", "tokens/s"]
    timed = [part for name in names for part in (name, "alone")] if compares else names
    return ["load", "AL", *timed, *(["speed-up", "±"] if compares else [])]


def short_row(p: Point) -> list[str]:
    arms = [p["with"], *([p["without"]] if p["without"] else [])]
    times = [[_ms(arm[name], "p50") for arm in arms] for name in ("ttft", "itl")]
    rates = [_number(arm["output_tokens_per_second"], 1) for arm in arms]
    cells = [f"{p['load']:g}", _number(p["acceptance"] and p["acceptance"]["value"], 2), *times[0], *times[1], *rates]
    return cells + ([_number(p["speedup"] and p["speedup"]["value"], 2), _half(p["speedup"])] if p["without"] else [])


# Two tables, as paper is not wide enough for one.
TIME_COLUMNS = ("load", "arm", *(f"{name} {p}" for name in ("TTFT", "ITL", "latency") for p in PERCENTILES))
RATE_COLUMNS = ("load", "arm", "requests", "prompt tokens", ALL, READER, "AL", "speed-up", "95 %")


def time_rows(p: Point) -> list[list[str]]:
    """Every percentile in ms, a row an arm."""
    return [
        [f"{p['load']:g}", name, *(_ms(arm[kind], at) for kind in ("ttft", "itl", "latency") for at in PERCENTILES)]
        for name, arm in _arms(p)
    ]


def rate_rows(p: Point) -> list[list[str]]:
    """Counts, speeds and acceptance, a row an arm."""
    found = []
    for name, arm in _arms(p):
        rates = [_number(arm[kind], 1) for kind in ("output_tokens_per_second", "user_tokens_per_second")]
        head = [f"{p['load']:g}", name, str(arm["answers"]), _number(p["prompt_tokens"], 0)]
        drafted = name == "draft"
        length = _number(p["acceptance"] and p["acceptance"]["value"], 2) if drafted else ""
        ratio = [_number(p["speedup"] and p["speedup"]["value"], 2), _range(p["speedup"])] if drafted else ["", ""]
        found.append([*head, *rates, length, *ratio])
    return found


def _arms(p: Point) -> list[tuple[str, Any]]:
    return [(name, arm) for name, arm in (("draft", p["with"]), ("alone", p["without"])) if arm is not None]


def speedups(found: Mapping[str, Any], workload: Mapping[str, Any]) -> str | None:
    """The speed-up of each load in one line; None where none was measured."""
    known = [f"{p['speedup']['value']:.2f} at {p['load']:g}" for p in workload["points"] if p["speedup"]]
    return f"speed-up by {axis(found)}: {', '.join(known)}" if known else None


def break_even(workload: Mapping[str, Any]) -> str | None:
    """One sentence; None where there is no comparison by concurrency."""
    found = workload["break_even"]
    if found is None:
        return None
    values = [p["speedup"]["value"] for p in workload["points"] if p["speedup"]]
    return break_even_words(found["measured_to"], found["largest"], found["crossing"], values)


def break_even_words(measured_to: float, largest: float | None, crossing: float | None, values: Sequence[float]) -> str:
    """values: speed-ups by concurrency, the smallest first."""
    to = f"{measured_to:g} requests at once"
    if crossing is not None:
        unsure = largest is not None and largest > crossing
        chance = f"; up to {largest:g} the difference may be chance" if unsure else ""
        return f"the draft stops paying near {crossing:.1f} requests at once (break-even){chance}; measured up to {to}"
    if all(value >= 1 for value in values):
        return f"the draft is faster up to {to}, the most that was measured: no break-even so far"
    if values and values[-1] >= 1:
        return f"the draft is faster at {to}, the most that was measured, and not at every smaller load"
    chance = "" if largest is None else f", though up to {largest:g} the difference may be chance"
    return f"the target alone is faster at every load that was measured, up to {to}{chance}: the draft does not pay"


def notes(workload: Mapping[str, Any], compares: bool) -> list[str]:
    """What to know of the figures."""
    points, synthetic = workload["points"], workload["kind"] == "synthetic"
    found = [sentence] if (sentence := break_even(workload)) else []
    if workload["ended"]:
        found.append(f"the sweep ended: {workload['ended']}")
    if not points:
        return [*found, "no round was finished"]
    if all(p["acceptance"] is None for p in points):
        found.append(SILENT)
    elif any(p["acceptance"] and p["acceptance"]["convention"] != "request_mean" for p in points):
        found.append(COUNTED)
    found += [f"at load {p['load']:g} the server ran {p['at_once']} at once, the others waited" for p in points if p["at_once"]]
    if synthetic:
        found.append(RANDOM_WORDS)
        off = [p for p in points if p["prompt_tokens"] and abs(p["prompt_tokens"] - workload["prompt_tokens"]) >= 0.5]
        if off:
            lengths = ", ".join(f"{p['prompt_tokens']:,.0f}" for p in off)
            found.append(f"the server counts no tokens for others (/tokenize): prompts had {lengths} tokens on average")
        if stopped := sum(p["stopped"] for p in points):
            found.append(f"{counted(stopped, 'answer')} ended before --max-tokens: the server does not know ignore_eos")
    elif not all(p["flushed"] for p in points):
        found.append("the server cannot empty its prefix cache: prompts that come again are read sooner than the first time")
    if refused := sum(p["refused"] for p in points):
        found.append(f"{counted(refused, 'request')} of {sum(_answers(p) for p in points) + refused} were refused")
    if compares:
        texts = [p["texts"] for p in points if p["texts"]]
        differing, compared = (sum(text[name] for text in texts) for name in ("differing", "compared"))
        found.append(f"texts with and without the draft: {differing} of {compared} differ")
    return found


def show(found: Mapping[str, Any], output: Path) -> None:
    for workload in found["workloads"]:
        compares = _compares(workload)
        legend = f", {ALONE}" if compares else ""
        out.print(f"\n{plain(workload['name'])}: {plain(found['draft'])}", style="bold", markup=False)
        out.print(f"load in {axis(found)}, times in ms (medians), tokens/s of all requests{legend}", style="dim", markup=False)
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in short_columns(found, compares):
            table.add_column(name, justify="right", no_wrap=True)
        for p in workload["points"]:
            table.add_row(*map(escape, short_row(p)))
        out.print(table)
        for line in notes(workload, compares):
            out.print(line, markup=False)
    for gate in found["gates"]:
        out.print(plain(gate_line(gate)), markup=False, style="green" if gate["passed"] else "red")
    out.print(f"{output}/bench.html, bench.md, bench.json, requests.jsonl", style="dim", markup=False)


def gate_line(gate: Mapping[str, Any]) -> str:
    option = f"--min-speedup {gate['bound']:g}"
    if gate["passed"] is None:
        return f"{gate['workload']}: {option} cannot be judged: it was not measured"
    reached = "reaches" if gate["passed"] else "is below"
    return f"{gate['workload']}, load {gate['load']:g}: {gate['value']:.2f} {reached} {option}"


def markdown(found: Mapping[str, Any]) -> str:
    lines = [f"# Speed of {in_markdown(found['draft'])}", ""]
    if not found["complete"]:
        lines += ["**Not complete.** The same command goes on.", ""]
    for workload in found["workloads"]:
        lines += [f"## {in_markdown(workload['name'])}", ""]
        for columns, rows in ((RATE_COLUMNS, rate_rows), (TIME_COLUMNS, time_rows)):
            lines += [*_table(columns, [row for p in workload["points"] for row in rows(p)]), ""]
        lines += [*(f"- {line}" for line in notes(workload, _compares(workload))), ""]
    lines += [f"- {in_markdown(gate_line(gate))}" for gate in found["gates"]] + ([""] if found["gates"] else [])
    lines += [about(found), "", *_table(("setting", ""), settings(found))]
    return "\n".join(lines) + "\n"


def about(found: Mapping[str, Any]) -> str:
    return (
        f"Load is in {axis(found)}. Times are in milliseconds: TTFT to the first token, ITL between tokens (one a request), "
        "latency to the end of the answer. tokens/s are of all requests where nothing else is said; alone is without "
        "the draft. The speed-up is tokens over seconds of whole requests with the draft over the same without, on the same "
        f"prompts; intervals are of 95 %, by bootstrap over requests, and fewer than {FEWEST} have none."
    )


def settings(found: Mapping[str, Any]) -> list[list[str]]:
    return [list(row) for row in readable({**found["settings"], **found["provenance"]})]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[in_markdown(cell) for cell in row] for row in rows]
    return [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *(f"| {' | '.join(row)} |" for row in cells)]


def _compares(workload: Mapping[str, Any]) -> bool:
    return any(p["without"] for p in workload["points"])


def _answers(p: Point) -> int:
    return int(p["with"]["answers"] + (p["without"]["answers"] if p["without"] else 0))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _ms(found: Mapping[str, float] | None, at: str) -> str:
    if found is None:
        return "-"
    value = 1000 * found[at]
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"


def _range(found: Mapping[str, Any] | None) -> str:
    return "-" if found is None or found["low"] is None else f"{found['low']:.2f}-{found['high']:.2f}"


def _half(found: Mapping[str, Any] | None) -> str:
    return "-" if found is None or found["low"] is None else f"{(found['high'] - found['low']) / 2:.2f}"
