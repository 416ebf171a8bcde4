"""`flashdraft eval prepare speed-bench`: rows that SPEED-Bench publishes as placeholders, filled from their sources."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from flashdraft.errors import CheckpointError, ConfigError, counted
from flashdraft.eval.prepare_rows import PLACEHOLDER, Rebuilder, is_of_files
from flashdraft.eval.prepare_text import Encoding
from flashdraft.eval.sources import Fetch, Row, Sources
from flashdraft.eval.suites import SPEED_BENCH, Suite, suite_of_rows
from flashdraft.train.display import err, out
from flashdraft.train.files import replacing, saying_what_is_wrong
from flashdraft.train.hub import Loader, load_dataset, stream_rows

NAME = "speed-bench"
CATEGORIES = {"qualitative": (11, 80)} | {name: (3, 512) for name in SPEED_BENCH if name != "qualitative"}
SHOWN = 3  # rows named in the error; all are on standard error before
LICENCE = (
    "SPEED-Bench is licensed for evaluation only, and each of its sources has terms of its own: do not train on this file, nor "
    "pass it on"
)


def run_prepare(name: str, configuration: str, output: Path | None) -> None:
    """The command: write the file, and say what it is and what it may be used for."""
    if name.lower() != NAME:
        raise ConfigError(f"there is nothing to prepare for {name!r}: only {NAME} is published without its prompts")
    if output is not None and not output.name:  # Path("") is the working directory
        raise ConfigError("--output names no file: give the name of the JSONL file to write")
    path = output or Path(f"{NAME}-{configuration}.jsonl")
    suite = prepare(configuration, path)
    out.print(f"{suite}, in {path}: measure with `flashdraft eval {path}`", markup=False)
    out.print(f"{LICENCE}.", style="dim", markup=False)


def prepare(
    configuration: str,
    output: Path,
    *,
    load: Loader | None = None,
    fetch: Fetch | None = None,
    encoding: Encoding | None = None,
) -> Suite:
    """Write one configuration of SPEED-Bench as a JSONL suite, whole or not at all; rows that are no placeholders stay.

    load, fetch and encoding stand for `datasets`, the web and tiktoken. Raises ConfigError for another name, and
    CheckpointError for a count of rows that is not the published one, and for rows that cannot be resolved.
    """
    if configuration not in SPEED_BENCH:
        raise ConfigError(f"--config must be one of {', '.join(SPEED_BENCH)}, got {configuration!r}")
    if output.is_dir():
        raise ConfigError(f"--output {output} is a directory: give the name of the JSONL file to write")
    published = SPEED_BENCH[configuration]
    where = f"{published.dataset} ({configuration})"
    load = load or load_dataset("eval")
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(where, total=None)

        def report(name: str) -> None:
            progress.update(task, description=f"reading {name}")

        rows: list[dict[str, Any]] = [dict(row) for row in stream_rows(load, *published[:3], None)]
        check_counts(rows, where, configuration)
        progress.update(task, total=len(rows))
        rebuilder = Rebuilder(Sources(load, fetch, report), configuration, encoding)
        failed = _resolve(rows, rebuilder, lambda: progress.advance(task))
    if failed:
        _refuse(failed, where)
    suite = suite_of_rows(f"{NAME}:{configuration}", where, rows)  # which refuses what is left of placeholders
    with saying_what_is_wrong(output.parent):
        output.parent.mkdir(parents=True, exist_ok=True)
        with replacing(output) as partial, partial.open("w", encoding="utf-8") as file:
            # Each row says whose it is: the name counts only with all of the rows, as they are (suites.load_suite).
            marked = ({**row, "suite": suite.name, "suite_digest": suite.digest} for row in rows)
            file.writelines(json.dumps(row) + "\n" for row in marked)
    return suite


def check_counts(rows: Sequence[Row], where: str, configuration: str) -> None:
    """Raises CheckpointError where there are more or fewer categories, or rows of one, than were published."""
    kinds, each = CATEGORIES[configuration]
    counts = Counter(str(row.get("category")) for row in rows)
    if len(counts) != kinds or set(counts.values()) != {each}:
        found = ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"
        raise CheckpointError(
            f"{where} should hold {kinds * each:,} rows, {each} of each of {kinds} categories, but holds {len(rows):,} "
            f"({found}): it has changed since this version of flashdraft, or was not read to its end; try again"
        )


def _resolve(rows: Sequence[dict[str, Any]], rebuilder: Rebuilder, advance: Callable[[], None]) -> list[tuple[int, Row, str]]:
    """Fill the placeholders in. Returns what could not be: number, row and reason.

    Data sets of the hub come first: some ask for a login, and gigabytes of files are not read where one of them fails.
    """
    failed: list[tuple[int, Row, str]] = []
    of_files: list[tuple[int, dict[str, Any]]] = []

    def fill(number: int, row: dict[str, Any], files_too: bool) -> None:
        try:
            if _is_placeholder(row):
                if not files_too and is_of_files(row):
                    of_files.append((number, row))
                    return
                row["turns"] = rebuilder.turns(row)
        except CheckpointError as error:
            failed.append((number, row, str(error)))
        advance()

    for number, row in enumerate(rows, 1):
        fill(number, row, files_too=False)
    for number, row in of_files if not failed else ():
        fill(number, row, files_too=True)
    return failed


def _is_placeholder(row: Row) -> bool:
    turns = row.get("turns")
    return isinstance(turns, list | tuple) and bool(turns) and str(turns[0]).startswith(PLACEHOLDER)


def _refuse(failed: Sequence[tuple[int, Row, str]], where: str) -> None:
    lines = [f"row {number} ({row.get('question_id')}, {row.get('source')}): {why}" for number, row, why in failed]
    for line in lines:
        err.print(line, style="dim", markup=False, soft_wrap=True)
    reasons: dict[str, str] = {}
    for line, (_, _, why) in zip(lines, failed, strict=True):
        reasons.setdefault(why, line)
    shown = "; ".join(list(reasons.values())[:SHOWN])
    raise CheckpointError(
        f"{counted(len(failed), 'row')} of {where} cannot be resolved, nothing was written: {shown}. Where a data set asks for "
        "a login, accept its terms on the hub and run `hf auth login`; then give the same command again"
    )
