"""Acceptance and speed out of records: every convention by its name, with intervals."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from flashdraft.prompts import LOOP

RESAMPLES = 2000
PLACES = (0, 32, 128, 512, 2048, 8192)  # where bins of tokens begin
PERCENTILES = (50, 90, 99)
FEWEST = 5  # requests or conversations that an interval needs: resampling fewer says nothing of what else there is

Record = dict[str, Any]
Talk = tuple[str, int]  # prompt hash, sample


def talk_of(record: Record) -> Talk:
    return record["prompt"], record["sample"]


def answered(records: Iterable[Record]) -> list[Record]:
    return [record for record in records if "refused" not in record]


def loops(record: Record) -> bool:
    return bool(record["repetition"] > LOOP)


def interval(columns: Sequence[Sequence[float]], of: Callable[[Any], Any]) -> dict[str, Any] | None:
    """A statistic of column sums, with the middle 95 % of it over resampled rows; None of no rows.

    columns: a row a conversation. of: from sums [..., columns] to the statistic [...]. Fewer rows than FEWEST have no interval.
    """
    if not columns:
        return None
    rows = np.asarray(columns, dtype=np.float64)
    found = {"value": float(of(rows.sum(0))), "low": None, "high": None, "n": len(rows)}
    if len(rows) >= FEWEST:
        draws = np.random.default_rng(0).multinomial(len(rows), np.full(len(rows), 1 / len(rows)), size=RESAMPLES)
        with np.errstate(divide="ignore", invalid="ignore"):
            values = of(draws @ rows)
        values = values[np.isfinite(values)]
        if len(values):
            found["low"], found["high"] = (float(v) for v in np.percentile(values, (2.5, 97.5)))
    return found


def _ratio(sums: Any) -> Any:
    return sums[..., 0] / sums[..., 1]


def conversations(
    judged: Iterable[Record], on: Iterable[Record] = (), off: Iterable[Record] = (), *, named: bool = True
) -> list[dict[str, Any]]:
    """A row a conversation of `judged`, with the sums that every convention and speed is made of; see docs/evaluation.md.

    committed and steps: of drafting steps. step_tokens and verify_steps: of turns that drafted at all. named: with what is
    only for people and for pairing runs.
    """
    rows: dict[Talk, dict[str, Any]] = {}
    turns: dict[Talk, list[Record]] = defaultdict(list)
    for record in judged:
        turns[talk_of(record)].append(record)
    for talk, records in turns.items():
        row: dict[str, Any] = {"prompt": talk[0], "sample": talk[1], "category": records[0]["category"]}
        row |= dict.fromkeys(("committed", "steps", "step_tokens", "verify_steps"), 0)
        for record in records:
            s = record["speculation"]
            if s and s["steps"] and s["accepted"] is not None:
                row["committed"] += s["steps"] + s["accepted"]
                row["steps"] += s["steps"]
            if s and s["steps"] and record["tokens"]:
                row["step_tokens"] += record["tokens"]
                row["verify_steps"] += s["verify_steps"]
        rows[talk] = row
    if not named:
        return list(rows.values())
    with_draft, without, both = _times(on), _times(off), paired_times(on, off)
    for talk, row in rows.items():
        records = sorted(turns[talk], key=lambda record: record["turn"])
        texts = hashlib.blake2b("\0".join(r["text"] for r in records).encode(errors="replace"), digest_size=8).hexdigest()
        row |= {"id": records[0]["id"], "turns": len(records), "tokens": sum(r["tokens"] or 0 for r in records)}
        row |= {"loops": any(map(loops, records)), "texts": texts}
        row |= {"with": with_draft.get(talk), "without": without.get(talk), "both": both.get(talk)}
    return list(rows.values())


def _times(records: Iterable[Record]) -> dict[Talk, dict[str, float]]:
    """Turns, tokens and seconds of requests that had tokens."""
    found: dict[Talk, dict[str, float]] = {}
    for r in records:
        if r["tokens"]:
            sums = found.setdefault(talk_of(r), {"turns": 0, "tokens": 0, "seconds": 0.0})
            for name, value in (("turns", 1), ("tokens", r["tokens"]), ("seconds", r["seconds"])):
                sums[name] += value
    return found


def conventions(records: Sequence[Record]) -> dict[str, Any]:
    """Acceptance length by every convention; None where the server did not say what it needs. See docs/evaluation.md."""
    rows = conversations(records, named=False)
    drafted = [row for row in rows if row["steps"]]
    by_category: dict[str, list[float]] = defaultdict(list)
    for row in drafted:
        by_category[row["category"]].append(row["committed"] / row["steps"])
    means = [float(np.mean(values)) for values in by_category.values()]
    whole = [(row["step_tokens"], row["verify_steps"]) for row in rows if row["verify_steps"]]
    return {
        "request_mean": interval([(row["committed"] / row["steps"], 1.0) for row in drafted], _ratio),
        "step_pooled": interval([(row["committed"], row["steps"]) for row in drafted], _ratio),
        "category_mean": {"value": float(np.mean(means)), "low": None, "high": None, "n": len(means)} if means else None,
        "tokens_over_steps": interval(whole, _ratio),
    }


def positions(records: Iterable[Record]) -> dict[str, Any] | None:
    """Steps by accepted proposals, joint P(length > k) and conditional acceptance of proposal k, for k = 1, 2, ..."""
    found = [s for record in records if (s := record["speculation"]) and s["histogram"]]
    if not found:
        return None
    width = max(len(s["histogram"]) for s in found)
    histogram = np.sum([[*s["histogram"], *[0] * (width - len(s["histogram"]))] for s in found], axis=0)
    return curves([int(count) for count in histogram])


def curves(histogram: Sequence[int]) -> dict[str, Any] | None:
    """The same of one histogram: steps that accepted 0, 1, 2 ... proposals."""
    steps = sum(histogram)
    if not steps:
        return None
    joint = [sum(histogram[k:]) / steps for k in range(1, len(histogram))]
    before = [1.0, *joint[:-1]]
    conditional = [j / b if b else None for j, b in zip(joint, before, strict=True)]
    return {"histogram": list(histogram), "joint": joint, "conditional": conditional}


def places(records: Iterable[Record]) -> dict[str, Any] | None:
    """Mean step length by where in the answer a step begins, and of thinking and answer; None without steps in order."""
    bins: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    parts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    narrow = steps = 0
    for record in records:
        s = record["speculation"]
        if not s or s["accepted_per_step"] is None:
            continue
        at = 1  # the first token is prefill's
        for accepted, drafted in zip(s["accepted_per_step"], s["drafted_per_step"], strict=True):
            if drafted:
                thinking = record["thinking_tokens"]  # None: not told apart
                part = "all" if thinking is None else "thinking" if at < thinking else "answer"
                for count in (bins[max(b for b in PLACES if b <= at)], parts[part]):
                    count[0] += accepted + 1
                    count[1] += 1
                steps += 1
                narrow += drafted < (s["width"] or 0)
            at += accepted + 1
    if not steps:
        return None
    return {
        "by_place": [{"from": b, "length": bins[b][0] / bins[b][1], "steps": bins[b][1]} for b in sorted(bins)],
        "by_part": {name: {"length": total / count, "steps": count} for name, (total, count) in sorted(parts.items())},
        "narrower_steps": narrow / steps,
    }


def by_prompt_length(records: Iterable[Record]) -> list[dict[str, Any]]:
    """request_mean, of single answers, by tokens of the prompt."""
    bins: dict[int, list[float]] = defaultdict(list)
    for record in records:
        s = record["speculation"]
        if s and s["steps"] and s["accepted"] is not None and record["prompt_tokens"]:
            bins[max(b for b in PLACES if b <= record["prompt_tokens"])].append(1 + s["accepted"] / s["steps"])
    return [{"from": b, "length": float(np.mean(bins[b])), "n": len(bins[b])} for b in sorted(bins)]


def speed(records: Sequence[Record], pieces: Iterable[Record] = ()) -> dict[str, Any]:
    """Latencies in seconds, tokens/s of one reader and of all together. An answer of one token has no time between tokens.

    pieces: those whose time is known; what was interrupted has none.
    """
    between = [
        (r["last"] - r["first"]) / (r["tokens"] - 1)
        for r in records
        if r["tokens"] and r["tokens"] > 1 and r["last"] > r["first"]
    ]
    timed = list(pieces)
    seconds = sum(piece["seconds"] for piece in timed)
    return {
        "answers": len(records),
        "tokens": sum(r["tokens"] or 0 for r in records),
        "output_tokens_per_second": sum(piece["tokens"] for piece in timed) / seconds if seconds else None,
        "user_tokens_per_second": float(np.mean([1 / t for t in between])) if between else None,
        "ttft": _percentiles([r["first"] for r in records]),
        "itl": _percentiles(between),
        "latency": _percentiles([r["seconds"] for r in records]),
    }


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"mean": float(np.mean(values))} | {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}


def paired_times(on: Iterable[Record], off: Iterable[Record]) -> dict[Talk, tuple[float, ...]]:
    """Tokens and seconds with the draft, then without, of the turns that both arms answered, by conversation."""
    others = {(*talk_of(r), r["turn"]): r for r in off if r["tokens"]}
    sums: dict[Talk, np.ndarray] = defaultdict(lambda: np.zeros(4))
    for r in on:
        other = others.get((*talk_of(r), r["turn"]))
        if other and r["tokens"]:
            sums[talk_of(r)] += (r["tokens"], r["seconds"], other["tokens"], other["seconds"])
    return {talk: tuple(float(value) for value in row) for talk, row in sums.items()}


def speedup(on: Iterable[Record], off: Iterable[Record]) -> dict[str, Any] | None:
    """Tokens/s of requests with the draft over those without, of turns that both arms answered; resampled by conversation."""
    return interval(list(paired_times(on, off).values()), lambda s: (s[..., 0] / s[..., 1]) / (s[..., 2] / s[..., 3]))


def differing(on: Iterable[Record], off: Iterable[Record]) -> dict[str, int]:
    """Turns whose text differs between the arms. After one that differs the later turns had other prompts: not compared."""
    others = {(*talk_of(r), r["turn"]): r["text"] for r in off}
    compared = count = 0
    apart: set[Talk] = set()
    for r in sorted(on, key=lambda r: r["turn"]):
        key = (*talk_of(r), r["turn"])
        if key in others and talk_of(r) not in apart:
            compared += 1
            if r["text"] != others[key]:
                count += 1
                apart.add(talk_of(r))
    return {"compared": compared, "differing": count}
