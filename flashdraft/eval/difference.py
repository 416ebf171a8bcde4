"""Two drafts over the same conversations: differences of acceptance and ratios of speed, paired, with intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flashdraft.eval.metrics import interval

Row = dict[str, Any]  # of metrics.conversations
Pair = tuple[Row, Row]
CONVENTIONS = ("request_mean", "step_pooled", "category_mean", "tokens_over_steps")


def between(first: Sequence[Row], second: Sequence[Row]) -> dict[str, Any]:
    """The second against the first. Entries: {first, second, value, low, high, n}, or None where it was not measured.

    value: of acceptance the difference in tokens, of speed the ratio. n: pairs, of category_mean categories.
    """
    paired = pairs(first, second)
    categories = sorted({a["category"] for a, _ in paired})
    return {
        "pairs": len(paired),
        "conversations": [len(first), len(second)],
        "acceptance": {name: acceptance(paired, name) for name in CONVENTIONS},
        "speed": {name: speed(paired, name) for name in ("with", "without", "speedup")},
        "texts": {"compared": len(paired), "differing": sum(a["texts"] != b["texts"] for a, b in paired)},
        "by_category": {name: _category([pair for pair in paired if pair[0]["category"] == name]) for name in categories},
    }


def pairs(first: Sequence[Row], second: Sequence[Row]) -> list[Pair]:
    """Conversations that both answered, with as many turns."""
    others = {(row["prompt"], row["sample"], row["turns"]): row for row in second}
    keys = ((row, (row["prompt"], row["sample"], row["turns"])) for row in first)
    return [(row, others[key]) for row, key in keys if key in others]


def _category(paired: Sequence[Pair]) -> dict[str, Any]:
    return {
        "pairs": len(paired),
        "request_mean": acceptance(paired, "request_mean"),
        "with": speed(paired, "with"),
        "speedup": speed(paired, "speedup"),
    }


def acceptance(paired: Sequence[Pair], convention: str) -> dict[str, Any] | None:
    """Difference of the acceptance length by a convention of metrics.conventions, of conversations where both drafted."""
    if convention == "tokens_over_steps":
        return _difference(paired, "step_tokens", "verify_steps")
    if convention == "step_pooled":
        return _difference(paired, "committed", "steps")
    by_category = convention == "category_mean"
    kept = [(a, b) for a, b in paired if _both(a, b, "steps")]
    groups = [a["category"] if by_category else "" for a, _ in kept]
    names = sorted(set(groups))
    columns = np.zeros((len(kept), len(names), 3))
    for row, group, (a, b) in zip(columns, groups, kept, strict=True):
        row[names.index(group)] = (a["committed"] / a["steps"], b["committed"] / b["steps"], 1.0)

    def mean(side: int) -> Callable[[Any], Any]:
        def of(sums: Any) -> Any:
            by_name = sums.reshape(*sums.shape[:-1], len(names), 3)
            return np.nanmean(by_name[..., side] / by_name[..., 2], axis=-1)  # a resample may lack a category

        return of

    found = _entry([row.ravel().tolist() for row in columns], mean(0), mean(1), lambda a, b: b - a)
    return found | {"n": len(names)} if found and by_category else found


def speed(paired: Sequence[Pair], name: str) -> dict[str, Any] | None:
    """Ratio of tokens/s of requests `with` the draft or `without` it, or of the `speedup` itself."""
    if name == "speedup":
        rows = [(*a["both"], *b["both"]) for a, b in paired if a["both"] and b["both"]]
        return _entry(rows, _speedup(0), _speedup(4), lambda a, b: b / a)
    kept = [(a[name], b[name]) for a, b in paired if a[name] and b[name] and a[name]["turns"] == b[name]["turns"]]
    rows = [(a["tokens"], a["seconds"], b["tokens"], b["seconds"]) for a, b in kept]
    return _entry(rows, lambda s: s[..., 0] / s[..., 1], lambda s: s[..., 2] / s[..., 3], lambda a, b: b / a)


def _difference(paired: Sequence[Pair], total: str, count: str) -> dict[str, Any] | None:
    rows = [(a[total], a[count], b[total], b[count]) for a, b in paired if _both(a, b, count)]
    return _entry(rows, lambda s: s[..., 0] / s[..., 1], lambda s: s[..., 2] / s[..., 3], lambda a, b: b - a)


def _both(a: Row, b: Row, name: str) -> bool:
    return bool(a[name] and b[name])


def _speedup(at: int) -> Callable[[Any], Any]:
    return lambda s: (s[..., at] / s[..., at + 1]) / (s[..., at + 2] / s[..., at + 3])


def _entry(
    rows: Sequence[Sequence[float]], first: Callable[[Any], Any], second: Callable[[Any], Any], of: Callable[[Any, Any], Any]
) -> dict[str, Any] | None:
    """first, second: statistics of sums of the rows, a row a pair of conversations; of: how they are compared."""
    found = interval(rows, lambda sums: of(first(sums), second(sums)))
    if found is None:
        return None
    sums = np.asarray(rows, dtype=np.float64).sum(0)
    return {"first": float(first(sums)), "second": float(second(sums)), **found}
