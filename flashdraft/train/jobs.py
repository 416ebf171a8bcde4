"""Jobs and their answers: what stands between the prompts and whatever makes the answers (sources.py, endpoint.py)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from transformers import PreTrainedTokenizerBase

Finish = Literal["stop", "length", "loop"]
# An answer whose last LOOP_WINDOW tokens repeat more than LOOP_SHARE of their 8-grams will not recover: small targets loop in a
# quarter of their greedy answers, and each would cost up to three times the tokens of a good answer.
LOOP_WINDOW, LOOP_SHARE, LOOP_STRIDE = 192, 0.5, 64


@dataclass
class Job:
    """One answer to generate. `tag` is the caller's own."""

    prompt: list[int]
    temperature: float = 0.0
    max_new: int = 512
    tag: Any = None
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    seed: int = 0  # 63 bits
    messages: Sequence[Mapping[str, str]] = ()  # what the prompt was rendered from
    template: Mapping[str, Any] = field(default_factory=dict)  # chat_template_kwargs


@dataclass(frozen=True)
class Answer:
    job: Job
    tokens: list[int]  # the stop token included
    finish: Finish
    problem: str = ""  # why it cannot be trained on, if its source knows


class Jobs(Protocol):
    """A queue of jobs: a deque, or one that makes them as they are asked for, whose length is of those that are made."""

    def __len__(self) -> int: ...
    def popleft(self) -> Job: ...
    def append(self, job: Job, /) -> None: ...
    def appendleft(self, job: Job, /) -> None: ...
    def extendleft(self, jobs: Iterable[Job], /) -> None: ...
    def clear(self) -> None: ...


class LazyJobs:
    """Jobs of an iterator, made when they are asked for; those that were put in come first."""

    def __init__(self, source: Iterator[Job]) -> None:
        self._source, self._ready = source, deque[Job]()

    def __len__(self) -> int:
        if not self._ready:
            self._ready.extend(job for job in (next(self._source, None),) if job is not None)
        return len(self._ready)

    def popleft(self) -> Job:
        return self._ready.popleft() if self else next(self._source)

    def append(self, job: Job, /) -> None:
        self._ready.append(job)

    def appendleft(self, job: Job, /) -> None:
        self._ready.appendleft(job)

    def extendleft(self, jobs: Iterable[Job], /) -> None:
        self._ready.extendleft(jobs)

    def clear(self) -> None:
        self._source = iter(())
        self._ready.clear()


class Source(Protocol):
    """What answers jobs. `max_len` is the longest prompt and answer together, None where nobody knows; `model` the name that a
    server gives the target, None where there is no server; `target_hash` that of its weights (identity.py), where it is known.
    """

    tokenizer: PreTrainedTokenizerBase
    max_len: int | None
    model: str | None
    target_hash: str | None

    def describe(self) -> str:
        """What makes the answers, in a few words."""

    def run(self, jobs: Jobs) -> Iterator[Answer]:
        """Yield answers as they finish, until `jobs` is empty. The caller may add jobs, or clear them, in between."""
