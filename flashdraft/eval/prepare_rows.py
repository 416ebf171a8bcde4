"""How each source of SPEED-Bench becomes the turns of a row, as NVIDIA's own script does it.

Facts from NVIDIA's examples/specdec_bench of Model-Optimizer: which `source` is which data set, at which revision, how `src_id`
names a row in it, and how the text is built. The wording of the prompts is no part of this package: see prepare_text.py.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from flashdraft.errors import CheckpointError
from flashdraft.eval.prepare_text import Encoding, Wording, fitted, o200k_base
from flashdraft.eval.sources import Row, Sources, Table, file_address

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
LIVECODEBENCH = (
    "https://huggingface.co/datasets/livecodebench/code_generation_lite/resolve/0fe84c3912ea0c4d4a78037083943e8f0c4dd505/"
)
ROLES = (
    "https://huggingface.co/datasets/ZenMoore/RoleBench/resolve/a57ed54f9613921e4a5f1b63601a558cd5acf971/profiles-eng/desc.json"
)
HLE = Table(
    "cais/hle",
    ("id", "question", "rationale", "category", "image"),
    revision="021a3d71f516a7ac28ceb8d284969902edf1edeb",
)


class Source(NamedTuple):
    """A publisher of rows: what its name has in `source`, the tables a row needs, and how its turns are built."""

    marker: str
    tables: Callable[[Row], list[Table]]
    turns: Callable[[Rebuilder, Row], list[str]]


class Rebuilder:
    """Turns of placeholder rows of one configuration. Rows must come in their published order: some draw from one generator.

    encoding: stands for tiktoken's o200k_base, which the lengths of throughput rows are counted in.
    """

    def __init__(self, sources: Sources, configuration: str, encoding: Encoding | None = None) -> None:
        self.sources, self.configuration = sources, configuration
        self.wording = Wording(sources)
        self._encoding = encoding
        self._halves: tuple[list[Row], list[Row]] | None = None
        self._generator = np.random.default_rng(42)  # of all HLE rows of a configuration together

    def turns(self, row: Row) -> list[str]:
        """Raises CheckpointError that says why this row cannot be rebuilt, and ConfigError for a package that is missing."""
        with _known_layout():
            return source_of(row).turns(self, row)

    @property
    def encoding(self) -> Encoding:
        self._encoding = self._encoding or o200k_base()
        return self._encoding

    @property
    def length(self) -> int:
        """Tokens of a row of this configuration."""
        found = re.fullmatch(r"throughput_(\d+)k", self.configuration)
        if found is None:
            raise ValueError(f"{self.configuration} says no length")
        return 1000 * int(found[1])

    def table(self, row: Row, place: int = 0) -> list[Row]:
        return self.sources.rows(source_of(row).tables(row)[place])

    def halves(self) -> tuple[list[Row], list[Row]]:
        """HLE cut as `train_test_split(test_size=0.5, shuffle=True, seed=42)` of datasets: examples, and questions."""
        if self._halves is None:
            rows = self.sources.rows(HLE)
            order = np.random.default_rng(42).permutation(len(rows)).tolist()
            asked = math.ceil(len(rows) / 2)
            self._halves = [rows[i] for i in order[asked:] if rows[i]["image"] == ""], [rows[i] for i in order[:asked]]
        return self._halves

    def hle(self, row: Row) -> list[str]:
        if self.configuration == "qualitative":
            return [str(_where(self.table(row), "id", row["src_id"])["question"])]
        examples, questions = self.halves()
        asked = _where(questions, "id", row["src_id"])
        opening = self.wording("Please answer the question below.") + asked["category"] + ":\n\n"
        tokens, question = self.encoding.encode(opening), self.encoding.encode(asked["question"])
        alike = [example for example in examples if example["category"] == asked["category"]]
        while len(tokens) + len(question) < self.length:
            [drawn] = self._generator.choice(len(alike), size=1, replace=False).tolist()  # as pandas draws a sample of 1
            example = alike[drawn]
            tokens += self.encoding.encode(f"Question: {example['question']}\n\nAnswer: {example['rationale']}\n\n")
        return [self.encoding.decode(tokens[: self.length - len(question) + 1] + question)]

    def bamboo(self, row: Row) -> list[str]:
        contents = [self.table(row)[number]["content"] for number in _numbers(row)]
        numbered = (f"START CONTENT {number}\n\n{content}\n\nEND CONTENT" for number, content in enumerate(contents, 1))
        wording = self.wording("\nI want you to act as a long dialogue completer")
        return [fitted(wording.replace("{content}", "\n\n".join(numbered)), self.length, self.encoding)]

    def stackselect(self, row: Row) -> list[str]:
        found = _where(self.table(row), "question_id", row["src_id"])
        answers, best = list(found["all_answers"]), int(found["answer"].strip("A")) - 1
        opening = self.wording("\nYou are an AI assistant. Your job is to find out the most helpful answer")
        opening += f"The question is given below.\n{found['question']}\n\nPossible answers are given below.\n"
        closing = "".join(
            self.wording(start) for start in ("Now the answers are over", "You must give me the", "For every other answer")
        )
        texts = (opening, closing, f"{found['answer']}:\n\n{answers[best]}\n\n")
        taken = sum(len(self.encoding.encode(text)) for text in texts)
        last = 0
        for number, answer in enumerate(answers):
            if number == best:
                continue
            # What was added before is not counted, in the original neither: `fitted` cuts what is too long.
            if taken + len(self.encoding.encode(f"A{number + 1}:\n\n{answer}\n\n")) > self.length:
                break
            last = number
        shown = answers[: last + 1]
        if last < best:  # the original adds a list to an array, which joins the best answer to each of the others
            shown = [answers[best] + answer for answer in shown]
        random.Random(42).shuffle(shown)
        listed = "".join(f"A{number}:\n\n{answer}\n\n" for number, answer in enumerate(shown, 1))
        return [fitted(opening + listed + closing, self.length, self.encoding)]

    def textsort(self, row: Row) -> list[str]:
        prompt = self.table(row)[int(row["src_id"].split("_")[1])]["prompt"]
        before = self.wording("\n    You are an AI assistant. Your job is to sort")
        return [
            fitted(
                prompt.replace(before, self.wording("\nYou are an AI assistant. Your job is to sort"), 1),
                self.length,
                self.encoding,
            )
        ]

    def mmlu_pro(self, row: Row) -> list[str]:
        first = int(row["src_id"].split("(")[1].split(",")[0])
        asked = _slice(self.table(row), first, len(row["turns"]))
        turns = []
        for question in asked:
            options = "\n".join(f"({chr(ord('A') + i)}) {option}" for i, option in enumerate(question["options"]))
            turns.append(f"Question: {question['question']}\n\nOptions: {options}\n\n")
        opening = self.wording("The following are multiple choice questions").format(subject=row["sub_category"])
        return [opening + turns[0], *turns[1:]]

    def chatrag(self, row: Row) -> list[str]:
        rows = [found for table in source_of(row).tables(row) for found in self.sources.rows(table)]
        found = rows[_last_number(row)]
        questions = [message["content"] for message in found["messages"] if message["role"] == "user"]
        context = "\n\n".join(passage["text"] for passage in found["ctxs"])
        opening = self.wording("Please give a full and complete answer").format(context=context, question=questions[0])
        return [opening, *questions[1:]]

    def rolebench(self, row: Row) -> list[str]:
        rows = [self.table(row)[number] for number in _numbers(row)[: len(row["turns"])]]
        role = rows[0]["role"]
        described = self.table(row, 1)[0][role]
        opening = _own_text(row).format(role_name=role, role_description_and_catchphrases=described)
        later = [found["question"].removeprefix(f"{role}, ").removeprefix(f" {role},") for found in rows[1:]]
        return [f"{opening}\n{rows[0]['question']}", *later]

    def coser(self, row: Row) -> list[str]:
        found = self.table(row)[int(row["src_id"].split("_")[1])]
        character = str(np.random.default_rng(12347).choice(found["major_characters"]))
        profiles = found["character_profiles"]
        motives = (key["motivation"] for key in found["key_characters"] if key["name"] == character)
        others = (f"{name}: {told}" for name, told in profiles.items() if name != character and told is not None)
        return [
            self.wording("You are {character} from {book_name}.").format(
                character=character,
                character_profile=profiles[character],
                book_name=found["book"],
                scenario=found["scenario"],
                other_character_profiles_str="\n\n".join(others),
                motivation=next(motives, "No motivation provided"),
            )
        ]


def source_of(row: Row) -> Source:
    """Raises CheckpointError for a source that is not known."""
    name = str(row.get("source"))
    for source in SOURCES:
        if source.marker in name:
            return source
    raise CheckpointError("its source is not known: SPEED-Bench has changed since this version of flashdraft")


def is_of_files(row: Row) -> bool:
    """Whether the row's source is files, some of gigabytes. Raises CheckpointError as Rebuilder.turns does."""
    with _known_layout():
        return source_of(row).tables(row)[0].is_file


@contextmanager
def _known_layout() -> Iterator[None]:
    try:
        yield
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        what = f"there is no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise CheckpointError(f"its source has another layout than is known ({what})") from error


def _own_text(row: Row) -> str:
    """The row's own text around what is left out of it, which stands in braces."""
    return str(row["turns"][0]).removeprefix(f"{PLACEHOLDER}\n\n")


def _formatted(key: str, **columns: str) -> Callable[[Rebuilder, Row], list[str]]:
    """The row's own text with columns of the row of its source that has `src_id` in `key`."""

    def turns(rebuilder: Rebuilder, row: Row) -> list[str]:
        found = _where(rebuilder.table(row), key, row["src_id"])
        return [_own_text(row).format(**{name: found[column] for name, column in columns.items()})]

    return turns


def _opus(rebuilder: Rebuilder, row: Row) -> list[str]:
    return [_own_text(row).format(question=rebuilder.table(row)[_last_number(row)]["translation"])]


def _mtbench_101(rebuilder: Rebuilder, row: Row) -> list[str]:
    return [entry["user"] for entry in rebuilder.table(row)[_last_number(row)]["history"]]


def _livecodebench(rebuilder: Rebuilder, row: Row) -> list[str]:
    for table in source_of(row).tables(row):
        if found := [f for f in rebuilder.sources.rows(table) if f["question_id"] == row["src_id"]]:
            return [_own_text(row).format(question=found[0]["question_content"], starter_code=found[0]["starter_code"])]
    raise ValueError(f"no question_id is {row['src_id']!r}")


def _where(rows: list[Row], key: str, value: Any) -> Row:
    for row in rows:
        if str(row[key]) == str(value):
            return row
    raise ValueError(f"no {key} is {value!r}")


def _slice(rows: list[Row], first: int, count: int) -> list[Row]:
    return [rows[number] for number in range(first, first + count)]  # of a row that is not there an IndexError


def _numbers(row: Row) -> list[int]:
    return [int(number) for number in re.findall(r"_(\d+)", row["src_id"])]


def _last_number(row: Row) -> int:
    return int(row["src_id"].rsplit("_", 1)[1])


def _at(*columns: str) -> Callable[[Row], list[Table]]:
    """A file whose address is the row's `source`."""
    return lambda row: [Table(file_address(row["source"]), columns)]


def _hub(name: str, *columns: str, configurations: tuple[str | None, ...] = (None,), revision: str | None = None) -> Any:
    return lambda row: [Table(name, columns, configuration, revision) for configuration in configurations]


def _opus_tables(row: Row) -> list[Table]:
    pair = row["src_id"].split("_")[1]
    return [Table("Helsinki-NLP/opus-100", ("translation",), pair, "805090dc28bf78897da9641cdf08b61287580df9")]


def _livecodebench_tables(row: Row) -> list[Table]:
    columns = ("question_id", "question_content", "starter_code")
    return [Table(f"{LIVECODEBENCH}test{number}.jsonl", columns) for number in ("", "2", "3", "4", "5", "6")]


def _rolebench_tables(row: Row) -> list[Table]:
    kind = row["src_id"].split("_")[1]
    return [
        Table(file_address(f"{row['source']}/{kind}/role_specific/test.jsonl"), ("role", "question")),
        Table(ROLES),
    ]


def _coser_tables(row: Row) -> list[Table]:
    columns = ("major_characters", "character_profiles", "key_characters", "scenario", "book")
    return [Table(file_address(f"{row['source']}/test/test_set.json"), columns)]


# In the order in which NVIDIA's script looks for them in `source`.
SOURCES = (
    Source("RUCAIBox/BAMBOO", _at("content"), Rebuilder.bamboo),
    Source(
        "abisee/cnn_dailymail",
        _hub("abisee/cnn_dailymail", "id", "article", configurations=("3.0.0",)),
        _formatted("id", article="article"),
    ),
    Source("cais/hle", lambda row: [HLE], Rebuilder.hle),
    Source("livecodebench/code_generation_lite", _livecodebench_tables, _livecodebench),
    Source(
        "deepmind/code_contests",
        _hub("deepmind/code_contests", "name", "description", revision="802411c3010cb00d1b05bad57ca77365a3c699d6"),
        _formatted("name", question="description"),
    ),
    Source("mtbench101/mt-bench-101", _at("history"), _mtbench_101),
    Source("Helsinki-NLP/opus-100", _opus_tables, _opus),
    Source(
        "nvidia/ChatRAG-Bench",
        _hub(
            "nvidia/ChatRAG-Bench",
            "messages",
            "ctxs",
            configurations=("hybridial", "sqa"),
            revision="af6c7d420ddddf21f54f8ab3394bbf462aad2577",
        ),
        Rebuilder.chatrag,
    ),
    Source(
        "TIGER-Lab/MMLU-Pro",
        _hub("TIGER-Lab/MMLU-Pro", "question", "options", revision="30527804ea8854662078e457808040d872ecdf29"),
        Rebuilder.mmlu_pro,
    ),
    Source("AdaLEval/stackselect", _at("question_id", "question", "all_answers", "answer"), Rebuilder.stackselect),
    Source("AdaLEval/textsort", _at("prompt"), Rebuilder.textsort),
    Source("ZenMoore/RoleBench", _rolebench_tables, Rebuilder.rolebench),
    Source("Neph0s/CoSER", _coser_tables, Rebuilder.coser),
)
