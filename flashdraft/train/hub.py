"""Prompts of a hub data set: streamed once into a prompt file, which is then read as any other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.prompts import Prompt, prompt_of_row
from flashdraft.train.files import replacing, saying_what_is_wrong

Loader = Callable[..., Iterable[Any]]  # (name, configuration, split=, revision=, streaming=True) -> rows


def fetch_prompts(
    dataset: str,
    splits: Sequence[str],
    directory: Path,
    *,
    limit: int | None = None,
    revision: str | None = None,
    load: Loader | None = None,
    report: Callable[[str, int], None] | None = None,
) -> list[Path]:
    """Prompt files in `directory`, one a split, of a hub data set NAME or NAME:CONFIGURATION; those that are there stay.

    Rows hold `messages`, `conversations`, `turns` or `prompt`; assistant turns are dropped, and rows without a usable turn of
    the user are skipped. limit: so many prompts in all, the first of each split. `load` stands for datasets.load_dataset.
    Raises ConfigError without the package `datasets` and for splits without prompts, CheckpointError for what cannot be loaded.
    """
    each = -(-limit // len(splits)) if limit else None
    paths = []
    for split in splits:
        name = "-".join(re.sub(r"[^\w.]+", "-", part) for part in (dataset, split, revision or "", str(each or "")) if part)
        path = directory / f"prompts-{name}.jsonl"
        if not path.exists():
            _fetch(dataset, split, path, each, revision, load or load_dataset(), report)
        paths.append(path)
    return paths


def _fetch(
    dataset: str,
    split: str,
    path: Path,
    limit: int | None,
    revision: str | None,
    load: Loader,
    report: Callable[[str, int], None] | None,
) -> None:
    name, _, configuration = dataset.partition(":")
    prompts = skipped = 0
    with saying_what_is_wrong(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
            for number, row in enumerate(stream_rows(load, name, configuration or None, split, revision)):
                try:
                    prompt = prompt_of_row(row, f"{split}/{number}")
                except ValueError:
                    skipped += 1
                    continue
                file.write(json.dumps(_in_split(prompt, split).to_row(), ensure_ascii=False) + "\n")
                prompts += 1
                if report is not None and prompts % 1000 == 0:
                    report(split, prompts)
                if prompts == limit:
                    break
            if not prompts:
                raise ConfigError(
                    f"split {split!r} of {dataset} holds no prompts ({skipped:,} rows without `messages`, `conversations`, "
                    "`turns` or `prompt`): give another one"
                )


def stream_rows(load: Loader, name: str, configuration: str | None, split: str, revision: str | None) -> Iterable[Any]:
    """The rows of one split. Raises CheckpointError for what cannot be loaded."""
    try:
        yield from load(name, configuration, split=split, revision=revision, streaming=True)
    except Exception as error:  # of datasets, the hub and the network, in many kinds
        raise CheckpointError(
            f"{name}, split {split!r}: cannot be loaded ({shorten(str(error) or type(error).__name__, 200)}): check the name, "
            "the split and the network"
        ) from error


def _in_split(prompt: Prompt, split: str) -> Prompt:
    """The prompt with its split as category, and the language of a split such as multilingual_de, where its row names none."""
    language = re.fullmatch(r".*_([a-z]{2})", split)
    return replace(prompt, category=prompt.category or split, lang=prompt.lang or (language[1] if language else ""))


def load_dataset(extra: str = "train") -> Loader:
    """The loader of `datasets`. Raises ConfigError without the package; extra: the one of ours to name."""
    try:
        from datasets import load_dataset as load
    except ImportError as error:
        raise ConfigError(
            f"hub data sets are read with the package datasets: run `pip install 'flashdraft[{extra}]'`"
        ) from error
    return load
