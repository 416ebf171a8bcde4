"""An engine on PATH, and a draft to change."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from saved import Pair as Saved

from flashdraft import cli_serve


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine's script on PATH, that says this version."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    for name in cli_serve.KEYS:
        monkeypatch.delenv(name, raising=False)

    def put(name: str, version: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\necho {version}\n")
        (folder / name).chmod(0o755)

    return put


@pytest.fixture
def draft(pair: Saved, tmp_path: Path) -> Path:
    """A copy of the pair's draft, to be changed."""
    return Path(shutil.copytree(pair.draft, tmp_path / "changed"))
