"""Prompts of a hub data set, through a local one in the layout of nvidia/Nemotron-Post-Training-Dataset-v2."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.prompts import read_prompts
from flashdraft.train.hub import fetch_prompts


def row(number: int, category: str, *messages: tuple[str, str]) -> dict[str, Any]:
    return {
        "uuid": f"{number:08x}",
        "license": "cc-by-4.0",
        "generator": "some-model",
        "version": "v2",
        "category": category,
        "reasoning": "off",
        "messages": [{"role": role, "content": content} for role, content in messages],
    }


SPLITS = {
    "chat": [
        row(1, "chat", ("system", ""), ("user", "hello"), ("assistant", "hi"), ("user", "again"), ("assistant", "yes")),
        row(2, "chat", ("system", "be brief"), ("user", "why?"), ("assistant", "so")),
        row(3, "chat", ("system", ""), ("user", ""), ("assistant", "nothing was asked")),
        row(4, "chat", ("user", "more"), ("assistant", "less")),
    ],
    "math": [row(5, "math", ("user", "1 + 1"), ("assistant", "2"))],
    "multilingual_de": [row(6, "", ("user", "Hallo"), ("assistant", "Hi"))],
    "empty": [{"text": "no prompts here"}],
}


class Hub:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.rows = 0

    def __call__(
        self, name: str, configuration: str | None, *, split: str, revision: str | None, streaming: bool
    ) -> Iterator[Any]:
        assert streaming
        self.calls.append((name, configuration, split, revision))
        if split not in SPLITS:
            raise ValueError(f"Bad split: {split}")
        return self._rows(split)

    def _rows(self, split: str) -> Iterator[Any]:
        for one in SPLITS[split]:
            self.rows += 1
            yield one


def test_user_turns_and_system_prompts_of_every_split_become_prompts(tmp_path: Path) -> None:
    hub = Hub()
    paths = fetch_prompts("nvidia/Nemotron", ["chat", "math", "multilingual_de"], tmp_path, load=hub)
    prompts = [prompt for path in paths for prompt in read_prompts(path)]
    assert [(p.id, p.category, p.turns, p.system, p.lang) for p in prompts] == [
        ("chat/0", "chat", ("hello", "again"), "", ""),
        ("chat/1", "chat", ("why?",), "be brief", ""),
        ("chat/3", "chat", ("more",), "", ""),
        ("math/0", "math", ("1 + 1",), "", ""),
        ("multilingual_de/0", "multilingual_de", ("Hallo",), "", "de"),
    ]
    assert "nothing was asked" not in "".join(path.read_text() for path in paths)


def test_a_limit_reads_no_more_rows_than_it_needs(tmp_path: Path) -> None:
    hub = Hub()
    paths = fetch_prompts("nvidia/Nemotron", ["chat", "math"], tmp_path, limit=2, load=hub)
    assert [len(read_prompts(path)) for path in paths] == [1, 1]
    assert hub.rows == 2


def test_what_was_read_is_not_read_again(tmp_path: Path) -> None:
    first = fetch_prompts("a/b:main", ["chat"], tmp_path, revision="v1", load=(hub := Hub()))
    assert hub.calls == [("a/b", "main", "chat", "v1")]
    assert fetch_prompts("a/b:main", ["chat"], tmp_path, revision="v1", load=hub) == first
    assert len(hub.calls) == 1
    assert fetch_prompts("a/b:main", ["chat"], tmp_path, revision="v2", load=hub) != first


def test_a_stream_that_breaks_leaves_no_half_a_file(tmp_path: Path) -> None:
    def broken(*_: Any, **__: Any) -> Iterator[Any]:
        yield SPLITS["chat"][0]
        raise ConnectionError("the line is dead")

    with pytest.raises(CheckpointError, match=r"cannot be loaded .the line is dead.*network"):
        fetch_prompts("a/b", ["chat"], tmp_path, load=broken)
    assert not list(tmp_path.glob("*.jsonl"))
    (path,) = fetch_prompts("a/b", ["chat"], tmp_path, load=Hub())
    assert len(read_prompts(path)) == 3


@pytest.mark.parametrize(
    ("split", "error", "message"),
    [("train", CheckpointError, "Bad split: train"), ("empty", ConfigError, "holds no prompts .1 rows without")],
)
def test_a_split_that_is_not_there_or_holds_none_is_one_sentence(
    tmp_path: Path, split: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fetch_prompts("a/b", [split], tmp_path, load=Hub())


def test_without_the_package_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigError, match=r"pip install 'flashdraft\[train\]'"):
        fetch_prompts("a/b", ["chat"], tmp_path)


def test_a_local_data_set_is_streamed_by_the_package_itself(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in SPLITS["chat"]))

    def load(name: str, configuration: str | None, **options: Any) -> Any:
        return datasets.load_dataset("json", data_files={"chat": str(file)}, split=options["split"], streaming=True)

    (path,) = fetch_prompts("a/b", ["chat"], tmp_path / "out", load=load)
    assert [p.turns for p in read_prompts(path)] == [("hello", "again"), ("why?",), ("more",)]
