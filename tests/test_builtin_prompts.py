"""The built-in prompts cover every category and tier of the evaluation, evenly enough to compare."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import flashdraft

TEXT = (Path(flashdraft.__file__).parent / "builtin" / "prompts.jsonl").read_text(encoding="utf-8")
ROWS = [json.loads(line) for line in TEXT.splitlines()]
CATEGORIES = ["coding", "humanities", "math", "multilingual", "qa", "rag", "reasoning", "roleplay", "stem", "summarization"]


def test_there_are_four_prompts_in_each_of_eleven_categories() -> None:
    assert Counter(row["category"] for row in ROWS) == dict.fromkeys([*CATEGORIES, "writing"], 4)
    assert len({row["id"] for row in ROWS}) == len(ROWS)


def test_every_tier_has_at_least_eight_prompts() -> None:
    tiers = Counter(row["tier"] for row in ROWS)
    assert set(tiers) == {"low_entropy", "mixed", "high_entropy"}
    assert min(tiers.values()) >= 8


def test_turns_are_short_texts_none_of_them_twice() -> None:
    turns = [turn for row in ROWS for turn in row["turns"]]
    assert all(set(row) == {"id", "category", "turns", "tier"} and 1 <= len(row["turns"]) <= 2 for row in ROWS)
    assert len(set(turns)) == len(turns)
    assert all(turn == turn.strip() and 20 < len(turn) < 700 for turn in turns)
    assert sum(len(row["turns"]) == 2 for row in ROWS) == 6
