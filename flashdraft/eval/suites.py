"""Suites of prompts: the built-in one, those of the hub, and any file."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from flashdraft.builtin import PROMPTS
from flashdraft.errors import CheckpointError, ConfigError, counted
from flashdraft.prompts import Prompt, prompt_of_row, round_robin
from flashdraft.train.hub import Loader, load_dataset, stream_rows

MINI = "mini"
NO_CATEGORY = "other"  # of a file whose rows name none
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
PREPARE = (  # NVIDIA's own script, which fetches the sources; some of them ask for a login to the hub
    "curl -LsSf https://raw.githubusercontent.com/NVIDIA-NeMo/Skills/refs/heads/main/nemo_skills/dataset/speed-bench/prepare.py"
    " | python3 - --config {} --output_dir DIR"
)
SIZES = ("1k", "2k", "8k", "16k", "32k")


class Published(NamedTuple):
    """A suite of the hub."""

    dataset: str
    configuration: str | None
    split: str


SPEED_BENCH = {
    name: Published("nvidia/SPEED-Bench", name, "test") for name in ("qualitative", *(f"throughput_{s}" for s in SIZES))
}
HUB = {
    "mt-bench": Published("HuggingFaceH4/mt_bench_prompts", None, "train"),
    "speed-bench": SPEED_BENCH["qualitative"],
    **{f"speed-bench:{name}": suite for name, suite in SPEED_BENCH.items()},
}


@dataclass(frozen=True)
class Suite:
    """Prompts with the category each row names. digest: of all that was read, before any limit."""

    name: str
    prompts: tuple[Prompt, ...]
    digest: str

    @property
    def turns(self) -> int:
        return sum(len(prompt.turns) for prompt in self.prompts)

    @property
    def categories(self) -> dict[str, int]:
        return dict(sorted(Counter(prompt.category for prompt in self.prompts).items()))

    def __str__(self) -> str:
        kinds = len(self.categories)
        count = f"{kinds} categor{'y' if kinds == 1 else 'ies'}"
        return f"{self.name}: {counted(len(self.prompts), 'prompt')}, {counted(self.turns, 'turn')}, {count}"

    def limited(self, limit: int | None) -> Suite:
        """The first prompts, the categories in turn: the same ones every time."""
        return self if limit is None else replace(self, prompts=tuple(round_robin(self.prompts, limit)))


def load_suite(name: str, *, revision: str | None = None, load: Loader | None = None) -> Suite:
    """A suite by its name (`mini`, those of HUB) or its path: JSONL or parquet with `turns`, `messages` or `prompt`.

    load: stands for datasets.load_dataset. Raises ConfigError for a name that is none, CheckpointError that names the first
    row with a field missing, or with a placeholder instead of its prompt.
    """
    if name == MINI:
        return _suite(MINI, PROMPTS.name, _jsonl(PROMPTS), "line")
    if published := HUB.get(name.lower()):
        dataset, configuration, split = published
        streamed = stream_rows(load or load_dataset("eval"), dataset, configuration, split, revision)
        where = f"{dataset}{f' ({configuration})' if configuration else ''}"
        return _suite(name.lower(), where, enumerate(streamed, 1), "row", configuration)
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"there is no suite {name!r}: give {MINI}, {', '.join(HUB)}, or the path of a JSONL or parquet file")
    if path.suffix == ".parquet":
        return _suite(path.stem, name, _parquet(path), "row")
    return _suite(path.stem, name, _jsonl(path), "line")


def _suite(name: str, where: str, rows: Iterable[tuple[int, Any]], unit: str, configuration: str | None = None) -> Suite:
    """configuration: of SPEED-Bench, for the command that prepares it."""
    prompts: list[tuple[int, Prompt]] = []
    digest = hashlib.blake2b(digest_size=16)
    for number, row in rows:
        try:
            prompt = prompt_of_row(_usual(row), str(number))
        except ValueError as error:
            raise CheckpointError(f"{where}, {unit} {number}: {error}") from error
        if any(PLACEHOLDER in turn for turn in prompt.turns):
            command = PREPARE.format(configuration or "all")
            raise CheckpointError(
                f"{where}, {unit} {number} holds a placeholder instead of its prompt: run `{command}` and give the file that "
                "it writes instead of the name"
            )
        digest.update(json.dumps(prompt.to_row(), ensure_ascii=True).encode())
        prompts.append((number, prompt))
    if not prompts:
        raise CheckpointError(f"{where} holds no prompts: rows need `turns`, `messages` or `prompt`")
    named = any(prompt.category for _, prompt in prompts) or name in HUB
    for number, prompt in prompts:
        if named and not prompt.category:
            raise CheckpointError(f"{where}, {unit} {number}: `category` is missing, which other rows have")
    return Suite(name, tuple(replace(p, category=p.category or NO_CATEGORY) for _, p in prompts), digest.hexdigest())


def _usual(row: Any) -> Any:
    """A row with its id and turns under our names: `question_id` or `prompt_id`, and `prompt` as a list of turns."""
    if not isinstance(row, Mapping):
        return row
    found = {key: value for key, value in row.items() if value is not None}
    identity = next((found[key] for key in ("id", "question_id", "prompt_id") if key in found), None)
    if isinstance(found.get("prompt"), Sequence) and all(isinstance(turn, str) for turn in found["prompt"]):
        prompt = found["prompt"]
        found.setdefault("turns", [prompt] if isinstance(prompt, str) else list(prompt))
    return found if identity is None else {**found, "id": identity}


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise CheckpointError(f"{path}, line {number}: not a JSON object in UTF-8") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read the prompts ({error.strerror or error})") from error


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError("parquet files are read with pyarrow: run `pip install 'flashdraft[eval]'`") from error
    try:
        rows = pq.read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own are both
        raise CheckpointError(f"{path}: cannot be read as parquet ({error})") from error
    yield from enumerate(rows, 1)
