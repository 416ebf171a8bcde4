"""Parquet shards of answers: written whole or not at all, and read with every column checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.train.files import replacing, sync

COLUMNS = {
    "prompt_ids": "list<int32>",
    "output_ids": "list<int32>",  # the stop token included
    "thinking": "bool",
    "category": "string",
    "lang": "string",
    "finish": "string",
    "temperature": "float32",
    "sample": "int32",
    "turn": "int32",
    "prompt_hash": "uint64",  # Prompt.hash: of the conversation
    "first_hash": "uint64",  # Prompt.first_hash
    "turn_hash": "uint64",  # of the turn that is answered
}
DEFAULTS: dict[str, Any] = {"sample": 0, "turn": 0, "first_hash": "prompt_hash", "turn_hash": "prompt_hash"}  # or that column
MOST = {"int32": 2**31 - 1, "list<int32>": 2**31 - 1, "uint64": 2**64 - 1}
MEND = "remove it, or make it again with `flashdraft synthesize`"


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("answers-*.parquet"))


def next_shard(directory: Path) -> Path:
    numbers = [int(found[1]) for path in shards(directory) if (found := re.fullmatch(r"answers-(\d+)", path.stem))]
    return directory / f"answers-{max(numbers, default=-1) + 1:05d}.parquet"


def write_shard(directory: Path, rows: Sequence[Mapping[str, Any]], header: Mapping[str, Any] | None = None) -> Path:
    """Append one parquet shard to the directory, whole or not at all. `header` becomes its metadata "flashdraft", as JSON.

    rows: COLUMNS, of which a row need not name DEFAULTS.
    """
    pa, pq = pyarrow()
    metadata = {"flashdraft": json.dumps(header)} if header is not None else None
    schema = pa.schema([(name, _type(kind)) for name, kind in COLUMNS.items()], metadata=metadata)
    directory.mkdir(parents=True, exist_ok=True)
    path = next_shard(directory)
    columns = {name: [row[name] if name in row else _default(row, name) for row in rows] for name in COLUMNS}
    with replacing(path) as partial:
        pq.write_table(pa.table(columns, schema=schema), partial, compression="zstd")
    sync(directory)
    return path


def read_shard(path: Path, columns: Sequence[str], whole: bool = False) -> Any:
    """The table of these COLUMNS of a shard: of their types, without a null, numbers not negative. DEFAULTS stand in for what
    the shards of flashdraft 0.1 and of other programs lack, unless it must be `whole`.

    Raises CheckpointError that names the shard, and the row where one is at fault.
    """
    pa, pq = pyarrow()
    try:
        present = set(pq.read_schema(path).names)
        named = [name for name in columns if name in present or whole or name not in DEFAULTS]
        others = {DEFAULTS[name] for name in columns if name not in named} & COLUMNS.keys()
        if missing := [name for name in (*named, *others) if name not in present]:
            old = "it is of an earlier version, and training alone still reads it: give another directory"
            raise CheckpointError(f"{path} has no column `{missing[0]}`: {old if missing[0] in DEFAULTS else MEND}")
        table = pq.read_table(path, columns=list({*named, *others}))
    except CheckpointError:
        raise
    except Exception as error:  # of pyarrow, in many kinds
        raise CheckpointError(f"{path} cannot be read ({shorten(str(error), 120)}): {MEND}") from error
    found = {name: _checked(path, name, table[name].combine_chunks()) for name in table.column_names}
    for name in columns:
        if name not in found:
            default = DEFAULTS[name]
            found[name] = found[default] if isinstance(default, str) else pa.array([default] * len(table), COLUMNS[name])
    return pa.table({name: found[name] for name in columns})


def read_column(directory: Path, name: str) -> list[Any]:
    """One column of all shards; empty where there are none."""
    return [value for path in shards(directory) for value in read_shard(path, [name])[name].to_pylist()]


def rows_holding(path: Path, token: int) -> list[int]:
    """The rows of a shard that hold a token, in the prompt or the answer."""
    rows: set[int] = set()
    for column in read_shard(path, ["prompt_ids", "output_ids"]).columns:
        ids = column.combine_chunks()
        rows.update(ids.value_parent_indices().to_numpy()[ids.flatten().to_numpy() == token].tolist())
    return sorted(rows)


def place_of(directory: Path, token: int) -> str:
    """The first shard, and its row, that hold a token, for messages; the directory where there is none."""
    found = ((path, rows[0]) for path in shards(directory) if (rows := rows_holding(path, token)))
    path, row = next(found, (directory, None))
    return str(path) if row is None else f"{path}, row {row:,} (from 0),"


def _checked(path: Path, name: str, column: Any) -> Any:
    """A column as the type that COLUMNS names."""
    kind = COLUMNS[name]
    if not _is(column.type, kind):
        raise CheckpointError(f"{path}: column `{name}` is {column.type} and not {kind}: {MEND}")
    values = column.flatten() if kind.startswith("list") else column
    for part, what in ((column, "is null"), (values, "holds a null")):
        if part.null_count:
            place = int(np.argmax(part.is_null().to_numpy(zero_copy_only=False)))
            raise _at_row(path, name, column, place, part is not column, what)
    if kind in MOST and len(values):
        numbers = values.to_numpy()
        for place in (int(numbers.argmin()), int(numbers.argmax())):
            if not 0 <= (number := int(numbers[place])) <= MOST[kind]:
                raise _at_row(path, name, column, place, values is not column, f"holds {number:,}, which it cannot be")
    return column.cast(_type(kind))


def _at_row(path: Path, name: str, column: Any, place: int, inside: bool, what: str) -> CheckpointError:
    """The error of a value of a column, or of the lists inside it."""
    row = column.value_parent_indices()[place].as_py() if inside else place
    return CheckpointError(f"{path}, row {row:,} (from 0): `{name}` {what}: {MEND}")


def _is(found: Any, kind: str) -> bool:
    """Whether values of a type can be those of a kind of COLUMNS, if their range allows."""
    pa, _ = pyarrow()
    is_a = pa.types
    if kind == "list<int32>":
        lists = is_a.is_list(found) or is_a.is_large_list(found) or is_a.is_fixed_size_list(found)
        return bool(lists and is_a.is_integer(found.value_type))
    if kind == "string":
        text = found.value_type if is_a.is_dictionary(found) else found
        return bool(is_a.is_string(text) or is_a.is_large_string(text))
    if kind == "float32":
        return bool(is_a.is_floating(found))
    return bool(is_a.is_boolean(found) if kind == "bool" else is_a.is_integer(found))


def _type(kind: str) -> Any:
    pa, _ = pyarrow()
    return {"list<int32>": pa.list_(pa.int32()), "bool": pa.bool_()}.get(kind) or pa.type_for_alias(kind)


def _default(row: Mapping[str, Any], name: str) -> Any:
    default = DEFAULTS[name]
    return row[default] if isinstance(default, str) else default


def pyarrow() -> tuple[Any, Any]:
    """The package and its part for parquet. Raises ConfigError where it is missing."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("answers are kept as parquet, which needs pyarrow: run `pip install 'flashdraft[train]'`") from error
    return pyarrow, pyarrow.parquet
