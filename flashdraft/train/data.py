"""Records of synthesized answers, and how they are packed into rows.

A record holds prompt_ids, output_ids, category, lang, thinking, finish, temperature and prompt_hash; shards are parquet files,
append-only. Symbols: B rows, S row length, N anchors a row, K = block size - 1, n captured layers, H hidden.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from flashdraft.errors import CheckpointError, ConfigError, counted
from flashdraft.train.anchors import block_labels, sample_anchors
from flashdraft.train.shards import read_column as read_column
from flashdraft.train.shards import read_shard, shards
from flashdraft.train.shards import write_shard as write_shard

OPEN_ROWS = 32  # rows kept open while packing: best fit among 32 fills rows of 2,048 to 99 %


@dataclass(frozen=True)
class Records:
    """Many records, flat: record i is tokens[starts[i] : starts[i + 1]], its first prompt_lengths[i] tokens the prompt."""

    tokens: np.ndarray  # int32
    starts: np.ndarray  # int64, one more than there are records
    prompt_lengths: np.ndarray  # int64
    categories: list[str]
    languages: list[str]
    thinking: np.ndarray  # bool
    prompt_hashes: np.ndarray  # uint64, Prompt.first_hash: all samples and turns of a prompt share it
    turn_hashes: np.ndarray  # uint64, of the turn that is answered
    origins: np.ndarray  # int64: where each record's tokens began in the data as they were loaded

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

    def select(self, keep: np.ndarray) -> Records:
        """The records that `keep` [len] marks, in order."""
        lengths, chosen = self.lengths, np.flatnonzero(keep).tolist()
        return Records(
            tokens=self.tokens[np.repeat(keep, lengths)],
            starts=np.concatenate(([0], lengths[keep].cumsum())),
            prompt_lengths=self.prompt_lengths[keep],
            categories=[self.categories[i] for i in chosen],
            languages=[self.languages[i] for i in chosen],
            thinking=self.thinking[keep],
            prompt_hashes=self.prompt_hashes[keep],
            turn_hashes=self.turn_hashes[keep],
            origins=self.origins[keep],
        )

    def holding(self, token: int) -> np.ndarray:
        """Which records hold `token`: bool [len]."""
        held = np.zeros(len(self), dtype=bool)
        held[np.searchsorted(self.starts, np.flatnonzero(self.tokens == token), side="right") - 1] = True
        return held

    def without(self, token: int) -> Records:
        """The records that do not hold `token`: the mask token must never occur in data, and sampling can draw any token."""
        return self.select(~self.holding(token))

    def cut(self, length: int) -> Records:
        """Records cut to their first `length` tokens; those of which two answer tokens do not remain are left out."""
        kept = self.select(np.minimum(self.lengths, length) >= self.prompt_lengths + 2)
        lengths = np.minimum(kept.lengths, length)
        inside = np.arange(len(kept.tokens)) - np.repeat(kept.starts[:-1], kept.lengths) < length
        return replace(kept, tokens=kept.tokens[inside], starts=np.concatenate(([0], lengths.cumsum())))

    def split(self, share: float, least: int = 0, seen: np.ndarray | None = None) -> tuple[Records, Records]:
        """Records to train on and records held out, by the first turn's hash: however data grow, no prompt is on both sides.

        Held out are the prompts with the smallest hashes, about `share` of them, and `least` at least, but none that is `seen`:
        uint64, the first turns that a draft learned from before. The answers to a later turn with which a prompt of the other
        side begins are on neither side.
        """
        seen = np.zeros(0, np.uint64) if seen is None else seen
        fresh = np.setdiff1d(self.prompt_hashes, seen)
        limit = min(int(share * 2.0**64), 2**64 - 1)
        if least:
            limit = max(limit, int(fresh[least - 1]))
        chosen = fresh[fresh <= np.uint64(limit)] if limit else fresh[:0]
        held, asked = np.isin(self.prompt_hashes, chosen), np.isin(self.turn_hashes, chosen)
        learned = np.isin(self.turn_hashes, np.concatenate((seen, self.prompt_hashes[~held])))
        return self.select(~held & ~asked), self.select(held & ~learned)

    def digest(self) -> str:
        """32 hexadecimal digits that name these very tokens and their boundaries."""
        state = hashlib.blake2b(digest_size=16)
        for array in (self.tokens, self.starts, self.prompt_lengths):
            state.update(np.ascontiguousarray(array).data)
        return state.hexdigest()

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
        names = list(categories) if categories is not None else [""] * len(pairs)
        hashes = np.arange(len(pairs), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # spread, and each its own
        return cls(flat, starts, prompts, names, ["en"] * len(pairs), np.zeros(len(pairs), bool), hashes, hashes, starts[:-1])


def shard_paths(directory: Path) -> list[Path]:
    """The shards of a directory, in order. Raises CheckpointError where there are none."""
    paths = shards(directory)
    if not paths:
        raise CheckpointError(f"no answers-*.parquet in {directory}: run `flashdraft synthesize` first")
    return paths


def load_records(directory: Path) -> Records:
    """All shards of a directory. Raises CheckpointError where there are none, and for one that cannot be read, holds what
    synthesize never writes, or is a copy of another.
    """
    parts: list[tuple[Any, ...]] = []
    seen: dict[bytes, Path] = {}
    for path in shard_paths(directory):
        part = _read(path)
        digest = hashlib.blake2b(b"".join(array.tobytes() for array in part[:3]), digest_size=16).digest()
        if len(part[1]) and (other := seen.setdefault(digest, path)) != path:
            raise CheckpointError(f"{path} holds the same answers as {other.name}: remove one of the two")
        parts.append(part)
    tokens, prompts, lengths, hashes, turns, thinking = (np.concatenate([part[i] for part in parts]) for i in range(6))
    starts = np.concatenate(([0], lengths.cumsum()))
    categories, languages = ([text for part in parts for text in part[i]] for i in (6, 7))
    if not len(lengths):
        raise CheckpointError(f"the shards of {directory} hold no answers: run `flashdraft synthesize` to its end")
    return Records(tokens, starts, prompts, categories, languages, thinking, hashes, turns, starts[:-1])


def _read(path: Path) -> tuple[Any, ...]:
    """Of a shard: tokens, lengths of prompts and of records, both hashes, thinking; categories and languages, as lists."""
    names = ["prompt_ids", "output_ids", "first_hash", "turn_hash", "thinking", "category", "lang"]
    prompts, outputs, *rest = (column.combine_chunks() for column in read_shard(path, names).columns)
    p, o = (np.diff(column.offsets.to_numpy()).astype(np.int64) for column in (prompts, outputs))
    from_prompt = np.repeat(np.tile([True, False], len(p)), np.stack((p, o), 1).ravel())
    flat = np.empty(len(from_prompt), dtype=np.int32)
    flat[from_prompt], flat[~from_prompt] = prompts.flatten().to_numpy(), outputs.flatten().to_numpy()
    first, turn, thinking = (column.to_numpy(zero_copy_only=False) for column in rest[:3])
    return flat, p, p + o, first, turn, thinking, rest[3].to_pylist(), rest[4].to_pylist()


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
    places: np.ndarray  # [R] int64: where in the flattened [B * S] the target chooses their labels; stays on the host
    features: Tensor | None = None  # [B, S, n*H], where they were cached
    last: Tensor | None = None  # [B, S, H] the target's last hidden states, where they were cached

    @property
    def tokens(self) -> int:
        """Tokens of records; the rest of the rows is padding."""
        return int((self.documents >= 0).sum())

    def to(self, device: torch.device) -> Batch:
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        changed: dict[str, Any] = {name: change(value) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **changed)


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
    # The target's choice of token a + k is made at a + k - 1.
    at = anchors[:, :, None] + torch.arange(block_size - 1) + torch.arange(len(anchors))[:, None, None] * ids.shape[1]
    return Batch(ids, positions, documents, loss_mask, anchors, labels, supervised, rows, at.flatten()[rows].numpy())


class FeatureCache(Protocol):
    """Where the features of records are kept (offline.py)."""

    def rows(self, records: Records, rows: Sequence[Sequence[int]], row_length: int) -> tuple[Tensor, Tensor]: ...


class Batches:
    """Batches by step number: a pure function of records, seed and step, so that a run resumes exactly.

    Rows are packed once; every epoch has its own order of rows and every visit its own anchors. `rows` is the number of one
    update; rank `rank` of `ranks` gets its share of them in batches of `micro_rows`. The draws of a row depend on its place in
    the update alone: the same rows and anchors, however they are shared. `trim` drops blocks that are padding in every row of a
    batch, which compiled code with its fixed shapes must keep.
    """

    def __init__(
        self,
        records: Records,
        *,
        seq_length: int,
        rows: int,
        anchors: int,
        block_size: int,
        seed: int,
        micro_rows: int | None = None,
        rank: int = 0,
        ranks: int = 1,
        cache: FeatureCache | None = None,
        trim: bool = False,
    ) -> None:
        self.records, self.seq_length, self.rows_per_batch = records, seq_length, rows
        self.anchors, self.block_size, self.seed = anchors, block_size, seed
        self.rank, self.ranks, self.cache, self.trim = rank, ranks, cache, trim
        self.micro_rows = micro_rows or max(rows // ranks, 1)
        if rows % (self.micro_rows * ranks):
            raise ConfigError(
                f"{counted(rows, 'row')} an update cannot be shared by {counted(ranks, 'process')} in batches of "
                f"{self.micro_rows}: give rows as a multiple of {self.micro_rows * ranks}"
            )
        self.rows = pack_rows(records.lengths, seq_length, np.random.default_rng(seed))
        if len(self.rows) < rows:
            raise ConfigError(
                f"{counted(len(self.rows), 'packed row')}, fewer than the {rows} of one update: make more answers, or "
                "give fewer rows"
            )

    @property
    def steps_per_epoch(self) -> int:
        return len(self.rows) // self.rows_per_batch

    @property
    def parts(self) -> int:
        """Batches of this process an update."""
        return self.rows_per_batch // (self.micro_rows * self.ranks)

    def batch(self, step: int, part: int = 0) -> Batch:
        epoch, index = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.rows))
        first = (self.rank * self.parts + part) * self.micro_rows
        places = range(first, first + self.micro_rows)
        members = [self.rows[order[index * self.rows_per_batch + place]] for place in places]
        layout = lay_out(self.records, members, self.seq_length)
        draws = [np.random.default_rng((self.seed, step, place)).random(self.seq_length, np.float32) for place in places]
        anchors, real = sample_anchors(layout[3], layout[2], self.anchors, torch.from_numpy(np.stack(draws)))
        if self.trim:
            used = max(int(real.sum(1).max()), 1)
            anchors, real = anchors[:, -used:], real[:, -used:]
        batch = make_batch(layout, anchors, real, self.block_size)
        if self.cache is None:
            return batch
        features, last = self.cache.rows(self.records, members, self.seq_length)
        return replace(batch, features=features, last=last)
