"""Values as Markdown: whatever a file or a name holds, it stays one piece of text, one cell or one block of code."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

LONGEST = 500  # characters of a value: a name of a megabyte makes no card unreadable
SPECIAL = re.compile(r"[\\`*\[\]<>|~$&]|(?<![^\W_])_|_(?![^\W_])")  # an underscore inside a word is no emphasis
FIRST = re.compile(r"^(?=[#+=-])|^(\d+)(?=[.)](\s|$))")  # what would begin a list, a heading or a rule
NONE = "-"


class Markdown(str):
    """Text that is Markdown already. The template escapes everything else."""


def one_line(value: object, longest: int | None = LONGEST) -> str:
    """The value without line breaks, control characters or marks that turn the direction of text."""
    text = " ".join(str(value).split())
    text = "".join(c for c in text if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Cn") or c == "\u200d")
    return text if longest is None or len(text) <= longest else f"{text[: longest - 3]}..."


def escape(value: object) -> Markdown:
    """Plain text that renders as what it is."""
    if isinstance(value, Markdown):
        return value
    text = _plain(value)
    return Markdown(FIRST.sub(lambda found: f"{found[1]}\\" if found[1] else "\\", text, count=1))


def _plain(value: object) -> str:
    return SPECIAL.sub(lambda found: f"\\{found[0]}", one_line(value))


def words(value: object) -> Markdown:
    """Plain text, or a link where it is an address."""
    text = one_line(value)
    return Markdown(f"<{address(text)}>") if re.fullmatch(r"https?://\S+", text) else escape(text)


def address(value: object) -> Markdown:
    """An address as links hold it."""
    return Markdown(quote(one_line(value), safe="/:?=&%#.,~+@-_"))


def code(value: object) -> Markdown:
    """Inline code."""
    text = one_line(value)
    ticks = "`" * (longest_run(text) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") or not text.strip() else ""
    return Markdown(f"{ticks}{pad}{text}{pad}{ticks}")


def fence(text: str, language: str = "") -> Markdown:
    """A block of code. Its lines are the caller's: values in them are quoted, and hold no line breaks."""
    ticks = "`" * max(3, longest_run(text) + 1)
    return Markdown(f"{ticks}{language}\n{text}\n{ticks}")


def longest_run(text: str) -> int:
    """Of backticks."""
    return max((len(run) for run in re.findall(r"`+", text)), default=0)


def table(header: Sequence[object], rows: Sequence[Sequence[object]], text: int = 1) -> Markdown:
    """A table whose first `text` columns are words; figures are on the right."""
    align = ["---" if i < text else "---:" for i in range(len(header))]
    lines = [header, align, *rows]
    assert all(len(line) == len(header) for line in lines)
    return Markdown("\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines))


def _cell(value: object) -> str:
    # In a table a bar ends the cell even inside of code.
    text = value.replace("\n", " ") if isinstance(value, Markdown) else _plain(value)
    return re.sub(r"(?<!\\)\|", r"\\|", text)


def bullets(lines: Sequence[object]) -> Markdown:
    return Markdown("\n".join(f"- {escape(line)}" for line in lines))


def number(value: Any) -> float | None:
    """A finite number of a JSON file; None for all else, NaN and booleans included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def decimal(value: Any, digits: int = 2) -> str:
    found = number(value)
    return NONE if found is None else f"{found:,.{digits}f}"


def whole(value: Any) -> str:
    found = number(value)
    return NONE if found is None else f"{round(found):,}"


def percent(value: Any, digits: int = 2) -> str:
    found = number(value)
    return NONE if found is None else f"{100 * found:.{digits}f} %"


def interval(low: Any, high: Any) -> str:
    return NONE if number(low) is None or number(high) is None else f"{decimal(low)} to {decimal(high)}"


def text_of(value: Any) -> str | None:
    """A text of a JSON file; None for all else, and for an empty one."""
    return value if isinstance(value, str) and value.strip() else None


def at(value: Any, *keys: str) -> Any:
    """A field of nested JSON objects; None where there is none, or something else stands on the way."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value
