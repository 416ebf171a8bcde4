"""benchmarks/on_gpus.py: jobs side by side, cut when the time is up."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "on_gpus.py"
SHOW = "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); time.sleep({seconds})"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return runpy.run_path(str(SCRIPT))


def played(script: dict[str, Any], jobs: dict[str, str], output: Path, seconds: float) -> tuple[dict[str, str], dict[str, str]]:
    script["JOBS"].clear()
    script["JOBS"].update(jobs)
    names = dict(target=Path("target"), prompts=["a b"], others=["c d"])
    arguments = argparse.Namespace(jobs=[*jobs], output=output, seconds=seconds, **names)
    ended = script["play"](arguments)
    return ended, {name: (output / f"{name}.log").read_text() for name in jobs if (output / f"{name}.log").exists()}


def job(seconds: float, code: int = 0) -> str:
    return f'{sys.executable} -c "{SHOW.format(seconds=seconds)}; raise SystemExit({code})"'


def test_each_job_has_a_gpu_and_one_for_all_waits_for_them(script: dict[str, Any], tmp_path: Path) -> None:
    jobs = {"one": job(1), "two": job(0, 3), "all": "ALL " + job(0), "last": job(0)}
    ended, logs = played(script, jobs, tmp_path, 60)
    assert {logs["one"], logs["two"]} == {"0\n", "1\n"}
    assert sorted(logs["all"].strip().split(",")) == ["0", "1"]
    assert ended["two"].startswith("exit code 3")
    assert all(ended[name].startswith("exit code 0") for name in ("one", "all", "last"))


def test_what_has_not_ended_in_time_is_cut_and_its_output_kept(script: dict[str, Any], tmp_path: Path) -> None:
    jobs = {"long": job(60), "longer": job(60), "never": job(0)}
    ended, logs = played(script, jobs, tmp_path, 8)
    assert ended["long"].startswith("cut after")
    assert ended["longer"].startswith("cut after")
    assert ended["never"] == "not begun"
    assert logs["long"].startswith("1\nFatal Python error: Aborted")
    assert "most recent call first" in logs["longer"], "where it was"


def test_what_lies_on_the_path_is_there_for_jobs_too(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    _, logs = played(script, {"path": f'{sys.executable} -c "import sys; print(sys.path)"'}, tmp_path, 60)
    assert f"'{SCRIPT.parent.parent}', '/elsewhere'" in logs["path"]


def test_names_with_spaces_stay_whole(script: dict[str, Any], tmp_path: Path) -> None:
    jobs = {"words": f'{sys.executable} -c "import sys; print(sys.argv[1:])" {{prompts}} {{others}} {{target}}'}
    _, logs = played(script, jobs, tmp_path, 60)
    assert logs["words"] == "['a b', 'c d', 'target']\n"
