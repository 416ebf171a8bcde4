"""What a fit has spent and done outlives its process."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from killing import start

from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.fit import ledger as module
from flashdraft.fit.ledger import Ledger

SETTINGS = {"prompts": "abc", "sampling": {"temperatures": (0.7,)}}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.02)


def test_seconds_and_findings_are_there_for_the_next_process(tmp_path: Path) -> None:
    first, begun = Ledger(tmp_path, SETTINGS), time.monotonic()
    with first.stage("answers"):
        time.sleep(0.1)
        assert 0.1 <= first.spent <= time.monotonic() - begun, "the stage under way counts"
    with first.stage("answers"):
        time.sleep(0.1)
    assert 0.2 <= first.spent <= time.monotonic() - begun
    first.finish("answers", {"kept": 12})
    first.close()
    second = Ledger(tmp_path, SETTINGS)
    assert second.spent == pytest.approx(first.spent)
    assert second.found == {"answers": {"kept": 12}}
    second.close()


def train(directory: Path) -> None:
    module.BEAT_SECONDS = 0.02
    with Ledger(directory, SETTINGS).stage("training"):
        time.sleep(60)


def test_what_a_killed_process_spent_counts(tmp_path: Path) -> None:
    begun = time.monotonic()
    process = start(train, tmp_path)
    while written_seconds(tmp_path) < 0.2:
        time.sleep(0.02)
    process.kill()
    process.join()
    ledger = Ledger(tmp_path, SETTINGS)
    assert 0.2 <= ledger.seconds["training"] <= time.monotonic() - begun
    ledger.close()


def written_seconds(directory: Path) -> float:
    file = directory / "fit.json"
    return json.loads(file.read_text())["seconds"].get("training", 0.0) if file.exists() else 0.0


def test_time_stops_where_a_stage_ends_with_an_error(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, SETTINGS)
    with pytest.raises(KeyboardInterrupt), ledger.stage("answers"):
        raise KeyboardInterrupt
    spent = ledger.spent
    time.sleep(0.05)
    assert ledger.spent == spent == json.loads((tmp_path / "fit.json").read_text())["seconds"]["answers"]
    ledger.close()


def test_once_answers_have_begun_other_settings_are_named_and_refused(tmp_path: Path) -> None:
    unbegun = Ledger(tmp_path / "work", {"prompts": "xyz"})
    unbegun.close()
    ledger = Ledger(tmp_path / "work", SETTINGS)
    ledger.finish("begun", {})
    ledger.close()
    with pytest.raises(ConfigError, match="was begun with other sampling: give the same, or another --output"):
        Ledger(tmp_path / "work", SETTINGS | {"sampling": {"temperatures": (0.5,)}})
    Ledger(tmp_path / "work", SETTINGS).close()


def test_two_processes_do_not_work_in_one_directory(tmp_path: Path) -> None:
    first = Ledger(tmp_path, SETTINGS)
    with pytest.raises(ConfigError, match="another process is at work"):
        Ledger(tmp_path, SETTINGS)
    first.close()
    Ledger(tmp_path, SETTINGS).close()


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fit.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"fit\.json is not what a fit wrote"):
        Ledger(tmp_path, SETTINGS)
