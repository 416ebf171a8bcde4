"""Settings every test shares: no network, one seed, reproducible property tests."""

from __future__ import annotations

import os

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

# A deadline would measure the machine, and CI must find tomorrow what it finds today.
settings.register_profile("flashdraft", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("flashdraft")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
