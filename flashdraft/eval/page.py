"""One HTML file out of sections, to be mailed and printed: pictures are in it, nothing is loaded, all text is escaped."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment

NO_TEXT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True)
class Text:
    """A paragraph. kind: `note` is dim, `warning` framed."""

    text: str
    kind: Literal["plain", "note", "warning"] = "plain"


@dataclass(frozen=True)
class Items:
    """A list."""

    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """left: so many columns, from the first, are text; the others are figures, at the right. total: the last row sums up."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1
    total: bool = False
    caption: str = ""


@dataclass(frozen=True)
class Picture:
    """A PNG. alt: what it shows, for those who do not see it. caption: how to read it."""

    png: Path
    alt: str
    caption: str = ""

    @property
    def url(self) -> str:
        return f"data:image/png;base64,{base64.b64encode(self.png.read_bytes()).decode()}"


@dataclass(frozen=True)
class Folded:
    """Blocks that are long and seldom read; opened by a click."""

    summary: str
    blocks: Sequence[Block]


Block = Text | Items | Table | Picture | Folded


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]


def page(title: str, sections: Sequence[Section]) -> str:
    """The file's content. The first section stands above the contents, so its own title is left out."""
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_finalize).from_string(TEMPLATE)
    return template.render(title=title, sections=sections, style=STYLE) + "\n"


def _finalize(value: Any) -> Any:
    return printable(value) if type(value) is str else value


def printable(text: str) -> str:
    """Text without what is no letter: control signs, changes of direction, halves of a surrogate pair."""
    return NO_TEXT.sub("\ufffd", text)


def plain(text: str) -> str:
    """One line without what a terminal would take for commands."""
    return " ".join(printable(text).split())


def in_markdown(text: str) -> str:
    """Names, which others chose, as one line of Markdown: no cell, tag, link or code of their own."""
    return re.sub(r"[\\|<`\[]", lambda found: f"\\{found[0]}", plain(text))


STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c2024; --dim: #5b6470; --line: #d8dde3; --band: #f5f7f9;
  --link: #0b62a8; --warn: #8a4b00; --warn-back: #fff4e0; }
@media (prefers-color-scheme: dark) { :root { --back: #15181c; --text: #e4e7ea; --dim: #9aa4af; --line: #343a42;
  --band: #1d2127; --link: #6cb6ff; --warn: #ffc77d; --warn-back: #33270f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 62rem; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif;
  overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 1rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; padding-top: .75rem; border-top: 1px solid var(--line); }
p { margin: .6rem 0; } a { color: var(--link); }
.note, figcaption, caption { color: var(--dim); font-size: .9rem; }
.warning { color: var(--warn); background: var(--warn-back); border-left: 4px solid currentColor; padding: .5rem .75rem; }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1.1rem; margin: 1.25rem 0; font-size: .95rem; }
.wide { overflow-x: auto; margin: .9rem 0; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: .3rem; }
th, td { padding: .3rem .7rem; text-align: right; white-space: nowrap; vertical-align: top;
  border-bottom: 1px solid var(--line); }
th { border-bottom: 2px solid var(--line); font-weight: 600; white-space: normal; overflow-wrap: normal;
  vertical-align: bottom; }
.left { text-align: left; white-space: normal; min-width: 8rem; max-width: 34rem; }
tbody tr:nth-child(even) { background: var(--band); }
.total td { font-weight: 600; border-top: 2px solid var(--line); }
figure { margin: 1.1rem 0; }
img { display: block; max-width: 100%; height: auto; background: #fff; border: 1px solid var(--line); border-radius: 4px; }
figcaption { margin-top: .35rem; }
details { margin: .9rem 0; } summary { cursor: pointer; color: var(--link); }
ul { padding-left: 1.3rem; } li { margin: .2rem 0; }
@media (max-width: 40rem) { body { padding: 1rem .8rem 3rem; } th, td { padding: .25rem .45rem; } }
@media print { :root { --back: #fff; --text: #000; --dim: #444; --line: #bbb; --band: #f5f5f5; --link: #000; --warn: #000;
  --warn-back: #fff; } body { max-width: none; padding: 0; font-size: 10.5pt; } nav { display: none; }
  figure, tr { break-inside: avoid; } h2 { break-after: avoid; } .wide { overflow: visible; }
  table { font-size: .85rem; } th, td { padding: .15rem .3rem; }
  .left { min-width: 4rem; } }
"""

TEMPLATE = """\
{% macro show(block) %}
{% if block.columns is defined %}
<div class="wide"><table>
{% if block.caption %}<caption>{{ block.caption }}</caption>{% endif %}
<thead><tr>{% for name in block.columns -%}
<th scope="col"{% if loop.index <= block.left %} class="left"{% endif %}>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in block.rows %}
<tr{% if block.total and loop.last %} class="total"{% endif %}>{% for cell in row -%}
<td{% if loop.index <= block.left %} class="left"{% endif %}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% elif block.png is defined %}
<figure><img src="{{ block.url }}" alt="{{ block.alt }}">
{% if block.caption %}<figcaption>{{ block.caption }}</figcaption>{% endif %}</figure>
{% elif block.summary is defined %}
<details><summary>{{ block.summary }}</summary>
{% for inner in block.blocks %}{{ show(inner) }}{% endfor %}
</details>
{% elif block.kind is defined %}
<p{% if block.kind != "plain" %} class="{{ block.kind }}"{% endif %}>{{ block.text }}</p>
{% else %}
<ul>{% for item in block["items"] %}<li>{{ item }}</li>
{% endfor %}</ul>
{% endif %}
{% endmacro %}
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{{ title }}</title>
<style>{{ style | safe }}</style>
</head>
<body>
<h1>{{ title }}</h1>
{% for section in sections %}
{% if not loop.first %}<h2 id="s{{ loop.index }}">{{ section.title }}</h2>{% endif %}
{% for block in section.blocks %}{{ show(block) }}{% endfor %}
{% if loop.first and sections | length > 2 %}
<nav>{% for other in sections[1:] %}<a href="#s{{ loop.index + 1 }}">{{ other.title }}</a>
{% endfor %}</nav>
{% endif %}
{% endfor %}
</body>
</html>
"""
