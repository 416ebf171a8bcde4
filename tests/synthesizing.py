"""What tests of synthesis share: a tiny pair, prompts for it, and the records of a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from saved import Pair, ending_pair

from flashdraft.llm import LLM
from flashdraft.prompts import Prompt
from flashdraft.train.synthesize import SynthesisConfig

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "and", "back", "again", "once"]
THINKING_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)
SHORT = SynthesisConfig(max_tokens=12, max_prompt_tokens=200, temperatures=(0.8,))


def tiny_llm(folder: Path, *, draft: bool = True, **options: Any) -> LLM:
    return load_pair(ending_pair(folder), draft=draft, **options)


def load_pair(pair: Pair, *, draft: bool = True, **options: Any) -> LLM:
    limits = {"max_model_len": 320, "max_num_seqs": 4, "dtype": "float32", "device": "cpu", **options}
    return LLM(pair.target, pair.draft if draft else False, **limits)


def some_prompts(count: int, turns: int = 1) -> list[Prompt]:
    """Different prompts of one to `turns` turns, of two categories."""
    return [
        Prompt(f"p/{i}", "code" if i % 2 else "fr/chat", tuple(f"{WORDS[i % 12]} {i} {turn}" for turn in range(1 + i % turns)))
        for i in range(count)
    ]


def rows_of(directory: Path) -> dict[tuple[int, int, int], dict[str, Any]]:
    """All records by (prompt hash, sample, turn); none may be there twice."""
    rows: dict[tuple[int, int, int], dict[str, Any]] = {}
    for path in sorted(directory.glob("answers-*.parquet")):
        for row in pq.read_table(path).to_pylist():
            key = row["prompt_hash"], row["sample"], row["turn"]
            assert key not in rows, "a record is there twice"
            rows[key] = row
    return rows
