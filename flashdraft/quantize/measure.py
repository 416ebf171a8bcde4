"""The acceptance length of several forms of a draft on the same answers, and what each loses, with a bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

ONE_SIDED_95 = 1.6449


@dataclass(frozen=True)
class Arm:
    """One form of a draft on the held-out answers. Losses are shares of the reference's acceptance length."""

    name: str
    acceptance_length: float  # mean over answers
    over_steps: float
    answers: int
    loss: float | None  # None: the reference itself
    loss_at_most: float | None  # paired, one-sided, at 95 %

    def to_json(self) -> dict[str, Any]:
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()}


def lengths(accepted: Sequence[Sequence[int]]) -> np.ndarray:
    """The acceptance length of every answer; NaN for one of a single token, which takes no step."""
    return np.array([1 + sum(steps) / len(steps) if steps else np.nan for steps in accepted])


def arm(name: str, accepted: Sequence[Sequence[int]], reference: Sequence[Sequence[int]] | None = None) -> Arm:
    """Against the reference, answer by answer."""
    own = lengths(accepted)
    steps = [a for record in accepted for a in record]
    mean = float(np.nanmean(own))
    over = 1 + sum(steps) / len(steps)
    count = int((~np.isnan(own)).sum())
    if reference is None:
        return Arm(name, mean, over, count, None, None)
    other = lengths(reference)
    lost = (other - own)[~np.isnan(own)]
    error = float(lost.std(ddof=1)) / np.sqrt(len(lost)) if len(lost) > 1 else np.inf
    base = float(np.nanmean(other))
    return Arm(name, mean, over, count, float(lost.mean()) / base, float(lost.mean() + ONE_SIDED_95 * error) / base)
