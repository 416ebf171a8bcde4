"""Synthesize training data: prompts in, the target's own answers out, turn by turn, at the temperatures it is served with."""

from __future__ import annotations

import random
import re
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from flashdraft.prompts import Prompt, normalise, prompt_hash, repetition
from flashdraft.train.data import read_column, write_shard
from flashdraft.train.rollout import Answer, Job, Rollout

SHARD_ROWS = 20_000
# A prompt that shares this many words in a row with an evaluation prompt is taken for a copy of it.
OVERLAP_WORDS = 13


def language(prompt: Prompt) -> str:
    """The language a category names in front ("fr/chat"), else "en"."""
    head = prompt.category.split("/")[0]
    return head if re.fullmatch("[a-z]{2}", head) and head != "qa" else "en"


class Exclusions:
    """What must never be trained on: evaluation prompts, by hash and by any 13 words in a row.

    Word runs that three or more evaluation prompts share are the wording of a template, not of a prompt, and do not count.
    """

    def __init__(self, prompts: Iterable[Prompt] = (), hashes: Iterable[int] = ()) -> None:
        texts = [turn for prompt in prompts for turn in prompt.turns]
        self.hashes = {*map(prompt_hash, texts), *hashes}
        runs = Counter(run for text in {normalise(t) for t in texts} for run in set(_word_runs(text)))
        self.runs = {run for run, count in runs.items() if count < 3}

    def __contains__(self, text: str) -> bool:
        return prompt_hash(text) in self.hashes or any(run in self.runs for run in _word_runs(normalise(text)))


def _word_runs(text: str) -> Iterator[int]:
    words = text.split()
    return (hash(tuple(words[i : i + OVERLAP_WORDS])) for i in range(len(words) - OVERLAP_WORDS + 1))


def select_prompts(prompts: Iterable[Prompt], exclusions: Exclusions, counts: Counter[str]) -> list[Prompt]:
    """Prompts without duplicates (by the first turn) and without excluded ones; both are counted."""
    seen: set[int] = set()
    kept = []
    for prompt in prompts:
        key = prompt.hash
        if key in seen:
            counts["prompts duplicate"] += 1
        elif any(turn in exclusions for turn in prompt.turns):
            counts["prompts excluded"] += 1
        else:
            seen.add(key)
            kept.append(prompt)
    return kept


@dataclass(frozen=True)
class Seed:
    """How a self prompt begins: the target writes the rest of the user's turn."""

    text: str
    category: str
    weight: float = 1.0


@dataclass(frozen=True)
class SynthesisConfig:
    samples: Mapping[str, int] = field(default_factory=dict)  # answers a prompt by category; "" is every other category
    greedy_share: float = 0.4
    temperatures: tuple[float, float] = (0.3, 1.0)  # of the others, uniform
    max_new: int = 640
    max_prompt: int = 512
    max_repetition: float = 0.3
    self_prompt_tokens: tuple[int, int] = (10, 300)
    seed: int = 0


class Synthesizer:
    """Runs jobs through a rollout and writes what may be trained on; `counts` says what became of everything else."""

    def __init__(
        self,
        rollout: Rollout,
        tokenizer: PreTrainedTokenizerBase,
        config: SynthesisConfig,
        exclusions: Exclusions,
        directory: Path,
    ) -> None:
        self.rollout, self.tokenizer, self.config = rollout, tokenizer, config
        self.exclusions, self.directory = exclusions, directory
        self.random = random.Random(config.seed)
        self.counts: Counter[str] = Counter()
        self._rows: list[dict[str, Any]] = []

    def self_prompts(self, seeds: Sequence[Seed], count: int, seconds: float) -> list[Prompt]:
        """User turns by the target itself, sampled at temperature 1 after its own user header and a seed's text (Magpie)."""
        header = self.render([{"role": "user", "content": "\x00"}]).split("\x00")[0]
        drawn = self.random.choices(seeds, [seed.weight for seed in seeds], k=count)
        ids = {seed.text: self.encode([header + seed.text])[0] for seed in seeds}
        low, high = self.config.self_prompt_tokens
        jobs = deque(Job(ids[seed.text], 1.0, min(high, self.rollout.max_new), seed) for seed in drawn)
        begun = {seed.text: self.encode([seed.text])[0] if seed.text else [] for seed in seeds}
        chosen, tokens, deadline = [], [], time.monotonic() + seconds
        for answer in self.rollout.run(jobs):
            if time.monotonic() > deadline:
                jobs.clear()
            self.counts["self prompts sampled"] += 1
            repeats = repetition(answer.tokens) > self.config.max_repetition
            if answer.finish == "stop" and low <= len(answer.tokens) and not repeats:
                chosen.append(answer.job.tag)
                tokens.append(begun[answer.job.tag.text] + answer.tokens[:-1])
        texts = self.tokenizer.batch_decode(tokens)
        made = [
            Prompt(f"self/{i}", seed.category, (text.strip(),))
            for i, (seed, text) in enumerate(zip(chosen, texts, strict=True))
            if "<|" not in text and len(text.strip()) > len(seed.text)
        ]
        self.counts["self prompts kept"] = len(made)
        return made

    def answer(self, prompts: Sequence[Prompt], seconds: float) -> None:
        """Answers in random order until all are done or the time is up; resumes after the prompts that have records already."""
        done = set(read_column(self.directory, "prompt_hash"))
        jobs = self._jobs([prompt for prompt in prompts if prompt.hash not in done])
        deadline = time.monotonic() + seconds
        for answer in self.rollout.run(jobs):
            if jobs and time.monotonic() > deadline:
                self.counts["answers not begun"] += len(jobs)
                jobs.clear()
            self._take(answer, jobs)
        self.flush()

    def render(self, messages: list[dict[str, str]]) -> str:
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert isinstance(text, str)
        return text

    def encode(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]

    def _jobs(self, prompts: Sequence[Prompt]) -> deque[Job]:
        c = self.config
        jobs = []
        encoded = self.encode([self.render([{"role": "user", "content": p.turns[0]}]) for p in prompts]) if prompts else []
        for prompt, ids in zip(prompts, encoded, strict=True):
            if len(ids) > c.max_prompt:
                self.counts["prompts too long"] += 1
                continue
            samples = c.samples.get(prompt.category, c.samples.get("", 1))
            for sample in range(samples):
                greedy = sample == 0 and self.random.random() < c.greedy_share * samples
                temperature = 0.0 if greedy else self.random.uniform(*c.temperatures)
                jobs.append(Job(ids, temperature, c.max_new, (prompt, ())))
        self.random.shuffle(jobs)
        return deque(jobs)

    def _take(self, answer: Answer, jobs: deque[Job]) -> None:
        """Keep or drop an answer, and queue the next turn of its conversation."""
        prompt, history = answer.job.tag
        self.counts[f"answers {answer.finish}"] += 1
        if answer.finish == "loop" or repetition(answer.tokens) > self.config.max_repetition:
            self.counts["answers dropped: repetition"] += 1
            return
        if len(answer.tokens) < 2:
            self.counts["answers dropped: one token"] += 1
            return
        self._rows.append(
            {
                "prompt_ids": answer.job.prompt,
                "output_ids": answer.tokens,
                "category": prompt.category,
                "lang": language(prompt),
                "thinking": False,
                "finish": answer.finish,
                "temperature": answer.job.temperature,
                "prompt_hash": prompt.hash,
            }
        )
        self.counts["answers kept"] += 1
        self.counts["answer tokens kept"] += len(answer.tokens)
        if len(self._rows) >= SHARD_ROWS:
            self.flush()
        turn = len(history) // 2 + 1
        if answer.finish != "stop" or turn >= len(prompt.turns):
            return
        text = self.tokenizer.decode(answer.tokens[:-1])
        history = (*history, {"role": "user", "content": prompt.turns[turn - 1]}, {"role": "assistant", "content": text})
        (ids,) = self.encode([self.render([*history, {"role": "user", "content": prompt.turns[turn]}])])
        if len(ids) <= self.config.max_prompt:
            jobs.append(Job(ids, answer.job.temperature, self.config.max_new, (prompt, history)))

    def flush(self) -> None:
        if self._rows:
            write_shard(self.directory, self._rows)
            self._rows = []


def training_hashes(directory: Path) -> np.ndarray:
    """Hashes of all prompts with records: sorted, unique, uint64. They ship with the draft."""
    return np.unique(np.array(read_column(directory, "prompt_hash"), dtype=np.uint64))
