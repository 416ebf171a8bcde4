"""The texts that the target which thinks learns from: prompts, templated reasoning, arithmetic with its steps, answers made
short; and what an answer must look like."""

from __future__ import annotations

import argparse
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashdraft.errors import ConfigError
from flashdraft.prompts import prompt_hash, read_prompts

WELL_FORMED = re.compile(r"<think>\n(?P<thinking>\S.*?)\n</think>\n\n(?P<answer>\S.*)", re.DOTALL)
MARKER = re.compile(r"</?think>")
FRENCH = re.compile(r"\b(le|la|les|des|une|est|que|quelle?s?|pour|dans|écri\w+|expli\w+|donne\w*|vous|qu)\b", re.IGNORECASE)
CODE = re.compile(r"\b(code|function|program|script|python|java\w*|sql|html|css|class|algorithm|regex)\b", re.IGNORECASE)
QUESTION = re.compile(r"\?(\s|$)|^(who|what|when|where|why|how|which|is|are|can|do|does|did)\b", re.IGNORECASE)
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


@dataclass(frozen=True)
class Answered:
    """A prompt with an answer, and the reasoning that leads to it."""

    prompt: str
    reasoning: str
    answer: str


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The files, and the JSONL files of the directories. Raises ConfigError for a directory without any."""
    found = []
    for path in paths:
        inside = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not inside:
            raise ConfigError(f"{path} holds no JSONL files of prompts: give files, or a directory of them")
        found += inside
    return found


def choose(args: argparse.Namespace, data: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Prompts to answer and prompts held out, by their hash; from files as evenly as they allow, or self-made.

    Raises ConfigError where none are left for one of the two.
    """
    if args.prompts:
        groups = [[p.turns[0] for p in read_prompts(path)] for path in args.prompts]
    else:
        groups = [[form.format(topic) for form in one["forms"] for topic in one["topics"]] for one in args.recipe["self_made"]]
    train: list[str] = []
    held: list[str] = []
    seen: set[int] = set()
    for left, group in zip(range(len(groups), 0, -1), sorted(groups, key=len), strict=True):
        fitting = {prompt_hash(t): t for t in group if len(t) <= data["max_prompt_chars"] and not MARKER.search(t)}
        fresh = {name: text for name, text in fitting.items() if name not in seen}
        seen |= set(fresh)
        out = [text for name, text in fresh.items() if name % data["held_out"] == 0]
        rest = [text for name, text in fresh.items() if name % data["held_out"]]
        for texts in (out, rest):
            random.Random(args.seed).shuffle(texts)
        train += rest[: (data["prompts"] - len(train)) // left]
        held += out[: math.ceil((args.held_out - len(held)) / left)]
    if not train or not held:
        raise ConfigError(f"of {len(seen)} short prompts none are left to train on, or to measure on: give more --prompts")
    return train, held


def thoughts(prompt: str, reasoning: dict[str, Any]) -> str:
    """Templated reasoning: the question restated, what it is about, and the steps; in French for French prompts."""
    sentences = re.split(r"(?<=[.!?])\s+", " ".join(prompt.split()))
    asked = next((s for s in reversed(sentences) if s.endswith("?")), sentences[0])
    words = [w for w in re.findall(r"[^\W\d_]{3,}", prompt) if w.lower() not in reasoning["small_words"].split()]
    asked = " ".join(asked.split()[:24])
    asked = asked if asked[-1] in ".?!:" else f"{asked}."  # without it some thinking ended right here
    slots = {"asked": asked, "words": ", ".join(list(dict.fromkeys(words))[:3])}
    return str(reasoning[kind_of(prompt)]).format(**slots, numbers=", ".join(NUMBER.findall(prompt)[:6])).strip()


def kind_of(prompt: str) -> str:
    """What is asked for: a key of [reasoning]."""
    if len(FRENCH.findall(prompt)) >= 2:
        return "french"
    if CODE.search(prompt):
        return "code"
    if len(NUMBER.findall(prompt)) >= 2:
        return "numbers"
    return "question" if QUESTION.search(prompt) else "task"


def shortened(text: str, finished: bool, most: int) -> str:
    """An answer up to its last whole sentence or line within `most` characters, and one with code up to the end of its first
    block; "" where nothing is whole."""
    if block := re.search(r"```.*?```", text, re.DOTALL):
        text = text[: block.end()]
    elif not finished or len(text) > most:
        text = text[:most]
        ends = [m.end() for m in re.finditer(r"(?<!\d)[.!?](?=\s|$)|(?<![:\s])\n", text)]
        text = text[: ends[-1]] if ends else ""
    return "" if text.count("```") % 2 or MARKER.search(text) else text.strip()


def exercise(rng: random.Random) -> Answered:
    """Arithmetic with its steps worked out."""
    a, b = rng.randrange(11, 99), rng.randrange(11, 99)
    kind = rng.choice(["+", "-", "*", "larger", "sort"])
    if kind == "+":
        tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
        asked, result = f"{a} + {b}", a + b
        steps = f"Tens: {a // 10 * 10} + {b // 10 * 10} = {tens}.\nOnes: {a % 10} + {b % 10} = {ones}.\n"
        steps += f"Together: {tens} + {ones} = {result}."
    elif kind == "-":
        a, b = max(a, b), min(a, b)
        rest, asked, result = a - b // 10 * 10, f"{a} - {b}", a - b
        steps = f"Take away the tens: {a} - {b // 10 * 10} = {rest}.\nTake away the ones: {rest} - {b % 10} = {result}."
    elif kind == "*":
        b = b % 8 + 2
        tens, ones, asked, result = a // 10 * 10 * b, a % 10 * b, f"{a} * {b}", a * b
        steps = f"Tens: {a // 10 * 10} * {b} = {tens}.\nOnes: {a % 10} * {b} = {ones}.\nTogether: {tens} + {ones} = {result}."
    elif kind == "larger":
        b += a == b
        steps = f"Compare {a} and {b}.\nTens: {a // 10} and {b // 10}. Ones: {a % 10} and {b % 10}."
        return Answered(f"Which number is larger, {a} or {b}?", steps, f"{max(a, b)} is larger than {min(a, b)}.")
    else:
        row = rng.sample(range(1, 60), 4)
        shown, ordered = ", ".join(map(str, row)), ", ".join(map(str, sorted(row)))
        steps = f"The numbers are {shown}.\nThe smallest is {min(row)}, the largest is {max(row)}.\nIn order: {ordered}."
        return Answered(f"Sort these numbers: {shown}.", steps, ordered)
    form = rng.choice(["What is {}?", "Calculate {}.", "How much is {}?", "{} = ?"])
    return Answered(form.format(asked), f"We compute {asked}.\n{steps}", f"{asked} = {result}.")


def well_formed(text: str, stopped: bool, thinking: bool) -> bool:
    """Whether an answer has the form of its mode, each part with something in it, and came to its end."""
    found = WELL_FORMED.fullmatch(text)
    answer = found["answer"] if found else ""
    if thinking:
        return stopped and not MARKER.search(answer) and found is not None and not MARKER.search(found["thinking"])
    return stopped and bool(text.strip()) and not MARKER.search(text)
