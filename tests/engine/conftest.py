from __future__ import annotations

import pairs
import pytest


@pytest.fixture(params=[False, True], ids=["host", "device"])
def steps(request, monkeypatch):
    """Engines of pairs.small_engine run every step to its end, and again from state on the device, one step ahead."""
    monkeypatch.setattr(pairs, "ASYNC_SCHEDULING", request.param)
    return request.param
