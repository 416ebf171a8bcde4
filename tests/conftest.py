"""What tests share: no network, one seed, reproducible property tests; the command line, and a tiny pair for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

# Read when the libraries are imported, hence before any test imports them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Tiny models gain nothing from threads, and on a busy machine each parallel region waits for a thread to be scheduled.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where there are more: threads that wait by spinning take the cores of those they wait for.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from hypothesis import settings
from saved import Pair, saved_pair

from flashdraft.cli import main

# A deadline would measure the machine, and CI must find tomorrow what it finds today.
settings.register_profile("flashdraft", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("flashdraft")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is asserted of texts and speeds, which is said of the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return saved_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def flashdraft(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process; returns (exit code, standard output, standard error)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["flashdraft", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call
