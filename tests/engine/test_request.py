"""Sampling parameters say no to whatever cannot work, and a request starts with what its caller left out."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashdraft.engine.request import MAX_LOGPROBS, Output, Request, SamplingParams
from flashdraft.errors import RequestError


def test_a_request_served_again_with_other_parameters_is_chosen_for_as_they_say() -> None:
    request = Request([1], SamplingParams())
    assert not request.is_for_host
    request.params = SamplingParams(logprobs=1)
    assert request.is_for_host
    request.params = SamplingParams()
    request.constraint = object()  # type: ignore[assignment]
    assert request.is_for_host


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.1, 1e300, "1", None, True, [1.0]])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_numbers_out_of_range_or_of_another_type_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_additive_penalties_go_from_minus_2_to_2(name: str) -> None:
    assert getattr(SamplingParams(**{name: -2}), name) == -2
    assert getattr(SamplingParams(**{name: 2.0}), name) == 2
    for value in (-2.1, 2.1, math.nan):
        with pytest.raises(RequestError, match=f"{name} must be a number from -2 to 2"):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.0),
        ("top_p", 1.0001),
        ("repetition_penalty", 0.0),
        ("top_k", -2),
        ("top_k", 2.0),
        ("n", 0),
        ("n", True),
        ("max_tokens", 0),
        ("max_tokens", "16"),
        ("min_tokens", -1),
        ("logprobs", -1),
        ("logprobs", MAX_LOGPROBS + 1),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 1.0),
        ("prompt_logprobs", MAX_LOGPROBS + 1),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("seed", 1.5),
        ("stop", ["a", ""]),
        ("stop", ["a", 1]),
        ("stop_token_ids", [-1]),
        ("logit_bias", {3: 100.5}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {-3: 1.0}),
        ("logit_bias", {"3": 1.0}),
    ],
)
def test_values_that_cannot_work_are_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name.rstrip("s")):
        SamplingParams(**{name: value})


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    with pytest.raises(RequestError, match="min_tokens 5 must not be greater than max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_forms_that_mean_the_same_are_equal() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(stop="end") == SamplingParams(stop=["end"]) == SamplingParams(stop=("end",))  # type: ignore[arg-type]
    assert SamplingParams(logit_bias=None, stop=None, stop_token_ids=None) == SamplingParams()  # type: ignore[arg-type]


def test_parameters_do_not_change_with_the_caller_s_objects() -> None:
    bias, stop = {1: 2.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop)  # type: ignore[arg-type]
    bias[2], stop[0] = 5.0, "b"
    assert dict(params.logit_bias) == {1: 2.0}
    assert params.stop == ("a",)


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-6, True), (1e-5, False), (1.0, False)])
def test_greedy_is_a_temperature_below_1e_5(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


@given(st.integers(-(2**63), 2**64 - 1))
def test_a_seed_resolves_to_64_unsigned_bits_and_stays(seed: int) -> None:
    resolved = SamplingParams(seed=seed).resolved_seed()
    assert 0 <= resolved < 2**64
    assert resolved == SamplingParams(seed=seed).resolved_seed()
    assert (resolved - seed) % 2**64 == 0


def test_unseeded_requests_all_differ() -> None:
    assert len({SamplingParams().resolved_seed() for _ in range(100)}) == 100
    assert len({Request([1], SamplingParams()).id for _ in range(100)}) == 100


def test_acceptance_length_is_the_mean_over_the_steps_that_drafted() -> None:
    output = Output(Request([1], SamplingParams()))
    assert output.acceptance_length is None
    assert not output.finished
    output.committed_per_step, output.drafted_per_step = [4, 1, 1, 8], [7, 0, 7, 7]
    assert output.acceptance_length == pytest.approx(13 / 3)
    output.committed_per_step, output.drafted_per_step = [1, 1], [0, 0]
    assert output.acceptance_length is None
    output.finish_reason = "length"
    assert output.finished
