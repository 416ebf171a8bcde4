"""What a benchmark asks: random words of an exact number of tokens, or the first turns of a suite."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashdraft.errors import ConfigError
from flashdraft.eval.reply import ask
from flashdraft.eval.run import Served
from flashdraft.eval.suites import Suite

COMMON = """
able above across after again air all along also animal answer any apple area arm around ask autumn baby back bank bear
because bed before begin behind believe below best better between big bird black blue board boat body book both bottle box boy
bread bridge bring brother brown build burn business butter call can car care carry case cat cause center chair change check
child circle city class clean clear climb clock close cloud coat cold color come cook corn cost could count country course
cover cross cut dance dark day deep desk dinner doctor dog door down draw dream dress drink drive drop dry during each early
earth east easy eat edge egg empty end enough evening ever every eye face fall family farm fast father feel few field figure
fill find fine finger fire first fish floor flower fly follow food foot forest forget form forward friend front fruit full
game garden gate girl give glass go gold good grass great green ground group grow hair half hand happy hard hat head hear
heart heavy help high hill hold home horse hot hour house how hundred ice idea inside island job join juice jump just keep key
kind king kitchen know lake land large last late laugh lead leaf learn leave left leg letter life light like line list listen
little live long look lose love low lunch machine make man many map mark market meat meet middle milk mind minute money moon
morning mother mountain mouth move much music name near neck need never new news next nice night noise north nose note nothing
number ocean off office old once only open orange order other outside over own page paint paper park part party pass past pay
pen people person phone picture piece place plan plant play point pool poor power pretty price problem public pull push put
queen question quick quiet rain read ready real red rest rice rich ride right ring river road rock room round rule run salt
same sand save say school sea season seat second see sell send set seven shape share sheep ship shirt shoe shop short show
side sign silver simple sing sister sit size skin sky sleep slow small smile snow soft some song soon sound south space speak
spring stand star start state stay step still stone stop store storm story street strong student sugar summer sun sure sweet
swim table take talk tall taste teach tell test thing think thousand time today together tomorrow tonight top touch town trade
train travel tree true try turn uncle under until use valley very village visit voice wait walk wall warm wash watch water way
weather week well west wheel when white wide wild wind window winter wish woman wonder wood word work world write yard year
yellow young
"""
WORDS = tuple(COMMON.split())
FILLERS = ("!", "?", ".", " a", " I")  # a token each in most vocabularies
TRIES = 40
SAMPLE = 200  # words by which the tokens of a word are estimated


@dataclass(frozen=True)
class Workload:
    """Prompts of one kind: random words, `tokens` with the chat template, or those of a suite."""

    tokens: int | None = None
    suite: Suite | None = None

    @property
    def name(self) -> str:
        return f"{self.tokens} tokens" if self.suite is None else self.suite.name


@dataclass(frozen=True)
class Question:
    """A request to be: `number` tells it from the others of its piece."""

    number: int
    id: str
    category: str
    messages: list[dict[str, str]]


class Writer:
    """Prompts of random words. Where the server counts tokens (/tokenize) they have exactly as many as asked for.

    Elsewhere two requests of one token show how long words are, and lengths come out near. No two prompts begin alike, so that
    no prefix cache holds any of them. Raises ConfigError where the server does not say how long a prompt is.
    """

    def __init__(self, served: Served, seed: int) -> None:
        self._served, self._seed = served, seed
        words = random.Random(f"{seed}/words").choices(WORDS, k=SAMPLE)
        self.exact = self._tokenized("a") is not None
        short, long = (self._count(text) for text in ("a", " ".join(words)))
        self._per_word = max(long - short, 1) / SAMPLE
        self.overhead = max(short - 1, 0)  # of the chat template

    def text(self, tokens: int, name: str) -> str:
        """`name` and the seed decide which words. Raises ConfigError for fewer tokens than the template has."""
        if tokens <= self.overhead:
            raise ConfigError(
                f"--prompt-tokens {tokens} is too short: the chat template alone takes {self.overhead} tokens of every prompt"
            )
        draw = random.Random(f"{self._seed}/{tokens}/{name}")
        parts = [f" {word}" for word in draw.choices(WORDS, k=max(1, round((tokens - self.overhead) / self._per_word)))]
        best, distance = "".join(parts).lstrip(), math.inf
        for _ in range(TRIES if self.exact else 0):
            text = "".join(parts).lstrip()
            missing = tokens - self._count(text)
            if abs(missing) < distance:
                best, distance = text, abs(missing)
            if missing == 0:
                break
            if missing >= 2 * self._per_word:
                parts += [f" {word}" for word in draw.choices(WORDS, k=int(missing / self._per_word))]
            elif missing > 0:
                parts.append(draw.choice(FILLERS))
            else:
                del parts[max(1, len(parts) - math.ceil(-missing / self._per_word)) :]
        return best

    def _count(self, text: str) -> int:
        count = self._tokenized(text) if self.exact else self._answered(text)
        if count is None:
            raise ConfigError(
                f"{self._served.client.base} does not say how many tokens a prompt has, neither at /tokenize nor in its usage: "
                "measure with --prompts instead of --prompt-tokens"
            )
        return count

    def _tokenized(self, text: str) -> int | None:
        body = {"model": self._served.model, "messages": _messages(text), "add_generation_prompt": True}
        count = (self._served.client.ask_beside("/tokenize", body) or {}).get("count")
        return count if type(count) is int else None

    def _answered(self, text: str) -> int | None:
        body: dict[str, Any] = {"model": self._served.model, "messages": _messages(text), "max_tokens": 1}
        return ask(self._served.client, body).prompt_tokens


def written(writer: Writer, tokens: int, name: str, count: int) -> list[Question]:
    texts = (writer.text(tokens, f"{name}/{number}") for number in range(count))
    return [Question(number, f"{tokens}-{number}", "", _messages(text)) for number, text in enumerate(texts)]


def of_suite(suite: Suite, first: int, count: int) -> list[Question]:
    """The first turns of prompts, from the `first` of them on; they begin again where there are too few."""
    prompts: Sequence[Any] = suite.prompts
    found = []
    for number in range(count):
        prompt = prompts[(first + number) % len(prompts)]
        messages = [*prompt.opening, {"role": "user", "content": prompt.turns[0]}]
        found.append(Question(number, prompt.id, prompt.category, messages))
    return found


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
