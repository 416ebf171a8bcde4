"""Benchmarks and recipes start: their options are read, what they import is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = [
    path
    for folder in ("benchmarks", "recipes")
    for path in sorted((ROOT / folder).glob("*.py"))
    if "ArgumentParser(" in path.read_text()
]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_script_says_what_its_options_are(script):
    pytest.importorskip("fastapi")
    if script.stem in ("kernel_times", "prefill"):
        pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, str(script), "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"usage: {script.name}")
