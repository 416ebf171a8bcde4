"""results.json: everything a report needs, out of the records of a run. Its fields are listed in docs/evaluation.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashdraft.eval import counters, metrics
from flashdraft.eval.difference import between
from flashdraft.eval.metrics import Record, loops
from flashdraft.eval.records import Log
from flashdraft.eval.run import Arm

SCHEMA = 1
SILENT = (
    "the server says nothing of its speculation, so acceptance is left out (it is never guessed from the stream): vLLM says it "
    "with --per-request-spec-decode-metrics detailed or in its metrics, SGLang with --enable-metrics"
)
COUNTED = "acceptance is from the server's counters, which count all requests it had meanwhile: no categories, no intervals"


def gather(log: Log, arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """One entry a draft, in the order of the arms."""
    names = list(dict.fromkeys(arm.draft for arm in arms))
    return [_draft(log, {arm.kind: arm for arm in arms if arm.draft == name}) for name in names]


def _draft(log: Log, arms: dict[str, Arm]) -> dict[str, Any]:
    on, off = _of(log, arms["draft"]), _of(log, arms.get("none"))
    judged_arm = arms.get("pinned", arms["draft"])
    judged = _of(log, judged_arm)
    of_arm = [r for r in log.answers.values() if r["arm"] == judged_arm.name]
    refused = [r for r in of_arm if "refused" in r]
    found: dict[str, Any] = {"name": arms["draft"].draft, "arm": judged_arm.kind}
    found["answers"] = _count(judged) | {"refused": len(refused)}
    found["refusals"] = [{"id": r["id"], "turn": r["turn"], "reason": r["refused"]} for r in refused]
    found |= _acceptance(judged, _pieces(log, judged_arm))
    found["speed"] = {"with": metrics.speed(on, _pieces(log, arms["draft"])), "without": None, "speedup": None}
    whole = {piece["piece"] for piece in log.pieces}
    found["speed"]["interrupted"] = sum(r["piece"] not in whole for r in (*on, *off))
    found["texts"] = None
    if "none" in arms:
        found["speed"]["without"] = metrics.speed(off, _pieces(log, arms["none"]))
        found["speed"]["speedup"] = metrics.speedup(on, off)
        found["texts"] = metrics.differing(on, off)
    found["by_category"] = {
        name: _category(_in(judged, name), _in(on, name), _in(off, name)) for name in sorted({r["category"] for r in of_arm})
    }
    found["looping"] = [{"id": r["id"], "turn": r["turn"], "repetition": r["repetition"]} for r in judged if loops(r)]
    found["conversations"] = metrics.conversations(judged, on, off)
    return found


def costs(drafts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each further draft costs or gains against the first, over the conversations that both answered."""
    return [
        {"draft": draft["name"], "against": drafts[0]["name"], **between(drafts[0]["conversations"], draft["conversations"])}
        for draft in drafts[1:]
    ]


def _acceptance(records: list[Record], pieces: list[Record]) -> dict[str, Any]:
    clean = [r for r in records if not loops(r)]
    pieces = counters.of_one_engine(pieces)
    counted = counters.total([piece["counters"] for piece in pieces])
    covered = sum(piece["answers"] for piece in pieces)
    found: dict[str, Any] = {"counters": counted and {**counted, "answers": covered}}
    if any(r["speculation"] for r in records):
        return found | {
            "statistics": "per_request",
            "note": None,
            "acceptance": {
                "all": metrics.conventions(records),
                "without_loops": metrics.conventions(clean),
                "positions": metrics.positions(records),
                "places": metrics.places(records),
                "by_prompt_length": metrics.by_prompt_length(records),
            },
        }
    if counted is None or not counted["drafts"]:
        return found | {"statistics": None, "note": SILENT if records else None, "acceptance": None}
    note = COUNTED + ("" if covered == len(records) else f"; they cover {covered} of {len(records)} answers")
    return found | {"statistics": "counters", "note": note, "acceptance": _counted(counted, pieces)}


def _counted(counted: counters.Counters, pieces: list[Record]) -> dict[str, Any]:
    """The conventions that counters know: those of vLLM and of SGLang."""
    drafts = counted["drafts"]
    tokens = counted.get("tokens", sum(piece["tokens"] for piece in pieces))
    known = {"tokens_over_steps": tokens / drafts} if tokens else {}
    positions = None
    if "accepted" in counted:
        known["step_pooled"] = 1 + counted["accepted"] / drafts
        at = [int(count) for count in counted["per_position"]]
        if at:
            positions = metrics.curves([int(drafts) - at[0], *(a - b for a, b in zip(at, [*at[1:], 0], strict=True))])
    names = ("request_mean", "step_pooled", "category_mean", "tokens_over_steps")
    lengths = {name: {"value": known[name], "low": None, "high": None, "n": None} if name in known else None for name in names}
    return {"all": lengths, "without_loops": None, "positions": positions, "places": None, "by_prompt_length": []}


def _category(judged: list[Record], on: list[Record], off: list[Record]) -> dict[str, Any]:
    lengths = metrics.conventions(judged)
    return {
        "answers": _count(judged),
        "request_mean": lengths["request_mean"],
        "step_pooled": lengths["step_pooled"],
        "positions": metrics.positions(judged),
        "with": metrics.speed(on),
        "without": metrics.speed(off) if off else None,
        "speedup": metrics.speedup(on, off),
    }


def _count(records: list[Record]) -> dict[str, int]:
    return {
        "count": len(records),
        "tokens": sum(r["tokens"] or 0 for r in records),
        "looping": sum(map(loops, records)),
        "one_token": sum(r["tokens"] is not None and r["tokens"] <= 1 for r in records),
        "cut": sum(r["finish_reason"] == "length" for r in records),
    }


def gates(drafts: Sequence[dict[str, Any]], min_al: float | None, min_speedup: float | None) -> list[dict[str, Any]]:
    """Whether each draft reaches what was asked for; `passed` None where it was not measured."""
    found = []
    for draft in drafts:
        for name, bound, value in (
            ("min_al", min_al, headline(draft)),
            ("min_speedup", min_speedup, draft["speed"]["speedup"]),
        ):
            if bound is not None:
                reached = None if value is None else value["value"]
                passed = None if reached is None else reached >= bound
                found.append({"draft": draft["name"], "gate": name, "bound": bound, "value": reached, "passed": passed})
    return found


def headline(draft: dict[str, Any]) -> dict[str, Any] | None:
    """request_mean; of counters what they know: step_pooled, or tokens_over_steps."""
    lengths = (draft["acceptance"] or {}).get("all") or {}
    names = ("request_mean", "step_pooled", "tokens_over_steps")
    return next((lengths[name] | {"convention": name} for name in names if lengths.get(name)), None)


def _of(log: Log, arm: Arm | None) -> list[Record]:
    return metrics.answered(r for r in log.answers.values() if arm is not None and r["arm"] == arm.name)


def _pieces(log: Log, arm: Arm) -> list[Record]:
    return [piece for piece in log.pieces if piece["arm"] == arm.name]


def _in(records: list[Record], category: str) -> list[Record]:
    return [r for r in records if r["category"] == category]
