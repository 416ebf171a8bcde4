"""What tests of cards share: drafts of a few kilobytes, results of runs that were never made, and a card's parts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import yaml
from markdown_it import MarkdownIt
from tiny_config import TINY

from flashdraft.card.measured import read_results
from flashdraft.card.render import Card, render
from flashdraft.card.speeds import read_benches
from flashdraft.card.subject import Subject
from flashdraft.checkpoint import save_draft
from flashdraft.draft import DFlashDraft
from flashdraft.eval.local import files_hash

GROUP = {"requests": 12, "acceptance_length": 2.125, "over_steps": 2.0}
TRAINING = {  # as `flashdraft fit` leaves it
    "target": "org/name",
    "draft_parameters": 5_938_816,
    "lora": None,
    "heldout": {
        **GROUP,
        "by_position": [0.5, 0.25],
        "by_category": {"all": GROUP, "": GROUP, "code": GROUP | {"acceptance_length": 3.5}},
        "by_language": {"all": GROUP, "en": GROUP},
        "by_thinking": {"all": GROUP, "on": GROUP},
    },
    "speed": {
        "setup": {"device": "a CPU", "dtype": "bfloat16", "torch": "2.13.0", "sampling": {"temperature": 0.6}},
        "all": {
            "answers": 8,
            "tokens": 1024,
            "tokens_per_second_on": 44.0,
            "tokens_per_second_off": 22.0,
            "speedup": 2.0,
            "acceptance_length": 2.25,
            "identical": 8,
        },
    },
    "data": {"records": 1000, "records_trained_on": 980, "answer_tokens": 123_456},
    "training": {"steps": 400, "epochs": 3.06},
    "prompts": {"hash": "0123456789abcdef" * 2, "count": 1100},
    "answers": {"sampling": {"temperatures": [0.6, 1.0]}},
    "fit": {"seconds": {"answers": 3000.0, "training": 4200.0}},
    "command": "flashdraft fit org/name --prompts p.jsonl --output DRAFT --hours 2",
}


def interval(value: float, low: float | None = None, high: float | None = None, n: int | None = None) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high, "n": n}


def tiny_draft(folder: Path, training: dict[str, Any] | None = None, **changed: Any) -> Path:
    torch.manual_seed(0)
    save_draft(DFlashDraft(TINY), folder, **changed)
    if training is not None:
        (folder / "training.json").write_text(json.dumps(training))
    return folder


def results(draft: Path, name: str = "mt-bench", **changed: Any) -> dict[str, Any]:
    """As `flashdraft eval` writes them, of two categories."""
    length, ratio = interval(3.21, 3.01, 3.4, 20), interval(2.5, 2.25, 2.75, 20)
    counts = {"count": 20, "tokens": 900, "looping": 1, "one_token": 0, "cut": 4, "refused": 0}
    lengths = {
        "request_mean": length,
        "step_pooled": interval(3.0, 2.8, 3.2, 20),
        "category_mean": interval(3.2, n=2),
        "tokens_over_steps": interval(3.1, 2.9, 3.3, 20),
    }
    category = {"answers": counts, "request_mean": interval(2.0, 1.9, 2.1, 10), "speedup": ratio}
    found = {
        "schema": 1,
        "complete": True,
        "left": 0,
        "suite": {"name": name, "digest": "ab" * 16, "prompts": 80, "turns": 160},
        "settings": {"max_tokens": 512, "temperature": 0.0, "top_p": None, "samples": 1, "thinking": None, "concurrency": 16},
        "provenance": {
            "started": "2026-11-30T15:16:54+0000",
            "flashdraft": "0.1.0",
            "engine": "flashdraft",
            "device": "an H200",
            "torch": "2.11.0",
            "draft_hashes": {"DRAFT": files_hash(str(draft))},
        },
        "drafts": [
            {
                "name": "DRAFT",
                "answers": counts,
                "statistics": "per_request",
                "note": None,
                "acceptance": {
                    "all": lengths,
                    "without_loops": lengths,
                    "positions": {"histogram": [1, 1], "joint": [0.75, 0.5]},
                    "places": {"narrower_steps": 0.0},
                },
                "speed": {
                    "with": {"user_tokens_per_second": 50.0},
                    "without": {"user_tokens_per_second": 20.0},
                    "speedup": ratio,
                },
                "texts": {"compared": 160, "differing": 0},
                "by_category": {
                    "coding": deepcopy(category) | {"request_mean": interval(4.0, 3.9, 4.1, 10)},
                    "writing": category,
                },
            }
        ],
    }
    return found | changed


def benched(draft: Path) -> dict[str, Any]:
    """As `flashdraft bench` writes it, of one kind of prompt and two loads."""
    times = {key: {"p50": 0.0125} for key in ("ttft", "itl")}
    times["answers"] = 48
    arms = {"with": times | {"output_tokens_per_second": 1234.5}, "without": times | {"output_tokens_per_second": 800.0}}
    points = [
        {
            "load": load,
            **arms,
            "prompt_tokens": 1024.0,
            "speedup": interval(ratio, ratio - 0.1, ratio + 0.1, 8),
            "acceptance": interval(3.5),
        }
        for load, ratio in ((1, 2.0), (16, 0.9))
    ]
    workload = {"name": "1024 tokens", "kind": "synthetic", "prompt_tokens": 1024, "points": points}
    return {
        "schema": 1,
        "complete": True,
        "load": "concurrency",
        "draft": "DRAFT",
        "settings": {"max_tokens": 64, "rounds": 2},
        "provenance": results(draft)["provenance"] | {"load_average": 0.5, "draft_hash": files_hash(str(draft))},
        "workloads": [workload | {"break_even": {"largest": 16, "crossing": 13.25, "measured_to": 16.0}}],
    }


def counted_only(draft: Path) -> dict[str, Any]:
    """Of an endpoint whose counters alone say something."""
    found = results(draft)
    one = found["drafts"][0]
    one |= {"name": "served", "statistics": "counters", "note": "acceptance is from the server's counters", "by_category": {}}
    one["acceptance"] = {
        "all": {"request_mean": None, "step_pooled": interval(2.75), "category_mean": None, "tokens_over_steps": None},
        "without_loops": None,
        "positions": None,
        "places": None,
    }
    found["provenance"] = {"engine": "vllm", "engine_version": "0.31.0", "endpoint": "http://host:8000", "model": "served"}
    return found


def written(folder: Path, content: Any, name: str = "results.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def card_of(draft: str | Path, given: dict[str, Any] | None = None, *runs: Path, bench: Sequence[Path] = ()) -> Card:
    subject = Subject.read(str(draft))
    return render(subject, given or {}, read_results(runs, subject), read_benches(bench, subject))


def front_of(text: str) -> dict[str, Any]:
    head = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    assert head, "a card begins with its metadata"
    found: dict[str, Any] = yaml.safe_load(head[1])
    return found


def body_of(text: str) -> str:
    return text.split("\n---\n", 1)[1]


def tokens_of(text: str) -> list[Any]:
    return MarkdownIt("commonmark").enable("table").parse(body_of(text))


def shape_of(text: str) -> list[str]:
    """Headings, tables with the cells of each row, and blocks of code, in order."""
    found, cells = [], 0
    for token in tokens_of(text):
        if token.type == "heading_open":
            found.append(token.tag)
        elif token.type in ("fence", "html_block", "hr", "code_block"):
            found.append(token.type)
        elif token.type in ("th_open", "td_open"):
            cells += 1
        elif token.type == "tr_close":
            found.append(f"row of {cells}")
            cells = 0
    return found


def commands_of(text: str) -> list[str]:
    """The lines of the shell blocks."""
    return [line for t in tokens_of(text) if t.type == "fence" and t.info == "sh" for line in t.content.splitlines()]
