"""What tests of fit share: prompts, and a recipe of milliseconds."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tiny_config import TINY_RECIPE

RECIPE = f"""{TINY_RECIPE}save_seconds = 0.3

[eval]
share = 0.3
records = 4
evaluations = 2
"""


def write_prompts(path: Path, count: int = 36) -> Path:
    rows = ({"prompt": f"the quick fox {i}", "category": "code" if i % 2 else "fr/chat"} for i in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def shrink(patch: pytest.MonkeyPatch) -> None:
    """A fit on the CPU that is content with little."""
    # Seconds of this process: what else the machine is busy with makes no budget too small, and no stage long.
    patch.setattr("time.monotonic", time.process_time)
    patch.setattr("torch.cuda.is_available", lambda: False)
    patch.setattr("flashdraft.fit.ledger.BEAT_SECONDS", 0.1)
    patch.setattr("flashdraft.fit.budget.LEAST_TOKENS", 4)
    patch.setattr("flashdraft.fit.budget.LEAST_STEPS", 4)
    patch.setattr("flashdraft.fit.budget.PROBE_TOKENS", 8)
    patch.setattr("flashdraft.fit.run.MOST_EPOCHS", 6)  # so that it ends before its time
    patch.setattr("flashdraft.fit.worth.MOST_TOKENS", 24)
    patch.setattr("flashdraft.fit.worth.MOST_PROMPTS", 6)
