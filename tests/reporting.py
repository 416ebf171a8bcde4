"""Runs made of records, for tests of what is concluded and shown of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from flashdraft.eval import results
from flashdraft.eval.records import Log
from flashdraft.eval.reply import from_steps
from flashdraft.eval.run import Arm, Settings

KINDS: tuple[Literal["pinned", "draft", "none"], ...] = ("pinned", "draft", "none")
Steps = Sequence[tuple[int, int]]  # accepted, drafted


def answer(arm: Arm, prompt: str, steps: Steps | None, *, seconds: float = 2.0, turn: int = 0, **given: Any) -> dict[str, Any]:
    """A record; steps None: the server says nothing of its speculation."""
    tokens = given.pop("tokens", 1 + sum(a + 1 for a, _ in steps or ()))
    fields = {"kind": "answer", "arm": arm.name, "prompt": prompt, "sample": 0, "turn": turn, "id": prompt, "category": "math"}
    fields |= {
        "piece": "x",
        "prompt_tokens": 40,
        "tokens": tokens,
        "thinking_tokens": None,
        "first": 0.5,
        "last": seconds - 0.1,
    }
    fields |= {"seconds": seconds, "finish_reason": "stop", "repetition": 0.0, "text": f"answer to {prompt}"}
    return (
        fields
        | {"speculation": None if steps is None else asdict(from_steps([a for a, _ in steps], [d for _, d in steps], 7))}
        | given
    )


def pair(
    draft: str, prompt: str, steps: Steps | None, *, on: float = 2.0, off: float = 4.0, **given: Any
) -> list[dict[str, Any]]:
    """The same answer with the draft and without."""
    with_draft = answer(Arm(draft, "draft"), prompt, steps, seconds=on, **given)
    plain = answer(Arm(draft, "none"), prompt, None, seconds=off, **({"tokens": with_draft["tokens"]} | given))
    return [with_draft, plain]


def piece(arm: Arm, answers: int, tokens: int, counters: dict[str, Any] | None = None) -> dict[str, Any]:
    fields = {"kind": "piece", "arm": arm.name, "piece": "x", "round": 0, "answers": answers, "tokens": tokens}
    return fields | {"seconds": 3.0, "flushed": True, "counters": counters}


def run(directory: Path, records: Iterable[dict[str, Any]], drafts: Sequence[str] = ("d",), **changed: Any) -> dict[str, Any]:
    """results.json of these records, written; changed: fields of it, those of settings and provenance one by one."""
    directory.mkdir(parents=True, exist_ok=True)
    log = Log(directory)
    given = list(records)
    timed = {record["arm"] for record in given if record["kind"] == "piece"}
    for record in given:
        log.add(record)
    for arm in (Arm(draft, kind) for draft in drafts for kind in KINDS):
        mine = [record for record in given if record["arm"] == arm.name]
        if mine and arm.name not in timed:
            log.add(piece(arm, len(mine), sum(record.get("tokens") or 0 for record in mine)))
    log.close()
    used = {record["arm"] for record in (*log.answers.values(), *log.pieces)}
    arms = [arm for name in drafts for kind in KINDS if (arm := Arm(name, kind)).name in used or kind == "draft"]
    found = results.gather(log, arms)
    prompts = {record["prompt"] for record in log.answers.values()}
    suite = {
        "name": "suite",
        "digest": "0123",
        "limit": None,
        "prompts": len(prompts),
        "turns": len(log.answers),
        "categories": {},
    }
    whole: dict[str, Any] = {"schema": 1, "complete": True, "left": 0, "suite": suite, "settings": asdict(Settings(16))}
    whole |= {"provenance": {"started": "2026-01-01T00:00:00+0000", "engine": "flashdraft", "device": "a machine"}}
    whole |= {"drafts": found, "costs": results.costs(found), "gates": results.gates(found, None, None)}
    for name, value in changed.items():
        whole[name] = {**whole[name], **value} if isinstance(value, dict) else value
    (directory / "results.json").write_text(json.dumps(whole))
    return whole
