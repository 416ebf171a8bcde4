"""What `flashdraft eval` shows: a table in the terminal, and the same as Markdown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from flashdraft.errors import counted
from flashdraft.eval.metrics import FEWEST
from flashdraft.eval.page import in_markdown, plain
from flashdraft.eval.readable import readable
from flashdraft.eval.results import headline
from flashdraft.prompts import LOOP
from flashdraft.train.display import out

CONVENTIONS = {
    "request_mean": "mean over requests",
    "step_pooled": "over all steps (vLLM)",
    "category_mean": "mean of category means",
    "tokens_over_steps": "tokens over steps (SGLang)",
}
READER, ALL = "tokens/s of one reader", "tokens/s of all requests"
ALONE = "without the draft"
COLUMNS = ("category", "answers", "looping", "tokens", "AL", "95 %", "TTFT", "ITL", READER, ALONE, "speed-up", "95 %")
NARROW = ("category", "n", "AL", "±", "TTFT", "ITL", "tokens/s", "without", "speed-up", "±")  # 80 columns
TIMES = (
    "TTFT (to the first token) and ITL (between tokens) are medians in ms; tokens/s are those of one reader, after the first "
    "token, with the draft and without. The speed-up is of whole requests, the wait for the first token included, so it is "
    "not the ratio of the two"
)
INTERVALS = f"Intervals (±, 95 %) are by bootstrap over conversations; fewer than {FEWEST} have none"


@dataclass(frozen=True)
class Row:
    """One line of a table, of a category or of all. Times in seconds, tokens/s of one reader."""

    name: str
    answers: dict[str, int]
    length: dict[str, Any] | None
    on: dict[str, Any]
    off: dict[str, Any] | None
    ratio: dict[str, Any] | None

    def wide(self) -> list[str]:
        count = self.answers
        head = [self.name, str(count["count"]), str(count["looping"]), f"{count['tokens']:,}"]
        return [*head, value(self.length), span(self.length), *self._speed(), value(self.ratio), span(self.ratio)]

    def narrow(self) -> list[str]:
        head = [self.name, str(self.answers["count"]), value(self.length), _half(self.length)]
        return [*head, *self._speed(), value(self.ratio), _half(self.ratio)]

    def _speed(self) -> list[str]:
        rates = [number(arm["user_tokens_per_second"] if arm else None, 1) for arm in (self.on, self.off)]
        return [_ms(self.on["ttft"]), _ms(self.on["itl"]), *rates]


def rows(draft: dict[str, Any]) -> list[Row]:
    """A row a category, and the last over all."""

    def row(name: str, entry: dict[str, Any], length: dict[str, Any] | None, speed: dict[str, Any]) -> Row:
        return Row(name, entry["answers"], length, speed["with"], speed["without"], speed["speedup"])

    found = [row(name, entry, entry["request_mean"], entry) for name, entry in draft["by_category"].items()]
    return [*found, row("all", draft, headline(draft), draft["speed"])]


def lines(draft: dict[str, Any]) -> list[str]:
    """What stands below a table: conventions, positions, and what to know of the answers."""
    found, acceptance, count = [], draft["acceptance"], draft["answers"]
    if acceptance:
        lengths = acceptance["all"]
        known = [f"{lengths[name]['value']:.2f} {text}" for name, text in CONVENTIONS.items() if lengths[name]]
        found.append(f"acceptance length: {', '.join(known)}" if known else "no step drafted anything: no acceptance length")
        clean = (acceptance["without_loops"] or {}).get("request_mean")
        if clean and count["looping"]:
            found.append(f"without the {count['looping']} looping answers: {clean['value']:.2f} {CONVENTIONS['request_mean']}")
        if shape := acceptance["positions"]:
            found.append(f"accepted up to position k:  {_curve(shape['joint'])}")
            found.append(f"accepted if those before:   {_curve(shape['conditional'])}")
        if (where := acceptance["places"]) and where["narrower_steps"] > 0.01:
            share = f"{100 * where['narrower_steps']:.0f} %"
            found.append(
                f"{share} of the steps verified fewer proposals than the draft makes, which lowers the acceptance length"
            )
    if draft["note"]:
        found.append(draft["note"])
    speed = draft["speed"]
    for name, text in (("with", "with the draft"), ("without", ALONE)):
        if speed[name] and (rate := speed[name]["output_tokens_per_second"]):
            found.append(f"{ALL}, {text}: {rate:.1f}")
    if cut := speed["interrupted"]:
        found.append(interrupted(cut))
    found.append(
        f"of {count['count']} answers {count['looping']} loop (8-gram repetition above {LOOP}), {count['one_token']} have at "
        f"most one token, {count['cut']} were cut at the longest length, {count['refused']} were refused"
    )
    if (texts := draft["texts"]) and texts["compared"]:
        found.append(f"texts with and without the draft: {texts['differing']} of {texts['compared']} differ")
    return found


def interrupted(count: int) -> str:
    return (
        f"{counted(count, 'answer')} of this draft came before a stop, and what was left of their pieces had another load: "
        "speeds are those of a run in one go only roughly"
    )


def show(results: dict[str, Any]) -> None:
    for draft in results["drafts"]:
        title = f"{results['suite']['name']}: {draft['name']}"
        table = Table(title=escape(plain(title)), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for i, name in enumerate(NARROW):
            table.add_column(name, justify="right" if i else "left", no_wrap=True)
        *categories, whole = rows(draft)
        for row in categories:
            table.add_row(*(escape(plain(cell)) for cell in row.narrow()))
        table.add_section()
        table.add_row(*whole.narrow(), style="bold")
        out.print(table)
        for line in lines(draft):
            out.print(line, markup=False)
    out.print(f"{TIMES}. {INTERVALS}.", markup=False, style="dim")
    for gate in results["gates"]:
        out.print(plain(gate_line(gate)), markup=False, style="green" if gate["passed"] else "red")


def gate_line(gate: dict[str, Any]) -> str:
    option = f"--{gate['gate'].replace('_', '-')} {gate['bound']:g}"
    if gate["passed"] is None:
        return f"{gate['draft']}: {option} cannot be judged: it was not measured"
    return f"{gate['draft']}: {gate['value']:.2f} {'reaches' if gate['passed'] else 'is below'} {option}"


def markdown(results: dict[str, Any]) -> str:
    suite, settings = results["suite"], results["settings"]
    found = [f"# {in_markdown(suite['name'])}", ""]
    if not results["complete"]:
        found += [f"**Not complete: {results['left']} answers are missing.** The same command goes on.", ""]
    for draft in results["drafts"]:
        found += [f"## {in_markdown(draft['name'])}", "", f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
        found += [f"| {' | '.join(map(in_markdown, row.wide()))} |" for row in rows(draft)]
        found += ["", *(f"- {line}" for line in lines(draft)), ""]
    found += [f"- {in_markdown(gate_line(gate))}" for gate in results["gates"]] + ([""] if results["gates"] else [])
    found += [f"{TIMES}. {INTERVALS}.", "", "| setting | |", "|---|---|"]
    found += [f"| {name} | {in_markdown(value)} |" for name, value in readable({**settings, **results["provenance"]})]
    return "\n".join(found) + "\n"


def value(found: dict[str, Any] | None) -> str:
    return "-" if found is None else f"{found['value']:.2f}"


def span(found: dict[str, Any] | None) -> str:
    return "-" if found is None or found["low"] is None else f"{found['low']:.2f}-{found['high']:.2f}"


def _half(found: dict[str, Any] | None) -> str:
    return "-" if found is None or found["low"] is None else f"{(found['high'] - found['low']) / 2:.2f}"


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _ms(found: dict[str, float] | None) -> str:
    return "-" if found is None else f"{1000 * found['p50']:,.0f}"


def _curve(values: list[float | None]) -> str:
    return " ".join("  - " if value is None else f"{value:.2f}" for value in values)
