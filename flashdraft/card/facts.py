"""What no file of a draft says: licence, release date and the like. Given in a TOML file, else a named TODO in the card."""

from __future__ import annotations

import datetime
import difflib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flashdraft.card.markdown import Markdown, escape, one_line, words
from flashdraft.errors import ConfigError

REPO = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # no ../.. and no option of a command
LICENSE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*")
DATASET_KEYS = ("name", "link", "size", "collection", "labelling", "properties")


@dataclass(frozen=True)
class Fact:
    """One thing a card says. `needed`: left out, it is a TODO; the others have words of their own, or need none.

    example: in <> what is to be said, where words of ours might be taken over as they are.
    """

    name: str
    what: str
    example: str
    kind: Literal["text", "lines", "datasets"] = "text"
    needed: bool = True


FACTS = (
    Fact("name", "name of the draft; else that of its directory", "Target-DFlash", needed=False),
    Fact("repo", "where the draft is published, OWNER/NAME; its commands then name it", "owner/target-dflash"),
    Fact("base_model", "hub id of the target", "owner/target"),
    Fact("developer", "who made the draft", "The Example Authors"),
    Fact("license", "licence of the draft, as the hub names it", "apache-2.0"),
    Fact("license_link", "address of its text", "https://www.apache.org/licenses/LICENSE-2.0", needed=False),
    Fact("terms", "further terms of use, such as those of the target", "Use is subject to the target's terms.", needed=False),
    Fact("geography", "where it may be deployed", "<everywhere, or the countries>"),
    Fact("use_case", "whom it is for, beside what every draft is for", "Chat in English.", needed=False),
    Fact("release_date", "day of the release, and where", "<day, and where>"),
    Fact("references", "papers and pages, one a line", "https://example.org/report", "lines", needed=False),
    Fact("training_data", "where the prompts came from, a table a data set", "", "datasets"),
    Fact("contact", "where to report faults and security problems", "https://example.org/security"),
    Fact("limitations", "limitations beside those that follow from the files", "Not tried on code.", "lines", needed=False),
    Fact("ethics", "ethical considerations beside those of every draft", "<what is to be considered>", needed=False),
    Fact("impacted_groups", "groups for whom comparable outcomes were tested", "<which groups, or that none was tested>"),
    Fact(
        "bias_participation", "whether impacted groups took part in design and testing", "<who took part, or that nobody did>"
    ),
    Fact("bias_measures", "measures against unwanted bias", "<what was done, or that nothing was>"),
    Fact("life_critical", "impact where lives depend on it", "<what it may do there, or that it is not for that>"),
    Fact("use_restrictions", "what it must not be used for", "<what is not allowed, and by which licence>"),
    Fact("data_restrictions", "who could reach model and data while it was made", "<who had access>"),
    Fact("generatable_data", "whether personal data can be generated or recovered", "<what was found, or that nobody looked>"),
    Fact("personal_data", "whether personal data were used", "<which, or how their absence is known>"),
    Fact("consent", "whether consent was obtained for them", "<how, or why none was needed>"),
    Fact("user_data", "whether users' own inputs were trained on", "<yes or no, and which>"),
    Fact("data_review", "how often the data are reviewed", "<when, and by whom>"),
    Fact("data_provenance", "whether the origin of all data is known", "<of which data it is known, and of which not>"),
    Fact("labelling_privacy", "whether labelling complies with privacy laws", "<which laws, and how that is known>"),
    Fact(
        "data_requests",
        "whether requests to correct or delete data can be met",
        "<how they are made, or that they cannot be met>",
    ),
    Fact("privacy_policy", "address of the privacy policy", "https://example.org/privacy"),
)
BY_NAME = {fact.name: fact for fact in FACTS}


def read_facts(file: Path) -> dict[str, Any]:
    """The facts of a TOML file; empty ones count as not given. Raises ConfigError that names what cannot be."""
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:  # of TOML, UTF-8 and the disk
        reason = getattr(error, "strerror", None) or one_line(error, 200)
        raise ConfigError(
            f"{file}: cannot read the facts ({reason}): `flashdraft card DIR --facts-template` prints one"
        ) from error
    found = {name: _checked(f"{file}: {name}", name, value) for name, value in given.items()}
    return {name: value for name, value in found.items() if value}


def _checked(where: str, name: str, value: Any) -> Any:
    fact = BY_NAME.get(name)
    if fact is None:
        near = difflib.get_close_matches(name, BY_NAME, 1)
        hint = f"did you mean {near[0]}?" if near else f"the facts are {', '.join(BY_NAME)}"
        raise ConfigError(f"{where[:200]}: there is no such fact: {hint}")
    if fact.kind == "datasets":
        return _datasets(where, value)
    if fact.kind == "lines":
        if not isinstance(value, list) or not all(isinstance(line, str) for line in value):
            raise ConfigError(f"{where} must be a list of texts")
        return [line.strip() for line in value if line.strip()]
    if isinstance(value, datetime.date):
        value = value.isoformat()
    if not isinstance(value, str):
        raise ConfigError(f"{where} must be a text, got {str(value)[:80]!r}")
    value = value.strip()
    if value.startswith("<") and value == fact.example:
        raise ConfigError(f"{where} still holds what is to be filled in, {value}: write it, or leave it empty")
    if value and name in ("repo", "base_model") and not REPO.fullmatch(value):
        raise ConfigError(f"{where} must be a hub id, OWNER/NAME, got {value[:80]!r}")
    if value and name == "license_link" and not re.fullmatch(r"https?://\S+", value):
        raise ConfigError(f"{where} must be an address, https://..., got {value[:80]!r}")
    if value and name == "license" and not LICENSE.fullmatch(value):
        raise ConfigError(f"{where} must be a licence as the hub names it, such as apache-2.0 or other, got {value[:80]!r}")
    return value


def _datasets(where: str, value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise ConfigError(f"{where} must be tables, each under [[training_data]]")
    for number, row in enumerate(value, 1):
        if unknown := sorted(row.keys() - set(DATASET_KEYS)):
            raise ConfigError(f"{where} {number}: there is no key {unknown[0]!r}; the keys are {', '.join(DATASET_KEYS)}")
        if not row.get("name"):
            raise ConfigError(f"{where} {number}: `name` is missing")
    return [{key: str(row[key]) for key in DATASET_KEYS if row.get(key)} for row in value]


class Facts:
    """What was given, what is known without, and, once the card is written, what is still to be done."""

    def __init__(self, given: Mapping[str, Any], known: Mapping[str, str] | None = None) -> None:
        self.values: dict[str, Any] = {**(known or {}), **given}
        self.todo: dict[str, str] = {}  # name -> how to give it

    def __call__(self, name: str) -> Markdown | None:
        """The words of a text fact: as given, its TODO, or None for one that is not needed."""
        fact = BY_NAME[name]
        if value := self.values.get(name):
            return words(value)
        return self.missing(name, fact.what, f"{name} = {json.dumps(fact.example)}") if fact.needed else None

    def missing(self, name: str, what: str, how: str) -> Markdown:
        self.todo[name] = how
        return Markdown(f"TODO({name}): {escape(what)}")

    def rows(self, name: str) -> list[Any]:
        """Of a fact that is a list: texts as Markdown, tables as they are."""
        return [words(row) if isinstance(row, str) else row for row in self.values.get(name) or []]


def template(known: Mapping[str, Any]) -> str:
    """A TOML file to fill in; what is known already stands in it."""
    lines = ["# What the card of a draft cannot read from its files. Leave empty what is not known."]
    tables: list[str] = []
    for fact in FACTS:
        value = known.get(fact.name)
        if fact.kind == "datasets":
            rows = value or []
            tables += ["", f"# {fact.name}: {fact.what}. Uncomment, and repeat for each."] if not rows else []
            tables += ["", *(f"# {line}" for line in _row({}))] if not rows else []
            for row in rows:
                tables += ["", *_row(row)]
            continue
        note = f"# {fact.what}" + ("" if fact.needed else " (optional)")
        example = "" if not fact.example else f": {json.dumps(fact.example, ensure_ascii=False)}"
        empty: Any = [] if fact.kind == "lines" else ""
        lines += ["", note + example, f"{fact.name} = {_toml(value or empty)}"]
    return "\n".join([*lines, *tables]) + "\n"


def _toml(value: Any) -> str:
    """A JSON text, or list of texts, is one of TOML too, but for one character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _row(row: Mapping[str, str]) -> list[str]:
    return ["[[training_data]]", *(f"{key} = {_toml(row.get(key, ''))}" for key in DATASET_KEYS)]
