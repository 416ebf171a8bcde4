"""`flashdraft bench`: loads, servers, a directory that can be resumed, results, exit code."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flashdraft.client import ServerError
from flashdraft.errors import ConfigError, FlashdraftError, counted
from flashdraft.eval import bench_display, bench_page, bench_results
from flashdraft.eval.bench_options import (
    Options,
    arms_of,
    check,
    draft_of,
    endpoints,
    fitting,
    limit_of,
    serve_arguments,
    workloads_of,
)
from flashdraft.eval.bench_prompts import Workload
from flashdraft.eval.bench_run import GROWTH, MOST, Bench, BenchLog, Cell, Full, at_once, throughput
from flashdraft.eval.command import BELOW, DIED, PASSED
from flashdraft.eval.local import files_hash, serving
from flashdraft.eval.provenance import draft_place, of_command, of_endpoint, of_pair, remember
from flashdraft.eval.run import Arm, Served
from flashdraft.train.display import err
from flashdraft.train.files import locked, saying_what_is_wrong, write_whole
from flashdraft.train.hub import Loader


@dataclass
class Measured:
    """What is to be measured, of what is known so far."""

    workloads: list[Workload]
    arms: list[Arm]
    log: BenchLog
    limit: int | None = None  # requests that the server runs at once
    full: dict[str, int] = field(default_factory=dict)  # by workload: the concurrency that the server refused in a sweep
    ended: dict[str, str] = field(default_factory=dict)  # by workload: why a sweep went no further


def run_bench(options: Options, *, load: Loader | None = None, before: Callable[[], None] = lambda: None) -> int:
    """Measure, write bench.json, bench.md and bench.html, show them. Returns the exit code.

    before: called where there is something left to measure, ahead of the server.
    """
    check(options)
    workloads = workloads_of(options, load)
    served = endpoints(options) if options.endpoint else None
    arms = arms_of(options, served)
    if served is not None:
        workloads = fitting(options, workloads, served.values())
    with saying_what_is_wrong(options.output):
        options.output.mkdir(parents=True, exist_ok=True)
    lock = locked(options.output, "measuring into")
    try:
        begun = _remember(options, workloads, arms)
        measured = Measured(workloads, arms, BenchLog(options.output), limit_of(options))
        try:
            failure = _measure(options, measured, served, before)
        finally:
            measured.log.close()
        found = _results(options, measured, served, begun)
        with saying_what_is_wrong(options.output):
            # Names of files may hold halves of a surrogate pair, which no file in UTF-8 can.
            whole = json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
            write_whole(options.output / "bench.json", whole.encode(errors="replace"))
            write_whole(options.output / "bench.md", bench_display.markdown(found).encode(errors="replace"))
            bench_page.write(options.output, found)
    finally:
        os.close(lock)
    bench_display.show(found, options.output)
    if isinstance(failure, ServerError):
        left = counted(found["left"], "round")
        end = f"flashdraft: {failure}. {left} missing; what there is was kept: the same command goes on"
        err.print(end, style="red", markup=False)
        return DIED
    if failure is not None:
        raise failure
    if any(gate["passed"] is None for gate in found["gates"]):
        raise ConfigError("--min-speedup cannot be judged: not all was measured")
    return PASSED if all(gate["passed"] for gate in found["gates"]) else BELOW


def _measure(
    options: Options, m: Measured, served: Mapping[str, Served] | None, before: Callable[[], None]
) -> FlashdraftError | None:
    """Run what is left to run. Returns what ended it early, once a round is whole."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress(*columns, console=err, transient=True))
        task = progress.add_task("", total=None)
        bench = Bench(m.log, options.settings, lambda record: progress.advance(task))

        def requests(cell: Cell) -> int:
            return len(bench.left(cell, m.arms)) * options.settings.count(cell.load)

        total = 0 if options.sweep else sum(map(requests, _cells(options, m)))
        if not any(map(requests, _cells(options, m))):
            err.print(f"all rounds are in {options.output} already: give another --output to measure again", markup=False)
            return None
        before()
        try:
            if served is None:
                assert m.limit is not None
                arguments = serve_arguments(options, m.workloads, m.limit)
                own = Served.at(stack.enter_context(serving(arguments, options.output / "server.log")), None)
                m.workloads[:] = fitting(options, m.workloads, [own])
                served = {"draft": own, "none": own}
            for cell in _cells(options, m):
                total += requests(cell) if options.sweep else 0
                progress.update(task, total=total, description=f"{cell.workload.name}, load {cell.load:g}")
                try:
                    bench.run(cell, [(arm, served[arm.kind]) for arm in m.arms])
                except Full:
                    if not options.sweep or cell.load == 1:
                        raise
                    m.full[cell.workload.name] = int(cell.load)
        except (ServerError, ConfigError) as error:
            if not m.log.pieces:
                raise
            return error
    return None


def _cells(options: Options, m: Measured) -> Iterator[Cell]:
    """One kind of prompt after the other. A sweep doubles the concurrency while that helps, by what the log holds by then."""
    for workload in m.workloads:
        name, value = workload.name, 1
        if not options.sweep:
            yield from (Cell(workload, load) for load in options.usual)
            continue
        while value < m.full.get(name, MOST + 1):
            yield Cell(workload, value)
            reason = _enough(options, m, workload, value)
            if reason is not None:
                m.ended[name] = reason
                break
            value *= 2
        if name in m.full:
            m.ended[name] = f"the server takes no more requests at {m.full[name]} at once"


def _enough(options: Options, m: Measured, workload: Workload, value: int) -> str | None:
    """Why a sweep goes no further than this concurrency; "" where it has not been measured."""
    rounds, most = options.settings.rounds, min(MOST, m.limit or MOST)
    now, before = Cell(workload, value), Cell(workload, value // 2)
    late = [throughput(m.log, now, arm, rounds) for arm in m.arms]
    early = [throughput(m.log, before, arm, rounds) for arm in m.arms]
    if any(rate is None for rate in late):
        return ""
    if limits := [limit for arm in m.arms if (limit := at_once(m.log, now, arm, rounds)) is not None]:
        return f"the server runs {max(limits)} requests at once, the others wait"
    if value > 1 and all(a and b and b < GROWTH * a for a, b in zip(early, late, strict=True)):
        return f"tokens/s grew by less than {100 * (GROWTH - 1):.0f} % from {value // 2} to {value} at once"
    return f"the server runs {most} requests at once" if 2 * value > most else None


def _remember(options: Options, workloads: Sequence[Workload], arms: Sequence[Arm]) -> dict[str, Any]:
    """What was asked for, and when first. Raises ConfigError where it differs but for loads, lengths and rounds."""
    settings = asdict(replace(options.settings, rounds=1))
    del settings["rounds"]
    now: dict[str, Any] = {"bench": settings, "arms": [arm.name for arm in arms], "pair": {}}
    now["suites"] = {w.suite.name: w.suite.digest for w in workloads if w.suite is not None}
    if not options.endpoint:  # a server that was started anew may be somewhere else: its address does not matter
        draft = files_hash(draft_place(draft_of(options)))
        now["pair"] = {"target": options.target, "draft": draft, "serve": list(options.serve)}
    return remember(options.output, now)


def _results(options: Options, m: Measured, served: Mapping[str, Served] | None, begun: Mapping[str, Any]) -> dict[str, Any]:
    bench, s = Bench(m.log, options.settings, lambda record: None), options.settings
    cells = list(_cells(options, m))
    left = sum(len(bench.left(cell, m.arms)) for cell in cells)
    workloads = [
        bench_results.of_workload(
            m.log,
            w,
            [cell.load for cell in cells if cell.workload == w],
            m.arms,
            s.rounds,
            s.by_rate,
            m.ended.get(w.name) or None,
        )
        for w in m.workloads
    ]
    return {
        "schema": bench_results.SCHEMA,
        "complete": left == 0,
        "left": left,
        "load": "requests per second" if s.by_rate else "concurrency",
        "draft": m.arms[0].draft,
        "settings": asdict(s) | {"sweep": options.sweep},
        "provenance": _provenance(options, m, served, begun),
        "workloads": workloads,
        "gates": bench_results.gates(workloads, options.min_speedup),
    }


def _provenance(options: Options, m: Measured, served: Mapping[str, Served] | None, begun: Mapping[str, Any]) -> dict[str, Any]:
    found = of_command(begun)
    if served is not None:
        return found | of_endpoint(served["draft"], options.baseline)
    serve = [*options.serve, "--max-num-seqs", str(m.limit)]
    pair = of_pair(options.target, options.device, serve)
    return found | pair | {"draft": m.arms[0].draft, "draft_hash": begun["pair"]["draft"]}
