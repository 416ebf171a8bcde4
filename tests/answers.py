"""Answers on disk, as `flashdraft synthesize` writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch


def counting(count: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Prompts of a few tokens and answers that count upwards from the last one: a draft learns them in seconds."""
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for _ in range(count):
        prompt = torch.randint(10, 40, (5,), generator=generator).tolist()
        length = int(torch.randint(12, 40, (1,), generator=generator))
        pairs.append((prompt, [*range(prompt[-1] + 1, prompt[-1] + length), 1]))
    return pairs


def write_answers(
    directory: Path,
    pairs: Sequence[tuple[list[int], list[int]]],
    tokenizer_hash: str | None = None,
    shard: int = 0,
    target_hash: object = None,
) -> None:
    """One shard as synthesize writes it: two languages, every third answer with thinking."""
    count = len(pairs)
    columns = {
        "prompt_ids": pa.array([p for p, _ in pairs], pa.list_(pa.int32())),
        "output_ids": pa.array([o for _, o in pairs], pa.list_(pa.int32())),
        "category": ["code" if i % 2 else "chat" for i in range(count)],
        "lang": ["en" if i % 4 else "fr" for i in range(count)],
        "thinking": [i % 3 == 0 for i in range(count)],
        "finish": ["stop"] * count,
        "temperature": pa.array([0.0] * count, pa.float32()),
        "prompt_hash": pa.array([(i * 0x9E3779B97F4A7C15 + shard) % 2**64 for i in range(count)], pa.uint64()),
    }
    header = {"tokenizer_hash": tokenizer_hash, "target_hash": target_hash}
    metadata = None if tokenizer_hash is None else {"flashdraft": json.dumps(header)}
    directory.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), directory / f"answers-{shard:05d}.parquet")
