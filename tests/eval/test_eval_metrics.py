"""Conventions of acceptance and speed, on cases computed by hand."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from flashdraft.eval import counters, metrics
from flashdraft.eval.reply import from_steps, sglang, vllm, within


def record(prompt: str, turn: int, steps: list[tuple[int, int]], **given: Any) -> dict[str, Any]:
    accepted, drafted = [a for a, _ in steps], [d for _, d in steps]
    return {
        "prompt": prompt,
        "sample": 0,
        "turn": turn,
        "category": "math",
        "tokens": 1 + sum(accepted) + len(steps),
        "thinking_tokens": 0,
        "prompt_tokens": 10,
        "first": 0.5,
        "last": 2.5,
        "seconds": 3.0,
        "repetition": 0.0,
        "text": "t",
        "speculation": asdict(from_steps(accepted, drafted, 3)),
        **given,
    }


# Two turns of one prompt: 6 committed in 2 drafting steps, then 1 in 1; a step without proposals counts for SGLang alone.
TALK = [record("p", 0, [(3, 3), (1, 3)]), record("p", 1, [(0, 3), (0, 0)])]
OTHER = record("q", 0, [(3, 3), (3, 3), (3, 3)], category="coding")
ONE_TOKEN = record("r", 0, [], category="coding")


def test_each_convention_is_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "FEWEST", 2)
    found = metrics.conventions([*TALK, OTHER, ONE_TOKEN])
    p, q = 7 / 3, 12 / 3
    assert {name: entry["value"] for name, entry in found.items()} == pytest.approx(
        {
            "request_mean": (p + q) / 2,  # of conversations; the answer of one token has no step
            "step_pooled": (7 + 12) / (3 + 3),
            "category_mean": (p + q) / 2,
            # 7 and 3 tokens (prefill's too) in 2 + 2 steps, 13 in 3
            "tokens_over_steps": (7 + 3 + 13) / (2 + 2 + 3),
        }
    )
    assert found["request_mean"]["n"] == 2
    assert p <= found["request_mean"]["low"] <= (p + q) / 2 <= found["request_mean"]["high"] <= q


def test_fewer_than_five_rows_have_no_interval() -> None:
    found = [metrics.interval([(float(n), 1.0) for n in range(count)], lambda s: s[..., 0] / s[..., 1]) for count in (4, 5)]
    assert [(f["value"], f["low"] is None, f["high"] is None, f["n"]) for f in found if f] == [
        (1.5, True, True, 4),
        (2.0, False, False, 5),
    ]


def test_categories_weigh_alike_in_the_mean_of_their_means() -> None:
    third = record("s", 0, [(0, 3)], category="coding")
    found = metrics.conventions([*TALK, OTHER, third])
    assert found["category_mean"]["value"] == pytest.approx((7 / 3 + (4 + 1) / 2) / 2)
    assert found["request_mean"]["value"] == pytest.approx((7 / 3 + 4 + 1) / 3)


def test_positions_are_joint_and_conditional() -> None:
    found = metrics.positions([*TALK, OTHER])
    assert found == {"histogram": [1, 1, 0, 4], "joint": [5 / 6, 4 / 6, 4 / 6], "conditional": [5 / 6, (4 / 6) / (5 / 6), 1.0]}
    assert metrics.curves([2, 0, 0]) == {"histogram": [2, 0, 0], "joint": [0.0, 0.0], "conditional": [0.0, None]}
    assert metrics.positions([ONE_TOKEN]) is None


def test_steps_are_told_apart_by_place_and_by_thinking() -> None:
    long = record("p", 0, [(3, 3)] * 32 + [(0, 2)], thinking_tokens=9)
    found = metrics.places([long])
    assert found is not None
    # Steps begin at tokens 1, 5, ..., 125, and the last one at 129; those at 1 and 5 are thinking.
    assert found["by_place"] == [
        {"from": 0, "length": 4.0, "steps": 8},
        {"from": 32, "length": 4.0, "steps": 24},
        {"from": 128, "length": 1.0, "steps": 1},
    ]
    assert found["by_part"] == {"answer": {"length": (30 * 4 + 1) / 31, "steps": 31}, "thinking": {"length": 4.0, "steps": 2}}
    assert found["narrower_steps"] == 1 / 33


def test_speed_is_of_the_times_a_reader_sees() -> None:
    found = metrics.speed([TALK[0], ONE_TOKEN], [{"tokens": 8, "seconds": 4.0}])
    assert found["itl"]["mean"] == pytest.approx(2.0 / 6)  # 7 tokens in 2 s; one token has no time between
    assert found["user_tokens_per_second"] == pytest.approx(3.0)
    assert (found["output_tokens_per_second"], found["ttft"]["p50"], found["latency"]["p99"]) == (2.0, 0.5, 3.0)


def test_the_speedup_is_of_turns_that_both_arms_answered() -> None:
    off = [record("p", 0, [], tokens=7, seconds=6.0), record("q", 0, [], tokens=13, seconds=12.0), record("z", 0, [])]
    found = metrics.speedup([*TALK, OTHER], off)
    assert found is not None
    assert found["value"] == pytest.approx(((7 + 13) / 6.0) / ((7 + 13) / 18.0))
    assert found["n"] == 2
    assert metrics.speedup(TALK, []) is None


def test_turns_behind_a_difference_are_not_compared() -> None:
    off = [record("p", 0, [], text="other"), record("p", 1, [], text="also"), record("q", 0, [])]
    assert metrics.differing([*TALK, OTHER], off) == {"compared": 2, "differing": 1}


def test_servers_say_it_in_three_ways() -> None:
    detailed = vllm({"per_step_accepted": [2, 0], "per_step_drafted": [3, 3], "num_spec_tokens": 3})
    assert detailed is not None
    assert (detailed.steps, detailed.accepted, detailed.histogram) == (2, 2, [1, 0, 1, 0])
    summary = vllm(
        {"num_spec_steps": 4, "num_accepted_draft_tokens": 6, "num_draft_tokens": 12, "acceptance_histogram": [1, 1, 1, 1]}
    )
    assert summary is not None
    assert (summary.steps, summary.accepted, summary.histogram, summary.accepted_per_step) == (4, 6, [1, 1, 1, 1], None)
    counted = sglang({"spec_verify_ct": 4, "completion_tokens": 11, "spec_accept_token_num": 6})
    assert counted is not None
    assert (counted.steps, counted.accepted) == (4, 6)
    assert vllm({}) is None
    assert sglang({"completion_tokens": 3}) is None


@pytest.mark.parametrize(
    ("tokens", "accepted"),
    [(8, [3, 2]), (7, [3, 1]), (6, [3, 0]), (5, [3, 2]), (9, [3, 2]), (None, [3, 2])],
    ids=["whole", "cut", "one token of it", "more than it has", "tokens without a step", "unknown"],
)
def test_the_last_step_is_cut_where_the_answer_is(tokens: int | None, accepted: list[int]) -> None:
    found = within(from_steps([3, 2], [3, 3], 3), tokens)
    assert found is not None
    assert (found.accepted_per_step, found.accepted, found.steps) == (accepted, sum(accepted), 2)
    assert found.histogram == [accepted.count(n) for n in range(4)]


VLLM = """# HELP x
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} %d
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} %d
vllm:spec_decode_num_accepted_tokens_total{engine="0"} %d
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} %d
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} %d
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e+09
"""


def test_counters_are_summed_over_engines_and_subtracted() -> None:
    before, after = counters.read(VLLM % (10, 20, 9, 6, 3)), counters.read(VLLM % (14, 28, 15, 10, 5))
    found = counters.difference(before, after)
    assert found == {"engine": "vllm", "drafts": 4, "accepted": 6, "draft_tokens": 8, "per_position": [4, 2]}
    assert counters.total([found, found]) == {
        "engine": "vllm",
        "drafts": 8,
        "accepted": 12,
        "draft_tokens": 16,
        "per_position": [8, 4],
    }
    assert counters.difference(after, before) is None  # started anew between
    assert counters.difference(None, after) is None


def test_sglang_counts_verify_steps_and_tokens() -> None:
    text = 'sglang:spec_verify_calls_total{tp_rank="0"} 40.0\nsglang:generation_tokens_total{tp_rank="0"} 100\n'
    assert counters.read(text) == {"engine": "sglang", "drafts": 40.0, "tokens": 100.0}
    assert counters.read("sglang:spec_accept_length 2.5\nother 1\n") is None
    assert counters.read(None) is None
