"""The suite `throughput`: long prompts in SPEED-Bench's three tiers of entropy, written by a seeded generator as they are read.

Every prompt is a document of one kind (a log, orders, letters, code ...) with a task below it. What an answer is like depends
on the task: to copy and to sort is easy to guess (low_entropy), to write freely is not (high_entropy), the rest is between.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

from flashdraft.errors import ConfigError
from flashdraft.eval.suites_words import DOCUMENTS, HEADINGS, TASKS, WORDS

LENGTHS = {"1k": 1000, "4k": 4000, "7k": 7000}  # tokens of a prompt, by the built-in target's tokenizer
# Loading that tokenizer to count would take longer than writing. It splits text into pieces such as these, and rare words
# further: tokens a piece, measured, within 2 % for each document.
PIECE = re.compile(r"\d| ?[A-Za-z]+| ?[^\w\s]+|_|\s+")
TOKENS_A_PIECE = {
    "log": 1.05,
    "orders": 1.21,
    "letters": 1.06,
    "code": 1.03,
    "minutes": 1.07,
    "stock": 1.05,
    "notes": 1.04,
    "chat": 1.03,
}
OF_TASKS = 1.17
SLOT = re.compile(r"<(\w+)>")


def throughput_rows(length: str = "") -> Iterator[dict[str, Any]]:
    """Rows of one length, or of all: 8 a tier and length, always the same. Raises ConfigError for a length that is none."""
    if length and length not in LENGTHS:
        raise ConfigError(f"there is no suite throughput:{length}: give throughput, throughput:{', throughput:'.join(LENGTHS)}")
    for name, tokens in LENGTHS.items():
        if length in ("", name):
            for tier, tasks in TASKS.items():
                for kind, task in tasks.items():
                    prompt = _prompt(kind, task, tokens, random.Random(f"{tier} {name} {kind}"))
                    yield {"id": f"{tier}-{name}-{kind}", "category": tier, "turns": [prompt]}


def _prompt(kind: str, task: str, tokens: int, generator: random.Random) -> str:
    """A heading that no other prompt has, a document, and a task: of about so many tokens together."""
    writer = Writer(generator)
    heading = writer.fill(f"Document <id>, {HEADINGS[kind]}")
    left = tokens - OF_TASKS * _pieces(heading + task)
    document = ""
    while True:
        unit = writer.fill(writer.pick(DOCUMENTS[kind])) + "\n"
        taken = TOKENS_A_PIECE[kind] * _pieces(unit)
        if taken / 2 > left:  # without it the length is nearer
            return f"{heading}\n\n{document.rstrip()}\n\n{task}"
        document += unit
        left -= taken


def _pieces(text: str) -> int:
    return len(PIECE.findall(text))


class Writer:
    """Fills templates: `<n>` and the like with figures, `<word>` with one of WORDS, which may hold slots itself.

    A slot whose name ends in 1 is filled with the same in all of a template.
    """

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator
        self._clock = generator.randrange(6 * 3600, 9 * 3600)  # seconds since midnight
        self._day = generator.randrange(1, 20)
        self._count = generator.randrange(100, 900)

    def pick(self, options: tuple[str, ...]) -> str:
        return options[self._generator.randrange(len(options))]

    def fill(self, template: str) -> str:
        same: dict[str, str] = {}
        return SLOT.sub(lambda match: self._slot(match[1], same), template)

    def _slot(self, name: str, same: dict[str, str]) -> str:
        if name.endswith("1"):
            if name not in same:
                same[name] = self._slot(name.removesuffix("1"), same)
            return same[name]
        draw = self._generator.randrange
        match name:
            case "n":
                return str(draw(2, 100))
            case "big":
                return str(draw(100, 10_000))
            case "price":
                return f"{draw(2, 400)}.{draw(100):02d}"
            case "hex":
                return f"{draw(16**6):06x}"
            case "id":
                return f"{draw(1000, 10_000)}-{chr(65 + draw(26))}{chr(65 + draw(26))}"
            case "count":
                self._count += 1
                return str(self._count)
            case "time":
                self._clock = (self._clock + draw(1, 90)) % 86_400
                return f"{self._clock // 3600:02d}:{self._clock // 60 % 60:02d}:{self._clock % 60:02d}"
            case "date":
                self._day += draw(1, 4)
                return f"{1 + self._day // 28 % 12:02d}-{1 + self._day % 28:02d}"
        return self.fill(self.pick(WORDS[name]))
