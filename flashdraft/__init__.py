"""flashdraft: train DFlash draft models, and generate text with them without loss.

The public names below are imported on first use, so that `import flashdraft` and `flashdraft --help` do not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashdraft.checkpoint import load_draft, save_draft
    from flashdraft.draft import DFlashConfig, DFlashDraft
    from flashdraft.engine.engine import Engine, EngineConfig
    from flashdraft.engine.request import SamplingParams
    from flashdraft.errors import FlashdraftError
    from flashdraft.llm import LLM, Completion
    from flashdraft.targets import Target, load_target

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Completion",
    "DFlashConfig",
    "DFlashDraft",
    "Engine",
    "EngineConfig",
    "FlashdraftError",
    "SamplingParams",
    "Target",
    "__version__",
    "load_draft",
    "load_target",
    "save_draft",
]

_HOMES = {
    "LLM": "flashdraft.llm",
    "Completion": "flashdraft.llm",
    "DFlashConfig": "flashdraft.draft",
    "DFlashDraft": "flashdraft.draft",
    "Engine": "flashdraft.engine.engine",
    "EngineConfig": "flashdraft.engine.engine",
    "FlashdraftError": "flashdraft.errors",
    "SamplingParams": "flashdraft.engine.request",
    "Target": "flashdraft.targets",
    "load_draft": "flashdraft.checkpoint",
    "load_target": "flashdraft.targets",
    "save_draft": "flashdraft.checkpoint",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'flashdraft' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
