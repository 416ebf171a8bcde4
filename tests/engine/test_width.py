"""The width policy on traces: never far below the better of "always all" and "off", and calm at a threshold."""

from __future__ import annotations

import random
import statistics
import time

import numpy as np
import pytest
from width_simulation import Simulation

from flashdraft.engine.width import Acceptance, StepCost, WidthPolicy


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


@pytest.mark.parametrize("lag", [0, 1])
def test_a_probe_that_paid_is_followed_by_another_at_once(lag):
    policy = WidthPolicy(7, StepCost(lambda sequences, rows: 1.0, lambda drafting: 1.5))
    outcomes, probes = [], []
    for step in range(900):
        (width,) = policy.choose([("one", 7)])
        outcomes.append((width, 0 if step < 400 else width))
        if step > lag:
            policy.observe("one", *outcomes[step - lag])
        if step >= 400 and width:
            probes.append(step)
    assert probes[1] - probes[0] == 1 + lag
    assert probes[-1] == 899
    assert probes[5] - probes[0] < 20, "it is on again soon"


def test_what_was_decided_holds_for_the_requests_it_was_decided_for():
    policy = WidthPolicy(7, StepCost(lambda sequences, rows: 1.0, lambda drafting: 0.1))
    requests = [("one", 7)]
    assert policy.choose(requests) == [7]
    requests.append(("two", 3))
    assert policy.choose(requests) == [7, 3]
    requests[0] = ("one", 0)
    assert policy.choose(requests) == [0, 3]


def test_rows_go_to_the_likeliest_proposals():
    policy = WidthPolicy(7, StepCost(lambda sequences, rows: 1.0 + 0.2 * (rows - sequences), lambda drafting: 0.0))
    for _ in range(200):
        policy.choose([("good", 7), ("bad", 7)])
        policy.observe("good", 7, 6)
        policy.observe("bad", 7, 0)
    good, bad = policy.choose([("good", 7), ("bad", 7)])
    assert good >= 5
    assert bad == 0


def test_proposals_that_become_dear_are_fewer():
    price = [0.0]
    policy = WidthPolicy(7, StepCost(lambda sequences, rows: 1.0, lambda drafting: 0.1, lambda: price[0]))
    for step in range(100):
        policy.choose([("one", 7)])
        policy.observe("one", 7, 7 if step % 3 else 2)
    assert policy.choose([("one", 7)]) == [7]
    price[0] = 5.0
    policy.observe("one", 7, 2)
    assert policy.choose([("one", 7)]) == [0]


def test_positions_behind_a_rejection_say_nothing():
    counts = Acceptance(3, 7)
    counts.observe(np.array([2, 0]), np.array([7, 2]), np.array([2, 2]), 1.0)
    assert counts.tried.tolist() == [[1, 1, 0, 0, 0, 0, 0], [0] * 7, [1, 1, 1, 0, 0, 0, 0]]
    assert counts.hit.tolist() == [[1, 1, 0, 0, 0, 0, 0], [0] * 7, [1, 1, 0, 0, 0, 0, 0]]


def test_a_step_of_many_requests_counts_for_all_as_much_as_one_after_another():
    drafted, accepted = np.array([7] * 64), np.array([3, 0, 7, 1] * 16)
    at_once, one_by_one = Acceptance(1, 7), Acceptance(1, 7)
    for _ in range(20):
        at_once.observe_all(drafted, accepted, 0.995)
        for d, a in zip(drafted, accepted, strict=True):
            one_by_one.observe(np.array([0]), np.array([d]), np.array([a]), 0.995)
    np.testing.assert_allclose(at_once.tried, one_by_one.tried)
    np.testing.assert_allclose(at_once.hit, one_by_one.hit, rtol=0.02)


def test_a_new_request_in_the_place_of_one_that_left_begins_anew():
    policy = WidthPolicy(7, StepCost(lambda sequences, rows: 1.0 + 0.2 * (rows - sequences), lambda drafting: 0.0))
    for step in range(300):
        keys = ["good", f"hopeless {step // 30}"]
        widths = policy.choose([(key, 7) for key in keys])
        assert widths[1] > 0 or step % 30, "what was seen of others is not held against it"
        for key, width, accepted in zip(keys, widths, (7, 0), strict=True):
            policy.observe(key, width, min(width, accepted))
        if step % 30 == 29:
            policy.forget(keys[1])
    assert policy.choose([("good", 7)]) == [7]


def test_choosing_for_64_requests_is_a_matter_of_microseconds():
    policy = WidthPolicy(7, StepCost(lambda sequences, rows: 1e-3 + 1e-6 * rows, lambda drafting: 3e-4))
    keys, times = list(range(64)), []
    for _ in range(60):
        start = time.perf_counter()
        for key, width in zip(keys, policy.choose([(key, 7) for key in keys]), strict=True):
            policy.observe(key, width, key % 3)
        times.append(time.perf_counter() - start)
    assert statistics.median(times) < 1e-3, "a step of 64 requests takes a small target 1 ms"
