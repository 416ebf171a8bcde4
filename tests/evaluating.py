"""What tests of `flashdraft eval` share: streamed answers of a scripted server, and runs in a process that may be killed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashdraft.eval.command import Options, run_eval
from flashdraft.eval.run import Settings

PROMPTS = [
    {"id": "a", "category": "math", "turns": ["one", "two"]},
    {"id": "b", "category": "math", "turns": ["three"]},
    {"id": "c", "category": "coding", "turns": ["four", "five"]},
    {"id": "d", "category": "coding", "turns": ["six"]},
]


def write_rows(path: Path, rows: Sequence[Any] = PROMPTS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def speculation(*steps: tuple[int, int], width: int = 7) -> dict[str, Any]:
    """`metrics.speculative_decoding` of steps (accepted, drafted)."""
    return {
        "num_spec_steps": sum(d > 0 for _, d in steps),
        "num_spec_tokens": width,
        "per_step_accepted": [a for a, _ in steps],
        "per_step_drafted": [d for _, d in steps],
    }


def stream(
    words: Sequence[str], *steps: tuple[int, int], finish: str | None = "stop", usage: dict[str, Any] | None = None, **last: Any
) -> tuple[int, bytes]:
    """A streamed answer of these words, a token each; steps: what the server says of its speculation; last: of the end."""
    choices: list[dict[str, Any]] = [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
    choices += [{"index": 0, "delta": {"content": word}, "finish_reason": None} for word in words]
    events: list[dict[str, Any]] = [{"choices": [choice]} for choice in choices]
    if finish:
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        counts = {"prompt_tokens": 5, "completion_tokens": len(words)} | (usage or {})
        metrics = {"metrics": {"speculative_decoding": speculation(*steps)}} if steps else {}
        events.append({"choices": [], "usage": counts, **metrics, **last})
    return 200, b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def options(suite: Path, output: Path, url: str | None, concurrency: int = 1, **given: Any) -> Options:
    settings = Settings(max_tokens=16, concurrency=concurrency, **given.pop("settings", {}))
    return Options(suite=str(suite), settings=settings, output=output, endpoint=url, **given)


def evaluate(suite: str, output: str, url: str) -> None:
    """Work for killing.start."""
    run_eval(options(Path(suite), Path(output), url, concurrency=2))


def answers(output: Path) -> list[dict[str, Any]]:
    lines = (output / "answers.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["kind"] == "answer"]


def results(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "results.json").read_text())
    return found
