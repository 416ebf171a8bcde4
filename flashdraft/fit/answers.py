"""The answers of a fit: as many as the time is enough for, none of them half written."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from flashdraft.errors import ConfigError, counted
from flashdraft.fit.budget import AnswerSpeed, longest_answer, samples_for
from flashdraft.train.commands_synthesize import Where
from flashdraft.train.corpus import Corpus
from flashdraft.train.display import duration, out
from flashdraft.train.jobs import Answer, Jobs, Source
from flashdraft.train.records import DROPPED
from flashdraft.train.synthesis_report import Display, dropped_of
from flashdraft.train.synthesize import SynthesisConfig, synthesize

LEAST_ANSWERS = 16  # fewer leave nothing to hold out


@dataclass
class Until:
    """A source whose answers under way are left when the time is over."""

    source: Source
    end: float  # of time.monotonic()

    def __post_init__(self) -> None:
        self.tokenizer, self.max_len, self.model = self.source.tokenizer, self.source.max_len, self.source.model
        self.target_hash = self.source.target_hash

    def describe(self) -> str:
        return self.source.describe()

    def run(self, jobs: Jobs) -> Iterator[Answer]:
        """See Source."""
        if time.monotonic() < self.end:
            for answer in self.source.run(jobs):
                yield answer
                if time.monotonic() >= self.end:
                    return


def derived_sampling(config: SynthesisConfig, corpus: Corpus, seconds: float, speed: AnswerSpeed) -> dict[str, int]:
    """The fields of SynthesisConfig that follow from the time."""
    longest = longest_answer(seconds, speed, config.max_tokens)
    several = min(config.temperatures) > 0
    return {"max_tokens": longest, "samples": samples_for(seconds, speed, len(corpus), longest) if several else 1}


def make_answers(
    source: Source,
    corpus: Corpus,
    directory: Path,
    config: SynthesisConfig,
    where: Where,
    *,
    seconds: float,
    speed: AnswerSpeed,
) -> Counter[str]:
    """Go on with the answers of a directory for so many seconds; says and returns what became of prompts and answers.

    Raises ConfigError where too few to train on were kept.
    """
    begun, display = time.monotonic(), Display(seconds=seconds)
    # What is begun so late ends in time, if its steps are a fifth slower than they were.
    asking = max(0.4 * seconds, seconds - 1.2 * config.max_tokens * speed.step)
    try:
        counts = synthesize(
            Until(source, begun + seconds),
            corpus,
            directory,
            config,
            target=where.made_by,
            revision=where.revision,
            max_seconds=asking,
            report=display,
        )
    finally:
        display.close()
    kept, dropped = counts["answers kept"], dropped_of(counts)
    if kept < LEAST_ANSWERS:
        raise ConfigError(_too_few(counts, dropped, directory))
    left_out = "".join(f"; left out for {name}: {n:,}" for name, n in sorted(dropped.items()))
    spent = duration(time.monotonic() - begun)
    out.print(
        f"{counted(kept, 'answer')} of {counted(counts['answer tokens kept'], 'token')} in {spent}{left_out}", markup=False
    )
    return counts


def _too_few(counts: Counter[str], dropped: Mapping[str, int], directory: Path) -> str:
    """A sentence on what became of the prompts and answers, with what would help."""
    prompts = {f"prompts {what}": counts[f"prompts {what}"] for what in ("too long", "refused by the chat template")}
    reasons = {name: n for name, n in (prompts | dict(dropped)).items() if n}
    why = ", ".join(f"{name} {n:,}" for name, n in reasons.items())
    remedy = "give the same command with more --hours"
    if sum(reasons.values()) > counts["answers kept"]:
        remedy = "give another --temperature, or other prompts, with another --output"
    left_out = f" (left out: {why}{f'; see {directory / DROPPED}' if dropped else ''})" if why else ""
    return f"too few answers to train on, {counts['answers kept']}{left_out}: {remedy}"
