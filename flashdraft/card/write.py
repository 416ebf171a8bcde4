"""Cards on disk: ours carry a hash of their text, so that a person's own words are never written over."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashdraft.card.facts import read_facts
from flashdraft.card.measured import read_results
from flashdraft.card.render import Card, render
from flashdraft.card.speeds import read_benches
from flashdraft.card.subject import Subject
from flashdraft.errors import ConfigError
from flashdraft.train.display import err, out
from flashdraft.train.files import write_whole

NAME = "README.md"
MARKER = re.compile(r"\n<!-- written by flashdraft card, ([0-9a-f]{32}) -->\s*\Z")


@dataclass(frozen=True)
class CardOptions:
    """The command line of `flashdraft card`."""

    draft: str
    results: Sequence[Path] = ()
    bench: Sequence[Path] = ()
    facts: Path | None = None
    output: Path | None = None
    force: bool = False


def run_card(options: CardOptions) -> None:
    """Write the card, and say what it lacks."""
    subject = Subject.read(options.draft)
    given = read_facts(options.facts) if options.facts else {}
    output = options.output or _beside(options.draft, subject)
    _refuse_to_overwrite(output, options.force)
    card = render(subject, given, read_results(options.results, subject), read_benches(options.bench, subject))
    _write(output, card)
    _show(output, card, options.draft)


def card_of(folder: Path, *, name: str | None = None, training: Mapping[str, Any] | None = None) -> str:
    """The card of a draft that was just made, ready to be written."""
    subject = Subject.read(str(folder), name=name, training=None if training is None else dict(training))
    return marked(render(subject, {}).text)


def write_card(folder: Path) -> None:
    """Put the card beside a draft, unless there is one that a person wrote."""
    if not is_handwritten(folder / NAME):
        write_whole(folder / NAME, card_of(folder))


def marked(text: str) -> str:
    return f"{text}\n<!-- written by flashdraft card, {_hash(text)} -->\n"


def is_handwritten(file: Path) -> bool:
    """Whether there is a file that `flashdraft card` did not write, or that was edited since."""
    try:
        text = file.read_bytes().decode("utf-8", errors="replace").replace("\r\n", "\n")
    except FileNotFoundError:
        return False
    found = MARKER.search(text)
    return found is None or _hash(text[: found.start()]) != found[1]


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _beside(draft: str, subject: Subject) -> Path:
    if subject.is_builtin or not Path(draft).expanduser().exists():
        raise ConfigError(f"{draft} is no directory of yours to write into: say where the card goes with --output")
    return subject.folder / NAME


def _refuse_to_overwrite(output: Path, force: bool) -> None:
    if output.is_dir():
        raise ConfigError(f"--output {output} is a directory: give the name of a file, such as {output / NAME}")
    try:
        if not force and is_handwritten(output):
            raise ConfigError(f"{output} was written or edited by hand: give another --output, or --force to write over it")
    except OSError as error:
        raise ConfigError(f"{output} cannot be read ({error.strerror or error}): give another --output") from error


def _write(output: Path, card: Card) -> None:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(output, marked(card.text))
    except OSError as error:
        raise ConfigError(f"{output} cannot be written ({error.strerror or error}): give another --output") from error


def _show(output: Path, card: Card, draft: str) -> None:
    out.print(f"wrote {output}", markup=False, soft_wrap=True)
    if not card.todo:
        return
    err.print(f"{len(card.todo)} things in it are TODO, and given by:", markup=False)
    for name, how in card.todo.items():
        err.print(f"  TODO({name}): {how}", markup=False, soft_wrap=True)
    err.print(
        f"facts stand in a file: `flashdraft card {draft} --facts-template > facts.toml`, fill it in, then give --facts "
        "facts.toml",
        markup=False,
        soft_wrap=True,
    )
