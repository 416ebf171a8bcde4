"""Fake sources of SPEED-Bench for tests: hub data sets, files on the web, a tokenizer of letters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flashdraft.eval.prepare_rows import Rebuilder
from flashdraft.eval.prepare_text import WORDINGS
from flashdraft.eval.sources import Sources

# In the form of the file that holds the prompts, with another wording.
PROGRAM = b'''
raise SystemExit("it is parsed, never run")


def stackselect(question):
    prompt = """
You are an AI assistant. Your job is to find out the most helpful answer.
"""
    prompt += "Now the answers are over.\\n"
    prompt += "You must give me the best.\\n"
    prompt += "For every other answer say why.\\n"


def textsort(prompt):
    """You are an AI assistant."""
    original = "\\n    You are an AI assistant. Your job is to sort: [4, 1, 3, 2]."
    new = """
You are an AI assistant. Your job is to sort multiple sections."""


def writing(content):
    return f"""
I want you to act as a long dialogue completer.
{content}
"""


def others(example):
    chatrag = "Please give a full and complete answer. {context} {question}"
    mmlu_pro = "The following are multiple choice questions about {subject}.\\n\\n"
    hle = "Please answer the question below." + example["category"]
    coser = (
        "You are {character} from {book_name}.|{character_profile}|{scenario}|"
        "{other_character_profiles_str}|{motivation}"
    )
'''
PAGES = {WORDINGS: PROGRAM}
Hub = Mapping[tuple[str, str | None], Sequence[Mapping[str, Any]]]


class Letters:
    """A tokenizer with a token for each letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


def hub_of(tables: Hub) -> Callable[..., Iterator[Mapping[str, Any]]]:
    def load(name: str, configuration: str | None = None, **how: Any) -> Iterator[Mapping[str, Any]]:
        if (name, configuration) not in tables:
            raise OSError("log in")
        return iter(tables[name, configuration])

    return load


def web_of(pages: Mapping[str, bytes], asked: list[str] | None = None) -> Callable[[str], Iterator[bytes]]:
    def fetch(address: str) -> Iterator[bytes]:
        if asked is not None:
            asked.append(address)
        if address not in pages:
            raise OSError("404")
        yield from pages[address].splitlines(keepends=True)

    return fetch


def rebuild(
    rows: Sequence[Mapping[str, Any]],
    configuration: str,
    hub: Hub,
    files: Mapping[str, bytes],
    asked: list[str] | None = None,
) -> list[list[str]]:
    """The turns of placeholder rows."""
    found = Sources(hub_of(hub), web_of({**PAGES, **files}, asked))
    rebuilder = Rebuilder(found, configuration, Letters())
    return [rebuilder.turns(row) for row in rows]
