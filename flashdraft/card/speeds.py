"""Speed over load, out of what `flashdraft bench` wrote (bench.json, docs/benchmarking.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashdraft.card.markdown import NONE, Markdown, at, code, decimal, escape, number, table, text_of, whole
from flashdraft.card.measured import of_this_draft, read_report, setup_of, spread
from flashdraft.card.subject import Subject
from flashdraft.errors import CheckpointError, counted
from flashdraft.eval.bench_display import break_even_words
from flashdraft.eval.metrics import FEWEST

SCHEMA = 1


@dataclass(frozen=True)
class Benched:
    """One bench.json of this draft. revision: as of Measured."""

    file: Path
    results: dict[str, Any]
    revision: str | None


def read_benches(paths: Iterable[Path], subject: Subject) -> list[Benched]:
    """Raises CheckpointError for what `flashdraft bench` did not write, and for another checkpoint's."""
    return [_read(path / "bench.json" if path.is_dir() else path, subject) for path in paths]


def _read(file: Path, subject: Subject) -> Benched:
    results = read_report(file, "flashdraft bench")
    if results.get("schema") != SCHEMA or not isinstance(results.get("workloads"), list):
        raise CheckpointError(f"{file} is not what `flashdraft bench` writes (schema {SCHEMA}): give the directory of a run")
    name = str(results.get("draft"))
    [revision] = of_this_draft(file, [name], {name: at(results, "provenance", "draft_hash")}, subject).values()
    return Benched(file, results, revision)


def speeds(benches: Sequence[Benched]) -> Markdown:
    """The section; empty without a run."""
    if not benches:
        return Markdown("")
    intro = (
        "Median times in milliseconds, tokens/s of all requests together, each with the draft and without it (*alone*). TTFT "
        f"is the time to the first token, ITL the time between tokens. Intervals are of 95 %, by resampling requests; "
        f"fewer than {FEWEST} have none."
    )
    parts = [Markdown("## Speed over load"), Markdown(intro)]
    for bench in benches:
        parts += _of_run(bench)
    return Markdown("\n\n".join(parts))


def _of_run(bench: Benched) -> list[Markdown]:
    results, settings = bench.results, at(bench.results, "settings")
    by_rate = text_of(results.get("load")) == "requests per second"
    where = f"{setup_of(results)}. "
    where += (
        "" if number(at(settings, "max_tokens")) is None else f"At most {whole(at(settings, 'max_tokens'))} tokens an answer. "
    )
    where += "" if not number(at(settings, "rounds")) else f"{counted(round(at(settings, 'rounds')), 'round')}. "
    started, busy = text_of(at(results, "provenance", "started")), number(at(results, "provenance", "load_average"))
    where += "" if busy is None else f"Load average of the machine: {busy:g}. "
    where += "" if started is None else f"On {started[:10]}."
    found = [Markdown(escape(where.strip()))]
    if results.get("complete") is not True:
        found.append(Markdown("**Incomplete: some rounds are missing.**"))
    if bench.revision is None:
        found.append(Markdown("Which files were measured is not recorded: that it was this draft is the publisher's word."))
    for workload in results["workloads"]:
        points = at(workload, "points")
        rows = [_row(point) for point in (points if isinstance(points, list) else []) if isinstance(point, dict)]
        revision = "revision not recorded" if bench.revision is None else f"revision {code(bench.revision)}"
        found.append(Markdown(f"### {escape(text_of(at(workload, 'name')) or 'prompts')}, {revision}"))
        if at(workload, "kind") == "synthetic":
            found.append(Markdown(_random_words(workload)))
        load = "requests a second" if by_rate else "requests at once"
        header = (load, "requests", "AL", "TTFT", "alone", "ITL", "alone", "tokens/s", "alone", "speed-up", "95 %")
        found.append(table(header, rows, text=0) if rows else Markdown("No load was measured."))
        if sentence := _break_even(workload):
            found.append(Markdown(sentence))
    return found


def _row(point: dict[str, Any]) -> list[str]:
    on, off, ratio = (at(point, key) for key in ("with", "without", "speedup"))
    load = number(point.get("load"))
    times = [_ms(at(arm, key, "p50")) for key in ("ttft", "itl") for arm in (on, off)]
    rates = [decimal(at(arm, "output_tokens_per_second"), 1) for arm in (on, off)]
    head = [NONE if load is None else f"{load:g}", whole(at(on, "answers")), decimal(at(point, "acceptance", "value"))]
    return [*head, *times, *rates, decimal(at(ratio, "value")), spread(ratio)]


def _random_words(workload: dict[str, Any]) -> str:
    """Lengths are exact where the server counts tokens; else the mean of what it counted afterwards is given."""
    wanted, points = number(at(workload, "prompt_tokens")), at(workload, "points")
    means = [number(at(point, "prompt_tokens")) for point in (points if isinstance(points, list) else [])]
    length = ""
    if wanted is not None:
        exact = all(mean is not None and abs(mean - wanted) < 0.5 for mean in means) and means
        length = f"exactly {whole(wanted)} tokens each" if exact else f"about {whole(wanted)} tokens each"
    return (
        f"Prompts of random words{', ' if length else ''}{length}: they show what length costs, not what acceptance is worth."
    )


def _ms(seconds: Any) -> str:
    found = number(seconds)
    return NONE if found is None else f"{1000 * found:,.1f}"


def _break_even(workload: Any) -> str:
    """As `flashdraft bench` says it; empty where there is no comparison by concurrency."""
    found, points = at(workload, "break_even"), at(workload, "points")
    measured, largest, crossing = (number(at(found, name)) for name in ("measured_to", "largest", "crossing"))
    ratios = [number(at(point, "speedup", "value")) for point in (points if isinstance(points, list) else [])]
    values = [ratio for ratio in ratios if ratio is not None]
    if measured is None or not values:
        return ""
    said = break_even_words(measured, largest, crossing, values)
    return f"{said[0].upper()}{said[1:]}."
