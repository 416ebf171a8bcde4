"""Which prompts are answered: none twice, none of an evaluation, in an order that grown files do not change; little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from flashdraft.errors import CheckpointError
from flashdraft.prompts import Prompt
from flashdraft.train.corpus import Corpus, Exclusions, language, select_prompts


def write(path: Path, texts: list[str], **extra: object) -> Path:
    path.write_text("".join(json.dumps({"prompt": text, **extra}) + "\n" for text in texts))
    return path


def texts_of(corpus: Corpus) -> list[str]:
    return [prompt.turns[0] for prompts in corpus.chunks(3) for prompt in prompts]


def test_the_first_of_duplicates_across_files_is_kept(tmp_path: Path) -> None:
    one = write(tmp_path / "1.jsonl", ["a fox", "b"], category="one")
    two = write(tmp_path / "2.jsonl", ["B ", "c", "A  FOX", "c"], category="two")
    corpus = Corpus.of_files([one, two])
    prompts = {p.turns[0]: p.category for chunk in corpus.chunks() for p in chunk}
    assert prompts == {"a fox": "one", "b": "one", "c": "two"}
    assert corpus.counts == {"prompts": 3, "prompts duplicate": 3, "prompts excluded": 0, "prompts not drawn": 0}


def test_what_is_excluded_is_left_out_by_hash_and_by_13_words_in_a_row() -> None:
    copy = " ".join(f"word{i}" for i in range(13))
    exclusions = Exclusions([Prompt("e", "x", ("What is 2 + 2?",)), Prompt("e", "x", ("short", copy))])
    texts = ["Fine", "fine ", "what is 2 +  2?", f"before {copy} after", "Also fine"]
    counts: Counter[str] = Counter()
    kept = select_prompts([Prompt(str(i), "x", (text,)) for i, text in enumerate(texts)], exclusions, counts)
    assert [prompt.id for prompt in kept] == ["0", "4"]
    assert (counts["prompts duplicate"], counts["prompts excluded"]) == (1, 2)


def test_a_later_turn_that_is_excluded_excludes_its_prompt() -> None:
    prompts = [Prompt("0", "", ("fine", "bad one")), Prompt("1", "", ("good",))]
    corpus = Corpus.of_prompts(prompts, Exclusions([Prompt("", "", ("Bad one",))]))
    assert texts_of(corpus) == ["good"]


def test_the_wording_of_a_template_excludes_nothing() -> None:
    template = " ".join(f"please{i}" for i in range(13))
    exclusions = Exclusions([Prompt(str(i), "x", (f"{template} number {i}",)) for i in range(3)])
    assert f"{template} number 2" in exclusions
    assert f"{template} something else" not in exclusions


def test_the_order_is_drawn_and_stays_when_files_grow(tmp_path: Path) -> None:
    texts = [f"prompt {i}" for i in range(40)]
    before = texts_of(Corpus.of_files([write(tmp_path / "a.jsonl", texts[:20])]))
    after = texts_of(Corpus.of_files([write(tmp_path / "b.jsonl", texts[20:]), tmp_path / "a.jsonl"]))
    assert [text for text in after if text in before] == before != texts[:20]
    assert texts_of(Corpus.of_files([tmp_path / "a.jsonl"], seed=1)) != before


def test_a_limit_draws_from_all_files(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.jsonl", [f"{name} {i}" for i in range(50)]) for name in "ab"]
    corpus = Corpus.of_files(files, limit=30)
    assert 5 < sum(text.startswith("a") for text in texts_of(corpus)) < 25
    assert (corpus.counts["prompts"], corpus.counts["prompts not drawn"]) == (30, 70)
    assert texts_of(corpus) == texts_of(Corpus.of_files(files))[:30]


def test_prompts_are_found_by_their_hashes(tmp_path: Path) -> None:
    corpus = Corpus.of_files([write(tmp_path / "a.jsonl", [f"prompt {i}" for i in range(9)])])
    hashes = np.array([Prompt("", "", (text,)).hash for text in ("prompt 4", "other", "prompt 8")], np.uint64)
    places = corpus.places_of(hashes)
    assert places[1] == -1
    assert [p.turns[0] for p in corpus.read(places[[0, 2]])] == ["prompt 4", "prompt 8"]


def test_a_bad_line_is_found_before_anything_is_answered(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ["fine"] * 3)
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(CheckpointError, match="line 4"):
        Corpus.of_files([path])


def test_a_file_that_changes_under_a_run_is_noticed(tmp_path: Path) -> None:
    corpus = Corpus.of_files([write(tmp_path / "a.jsonl", ["one", "two"])])
    (tmp_path / "a.jsonl").write_text("\n" * 60)
    with pytest.raises(CheckpointError, match="has changed"):
        texts_of(corpus)


def test_language_is_the_row_s_or_the_category_s() -> None:
    assert [language(Prompt("", c, ("x",))) for c in ("fr/chat", "de", "qa/nq", "code", "")] == ["fr", "de", "en", "en", "en"]
    assert language(Prompt("", "fr/chat", ("x",), lang="ja")) == "ja"


MEASURE = """
import json, resource, sys
from pathlib import Path
from flashdraft.train.corpus import Corpus
small = Corpus.of_files([Path(sys.argv[1])], limit=10)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
corpus = Corpus.of_files([Path(sys.argv[2])])
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps([len(corpus), corpus.counts["prompts duplicate"], grown]))
"""


def test_prompts_take_little_memory_however_long_they_are(tmp_path: Path) -> None:
    """120 MB of prompts in under 20 MB: 26 bytes stay of each, and some more while duplicates are found."""
    with (tmp_path / "many.jsonl").open("w") as file:
        for i in range(60_000):
            file.write(json.dumps({"prompt": f"{i % 50_000} " + "word " * 400}) + "\n")
    few = write(tmp_path / "few.jsonl", ["one", "two"])
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, few, tmp_path / "many.jsonl"], capture_output=True, text=True, check=True
    )
    prompts, duplicates, kilobytes = json.loads(run.stdout)
    assert (prompts, duplicates) == (50_000, 10_000)
    assert kilobytes < 20_000
