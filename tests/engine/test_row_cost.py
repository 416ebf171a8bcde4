"""What a pass costs by its rows, and how its points are timed."""

from __future__ import annotations

import itertools
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashdraft.engine import row_cost
from flashdraft.engine.row_cost import ROUNDS, RowCost, fastest

POINTS = st.dictionaries(st.integers(1, 4096), st.floats(1e-6, 100), min_size=1, max_size=6)


def test_between_points_it_is_linear_and_goes_on_with_the_last_slope():
    cost = RowCost({8: 1.0, 16: 2.0, 64: 5.0})
    assert [cost(rows) for rows in (8, 12, 16, 40, 64, 112)] == [1.0, 1.5, 2.0, 3.5, 5.0, 8.0]


def test_fewer_rows_than_the_first_point_cost_what_it_does():
    cost = RowCost({16: 2.0, 32: 3.0})
    assert [cost(rows) for rows in (0, 1, 15)] == [2.0] * 3


def test_a_single_point_says_nothing_of_rows_together():
    cost = RowCost({8: 1.0})
    assert [cost(rows) for rows in (1, 8, 16, 24)] == [1.0, 1.0, 2.0, 3.0]


def test_a_point_that_was_disturbed_is_no_dearer_than_more_rows():
    cost = RowCost({8: 1.0, 16: 9.0, 32: 2.0})
    assert [cost(rows) for rows in (8, 16, 24, 32, 64)] == [1.0, 2.0, 2.0, 2.0, 2.0]


@given(POINTS, st.integers(0, 8192))
def test_more_rows_never_cost_less_and_no_point_is_exceeded(points, rows):
    cost = RowCost(points)
    assert 0 < cost(rows) <= cost(rows + 1)
    assert all(cost(n) <= seconds * (1 + 1e-12) for n, seconds in points.items())
    assert cost(max(points)) == points[max(points)]


@pytest.mark.parametrize("points", [{}, {0: 1.0}, {-8: 1.0, 8: 2.0}])
def test_points_are_of_rows(points):
    with pytest.raises(AssertionError):
        RowCost(points)


class Clock:
    """Time that only passes run."""

    def __init__(self, monkeypatch):
        self.now, self.runs = 0.0, []
        monkeypatch.setattr(row_cost.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(row_cost, "thread_seconds", lambda: self.now)

    def taking(self, name, *seconds):
        times = itertools.cycle(seconds)

        def run():
            self.runs.append(name)
            self.now += next(times)

        return run


def test_the_shortest_time_of_interleaved_rounds_counts(monkeypatch):
    clock = Clock(monkeypatch)
    found = fastest({"a": clock.taking("a", 3.0, 1.0, 2.0), "b": clock.taking("b", 1.0, 5.0, 4.0)}, 1, budget=1000)
    assert found == {"a": 1.0, "b": 1.0}
    assert clock.runs == ["a", "b"] * ROUNDS


def test_over_budget_only_what_is_needed_is_timed_and_once(monkeypatch):
    clock = Clock(monkeypatch)
    passes = {name: clock.taking(name, 4.0) for name in "abcd"}
    assert fastest(passes, 2, budget=1.0) == {"a": 4.0, "b": 4.0}
    assert clock.runs == ["a", "b"]


def test_no_pass_is_begun_behind_the_budget(monkeypatch):
    clock = Clock(monkeypatch)
    passes = {name: clock.taking(name, 1.0) for name in "abc"}
    assert fastest(passes, 1, budget=3.5) == {"a": 1.0, "b": 1.0, "c": 1.0}
    assert clock.runs == [*"abc", "a"]


def test_work_is_timed_and_waiting_is_not():
    passes = {"nothing": lambda: None, "work": lambda: sum(range(300_000)), "waiting": lambda: time.sleep(0.2)}
    found = fastest(passes, 3, budget=10.0)
    assert found["nothing"] < found["work"]
    assert found["waiting"] < (1.0 if sys.platform == "win32" else 0.1)
