"""A time budget: how fast this machine is with this target, what of the time goes where, and whether it is enough at all."""

from __future__ import annotations

import math
import tempfile
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flashdraft.draft import DFlashDraft
from flashdraft.errors import ConfigError
from flashdraft.targets.target import Target
from flashdraft.train.commands_train import ready
from flashdraft.train.corpus import Corpus
from flashdraft.train.data import Records
from flashdraft.train.display import duration
from flashdraft.train.distributed import World
from flashdraft.train.jobs import Job, Source
from flashdraft.train.plan import draft_config, make_plan, measure, row_length
from flashdraft.train.prepare import first_draft
from flashdraft.train.recipe import Recipe
from flashdraft.train.sources import EngineSource, RolloutSource
from flashdraft.train.synthesize import SynthesisConfig
from flashdraft.train.trainer import Trainer

# Of the time between loading and measuring. The built-in draft was made from 400 s of answers and 420 s of training.
ANSWERS_SHARE = 0.45
MEASURING_SHARE, MEASURING_SECONDS = 0.1, 600.0  # of the whole, at most so long
LEAST_TOKENS, LEAST_STEPS = 32, 20  # of an answer, of training: less is good for nothing
MOST_SAMPLES = 8  # answers a prompt, where the prompts are few for the time
MOST_EPOCHS = 30  # the built-in draft took 3; more than this learns the answers by heart
PROBE_PROMPT, PROBE_TOKENS = 64, 16


@dataclass(frozen=True)
class TrainingSpeed:
    """Seconds: to load the target, that the first step takes beyond others (it compiles on a GPU), of a packed row."""

    load: float
    first: float
    row: float
    rows: int  # an update, where answers are plenty


@dataclass(frozen=True)
class AnswerSpeed:
    """Seconds until `at_once` answers have begun, and for one more token of each."""

    begin: float
    step: float
    at_once: int


def training_speed(target: Target, load: float, recipe: Recipe, init: str | None) -> TrainingSpeed:
    """Times a step on made-up answers, of the length and number of rows that training will have."""
    length = row_length(recipe, target)
    draft = first_draft(init, recipe, target) if init else DFlashDraft(draft_config(recipe.draft, target, 0))
    draw = np.random.default_rng(0)
    pairs = []
    for _ in range(128 if target.device.type == "cuda" else 32):  # eight updates
        tokens = draw.integers(1, target.vocab_size, length).tolist()
        pairs.append((tokens[: length // 4], tokens[length // 4 :]))
    records, world = Records.from_lists(pairs), World()
    plan = make_plan(recipe.with_budget(1, None), target, draft, records, world)
    rows, plan = plan.rows, replace(plan, rows=plan.micro_rows)
    batches, start = plan.batches(records, draft.config.block_size, world), time.monotonic()
    with ready(target, plan), tempfile.TemporaryDirectory() as scratch:
        measured = measure(Trainer(target, draft, batches, plan.config, Path(scratch)), steps=1)
    first = max(0.0, time.monotonic() - start - 2 * measured.seconds)
    return TrainingSpeed(load, first, measured.seconds / plan.micro_rows, rows)


def answer_speed(source: Source, corpus: Corpus, config: SynthesisConfig) -> AnswerSpeed:
    """Times a few tokens of as many answers as are made at once."""
    places = 1
    if isinstance(source, EngineSource):
        places = source.engine.scheduler.max_num_seqs
    elif isinstance(source, RolloutSource):
        places = source.rollout.slots
    texts = [prompt.turns[0] for prompt in corpus.read(corpus.order[:places])]
    prompts = [ids[:PROBE_PROMPT] for ids in source.tokenizer(texts)["input_ids"]]
    sampling: dict[str, Any] = dict(temperature=config.temperatures[0], top_p=config.top_p, top_k=config.top_k)
    seconds, lengths = [], []
    for tokens in (2, 2, PROBE_TOKENS):  # the first one warms up, and fills the prefix cache
        start = time.monotonic()
        jobs = deque(Job(ids, max_new=tokens, seed=i, **sampling) for i, ids in enumerate(prompts))
        lengths.append(max(len(answer.tokens) for answer in source.run(jobs)))
        seconds.append(time.monotonic() - start)
    most = seconds[2] / lengths[2]  # as if its prompts took no time; the second one's took as long
    step = (seconds[2] - seconds[1]) / max(lengths[2] - lengths[1], 1)
    return AnswerSpeed(seconds[0], min(step, most) if step > most / 4 else most, len(prompts))


@dataclass(frozen=True)
class Budget:
    """Seconds: the whole, and where in it (of what has been spent) answers and training end."""

    whole: float
    answers_end: float
    training_end: float

    @classmethod
    def of(cls, whole: float, begun: float, speed: TrainingSpeed) -> Budget:
        """`begun`: how much had been spent when the making of answers began."""
        training_end = whole - min(MEASURING_SHARE * whole, MEASURING_SECONDS) - speed.load
        free = training_end - begun - speed.load - speed.first
        return cls(whole, begun + ANSWERS_SHARE * free, training_end)


def check_enough(whole: float, spent: float, training: TrainingSpeed, answers: AnswerSpeed) -> None:
    """Raises ConfigError for a budget that nothing useful would come of, with one that something would."""
    step = training.row * training.rows
    least_answers = answers.begin + 2 * LEAST_TOKENS * answers.step
    free = max(least_answers / ANSWERS_SHARE, LEAST_STEPS * step / (1 - ANSWERS_SHARE))
    need = spent + 2 * training.load + training.first + free
    need = max(need / (1 - MEASURING_SHARE), 0.0)
    if need > whole:
        digit = 10 ** (math.floor(math.log10(need / 3600)) - 1)
        raise ConfigError(
            f"--hours {whole / 3600:g} is too little here: loading takes {seconds_(training.load)}, a token of "
            f"{answers.at_once:,} answers at once {seconds_(answers.step)}, a training step {seconds_(step)}; give at least "
            f"--hours {math.ceil(need / 3600 / digit) * digit:.2g}, or a recipe of a smaller draft and shorter rows"
        )


def longest_answer(seconds: float, speed: AnswerSpeed, most: int) -> int:
    """Tokens of the longest answer: half of the time is for it, so that those begun in the first half end."""
    return int(min(most, max(LEAST_TOKENS, 0.5 * (seconds - speed.begin) / speed.step)))


def samples_for(seconds: float, speed: AnswerSpeed, prompts: int, longest: int) -> int:
    """Answers a prompt that the time is enough for, if all were of full length: all prompts have one before any has two."""
    return int(min(MOST_SAMPLES, max(1, seconds / speed.step * speed.at_once / (prompts * longest))))


def seconds_(seconds: float) -> str:
    """A time for people; short ones with two digits."""
    return f"{seconds:.2g} s" if seconds < 9.5 else duration(seconds)
