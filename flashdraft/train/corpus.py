"""The prompts that are answered: from files, without duplicates and without what a draft is later measured on."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flashdraft.errors import CheckpointError
from flashdraft.prompts import CHANGED, Prompt, normalise, prompt_hash, prompts_at, scan_prompts

# A prompt that shares this many words in a row with an evaluation prompt is taken for a copy of it.
OVERLAP_WORDS = 13


def language(prompt: Prompt) -> str:
    """The language of the prompt's row, else the one its category names in front ("fr/chat"), else "en"."""
    if prompt.lang:
        return prompt.lang
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
        if not self.hashes:
            return False
        return prompt_hash(text) in self.hashes or not self.runs.isdisjoint(_word_runs(normalise(text)))


def _word_runs(text: str) -> Iterator[int]:
    words = text.split()
    return map(hash, zip(*(words[i:] for i in range(OVERLAP_WORDS)), strict=False))


def select_prompts(prompts: Iterable[Prompt], exclusions: Exclusions, counts: Counter[str]) -> list[Prompt]:
    """Prompts without duplicates (by their hash, the first one stays) and without excluded ones; both are counted."""
    corpus = Corpus.of_prompts(list(prompts), exclusions)
    counts.update({name: count for name, count in corpus.counts.items() if name != "prompts"})
    return corpus.read(np.sort(corpus.order))  # as they came


@dataclass(frozen=True)
class Corpus:
    """Prompts in an order drawn by a seed, read where they lie when they are asked for: 38 bytes of memory a prompt.

    The order depends on the prompts' hashes alone, so that a run over grown files meets the old prompts in the old order.
    """

    read: Callable[[np.ndarray], list[Prompt]]  # by place
    hashes: np.ndarray  # uint64, by place
    first_hashes: np.ndarray  # uint64, by place
    turns: np.ndarray  # uint32, by place
    order: np.ndarray  # places
    counts: Counter[str]  # of what was left out

    def __len__(self) -> int:
        return len(self.order)

    @classmethod
    def of_files(
        cls,
        paths: Sequence[Path],
        exclusions: Exclusions | None = None,
        *,
        seed: int = 0,
        limit: int | None = None,
        report: Callable[[int], None] | None = None,
    ) -> Corpus:
        """Of prompt files (flashdraft.prompts), which must stay as they are while they are in use. `limit`: only so many,
        drawn from all. Raises CheckpointError that names the first bad line, and for what can be read once only, as a pipe.
        """
        files, offsets = array("I"), array("Q")
        for path in paths:
            if path.exists() and not (path.is_file() or path.is_dir()):
                raise CheckpointError(f"{path} is no regular file, and prompts are read more than once: write them into a file")

        def found() -> Iterator[Prompt]:
            for number, path in enumerate(paths):
                for offset, prompt in scan_prompts(path):
                    files.append(number)
                    offsets.append(offset)
                    yield prompt

        def read(places: np.ndarray) -> list[Prompt]:
            prompts: dict[int, Prompt] = {}
            for number, path in enumerate(paths):
                here = np.sort(places[file_of[places] == number])
                if len(here):
                    prompts.update(zip(here.tolist(), prompts_at(path, offset_of[here].tolist()), strict=True))
            for place, prompt in prompts.items():
                if prompt.hash != corpus.hashes[place]:
                    raise CheckpointError(f"{paths[file_of[place]]} {CHANGED}")
            return [prompts[place] for place in places.tolist()]

        corpus = cls._of(found(), read, exclusions or Exclusions(), seed, limit, report)
        file_of, offset_of = np.array(files, np.uint32), np.array(offsets, np.int64)
        return corpus

    @classmethod
    def of_prompts(
        cls, prompts: Sequence[Prompt], exclusions: Exclusions | None = None, *, seed: int = 0, limit: int | None = None
    ) -> Corpus:
        """Of prompts in memory."""
        return cls._of(prompts, lambda places: [prompts[i] for i in places], exclusions or Exclusions(), seed, limit, None)

    @classmethod
    def _of(
        cls,
        prompts: Iterable[Prompt],
        read: Callable[[np.ndarray], list[Prompt]],
        exclusions: Exclusions,
        seed: int,
        limit: int | None,
        report: Callable[[int], None] | None,
    ) -> Corpus:
        hashes, firsts, turns, excluded = array("Q"), array("Q"), array("I"), array("B")
        for number, prompt in enumerate(prompts):
            hashes.append(prompt.hash)
            firsts.append(prompt.first_hash)
            turns.append(len(prompt.turns))
            excluded.append(any(turn in exclusions for turn in prompt.turns))
            if report is not None and number % 10_000 == 0:
                report(number)
        keys, dropped = np.array(hashes, np.uint64), np.array(excluded, bool)
        allowed = np.flatnonzero(~dropped)
        _, first = np.unique(keys[allowed], return_index=True)
        places = allowed[first]
        shuffled = places[np.argsort(_mixed(keys[places] ^ np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)), kind="stable")]
        counts = Counter(
            {"prompts excluded": int(dropped.sum()), "prompts duplicate": len(allowed) - len(places)}
            | {"prompts not drawn": len(places) - len(shuffled[:limit]), "prompts": len(shuffled[:limit])}
        )
        return cls(read, keys, np.array(firsts, np.uint64), np.array(turns, np.uint32), shuffled[:limit], counts)

    def chunks(self, size: int = 256) -> Iterator[list[Prompt]]:
        """All prompts, in order, some at a time."""
        for start in range(0, len(self.order), size):
            yield self.read(self.order[start : start + size])

    def places_of(self, hashes: np.ndarray) -> np.ndarray:
        """Places of the prompts with these hashes uint64, -1 where there is none."""
        ordered = self.order[np.argsort(self.hashes[self.order])]
        keys = self.hashes[ordered]
        at = np.searchsorted(keys, hashes).clip(max=len(keys) - 1)
        return np.where(keys[at] == hashes, ordered[at], -1)

    def beginning_with(self, first_hashes: np.ndarray) -> np.ndarray:
        """Places of all prompts whose first_hash uint64 is one of these, in order."""
        return self.order[np.isin(self.first_hashes[self.order], first_hashes)]


def _mixed(keys: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64: equal keys stay equal, all else looks random."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        keys = (keys ^ (keys >> np.uint64(shift))) * np.uint64(factor)
    return keys ^ (keys >> np.uint64(31))
