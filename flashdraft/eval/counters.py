"""What a server counts over all requests, read from /metrics before and after a piece of the run: vLLM's names and SGLang's."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
POSITION = re.compile(r'position="(\d{1,4})"')
QUEUES = (("vllm:num_requests_running", "vllm:num_requests_waiting"), ("sglang:num_running_reqs", "sglang:num_queue_reqs"))
VLLM, SGLANG = "vllm:spec_decode_num_", "sglang:"

Counters = dict[str, Any]  # engine, drafts, accepted, draft_tokens, tokens, and per_position of vLLM


def read(text: str | None) -> Counters | None:
    """The counters of speculation in Prometheus's text, summed over all labels; None where there are none.

    vLLM counts drafts, proposals and accepted ones; SGLang verify steps and answer tokens.
    """
    sums: dict[str, float] = defaultdict(float)
    positions: dict[int, float] = defaultdict(float)
    for line in (text or "").splitlines():
        if (match := LINE.match(line)) is None:
            continue
        name, labels, value = match[1].removesuffix("_total"), match[2] or "", _number(match[3])
        sums[name] += value
        if name == f"{VLLM}accepted_tokens_per_pos" and (position := POSITION.search(labels)):
            positions[int(position[1])] += value
    if f"{VLLM}drafts" in sums:
        return {
            "engine": "vllm",
            "drafts": sums[f"{VLLM}drafts"],
            "accepted": sums[f"{VLLM}accepted_tokens"],
            "draft_tokens": sums[f"{VLLM}draft_tokens"],
            "per_position": [positions[i] for i in range(max(positions, default=-1) + 1)],
        }
    if f"{SGLANG}spec_verify_calls" in sums:
        return {
            "engine": "sglang",
            "drafts": sums[f"{SGLANG}spec_verify_calls"],
            "tokens": sums[f"{SGLANG}generation_tokens"],
        }
    return None


def queued(text: str | None) -> tuple[int, int] | None:
    """Requests that run and that wait now; None where the server does not say."""
    sums: dict[str, float] = defaultdict(float)
    for line in (text or "").splitlines():
        if match := LINE.match(line):
            sums[match[1]] += _number(match[3])
    for running, waiting in QUEUES:
        if running in sums and waiting in sums:
            return int(sums[running]), int(sums[waiting])
    return None


def difference(before: Counters | None, after: Counters | None) -> Counters | None:
    """What was counted between; None where one is missing, or the server was started anew between."""
    if before is None or after is None or before["engine"] != after["engine"]:
        return None
    found: Counters = {"engine": after["engine"]}
    for name, value in after.items():
        if name == "per_position":
            earlier = [*before[name], *[0.0] * (len(value) - len(before[name]))]
            found[name] = [b - a for a, b in zip(earlier, value, strict=False)]
        elif name != "engine":
            found[name] = value - before[name]
    numbers = [*found.get("per_position", []), *(v for k, v in found.items() if k not in ("engine", "per_position"))]
    return None if min(numbers) < 0 else found


def of_one_engine(pieces: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The pieces of a run that have counters, of the engine of the first such piece: a run may go on with another engine."""
    known = [piece for piece in pieces if piece["counters"]]
    return [piece for piece in known if piece["counters"]["engine"] == known[0]["counters"]["engine"]]


def total(pieces: list[Counters]) -> Counters | None:
    """The sum of several differences of one engine."""
    if not pieces:
        return None
    found: Counters = {"engine": pieces[0]["engine"]}
    for name in pieces[0]:
        if name == "per_position":
            width = max(len(piece[name]) for piece in pieces)
            padded = [[*piece[name], *[0.0] * (width - len(piece[name]))] for piece in pieces]
            found[name] = [sum(column) for column in zip(*padded, strict=True)]
        elif name != "engine":
            found[name] = sum(piece[name] for piece in pieces)
    return found


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0
