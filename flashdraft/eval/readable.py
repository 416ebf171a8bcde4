"""Settings and provenance of a run as people read them: names and values without the marks of a program."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from datetime import datetime
from typing import Any

NAMES = {
    "max_tokens": "longest answer, tokens",
    "top_p": "top-p",
    "top_k": "top-k",
    "samples": "answers a prompt",
    "thinking": "thinking",
    "concurrency": "requests at once",
    "requests": "requests a round",
    "seconds": "seconds a round",
    "by_rate": "load in requests a second",
    "sweep": "sweep of the concurrency",
    "load_average": "load average of the machine, at the start",
    "flashdraft": "flashdraft version",
    "python": "Python version",
    "torch": "PyTorch version",
    "transformers": "transformers version",
    "engine_version": "version of the engine",
    "serve": "options of the server",
    "baseline": "endpoint without the draft",
    "target_hash": "hash of the target's files",
    "draft_hash": "hash of the draft's files",
    "draft_hashes": "hash of each draft's files",
    "draft_bytes": "weights of each draft",
    "suite_digest": "hash of the suite's prompts",
    "suite_limit": "limit of prompts (--limit)",
}


def readable(fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and value of each field that says something."""
    rows = ((name, _value(name, value)) for name, value in fields.items())
    return [(name_of(name), value) for name, value in rows if value]


def name_of(field: str) -> str:
    return NAMES.get(field, field.replace("_", " "))


def _value(name: str, value: Any) -> str:
    """ "" where there is nothing to say."""
    if value is None:
        return "as the chat template has it" if name == "thinking" else ""
    if isinstance(value, bool):
        return ("on" if value else "off") if name == "thinking" else "yes" if value else "no"
    if name == "temperature" and value == 0:
        return "0 (greedy)"
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {said}" for key, inner in value.items() if (said := _value(name, inner)))
    if isinstance(value, list | tuple):
        return shlex.join(map(str, value)) if name == "serve" else ", ".join(map(str, value))
    if name == "draft_bytes" and isinstance(value, int):
        return f"{value / 1e6:,.1f} MB"
    if name == "started" and isinstance(value, str):
        return _moment(value)
    return (
        f"{value:,}" if isinstance(value, int) and name != "seed" else f"{value:g}" if isinstance(value, float) else str(value)
    )


def _moment(text: str) -> str:
    try:
        return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M, UTC%z")
    except ValueError:
        return text
