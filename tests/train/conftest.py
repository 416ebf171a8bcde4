from __future__ import annotations

import pytest
import tiny

from flashdraft.draft import DFlashDraft
from flashdraft.targets.target import Target
from flashdraft.train.data import Records


@pytest.fixture(scope="session")
def tiny_target() -> Target:
    return tiny.make_target()


@pytest.fixture
def tiny_draft() -> DFlashDraft:
    return tiny.make_draft()


@pytest.fixture
def tiny_records() -> Records:
    return tiny.make_records()
