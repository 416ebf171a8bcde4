"""The recipe of the built-in draft: what it says where it cannot work."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from saved import saved_pair

RECIPE = Path(__file__).parent.parent / "recipes" / "builtin.py"


def test_slots_that_do_not_fit_in_the_memory_are_refused_with_a_number_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = saved_pair(tmp_path)
    arguments = ["--target", str(pair.target), "--work", str(tmp_path / "work"), "--slots", str(10**9)]
    monkeypatch.setattr(sys, "argv", [str(RECIPE), *arguments])
    capsys.readouterr()  # transformers shows a progress bar when it saves
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(RECIPE), run_name="__main__")
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "builtin.py: 1,000,000,000 slots need" in line
    assert "half of this machine's memory: give --slots " in line
    fits = int(line.split("--slots ")[1].split()[0])
    assert 1 <= fits < 10**9
