"""report.html of a run: its tables and plots for people, out of results.json alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashdraft.errors import counted
from flashdraft.eval import display, figures, figures_eval
from flashdraft.eval.difference_display import REQUESTS, acceptance_rows, speed_rows
from flashdraft.eval.display import CONVENTIONS
from flashdraft.eval.metrics import FEWEST
from flashdraft.eval.page import Block, Folded, Items, Picture, Section, Table, Text, page
from flashdraft.eval.readable import readable
from flashdraft.eval.results import headline
from flashdraft.prompts import LOOP
from flashdraft.train.files import write_whole

MOST_LISTED = 200  # looping answers of one draft; results.json has all
NO_PLOTS = f"no plots in the report: they take matplotlib ({figures.INSTALL}, then the same command again)"
Results = dict[str, Any]


def write(results: Results, directory: Path) -> bool:
    """report.html, and with matplotlib plots/*.png, which are in it too. False: without plots."""
    drawn = figures.available()
    plots = figures_eval.draw(results, directory / "plots") if drawn else {}
    write_whole(directory / "report.html", html(results, plots, drawn))
    return drawn


def html(results: Results, plots: dict[str, Path], drawn: bool = True) -> str:
    """The report. plots: PNGs by the names of figures_eval.PLOTS; drawn: there was a matplotlib for them."""
    sections = [
        Section("Summary", [*_summary(results), *([] if drawn else [Text(f"There are {NO_PLOTS}.", "warning")])]),
        Section("Acceptance by category", _acceptance(results, plots)),
        Section("Steps", _steps(results, plots)),
        Section("Where acceptance is high and low", _where(results, plots)),
        Section("Speed", _speed(results, plots)),
        *([Section(f"Against {results['drafts'][0]['name']}", _cost(results, plots))] if results["costs"] else []),
        Section("Answers", _answers(results)),
        Section("Settings and provenance", _provenance(results)),
        Section("What the words mean", [Items(WORDS)]),
    ]
    return page(f"Draft evaluation: {results['suite']['name']}", sections)


PERCENTILES = ("percentiles 50, 90, 99", "TTFT, ms", "ITL, ms", "whole answer, s", display.ALL)
WORDS = (
    "Acceptance length (AL): tokens committed per verify step, the target's own among them. 1 is no proposal accepted.",
    "Mean over requests (request_mean): mean step length of each conversation over all its turns, then the mean over "
    "conversations. Over all steps (step_pooled): 1 + accepted / drafts, as from vLLM's counters; long answers weigh more. "
    "Mean of category means (category_mean): of the first by category. Tokens over steps (tokens_over_steps): answer tokens, "
    "the first too, over verify steps, as SGLang. Compare only within one of them.",
    f"95 %: interval of 2,000 resamples of conversations. Fewer than {FEWEST} conversations have none.",
    f"An answer loops where more than {100 * LOOP:.0f} % of its 8-grams repeat earlier ones. Loops flatter a draft.",
    "TTFT: time to the first token. ITL: mean time between the tokens of an answer. Tokens/s of one reader: "
    "(n - 1) / (last - first token), the mean of the answers. Tokens/s of all requests: all tokens over their time.",
    "Speed-up: tokens over seconds of whole requests, the wait for the first token included, with the draft over without, of "
    "the turns that both answered. So it is not the ratio of the tokens/s of one reader.",
)


def _summary(results: Results) -> list[Block]:
    suite, settings = results["suite"], results["settings"]
    sampling = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}"
    blocks: list[Block] = [
        Text(
            f"{counted(suite['prompts'], 'prompt')} with {counted(suite['turns'], 'turn')}; answers of at most "
            f"{counted(settings['max_tokens'], 'token')}, {sampling}, {counted(settings['concurrency'], 'request')} at once."
        )
    ]
    if not results["complete"]:
        blocks.append(Text(f"Not complete: {counted(results['left'], 'answer')} missing. The same command goes on.", "warning"))
    rows = []
    for draft in results["drafts"]:
        length, speed = headline(draft), draft["speed"]
        rates = [display.number(arm["user_tokens_per_second"] if arm else None, 1) for arm in (speed["with"], speed["without"])]
        convention = CONVENTIONS[length["convention"]] if length else "not measured"
        cells = [display.value(length), display.span(length), *rates, display.value(speed["speedup"])]
        rows.append([draft["name"], convention, f"{draft['answers']['count']:,}", *cells, display.span(speed["speedup"])])
    columns = ("draft", "AL is the", "answers", "AL", "95 %", display.READER, display.ALONE, "speed-up", "95 %")
    blocks.append(Table(columns, rows, left=2))
    for draft in results["drafts"]:
        said = [] if draft["note"] is None else [draft["note"]]
        if draft["answers"]["refused"]:
            said.append(f"{counted(draft['answers']['refused'], 'answer')} refused: listed under Answers")
        blocks += [Text(_of(results, draft, text), "warning") for text in said]
    blocks += [Text(display.gate_line(gate), "plain" if gate["passed"] else "warning") for gate in results["gates"]]
    return blocks


def _acceptance(results: Results, plots: dict[str, Path]) -> list[Block]:
    blocks: list[Block] = []
    if picture := plots.get("acceptance-by-category"):
        blocks.append(
            Picture(
                picture,
                "Bars of the acceptance length of each category; the table below has the figures.",
                "Bar: mean over conversations, whose number is in brackets. Dot: a conversation. Dark line: 95 % interval "
                f"of the mean. Grey line: 1, nothing accepted.{_cut(results)}",
            )
        )
    for draft in results["drafts"]:
        rows = [row.wide()[:6] for row in display.rows(draft)]
        blocks.append(Table(display.COLUMNS[:6], rows, total=True, caption=_of(results, draft)))
        if draft["arm"] == "pinned":
            text = "Acceptance is of an arm of its own that verifies all proposals in every step; speed is of steps as served."
            blocks.append(Text(text, "note"))
        if draft["acceptance"] is None:
            blocks.append(Text("Not measured: the acceptance length.", "note"))
            continue
        whole, clean = draft["acceptance"]["all"], draft["acceptance"]["without_loops"]
        columns, lengths = ["all categories, by convention", "AL", "95 %"], [whole]
        if clean and draft["answers"]["looping"]:
            columns, lengths = [*columns, "without those that loop", "95 %"], [whole, clean]
        cells = [
            [text, *(cell for found in lengths for cell in (display.value(found[name]), display.span(found[name])))]
            for name, text in CONVENTIONS.items()
        ]
        blocks.append(Table(columns, cells))
    return blocks


def _steps(results: Results, plots: dict[str, Path]) -> list[Block]:
    blocks: list[Block] = []
    if picture := plots.get("steps"):
        caption = (
            "Left: how many tokens a step commits. Middle and right: which proposals are accepted, in all and of those reached."
        )
        blocks.append(
            Picture(picture, "Histogram of step lengths, and acceptance by position; the table has the figures.", caption)
        )
    for draft in results["drafts"]:
        shape = (draft["acceptance"] or {}).get("positions")
        if not shape:
            text = "not measured: the server does not say how many proposals each step accepted"
            blocks.append(Text(_of(results, draft, text), "note"))
            continue
        rows = [["0", f"{shape['histogram'][0]:,}", "-", "-"]]
        for k, count in enumerate(shape["histogram"][1:], 1):
            rows.append([str(k), f"{count:,}", *(display.number(shape[name][k - 1], 3) for name in ("joint", "conditional"))])
        columns = ("proposal k", "steps that accept just k", "accepted up to k", "accepted if those before")
        blocks.append(Table(columns, rows, left=0, caption=_of(results, draft)))
    return blocks


def _where(results: Results, plots: dict[str, Path]) -> list[Block]:
    blocks: list[Block] = []
    if picture := plots.get("answer-length"):
        caption = "Each dot is a conversation; a ring marks one that loops."
        blocks.append(Picture(picture, "Acceptance length of conversations by the tokens of their answers.", caption))
    if picture := plots.get("where"):
        blocks.append(
            Picture(picture, "Acceptance length by place in the answer and length of the prompt; the tables have the figures.")
        )
    for draft in results["drafts"]:
        acceptance = draft["acceptance"] or {}
        places, prompts = acceptance.get("places"), acceptance.get("by_prompt_length")
        rows = []
        if places:
            rows = [["answer, tokens " + figures_eval.bin_name(r["from"]), *_steps_of(r)] for r in places["by_place"]]
            if places["by_part"].keys() >= {"thinking", "answer"}:
                rows += [[f"all of the {name}", *_steps_of(places["by_part"][name])] for name in ("thinking", "answer")]
        for r in prompts or ():
            rows.append(["prompt, tokens " + figures_eval.bin_name(r["from"]), "-", f"{r['n']:,}", f"{r['length']:.2f}"])
        if rows:
            blocks.append(Table(("where", "steps", "answers", "AL"), rows, caption=_of(results, draft)))
        blocks += [Text(_of(results, draft, text), "note") for text in _unknown(places, prompts)]
    return blocks


def _unknown(places: dict[str, Any] | None, prompts: list[Any] | None) -> list[str]:
    """What stays unsaid of where steps are long."""
    found = []
    if places is None:
        found.append("not measured by place in the answer: the server does not say what each step accepted")
    elif "all" in places["by_part"]:
        found.append("thinking and answer are not told apart: the server does not count the tokens of thinking")
    elif places["by_part"].keys() == {"answer"}:
        found.append("no answer holds thinking")
    if not prompts:
        found.append("not measured by length of the prompt: the server does not say it of each request")
    return found


def _steps_of(row: dict[str, Any]) -> list[str]:
    return [f"{row['steps']:,}", "-", f"{row['length']:.2f}"]


def _speed(results: Results, plots: dict[str, Path]) -> list[Block]:
    blocks: list[Block] = []
    if picture := plots.get("speed-up"):
        caption = f"Point: speed-up. Line: its 95 % interval. Left of the dashed line the draft costs time.{_cut(results)}"
        blocks.append(Picture(picture, "Speed-up of each category; the table below has the figures.", caption))
    if picture := plots.get("latency"):
        caption = "Times of requests: half of them, nine of ten, and 99 of 100 took no longer."
        if len(results["drafts"]) > 1 and any(draft["speed"]["without"] for draft in results["drafts"]):
            caption += " Without a draft: as measured beside the first draft that was compared."
        blocks.append(Picture(picture, "Percentiles of latency; the table below has the figures.", caption))
    for draft in results["drafts"]:
        rows = [[row.name, *row.wide()[6:]] for row in display.rows(draft)]
        columns = (display.COLUMNS[0], "TTFT, ms", "ITL, ms", *display.COLUMNS[8:])
        blocks.append(Table(columns, rows, total=True, caption=f"{_of(results, draft)}: medians"))
        arms = [("with the draft", draft["speed"]["with"]), (display.ALONE, draft["speed"]["without"])]
        cells = [_times(name, arm) for name, arm in arms if arm]
        blocks.append(Table(PERCENTILES, cells))
        if draft["speed"]["without"] is None:
            blocks.append(Text(_of(results, draft, "not measured: answers without the draft, and so no speed-up"), "note"))
        elif draft["speed"]["speedup"] is None:
            blocks.append(
                Text(_of(results, draft, "no turn was answered both with and without the draft: no speed-up"), "note")
            )
        if cut := draft["speed"]["interrupted"]:
            blocks.append(Text(_of(results, draft, display.interrupted(cut)), "warning"))
    return blocks


def _times(name: str, arm: dict[str, Any]) -> list[str]:
    def cell(key: str, scale: float, digits: int) -> str:
        found = arm[key]
        return "-" if found is None else " / ".join(f"{scale * found[p]:,.{digits}f}" for p in figures_eval.PERCENTILES)

    return [
        name,
        cell("ttft", 1000, 0),
        cell("itl", 1000, 1),
        cell("latency", 1, 2),
        display.number(arm["output_tokens_per_second"], 1),
    ]


def _cost(results: Results, plots: dict[str, Path]) -> list[Block]:
    blocks: list[Block] = []
    if picture := plots.get("cost"):
        caption = (
            "Over the conversations that both drafts answered. An interval that crosses the dashed line may be no difference."
        )
        blocks.append(
            Picture(picture, "Difference of acceptance length and ratio of speed; the tables have the figures.", caption)
        )
    sizes = results["provenance"].get("draft_bytes") or {}
    known = [[draft["name"], f"{sizes[draft['name']] / 1e6:,.1f}"] for draft in results["drafts"] if sizes.get(draft["name"])]
    if known:
        blocks.append(Table(("draft", "weights on disk, MB"), known))
    else:
        blocks.append(Text("Size on disk: not known.", "note"))
    for row in results["costs"]:
        names = (row["against"], row["draft"])
        caption = f"{row['draft']} against {row['against']}, {counted(row['pairs'], 'conversation')}"
        if not row["pairs"]:
            blocks.append(Text(f"{caption}: nothing to compare yet", "note"))
            continue
        blocks.append(Table(("AL", *_sides(names), "difference", "95 %", "n"), acceptance_rows(row), caption=caption))
        blocks.append(Table((REQUESTS, *_sides(names), "ratio", "95 %", "n"), speed_rows(row)))
    return blocks


def _sides(names: tuple[str, str]) -> list[str]:
    return figures.names(names)


def _answers(results: Results) -> list[Block]:
    columns = (
        "draft",
        "answers",
        "tokens",
        "looping",
        "at most one token",
        "cut",
        "refused",
        "texts that differ",
    )
    rows, blocks = [], []
    for draft in results["drafts"]:
        count, texts = draft["answers"], draft["texts"]
        differ = f"{texts['differing']} of {texts['compared']}" if texts and texts["compared"] else "-"
        cells = [f"{count[name]:,}" for name in ("count", "tokens", "looping", "one_token", "cut", "refused")]
        rows.append([draft["name"], *cells, differ])
        if draft["looping"]:
            shown = sorted(draft["looping"], key=lambda row: -row["repetition"])[:MOST_LISTED]
            listed = [[str(r["id"]), str(r["turn"] + 1), f"{r['repetition']:.2f}"] for r in shown]
            rest = len(draft["looping"]) - len(shown)
            more = [Text(f"{rest} more in results.json.", "note")] if rest else []
            head = _of(results, draft, f"looping answers ({len(draft['looping']):,})")
            blocks.append(Folded(head, [Table(("prompt", "turn", "share of repeated 8-grams"), listed), *more]))
        if draft["refusals"]:
            listed = [[str(r["id"]), str(r["turn"] + 1), r["reason"]] for r in draft["refusals"][:MOST_LISTED]]
            head = _of(results, draft, f"refused answers ({len(draft['refusals']):,})")
            blocks.append(Folded(head, [Table(("prompt", "turn", "what the server said"), listed, left=3)]))
    words = "Cut: at the longest length allowed."
    if any(draft["texts"] for draft in results["drafts"]):
        words += " Texts that differ: with the draft against without, up to the first difference of a conversation."
    return [Table(columns, rows), Text(words, "note"), *blocks]


def _provenance(results: Results) -> list[Block]:
    suite = {f"suite_{name}": value for name, value in results["suite"].items() if name != "categories"}
    known = {**suite, **results["settings"], **results["provenance"]}
    return [Table(("what", "value"), [list(row) for row in readable(known)], left=2)]


def _of(results: Results, draft: dict[str, Any], text: str = "") -> str:
    """A sentence with the draft's name where there are several, or the name alone."""
    if not text:
        return draft["name"]
    return f"{draft['name']}: {text}." if len(results["drafts"]) > 1 else f"{text[0].upper()}{text[1:]}."


def _cut(results: Results) -> str:
    names = {name for draft in results["drafts"] for name in draft["by_category"]}
    rest = len(names) - figures_eval.MOST_CATEGORIES
    return f" {rest} categories with fewer answers are in the table alone." if rest > 0 else ""
