"""Silence while a model is loaded: no progress bars, no warnings of transformers. Errors pass."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from unittest import mock

from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers.utils import logging as transformers_logging


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    logger = logging.getLogger("transformers")
    bars, level = transformers_logging.is_progress_bar_enabled(), logger.level
    transformers_logging.disable_progress_bar()
    logger.setLevel(logging.ERROR)
    try:
        # The GGUF conversion takes its bar straight from tqdm.
        with mock.patch.object(tqdm, "__init__", functools.partialmethod(tqdm.__init__, disable=True)):
            yield
    finally:
        logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
