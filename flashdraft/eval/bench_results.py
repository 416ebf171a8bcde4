"""bench.json: every load's speed with and without the draft, and where the draft stops paying. See docs/benchmarking.md."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from flashdraft.eval import counters, metrics
from flashdraft.eval.bench_prompts import Workload
from flashdraft.eval.bench_run import BenchLog, Cell, at_once
from flashdraft.eval.metrics import Record, answered
from flashdraft.eval.run import Arm

SCHEMA = 1


def of_workload(
    log: BenchLog,
    workload: Workload,
    loads: Iterable[float],
    arms: Sequence[Arm],
    rounds: int,
    by_rate: bool,
    ended: str | None,
) -> dict[str, Any]:
    """ended: why a sweep went no further."""
    points = [point(log, Cell(workload, load), arms, rounds) for load in loads]
    found = [p for p in points if p is not None]
    return {
        "name": workload.name,
        "kind": "synthetic" if workload.suite is None else "suite",
        "prompt_tokens": workload.tokens,
        "ended": ended,
        "break_even": None if by_rate else break_even(found),
        "points": found,
    }


def point(log: BenchLog, cell: Cell, arms: Sequence[Arm], rounds: int) -> dict[str, Any] | None:
    """One load; None where no round of it is whole."""
    of_arm = {arm.kind: log.of(cell, arm, rounds) for arm in arms}
    on_pieces, on_all = of_arm["draft"]
    off_pieces, off_all = of_arm.get("none", ([], []))
    if not on_pieces and not off_pieces:
        return None
    on, off = answered(on_all), answered(off_all)
    records = [*on, *off]
    lengths = [record["prompt_tokens"] for record in records if record["prompt_tokens"]]
    limits = [limit for arm in arms if (limit := at_once(log, cell, arm, rounds)) is not None]
    return {
        "load": cell.load,
        "rounds": min(len(pieces) for pieces, _ in of_arm.values()),
        "prompt_tokens": float(np.mean(lengths)) if lengths else None,
        "refused": len(on_all) + len(off_all) - len(records),
        "stopped": sum(record["finish_reason"] != "length" for record in records),
        "at_once": max(limits) if limits else None,
        "flushed": all(piece["flushed"] for piece in (*on_pieces, *off_pieces)),
        "with": metrics.speed(on, on_pieces),
        "without": metrics.speed(off, off_pieces) if "none" in of_arm else None,
        "speedup": metrics.speedup(on, off),
        "acceptance": acceptance(on, on_pieces),
        "texts": metrics.differing(on, off) if "none" in of_arm else None,
    }


def acceptance(records: Sequence[Record], pieces: Sequence[Record]) -> dict[str, Any] | None:
    """Of each request where the server says it, else of its counters; None where neither says anything."""
    if length := metrics.conventions(records)["request_mean"]:
        return length | {"convention": "request_mean"}
    counted = counters.total([piece["counters"] for piece in counters.of_one_engine(pieces)])
    if counted is None or not counted["drafts"]:
        return None
    if "accepted" in counted:
        value, convention = 1 + counted["accepted"] / counted["drafts"], "step_pooled"
    else:
        value, convention = counted["tokens"] / counted["drafts"], "tokens_over_steps"
    return {"value": value, "low": None, "high": None, "n": None, "convention": convention}


def break_even(points: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The largest concurrency whose speed-up is not below 1 by its interval, and between which two the speed-up crosses 1.

    crossing: on a straight line over the logarithm of the concurrency; None where it is above 1 up to the last, or below 1
    from the first. None without a speed-up.
    """
    known = [(float(p["load"]), p["speedup"]) for p in points if p["speedup"]]
    if not known:
        return None
    good = [load for load, ratio in known if (ratio["high"] if ratio["high"] is not None else ratio["value"]) >= 1]
    crossing = None
    for (a, first), (b, second) in itertools.pairwise(known):
        if first["value"] >= 1 > second["value"]:
            share = (first["value"] - 1) / (first["value"] - second["value"])
            crossing = math.exp(math.log(a) + share * (math.log(b) - math.log(a)))  # the last one
    return {
        "largest": max(good, default=None),
        "crossing": crossing,
        "measured_to": known[-1][0],
    }


def gates(workloads: Sequence[Mapping[str, Any]], min_speedup: float | None) -> list[dict[str, Any]]:
    """Whether every load of every kind of prompt reaches --min-speedup; `passed` None where it was not measured."""
    if min_speedup is None:
        return []
    found = []
    for workload in workloads:
        for p in workload["points"] or [{"load": None, "speedup": None}]:
            value = p["speedup"] and p["speedup"]["value"]
            passed = None if value is None else value >= min_speedup
            found.append(
                {"workload": workload["name"], "load": p["load"], "bound": min_speedup, "value": value, "passed": passed}
            )
    return found
