"""Suites of prompts: the built-in one, those of the hub, and any file."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from flashdraft.builtin import PROMPTS
from flashdraft.errors import CheckpointError, ConfigError, counted
from flashdraft.eval.sources import Fetch, Sources, Table
from flashdraft.eval.suites_throughput import LENGTHS, throughput_rows
from flashdraft.prompts import Prompt, prompt_of_row, round_robin
from flashdraft.train.hub import Loader, load_dataset, stream_rows

MINI, THROUGHPUT = "mini", "throughput"
NO_CATEGORY = "other"  # of a file whose rows name none
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
PREPARE = "flashdraft eval prepare speed-bench --config {}"
SIZES = ("1k", "2k", "8k", "16k", "32k")
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
COMPLETE = "Complete the following Python function. Return only the full function in a code block."


class Published(NamedTuple):
    """A suite of the hub, or a file at an address. row: how a row of it reads as one of a prompt file; None: as it is."""

    dataset: str
    configuration: str | None
    split: str
    row: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None

    def __str__(self) -> str:
        return f"{self.dataset}{f' ({self.configuration})' if self.configuration else ''}"


def _humaneval(row: Mapping[str, Any]) -> dict[str, Any]:
    code = f"```python\n{row['prompt'].rstrip()}\n```"
    return {"id": row["task_id"], "category": "coding", "turns": [f"{COMPLETE}\n\n{code}"]}


def _mbpp(row: Mapping[str, Any]) -> dict[str, Any]:
    tests = "\n".join(row["test_list"])
    task = f"{row['prompt']} Your code should pass these tests:\n\n{tests}"
    return {"id": row["task_id"], "category": "coding", "turns": [f"Write a Python function for this task: {task}"]}


def _math500(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": row["unique_id"], "category": row["subject"], "turns": [f"{row['problem']}\n{BOXED}"]}


SPEED_BENCH = {
    name: Published("nvidia/SPEED-Bench", name, "test") for name in ("qualitative", *(f"throughput_{s}" for s in SIZES))
}
SPEC_BENCH = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
HUB = {
    "mt-bench": Published("HuggingFaceH4/mt_bench_prompts", None, "train"),
    "gsm8k": Published(
        "openai/gsm8k", "main", "test", lambda row: {"id": None, "category": "math", "turns": [row["question"]]}
    ),
    "math500": Published("HuggingFaceH4/MATH-500", None, "test", _math500),
    "humaneval": Published("openai/openai_humaneval", None, "test", _humaneval),
    "mbpp": Published("google-research-datasets/mbpp", "sanitized", "test", _mbpp),
    "ifeval": Published(
        "google/IFEval", None, "train", lambda row: {"id": row["key"], "category": "ifeval", "turns": [row["prompt"]]}
    ),
    "spec-bench": Published(SPEC_BENCH, None, ""),
    "speed-bench": SPEED_BENCH["qualitative"],
    **{f"speed-bench:{name}": suite for name, suite in SPEED_BENCH.items()},
}
PREPARED = tuple(f"speed-bench:{name}" for name in SPEED_BENCH)  # what `eval prepare` writes
NAMES = (MINI, THROUGHPUT, *(f"{THROUGHPUT}:{length}" for length in LENGTHS), *HUB)


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


def load_suite(name: str, *, revision: str | None = None, load: Loader | None = None, fetch: Fetch | None = None) -> Suite:
    """A suite by its name (`mini`, `throughput`, those of HUB) or path: JSONL or parquet with `turns`, `messages` or `prompt`.

    A file that `eval prepare` wrote has the name of its suite as long as all its prompts are as they were.
    load, fetch: stand for datasets.load_dataset and the web. Raises ConfigError for a name that is none, CheckpointError that
    names the first row with a field missing, or with a placeholder instead of its prompt.
    """
    named = name.lower()
    if named == MINI:
        return _suite(MINI, PROMPTS.name, _jsonl(PROMPTS), "line")
    if named.partition(":")[0] == THROUGHPUT:
        return _suite(named, named, enumerate(throughput_rows(named.partition(":")[2]), 1), "row")
    if published := HUB.get(named):
        return _suite(named, str(published), enumerate(_rows(published, revision, load, fetch), 1), "row", published)
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"there is no suite {name!r}: give {', '.join(NAMES)}, or the path of a JSONL or parquet file")
    # A file is no suite for its name alone; `eval prepare` writes one whose rows name it, with the hash of all its prompts.
    called = f"./{path.name}" if path.stem.lower() in NAMES else path.stem
    if path.suffix == ".parquet":
        return _suite(called, name, _parquet(path), "row")
    rows = list(_jsonl(path))
    suite = _suite(called, name, rows, "line")
    marks = [(row.get("suite"), row.get("suite_digest")) for _, row in rows]
    prepared = [known for known in PREPARED if all(mark == (known, suite.digest) for mark in marks)]
    return replace(suite, name=prepared[0]) if prepared else suite


def suite_of_rows(name: str, where: str, rows: Iterable[Any]) -> Suite:
    """The suite that a file of these rows would be. Raises as load_suite does."""
    return _suite(name, where, enumerate(rows, 1), "row")


def _rows(published: Published, revision: str | None, load: Loader | None, fetch: Fetch | None) -> Iterable[Any]:
    if "://" in published.dataset:
        return Sources(load, fetch).rows(Table(published.dataset))
    return stream_rows(load or load_dataset("eval"), *published[:3], revision)


def _suite(name: str, where: str, rows: Iterable[tuple[int, Any]], unit: str, published: Published | None = None) -> Suite:
    prompts: list[tuple[int, Prompt]] = []
    digest = hashlib.blake2b(digest_size=16)
    for number, row in rows:
        try:
            known = published.row(row) if published and published.row else row
            prompt = prompt_of_row(_usual(known), str(number))
        except KeyError as error:
            raise CheckpointError(f"{where}, {unit} {number}: `{error.args[0]}` is missing") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{where}, {unit} {number}: {error}") from error
        if any(PLACEHOLDER in turn for turn in prompt.turns):
            command = PREPARE.format((published and published.configuration) or "CONFIGURATION")
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
