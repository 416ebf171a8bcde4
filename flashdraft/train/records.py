"""Answers on disk: a store of records that loses none and doubles none wherever its process is killed.

An answer is written as one line of journal.jsonl the moment it is complete; lines become a shard in numbers, and the journal
begins anew. A line that was not finished, and a shard that was not, were never there; a line that a shard holds as well counts
once. What was left out is a line of dropped.jsonl with the reason, so that nothing is answered again to be left out again.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.train.files import locked, read_object, saying_what_is_wrong, write_whole
from flashdraft.train.shards import COLUMNS, MOST, next_shard, pyarrow, read_shard, shards, write_shard

DROPPED_FIELDS = {"prompt_hash": "uint64", "sample": "int32", "turn": "int32", "reason": "string"}
HEADER, JOURNAL, DROPPED = "synthesis.json", "journal.jsonl", "dropped.jsonl"
SHARD_ROWS, SHARD_TOKENS = 20_000, 8_000_000  # what a shard holds: 32 MB of tokens before compression
SYNC_SECONDS = 30.0  # between two waits for the disk: what a power failure can cost; a killed process loses nothing written


class Key(NamedTuple):
    """Which answer: to which prompt, its how manieth, to which turn of the conversation."""

    prompt_hash: int
    sample: int
    turn: int


def keys_of(hashes: Any, samples: Any, turns: Any) -> Any:
    """Keys uint64 of answers, of arrays or numbers: those of two answers are the same with a chance of 2**-64."""
    hashes, samples, turns = (np.asarray(part, np.uint64) for part in (hashes, samples, turns))
    with np.errstate(over="ignore"):  # modulo 2**64
        return hashes ^ ((samples << np.uint64(32) | turns) * np.uint64(0x9E3779B97F4A7C15))


class Store:
    """The answers of a directory, to be added to. `header` says what they are of: target, tokenizer_hash, sampling.

    Raises ConfigError where the directory holds answers made under another header, or another process adds to it, and where a
    disk is full: what was added until then stays.
    """

    def __init__(self, directory: Path, header: Mapping[str, Any]) -> None:
        pyarrow()
        self.directory, self.header = directory, json.loads(json.dumps(header))
        self.counts: Counter[str] = Counter()
        self._rows: list[dict[str, Any]] = []  # those of the journal
        self._shard: Path | None = None  # what they are becoming
        self._tokens, self._synced = 0, time.monotonic()
        self._files: list[int] = []
        with saying_what_is_wrong(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._files.append(locked(directory, "adding answers to"))
            try:
                self._open()
            except BaseException:
                self.close()
                raise

    def _open(self) -> None:
        self._check_header()
        for partial in self.directory.glob("*.partial"):
            partial.unlink()
        self._read_shards()
        for name in (JOURNAL, DROPPED):
            self._files.append(os.open(self.directory / name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644))
        _, self._journal, self._dropped = self._files
        self._read_journal()
        self._read_dropped()

    def _check_header(self) -> None:
        path = self.directory / HEADER
        if not path.exists():
            if shards(self.directory):
                raise ConfigError(
                    f"{self.directory} holds answers but no {HEADER}, which says whose they are: give another one"
                )
            return self.write_header()
        if (found := read_object(path)) is None:
            raise ConfigError(f"{path} is not what a run wrote there, a JSON object: repair it, or give another directory")
        weights = self.header.get("target_hash")
        same = weights is not None and found.get("target_hash") == weights  # then it may have another name, and lie elsewhere
        for name, value in self.header.items():
            if name != "flashdraft" and not (same and name in ("target", "revision")):
                self._compare(name, found.get(name), value)

    def _compare(self, name: str, found: Any, wanted: Any) -> None:
        if isinstance(wanted, dict) and isinstance(found, dict):
            for part in wanted | found:
                self._compare(part, found.get(part), wanted.get(part))
        elif name == "target_hash" and None in (found, wanted):
            return  # of a server, or of an engine that was given ready
        elif name == "tokenizer_hash" and found != wanted:
            raise ConfigError(
                f"{self.directory} holds answers made with another tokenizer or chat template than this target's: give another "
                "directory"
            )
        elif found != wanted:
            name = name.replace("_", " ")
            raise ConfigError(
                f"{self.directory} holds answers with {name} {_shown(found)}, and this is {_shown(wanted)}: go on with the "
                "same, or give another directory"
            )

    def write_header(self, counts: Mapping[str, int] | None = None) -> None:
        """synthesis.json: the header, and what became of the prompts."""
        with saying_what_is_wrong(self.directory):
            content = json.dumps({**self.header, "counts": dict(counts or {})}, indent=1)
            write_whole(self.directory / HEADER, content)

    def _read_shards(self) -> None:
        columns = ["prompt_hash", "sample", "turn", "finish"]
        parts: dict[str, list[np.ndarray]] = {name: [np.zeros(0, np.uint64)] for name in columns}
        tokens = 0
        for path in shards(self.directory):
            table = read_shard(path, [*columns, "output_ids", "first_hash"], whole=True)
            for name in columns[:3]:
                parts[name].append(table[name].to_numpy().astype(np.uint64))
            parts["finish"].append(np.array(table["finish"].to_pylist()) == "stop")
            tokens += sum(len(chunk.flatten()) for chunk in table["output_ids"].chunks)
        self._hashes, self._samples, self._turns = (np.concatenate(parts[name]) for name in columns[:3])
        self._stopped = np.concatenate(parts["finish"]).astype(bool)
        self._done = self._each_once([len(part) for part in parts["sample"][1:]])
        self.counts["answers kept"], self.counts["answer tokens kept"] = len(self._hashes), tokens

    def _each_once(self, sizes: Sequence[int]) -> np.ndarray:
        """The keys of all answers in the shards, of so many rows each. Raises CheckpointError where one is there twice."""
        keys = keys_of(self._hashes, self._samples, self._turns)
        unique, first = np.unique(keys, return_index=True)
        if len(unique) < len(keys):
            again = np.setdiff1d(np.arange(len(keys)), first)[0]
            one = first[np.searchsorted(unique, keys[again])]
            shard, other = (int(np.searchsorted(np.cumsum(sizes), row, side="right")) for row in (again, one))
            paths = shards(self.directory)
            raise CheckpointError(f"{paths[shard]} holds answers that are in {paths[other].name} too: remove one of the two")
        return unique

    def _read_journal(self) -> None:
        rows = list(_lines(self._journal, self.directory / JOURNAL, COLUMNS))
        known = self.are_done(_keys_of_rows(rows))
        fresh = [row for row, is_known in zip(rows, known, strict=True) if not is_known]
        if rows and not fresh:  # they became a shard, and the process ended before the journal began anew
            os.ftruncate(self._journal, 0)
        for row in fresh:
            self._remember(row | {name: np.array(row[name], np.int32) for name in ("prompt_ids", "output_ids")})
        self._done = np.union1d(self._done, _keys_of_rows(fresh))
        self._hashes, self._samples, self._turns = (
            np.append(old, np.array([row[name] for row in fresh], np.uint64))
            for old, name in ((self._hashes, "prompt_hash"), (self._samples, "sample"), (self._turns, "turn"))
        )
        self._stopped = np.append(self._stopped, np.array([row["finish"] == "stop" for row in fresh], bool))

    def _read_dropped(self) -> None:
        rows = list(_lines(self._dropped, self.directory / DROPPED, DROPPED_FIELDS))
        self.counts.update(f"answers dropped: {row['reason']}" for row in rows)
        self._done = np.union1d(self._done, _keys_of_rows(rows))
        self._ended = np.unique(_keys_of_rows([{**row, "turn": 0} for row in rows]))

    def are_done(self, keys: np.ndarray) -> np.ndarray:
        """Which of these keys (keys_of) had an answer, kept or dropped, when the store was opened: bool."""
        if not len(self._done):
            return np.zeros(len(keys), bool)
        return self._done[np.searchsorted(self._done, keys).clip(max=len(self._done) - 1)] == keys

    def unfinished(self, hashes: np.ndarray, turns: np.ndarray) -> list[Key]:
        """The next answers of conversations that were left between two turns, of prompts with `hashes` and so many turns."""
        order = np.argsort(hashes)
        hashes, turns = hashes[order], turns[order].astype(np.int64)
        if not len(hashes) or not len(self._hashes):
            return []
        place = np.searchsorted(hashes, self._hashes).clip(max=len(hashes) - 1)
        known, following = hashes[place] == self._hashes, self._turns.astype(np.int64) + 1
        open_ = known & self._stopped & (following < turns[place])
        open_ &= ~self.are_done(keys_of(self._hashes, self._samples, following))
        open_ &= self.are_done(keys_of(self._hashes, self._samples, 0))  # else it begins anew: somebody removed a shard
        open_ &= ~np.isin(keys_of(self._hashes, self._samples, 0), self._ended)
        return [
            Key(int(h), int(s), int(t))
            for h, s, t in zip(self._hashes[open_], self._samples[open_], following[open_], strict=True)
        ]

    def turns_before(self, wanted: Sequence[Key]) -> dict[Key, list[tuple[list[int], list[int]]]]:
        """Prompt and output ids of the turns before each of these keys."""
        found: dict[tuple[int, int], dict[int, tuple[list[int], list[int]]]] = {(k.prompt_hash, k.sample): {} for k in wanted}
        if not found:
            return {}
        hashes = np.array([h for h, _ in found], np.uint64)

        def take(row: Mapping[str, Any]) -> None:
            turns = found.get((row["prompt_hash"], row["sample"]))
            if turns is not None:
                turns[row["turn"]] = row["prompt_ids"], row["output_ids"]

        for path in shards(self.directory):
            table = read_shard(path, [*Key._fields, "prompt_ids", "output_ids"])
            rows = np.flatnonzero(np.isin(table["prompt_hash"].to_numpy(), hashes))
            for row in table.take(rows).to_pylist():
                take(row)
        for row in self._rows:
            take({**row, "prompt_ids": row["prompt_ids"].tolist(), "output_ids": row["output_ids"].tolist()})
        return {key: [turns[t] for t in range(key.turn) if t in turns] for key in wanted for turns in (found[key[:2]],)}

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep an answer: COLUMNS, with the ids as int32 arrays. It is on disk when this returns."""
        line = {**row, "prompt_ids": row["prompt_ids"].tolist(), "output_ids": row["output_ids"].tolist()}
        self._remember(dict(row))  # first: an interrupt between the two then costs nothing
        self._write(self._journal, line)
        if len(self._rows) >= SHARD_ROWS or self._tokens >= SHARD_TOKENS:
            self.seal()

    def drop(self, key: Key, reason: str, tokens: int = 0) -> None:
        """Leave an answer out, and with it what would follow it in its conversation."""
        self._write(self._dropped, {**key._asdict(), "reason": reason, "tokens": tokens})
        self.counts[f"answers dropped: {reason}"] += 1

    def seal(self) -> None:
        """Turn the journal into a shard; after an interrupt, what is missing of that."""
        if not self._rows:
            return
        with saying_what_is_wrong(self.directory):
            self._shard = self._shard or next_shard(self.directory)
            if not self._shard.exists():
                write_shard(self.directory, self._rows, self.header)
            os.ftruncate(self._journal, 0)
        self._rows, self._tokens, self._shard = [], 0, None

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def _remember(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        self._tokens += len(row["prompt_ids"]) + len(row["output_ids"])
        self.counts["answers kept"] += 1
        self.counts["answer tokens kept"] += len(row["output_ids"])

    def _write(self, file: int, line: Mapping[str, Any]) -> None:
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        with saying_what_is_wrong(self.directory):
            while data:  # a disk that fills up takes a part and refuses the rest
                data = data[os.write(file, data) :]
            if time.monotonic() - self._synced > SYNC_SECONDS:
                os.fsync(self._journal)
                os.fsync(self._dropped)
                self._synced = time.monotonic()


def _keys_of_rows(rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    return keys_of(*([row[name] for row in rows] for name in Key._fields))


def _lines(file: int, path: Path, fields: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The whole lines of a journal; what a killed process left behind them, half a line, is cut off.

    fields: what a line holds, with kinds as in COLUMNS. Raises ConfigError that names the first line that holds another thing.
    """
    with os.fdopen(os.dup(file), "rb") as stream:
        stream.seek(0)
        whole = 0
        for number, line in enumerate(stream, 1):
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict) or not all(_can_be(row.get(name), kind) for name, kind in fields.items()):
                raise ConfigError(
                    f"{path}, line {number}, is no record of this version: remove that line, and its prompt is asked again"
                )
            whole += len(line)
            yield row
    os.ftruncate(file, whole)


def _can_be(value: Any, kind: str) -> bool:
    """Whether a value of JSON is one of a kind of COLUMNS."""
    if kind == "list<int32>":
        return isinstance(value, list) and all(_can_be(item, "int32") for item in value)
    if kind in MOST:
        return type(value) is int and 0 <= value <= MOST[kind]
    if kind == "float32":
        return type(value) in (int, float)
    return isinstance(value, {"bool": bool, "string": str}[kind])


def _shown(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
