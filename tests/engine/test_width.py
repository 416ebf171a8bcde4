"""The width policy on traces: never far below the better of "always all" and "off", and calm at a threshold."""

from __future__ import annotations

import random

import pytest
from width_simulation import Simulation

from flashdraft.engine.width import Acceptance, WidthPolicy


def traces(rate: float, count: int = 24, length: int = 300, seed: int = 0) -> list[list[int]]:
    """Runs of leading right proposals at every anchor, each proposal right with probability `rate`."""
    source = random.Random(seed)
    made = []
    for _ in range(count):
        right = [source.random() < rate for _ in range(length + 8)]
        made.append([next((k for k in range(7) if not right[i + k]), 7) for i in range(length)])
    return made


COSTS = {
    "rows free": {"plain": 1.0, "draft": 0.3, "row": 0.0},
    "rows dear": {"plain": 1.0, "draft": 0.2, "row": 0.25},
    "draft dear": {"plain": 1.0, "draft": 1.5, "row": 0.0},
}


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("slots", [1, 4, 16])
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("rate", [0.02, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 0.95])
def test_never_below_the_better_of_all_and_off(rate, cost, slots, lag):
    simulation = Simulation(COSTS[cost], traces(rate), slots=slots, lag=lag)
    fixed = max(simulation.run(7), simulation.run(0))
    assert simulation.run(WidthPolicy(7, simulation.seconds)) >= 0.97 * fixed


def test_between_the_extremes_a_width_of_its_own_beats_both():
    simulation = Simulation(COSTS["rows dear"], traces(0.6))
    assert simulation.run(WidthPolicy(7, simulation.seconds)) > 1.08 * max(simulation.run(7), simulation.run(0))


def test_a_mix_of_easy_and_hopeless_requests_beats_one_width_for_all():
    mixed = [t for pair in zip(traces(0.02, 12), traces(0.9, 12), strict=True) for t in pair]
    simulation = Simulation(COSTS["draft dear"], mixed)
    assert simulation.run(WidthPolicy(7, simulation.seconds)) > 1.1 * max(simulation.run(7), simulation.run(0))


def test_at_a_threshold_the_width_does_not_oscillate():
    # With this cost a draft is worth exactly nothing at a rate of about 0.23: every choice is as good as the other.
    simulation = Simulation(COSTS["rows free"], traces(0.23, 8, 1000))
    simulation.run(WidthPolicy(7, simulation.seconds))
    changes = sum((a > 0) != (b > 0) for a, b in zip(simulation.widths_seen, simulation.widths_seen[1:], strict=False))
    assert changes < 0.06 * len(simulation.widths_seen)


def test_a_request_that_turns_hopeless_and_back_is_followed():
    turning = [traces(0.9, 1, 400)[0] + traces(0.0, 1, 400)[0] + traces(0.9, 1, 400)[0]]
    simulation = Simulation(COSTS["draft dear"], turning)
    fixed = max(simulation.run(7), simulation.run(0))
    assert simulation.run(WidthPolicy(7, simulation.seconds)) > fixed
    tail = simulation.widths_seen[-20:]
    assert sum(w > 0 for w in tail) >= 15


def test_rows_go_to_the_likeliest_proposals():
    policy = WidthPolicy(7, lambda sequences, rows, drafting: 1.0 + 0.2 * (rows - sequences))
    for _ in range(200):
        policy.choose([("good", 7), ("bad", 7)])
        policy.observe("good", 7, 6)
        policy.observe("bad", 7, 0)
    good, bad = policy.choose([("good", 7), ("bad", 7)])
    assert good >= 5
    assert bad == 0


def test_positions_behind_a_rejection_say_nothing():
    counts = Acceptance.of(7)
    counts.observe(7, 2, 1.0)
    assert counts.tried == [1, 1, 1, 0, 0, 0, 0]
    assert counts.hit == [1, 1, 0, 0, 0, 0, 0]
