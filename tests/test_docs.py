"""The documents point at things that exist: relative links, their headings, and the files the README tells one to read."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)\s>]+)>?[^)]*\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# `flashdraft/engine/engine.py`: a path in backticks, not a command, a pattern or a module.
NAMED_PATH = re.compile(r"`([\w-]+(?:/[\w.-]+)*/[\w-]+\.(?:py|md|toml|jsonl?|safetensors))`")


def anchors(markdown: str) -> set[str]:
    """The anchors that rendered headings get: lower case, punctuation dropped, spaces to hyphens."""
    headings = re.findall(r"^#+ +(.+?) *$", FENCE.sub("", markdown), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(document: Path) -> list[str]:
    markdown = document.read_text(encoding="utf-8")
    broken = []
    for link in LINK.findall(FENCE.sub("", markdown)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        goal = document.parent / path if path else document
        if not goal.exists() or (anchor and anchor not in anchors(goal.read_text(encoding="utf-8"))):
            broken.append(link)
    return broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    assert broken_links(document) == []


def test_every_file_the_readme_names_exists() -> None:
    named = NAMED_PATH.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(named) >= 8, "the README lists the files of the main path in reading order"
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_the_source_distribution_holds_what_the_documents_point_at() -> None:
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    always = {"README.md", "LICENSE", "pyproject.toml"}  # as every build backend does
    assert [path for path in included if not (ROOT / path.lstrip("/")).exists()] == []
    for document in DOCUMENTS:
        markdown = document.read_text(encoding="utf-8")
        named = [ROOT / path for path in NAMED_PATH.findall(markdown)]
        named += [
            document.parent / link.partition("#")[0] for link in LINK.findall(markdown) if not re.match(r"[a-z]+:|#", link)
        ]
        for path in [document, *(path for path in named if path.is_file())]:
            name = path.resolve().relative_to(ROOT).as_posix()
            assert name in always or any(f"/{name}".startswith(entry) for entry in included), f"{document.name} names {name}"


def test_the_link_checker_sees_a_missing_file_and_a_missing_heading(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A heading, really\n")
    document = tmp_path / "one.md"
    document.write_text(
        "[a](other.md) [b](other.md#a-heading-really) [c](https://example.org/x) [d](gone.md) [e](other.md#gone) [f](#gone)\n"
        "```\n[g](in-a-code-block.md)\n```\n"
    )
    assert broken_links(document) == ["gone.md", "other.md#gone", "#gone"]
