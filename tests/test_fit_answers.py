"""The answers of a fit end when their time does."""

from __future__ import annotations

import time
from collections import deque

from flashdraft.fit.answers import Until, derived_sampling
from flashdraft.fit.budget import AnswerSpeed
from flashdraft.prompts import Prompt
from flashdraft.train.corpus import Corpus
from flashdraft.train.jobs import Answer, Job
from flashdraft.train.synthesize import SynthesisConfig


class Slow:
    """One answer every 50 ms of a clock of its own; remembers whether it was left in good order."""

    tokenizer, max_len, model, target_hash, closed = None, 100, None, None, False

    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def describe(self) -> str:
        return "slowly"

    def run(self, jobs):
        try:
            while jobs:
                self.now += 0.05
                yield Answer(jobs.popleft(), [1, 2], "stop")
        finally:
            self.closed = True


def test_answers_under_way_are_left_when_the_time_is_over(monkeypatch) -> None:
    source, jobs = Slow(monkeypatch), deque(Job([1]) for _ in range(1000))
    answers = list(Until(source, source.now + 0.28).run(jobs))
    assert len(answers) == 6
    assert source.closed


def test_nothing_is_asked_when_the_time_is_over_already(monkeypatch) -> None:
    source, jobs = Slow(monkeypatch), deque([Job([1])])
    assert list(Until(source, source.now - 1).run(jobs)) == []
    assert len(jobs) == 1


def test_greedy_answers_are_one_a_prompt() -> None:
    corpus = Corpus.of_prompts([Prompt(str(i), "", (f"prompt {i}",)) for i in range(10)])
    speed = AnswerSpeed(begin=0.0, step=0.01, at_once=64)
    assert derived_sampling(SynthesisConfig(temperatures=(0.0,)), corpus, 100, speed) == {"max_tokens": 1024, "samples": 1}
    assert derived_sampling(SynthesisConfig(temperatures=(0.7,)), corpus, 100, speed) == {"max_tokens": 1024, "samples": 8}
