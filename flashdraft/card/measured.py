"""What `flashdraft eval` and `flashdraft bench` measured of this draft, and of no other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashdraft.card.markdown import NONE, at, interval, number, one_line, text_of
from flashdraft.card.subject import Subject
from flashdraft.errors import CheckpointError, counted
from flashdraft.eval.metrics import FEWEST
from flashdraft.eval.suites import NAMES
from flashdraft.model_files import reason_of

SCHEMA = 1


@dataclass(frozen=True)
class Suite:
    """A suite that others know. collection, labelling: how its prompts came to be, in the words that cards use."""

    title: str
    dataset: str | None
    collection: str
    labelling: str = "Not applicable: only the prompts are used"


SUITES = {
    "mt-bench": Suite("MT-Bench", "HuggingFaceH4/mt_bench_prompts", "Human"),
    "speed-bench": Suite("SPEED-Bench", "nvidia/SPEED-Bench", "Hybrid: rows of public data sets"),
    "gsm8k": Suite("GSM8K", "openai/gsm8k", "Human"),
    "humaneval": Suite("HumanEval", "openai/openai_humaneval", "Human"),
    "math500": Suite("MATH-500", "HuggingFaceH4/MATH-500", "Human"),
    "mbpp": Suite("MBPP", "google-research-datasets/mbpp", "Human"),
    "spec-bench": Suite("Spec-Bench", None, "Hybrid: rows of public data sets"),
    "mini": Suite("flashdraft mini", None, "Written for flashdraft"),
    "throughput": Suite("flashdraft throughput", None, "Synthetic: generated from a seed"),
}


@dataclass(frozen=True)
class Measured:
    """One draft of a results.json. revision: which form of the draft it is; None where the file cannot tell."""

    file: Path
    results: dict[str, Any]
    draft: dict[str, Any]
    revision: str | None

    @property
    def suite_name(self) -> str:
        return text_of(at(self.results, "suite", "name")) or "unnamed"

    @property
    def configuration(self) -> str | None:
        return (self.key and self.suite_name.partition(":")[2]) or None

    @property
    def suite(self) -> Suite:
        known = SUITES.get(self.key)
        return known or Suite(self.suite_name, None, "Not stated by the results", "Not stated by the results")

    @property
    def key(self) -> str:
        """The name that SUITES knows it by; "" of a file, which `flashdraft eval` never calls by such a name."""
        return self.suite_name.partition(":")[0] if self.suite_name in NAMES else ""

    @property
    def title(self) -> str:
        return f"{self.suite.title} {self.configuration}" if self.configuration else self.suite.title

    @property
    def limited(self) -> int | None:
        """Prompts of a run over a part of its suite; None where it was over all."""
        limit, prompts = (number(at(self.results, "suite", name)) for name in ("limit", "prompts"))
        return None if limit is None or (prompts is not None and prompts < limit) else round(limit)

    @property
    def named(self) -> str:
        """The title, with what was left out."""
        part = "" if self.limited is None else f" (limited to {counted(self.limited, 'prompt')})"
        return f"{self.title}{part}" if self.complete else f"{self.title}{part} (incomplete)"

    @property
    def stands_for_suite(self) -> bool:
        """Whether its figures may be called those of the suite."""
        n = number(at(self.headline[1], "n")) if self.headline else None
        return self.complete and self.limited is None and (n is None or n >= FEWEST)

    @property
    def complete(self) -> bool:
        return self.results.get("complete") is True

    @property
    def headline(self) -> tuple[str, dict[str, Any]] | None:
        """Convention and acceptance length: request_mean, or what counters know."""
        for name in ("request_mean", "step_pooled", "tokens_over_steps"):
            found = at(self.draft, "acceptance", "all", name)
            if number(at(found, "value")) is not None:
                return name, found
        return None


def read_results(paths: Iterable[Path], subject: Subject) -> list[Measured]:
    """Raises CheckpointError for what `flashdraft eval` did not write, and for results of other checkpoints alone."""
    return [found for path in paths for found in _read(path, subject)]


def _read(path: Path, subject: Subject) -> list[Measured]:
    file = path / "results.json" if path.is_dir() else path
    results = read_report(file, "flashdraft eval")
    drafts = results.get("drafts")
    if results.get("schema") != SCHEMA or not isinstance(drafts, list) or not isinstance(results.get("suite"), dict):
        raise CheckpointError(f"{file} is not what `flashdraft eval` writes (schema {SCHEMA}): give the directory of a run")
    drafts = [draft for draft in drafts if isinstance(draft, dict)]
    names = [str(draft.get("name")) for draft in drafts]
    hashes = at(results, "provenance", "draft_hashes")
    kept = of_this_draft(file, names, hashes, subject)
    return [Measured(file, results, draft, kept[name]) for draft, name in zip(drafts, names, strict=True) if name in kept]


def of_this_draft(file: Path, names: Sequence[str], hashes: Any, subject: Subject) -> dict[str, str | None]:
    """Which of the drafts in a report are this one: name -> revision, None for one whose checkpoint is not recorded.

    Raises CheckpointError where all of them are others.
    """
    revisions = {revision.digest: revision.name for revision in subject.revisions}
    known = {name: hashes.get(name) if isinstance(hashes, dict) else None for name in names}
    if not all(digest is None or isinstance(digest, str) for digest in known.values()):
        raise CheckpointError(f"{file} is damaged (hashes of its drafts): write it anew by the same command")
    found: dict[str, str | None] = {name: revisions[digest] for name, digest in known.items() if digest in revisions}
    # Of an endpoint, or a draft by its hub id, nobody wrote down which files they were: it is taken, and the card says so.
    unknown = [name for name, digest in known.items() if digest is None]
    if not found and len(unknown) == 1 == len(names):
        return {unknown[0]: None}
    if not found:
        which = f"{', '.join(names)[:200]}" if names else "no draft"
        raise CheckpointError(
            f"{file} measured another checkpoint ({which}) than {subject.folder}: measure this one, with --draft "
            f"{subject.folder}"
        )
    return found


def read_report(file: Path, command: str) -> dict[str, Any]:
    """A JSON object that a command of ours wrote."""
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"there is no {file}: give the directory that `{command}` wrote") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON ({reason_of(error)}): run `{command}` again") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds no JSON object: give what `{command}` wrote")
    return found


DIFFERENCES = (  # fields that tell runs of one suite apart, and their words
    ("settings", "temperature", "temperature {}"),
    ("settings", "thinking", "thinking {}"),
    ("settings", "top_p", "top-p {}"),
    ("settings", "top_k", "top-k {}"),
    ("settings", "samples", "{} samples a prompt"),
    ("settings", "seed", "seed {}"),
    ("settings", "max_tokens", "at most {} tokens"),
    ("settings", "concurrency", "{} at once"),
    ("provenance", "device", "on {}"),
    ("provenance", "engine", "by {}"),
)


def differences(measured: Sequence[Measured]) -> list[list[str]]:
    """Of each run what tells it from others of the same suite and revision; [] for the only one."""
    groups: dict[tuple[str, str | None], list[int]] = {}
    for place, one in enumerate(measured):
        groups.setdefault((one.named, one.revision), []).append(place)
    found: list[list[str]] = [[] for _ in measured]
    for places in groups.values():
        for part, field, words in DIFFERENCES:
            said = [_said(field, words, at(measured[place].results, part, field)) for place in places]
            if len(set(said)) > 1:
                for place, text in zip(places, said, strict=True):
                    found[place].append(text)
        seen: dict[str, int] = {}
        for place in places if len(places) > 1 else ():
            text = ", ".join(found[place])
            seen[text] = seen.get(text, 0) + 1
            found[place] += [f"run {seen[text]}"] if not text or seen[text] > 1 else []
    return found


def _said(field: str, words: str, value: Any) -> str:
    found = number(value)
    if field == "temperature" and found == 0:
        return "greedy"
    if isinstance(value, bool):
        return words.format("on" if value else "off")
    if found is not None or text_of(value):
        return words.format(one_line(value, 80) if found is None else f"{found:g}")
    return f"{field.replace('_', '-')} not set"


def conditions(results: dict[str, Any]) -> list[str]:
    """What figures depend on most: temperature, thinking where it was set, requests at once."""
    settings, words = at(results, "settings"), {field: words for _, field, words in DIFFERENCES}
    fields = ["temperature", *(["thinking"] if isinstance(at(settings, "thinking"), bool) else []), "concurrency"]
    return [_said(field, words[field], at(settings, field)) for field in fields]


def spread(found: Any) -> str:
    """The interval of a figure; none of fewer than FEWEST conversations or requests, which older reports still have."""
    n = number(at(found, "n"))
    return NONE if n is not None and n < FEWEST else interval(at(found, "low"), at(found, "high"))


def setup_of(results: dict[str, Any]) -> str:
    """Engine, its version and its device, in words."""
    made = at(results, "provenance")
    version = at(made, "flashdraft") if at(made, "engine") == "flashdraft" else at(made, "engine_version")
    words = [word for name in (at(made, "engine"), version) if (word := text_of(name))]
    parts = [" ".join(words) or "an engine that is not named", text_of(at(made, "device")) or "a device that is not recorded"]
    parts += [f"torch {made['torch']}"] if text_of(at(made, "torch")) else []
    return ", ".join(parts)


def settings_of(results: dict[str, Any]) -> str:
    """Prompts and sampling, in words."""
    settings, suite = at(results, "settings") or {}, at(results, "suite") or {}
    temperature = number(at(settings, "temperature"))
    parts = []
    if (prompts := number(at(suite, "prompts"))) is not None:
        turns = number(at(suite, "turns"))
        parts.append(
            counted(round(prompts), "prompt") + ("" if turns is None else f" of {counted(round(turns), 'turn')} in all")
        )
    parts.append(
        "sampling not recorded" if temperature is None else "greedy" if not temperature else f"temperature {temperature:g}"
    )
    parts += [
        f"{name.replace('_', '-')} {settings[name]}" for name in ("top_p", "top_k") if number(at(settings, name)) is not None
    ]
    parts += [f"{counted(round(n), 'sample')} a prompt" for n in [number(at(settings, "samples"))] if n and n > 1]
    parts += [f"thinking {'on' if settings['thinking'] else 'off'}"] if isinstance(at(settings, "thinking"), bool) else []
    parts += [f"at most {round(n):,} tokens an answer" for n in [number(at(settings, "max_tokens"))] if n]
    parts += [f"{round(n):,} at once" for n in [number(at(settings, "concurrency"))] if n]
    return ", ".join(parts)
