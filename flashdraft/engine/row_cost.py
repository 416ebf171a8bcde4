"""What a pass costs by its number of rows, from a few timed passes."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import numpy as np

ROUNDS = 3
# The processor time of this thread, which does its share of every parallel loop: where nothing else runs, what a clock shows,
# and hardly more beside other programs. A clock then showed 2 to 5 times as much, and the widths lost 11 % at 16 streams.
# Windows counts it in steps of 16 ms.
thread_seconds = time.perf_counter if sys.platform == "win32" else time.thread_time
Key = TypeVar("Key", bound=Hashable)


class RowCost:
    """Seconds of a pass by its rows: linear between the points that were timed and beyond the last two, never falling.

    Fewer rows than the first point cost what it does. Beyond a single point seconds grow with the rows: nothing says that rows
    are cheaper together.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        assert seconds
        assert min(seconds) >= 1
        self._rows = np.array(sorted(seconds), dtype=np.float64)
        # Fewer rows that took longer were disturbed: a time can be too long, never too short.
        points = np.array([seconds[int(rows)] for rows in self._rows])
        self._seconds = np.minimum.accumulate(points[::-1])[::-1]

    def __call__(self, rows: int) -> float:
        last = self._rows[-1]
        if rows <= last:
            return float(np.interp(rows, self._rows, self._seconds))
        if len(self._rows) == 1:
            return float(self._seconds[0] * rows / last)
        slope = (self._seconds[-1] - self._seconds[-2]) / (last - self._rows[-2])
        return float(self._seconds[-1] + slope * (rows - last))


def fastest(passes: Mapping[Key, Callable[[], object]], least: int, budget: float) -> dict[Key, float]:
    """The shortest time of each pass, in seconds of this thread, over ROUNDS rounds.

    The first `least` passes are timed whatever they take; no pass is begun once `budget` seconds are over, and one that was
    never timed is left out.
    """
    begun, found = time.perf_counter(), dict[Key, float]()
    for _ in range(ROUNDS):
        for number, (key, run) in enumerate(passes.items()):
            if time.perf_counter() - begun > budget and (number >= least or key in found):
                continue
            start = thread_seconds()
            run()
            found[key] = min(found.get(key, math.inf), thread_seconds() - start)
    return found
