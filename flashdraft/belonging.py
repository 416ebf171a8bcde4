"""Whom a draft belongs to: it learned from one target's answers, and guesses those of another less often."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flashdraft.checkpoint import locate
from flashdraft.targets.load import adapter_hash


def of_another_target(draft: str | Path, revision: str | None, lora: str | Path | None) -> str | None:
    """One sentence where a draft was trained for its target with another adapter than `lora`, or with one where this is None.

    What it was trained for is `lora` in its training.json ({"name", "hash"}, absent or null for the target as it is); without
    that file nobody knows, and nothing is said. Text is the target's own with any draft: only speed is lost.
    """
    file = locate(draft, revision, weights=False) / "training.json"
    try:
        training: Any = json.loads(file.read_text(encoding="utf-8"))
        own = training.get("lora")
        name, digest = (None, None) if own is None else (own["name"], own["hash"])
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None
    if digest == (None if lora is None else adapter_hash(lora)):
        return None
    if digest is None:
        return (
            f"the draft {draft} belongs to the base model and not to {lora}: fewer of its guesses are accepted; train one for "
            f"the adapter with `flashdraft train --lora {lora}`"
        )
    other = "the target without it" if lora is None else str(lora)
    return f"the draft {draft} was trained for the adapter {name} and not for {other}: fewer of its guesses are accepted"
