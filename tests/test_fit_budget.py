"""What of a time budget goes where, and when it is too small."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from saved import ending_pair

from flashdraft.errors import ConfigError
from flashdraft.fit.budget import (
    LEAST_STEPS,
    LEAST_TOKENS,
    AnswerSpeed,
    Budget,
    TrainingSpeed,
    check_enough,
    longest_answer,
    samples_for,
    seconds_,
    training_speed,
)
from flashdraft.targets.load import load_target
from flashdraft.train.recipe import Recipe, parse_recipe

TRAINING = TrainingSpeed(load=2.0, first=1.0, row=0.5, rows=4)
ANSWERS = AnswerSpeed(begin=5.0, step=0.5, at_once=64)


def test_an_hour_is_shared_between_answers_training_and_measuring() -> None:
    budget = Budget.of(3600, begun=20, speed=TRAINING)
    assert budget.training_end == 3600 - 360 - 2
    assert budget.answers_end == pytest.approx(20 + 0.45 * (3600 - 360 - 2 - 20 - 3))


def test_of_a_day_measuring_takes_ten_minutes() -> None:
    assert Budget.of(86_400, 20, TRAINING).training_end == 86_400 - 600 - 2


def least_hours(message: str) -> float:
    return float(message.split("at least --hours ")[1].split(",")[0])


@given(
    load=st.floats(0.1, 100), row=st.floats(1e-3, 30), step=st.floats(1e-3, 5), begin=st.floats(0, 60), spent=st.floats(0, 100)
)
def test_the_least_budget_that_is_named_is_enough_and_leaves_time_for_the_least(load, row, step, begin, spent) -> None:
    training, answers = replace(TRAINING, load=load, row=row), replace(ANSWERS, step=step, begin=begin)
    with pytest.raises(ConfigError, match="is too little here") as raised:
        check_enough(0.01, spent, training, answers)
    seconds = 3600 * least_hours(str(raised.value))
    check_enough(seconds, spent, training, answers)
    budget = Budget.of(seconds, spent, training)
    left = budget.answers_end - spent
    assert longest_answer(left, answers, 1024) * answers.step <= left
    assert budget.training_end - budget.answers_end - load >= 0.99 * LEAST_STEPS * row * training.rows


def test_too_small_a_budget_is_one_sentence_that_says_what_was_measured() -> None:
    with pytest.raises(ConfigError) as raised:
        check_enough(36, 10, TRAINING, ANSWERS)
    assert str(raised.value) == (
        "--hours 0.01 is too little here: loading takes 2 s, a token of 64 answers at once 0.5 s, a training step 2 s; give at "
        "least --hours 0.031, or a recipe of a smaller draft and shorter rows"
    )


def test_answers_are_as_long_as_half_of_the_time_is_enough_for() -> None:
    assert longest_answer(105, ANSWERS, 1024) == 100
    assert longest_answer(10_000, ANSWERS, 1024) == 1024
    assert longest_answer(6, ANSWERS, 1024) == LEAST_TOKENS


def test_few_prompts_are_answered_several_times_if_all_can_be() -> None:
    assert samples_for(1000, ANSWERS, prompts=10_000, longest=256) == 1
    assert samples_for(1000, ANSWERS, prompts=100, longest=256) == 5
    assert samples_for(100_000, ANSWERS, prompts=100, longest=256) == 8


def test_a_training_step_is_timed_without_data(tmp_path) -> None:
    target = load_target(ending_pair(tmp_path).target, dtype="float32", device="cpu")
    recipe = parse_recipe({"draft": {"num_hidden_layers": 1, "intermediate_size": 32}, "train": {"seq_length": 64, "rows": 3}})
    speed = training_speed(target, 1.5, recipe, None)
    assert (speed.load, speed.rows) == (1.5, 3)
    assert 0 < speed.row < 5
    with pytest.raises(ConfigError, match="seq_length 1024 is more than the 512 positions"):
        training_speed(target, 1.5, parse_recipe({"train": {"seq_length": 1024}}), None)
    assert training_speed(target, 0.0, Recipe(), str(tmp_path / "draft")).rows == 4


def test_short_times_have_two_digits() -> None:
    assert [seconds_(s) for s in (0.0123, 1.234, 12.3, 600)] == ["0.012 s", "1.2 s", "12 s", "10 min"]
