"""docs/scaling.md computes its table: the code in it runs, and gives the numbers that stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCUMENT = (Path(__file__).parent.parent / "docs" / "scaling.md").read_text(encoding="utf-8")


def test_the_table_is_what_the_code_beside_it_computes() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "docs/scaling.md", "exec"), names)
    table = DOCUMENT.partition("| quantity (computed) | value |\n|---|---|\n")[2].partition("\n\n")[0]
    assert [f"| {name} | {value} |" for name, value in names["results"].items()] == table.splitlines()


def test_what_its_text_says_is_what_the_code_computes() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "docs/scaling.md", "exec"), names)
    names["node_network"] = 10e9 / 8
    assert f"At 10 Gb/s a node the sum of the pair above takes {names['exchange'](100):.1f} s" in DOCUMENT
    assert f"{2 * 80 * 8192 * 2 * 2 * 7 / 8 / 1e6:.1f} MB for 80 layers of 8,192" in DOCUMENT
