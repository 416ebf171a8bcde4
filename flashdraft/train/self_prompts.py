"""Prompts that a target writes itself: sampled from its chat template up to the user's turn (Magpie, arXiv 2406.08464)."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from flashdraft.prompts import Prompt, repetition
from flashdraft.train.conversations import Renderer
from flashdraft.train.jobs import Job
from flashdraft.train.sources import RolloutSource

LEAST_TOKENS, MOST_TOKENS = 10, 300
MOST_REPETITION = 0.3
MARK = "\x00"


@dataclass(frozen=True)
class Seed:
    """How a self prompt begins: the target writes the rest of the user's turn."""

    text: str
    category: str
    weight: float = 1.0


def self_prompts(
    source: RolloutSource,
    seeds: Sequence[Seed],
    count: int,
    *,
    seconds: float,
    counts: Counter[str],
    lengths: tuple[int, int] = (LEAST_TOKENS, MOST_TOKENS),
    seed: int = 0,
) -> list[Prompt]:
    """User turns by the target, sampled at temperature 1 after its own user header and a seed's text.

    Of `count` turns those are kept that end by themselves within `lengths` tokens, without repeating themselves and without a
    template's own tokens; `counts` says how many.
    """
    renderer, draws, (low, high) = Renderer(source.tokenizer), random.Random(seed), lengths
    header = renderer.render([{"role": "user", "content": MARK}], {}).split(MARK)[0]
    prompt_ids = {one.text: renderer.encode([header + one.text])[0] for one in seeds}
    begun = {one.text: renderer.encode([one.text])[0] if one.text else [] for one in seeds}
    most = min(high, source.rollout.max_new)
    jobs = deque(
        Job(prompt_ids[one.text], 1.0, most, one, seed=draws.getrandbits(63))
        for one in draws.choices(seeds, [one.weight for one in seeds], k=count)
    )
    chosen, tokens, deadline = [], [], time.monotonic() + seconds
    for answer in source.run(jobs):
        if time.monotonic() > deadline:
            jobs.clear()
        counts["self prompts sampled"] += 1
        if answer.finish == "stop" and low <= len(answer.tokens) and repetition(answer.tokens) <= MOST_REPETITION:
            chosen.append(answer.job.tag)
            tokens.append(begun[answer.job.tag.text] + answer.tokens[:-1])
    texts = [str(source.tokenizer.decode(ids)) for ids in tokens]
    made = [
        Prompt(f"self/{i}", one.category, (text.strip(),))
        for i, (one, text) in enumerate(zip(chosen, texts, strict=True))
        if "<|" not in text and len(text.strip()) > len(one.text)
    ]
    counts["self prompts kept"] += len(made)
    return made
