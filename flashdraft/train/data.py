"""Records of synthesized answers, and how they are packed into rows.

A record holds prompt_ids, output_ids, category, lang, thinking, finish, temperature and prompt_hash; shards are parquet files,
append-only. Symbols: B rows, S row length, N anchors a row, K = block size - 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.train.anchors import block_labels, sample_anchors

OPEN_ROWS = 32  # rows kept open while packing: best fit among 32 fills rows of 2,048 to 99 %


@dataclass(frozen=True)
class Records:
    """Many records, flat: record i is tokens[starts[i] : starts[i + 1]], its first prompt_lengths[i] tokens the prompt."""

    tokens: np.ndarray
    starts: np.ndarray
    prompt_lengths: np.ndarray
    categories: list[str]

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    @property
    def answer_tokens(self) -> int:
        return int(self.lengths.sum() - self.prompt_lengths.sum())

    def record(self, index: int) -> np.ndarray:
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    def without(self, token: int) -> Records:
        """The records that do not hold `token`: the mask token must never occur in data, and sampling can draw any token."""
        owner = np.searchsorted(self.starts, np.flatnonzero(self.tokens == token), side="right") - 1
        keep = np.ones(len(self), dtype=bool)
        keep[owner] = False
        lengths = self.lengths
        starts = np.concatenate(([0], lengths[keep].cumsum()))
        categories = [c for c, kept in zip(self.categories, keep, strict=True) if kept]
        return Records(self.tokens[np.repeat(keep, lengths)], starts, self.prompt_lengths[keep], categories)

    @classmethod
    def from_lists(
        cls, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], categories: Iterable[str] | None = None
    ) -> Records:
        prompts = np.array([len(prompt) for prompt, _ in pairs], dtype=np.int64)
        lengths = prompts + np.array([len(output) for _, output in pairs], dtype=np.int64)
        flat = np.fromiter(
            (token for pair in pairs for part in pair for token in part), dtype=np.int32, count=int(lengths.sum())
        )
        starts = np.concatenate(([0], lengths.cumsum()))
        return cls(flat, starts, prompts, list(categories) if categories is not None else [""] * len(pairs))


_COLUMNS = {
    "prompt_ids": "list<int32>",
    "output_ids": "list<int32>",
    "category": "string",
    "lang": "string",
    "thinking": "bool",
    "finish": "string",
    "temperature": "float32",
    "prompt_hash": "uint64",
}


def write_shard(directory: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Append one parquet shard to the directory, whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {"list<int32>": pa.list_(pa.int32()), "string": pa.string(), "bool": pa.bool_(), "float32": pa.float32()}
    schema = pa.schema([(name, types.get(kind, pa.uint64())) for name, kind in _COLUMNS.items()])
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"answers-{len(list(directory.glob('answers-*.parquet'))):05d}.parquet"
    partial = path.with_suffix(".partial")
    columns = {name: [row[name] for row in rows] for name in _COLUMNS}
    pq.write_table(pa.table(columns, schema=schema), partial, compression="zstd")
    partial.rename(path)
    return path


def read_column(directory: Path, name: str) -> list[Any]:
    """One column of all shards; empty where there are none."""
    import pyarrow.parquet as pq

    return [
        v for path in sorted(directory.glob("answers-*.parquet")) for v in pq.read_table(path, columns=[name])[name].to_pylist()
    ]


def load_records(directory: Path) -> Records:
    """All shards of a directory. Raises CheckpointError where there are none."""
    import pyarrow.parquet as pq

    paths = sorted(directory.glob("answers-*.parquet"))
    if not paths:
        raise CheckpointError(f"no answers-*.parquet in {directory}: run synthesize first")
    tokens, prompt_lengths, lengths, categories = [], [], [], []
    for path in paths:
        table = pq.read_table(path, columns=["prompt_ids", "output_ids", "category"]).combine_chunks()
        prompts, outputs = (table[name].combine_chunks() for name in ("prompt_ids", "output_ids"))
        p, o = (np.diff(column.offsets.to_numpy()) for column in (prompts, outputs))
        from_prompt = np.repeat(np.tile([True, False], len(p)), np.stack((p, o), 1).ravel())
        flat = np.empty(len(from_prompt), dtype=np.int32)
        flat[from_prompt], flat[~from_prompt] = prompts.flatten().to_numpy(), outputs.flatten().to_numpy()
        tokens.append(flat)
        prompt_lengths.append(p.astype(np.int64))
        lengths.append((p + o).astype(np.int64))
        categories += table["category"].to_pylist()
    starts = np.concatenate(([0], np.concatenate(lengths).cumsum()))
    return Records(np.concatenate(tokens), starts, np.concatenate(prompt_lengths), categories)


def pack_rows(lengths: np.ndarray, row_length: int, rng: np.random.Generator | None = None) -> list[list[int]]:
    """Distribute records over rows of at most row_length tokens: best fit among OPEN_ROWS open rows, in random order."""
    if len(lengths) and lengths.max() > row_length:
        raise ConfigError(f"a record of {lengths.max()} tokens does not fit a row of {row_length}: raise seq_length")
    room = np.full(OPEN_ROWS, row_length)
    members: list[list[int]] = [[] for _ in range(OPEN_ROWS)]
    closed = []
    for index in rng.permutation(len(lengths)) if rng is not None else range(len(lengths)):
        left = room - lengths[index]
        at = int(np.where(left >= 0, left, row_length + 1).argmin())
        if left[at] < 0:
            at = int(room.argmin())
            closed.append(members[at])
            members[at], room[at] = [], row_length
        members[at].append(int(index))
        room[at] -= lengths[index]
    return closed + [row for row in members if row]


@dataclass(frozen=True)
class Batch:
    """B rows of S tokens with N blocks each. A padding token has document -1, a padding block nothing supervised."""

    ids: Tensor  # [B, S] long
    positions: Tensor  # [B, S] long, from 0 in every document
    documents: Tensor  # [B, S] int32
    loss_mask: Tensor  # [B, S] bool: tokens the target generated
    anchors: Tensor  # [B, N] long, index in the row, ascending
    labels: Tensor  # [B, N, K] long
    supervised: Tensor  # [B, N, K] bool
    rows: Tensor  # [R] long: the supervised entries of the flattened [B * N * K]

    def to(self, device: torch.device) -> Batch:
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)}
        return replace(self, **moved)

    def pinned(self) -> Batch:
        return replace(self, **{f.name: getattr(self, f.name).pin_memory() for f in fields(self)})


def lay_out(records: Records, rows: Sequence[Sequence[int]], row_length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids, positions, documents and loss mask [B, S] of packed rows."""
    shape = (len(rows), row_length)
    ids, positions = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    documents, loss_mask = np.full(shape, -1, dtype=np.int32), np.zeros(shape, dtype=bool)
    for b, members in enumerate(rows):
        start = 0
        for document, index in enumerate(members):
            tokens = records.record(index)
            end = start + len(tokens)
            ids[b, start:end] = tokens
            positions[b, start:end] = np.arange(len(tokens))
            documents[b, start:end] = document
            loss_mask[b, start + records.prompt_lengths[index] : end] = True
            start = end
    return torch.from_numpy(ids), torch.from_numpy(positions), torch.from_numpy(documents), torch.from_numpy(loss_mask)


def make_batch(layout: tuple[Tensor, Tensor, Tensor, Tensor], anchors: Tensor, real: Tensor, block_size: int) -> Batch:
    ids, positions, documents, loss_mask = layout
    labels, supervised = block_labels(ids, documents, loss_mask, anchors, real, block_size)
    rows = supervised.flatten().nonzero()[:, 0]
    return Batch(ids, positions, documents, loss_mask, anchors, labels, supervised, rows)


class Batches:
    """Batches by step number: a pure function of records, seed and step, so that a run resumes exactly.

    Rows are packed once; every epoch has its own order of rows and every visit its own anchors.
    """

    def __init__(self, records: Records, *, seq_length: int, rows: int, anchors: int, block_size: int, seed: int) -> None:
        self.records, self.seq_length, self.rows_per_batch = records, seq_length, rows
        self.anchors, self.block_size, self.seed = anchors, block_size, seed
        self.rows = pack_rows(records.lengths, seq_length, np.random.default_rng(seed))
        if len(self.rows) < rows:
            raise ConfigError(
                f"{len(self.rows)} packed rows are fewer than the {rows} of one batch: more answers, or fewer rows"
            )
        self.steps_per_epoch = len(self.rows) // rows

    def batch(self, step: int) -> Batch:
        epoch, index = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.rows))
        chosen = order[index * self.rows_per_batch : (index + 1) * self.rows_per_batch]
        layout = lay_out(self.records, [self.rows[i] for i in chosen], self.seq_length)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        anchors, real = sample_anchors(layout[3], layout[2], self.anchors, generator)
        return make_batch(layout, anchors, real, self.block_size)
