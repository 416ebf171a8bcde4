"""Pairs read for another engine, and drafts changed on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flashdraft.errors import ConfigError
from flashdraft.handover import vllm
from flashdraft.handover.command import Program
from flashdraft.handover.pair import Pair, read_pair
from flashdraft.handover.translation import Given

VLLM, SGLANG = Program(("vllm", "serve"), "0.32.0"), Program(("sglang", "serve"), "0.5.23")


def change(draft: Path, **changes: Any) -> Path:
    content = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**content, **changes}))
    return draft


def read(target: Path | str, draft: Path | str | None, **given: Any) -> Pair:
    given = {"revision": None, "draft_revision": None, "proposals": None, "engine": "vLLM", **given}
    return read_pair(str(target), draft=None if draft is None else str(draft), **given)


def refused(pair: Pair, message: str, engine: Any = vllm, **options: Any) -> None:
    start = VLLM if engine is vllm else SGLANG
    with pytest.raises(ConfigError, match=message):
        engine.command(start, pair, Given(options), {})
