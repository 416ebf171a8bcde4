"""Reading GGUF files through transformers, without the repetition.

transformers' loader parses the file anew for the configuration, the weights and the tokenizer, each time in pure Python over
every token and merge of the vocabulary, and builds its table of tensor names once for every module of the model: 21 s for a
135M model on one core, 4 s with what follows. Both come from the `gguf` package by its public names, looked up at each call, so
within `reading` those names stand for versions of them that remember.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import transformers

from flashdraft.errors import CheckpointError, ConfigError

_lock = threading.RLock()  # names of a module are replaced: one loader at a time


def gguf_arguments(path: Path) -> dict[str, Any]:
    """Where from_pretrained finds a GGUF file. Raises CheckpointError for a file that is none, ConfigError without `gguf`."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such GGUF file")
    missing = [m for m in ("gguf", "accelerate") if importlib.util.find_spec(m) is None]
    if missing:
        raise ConfigError(f"reading GGUF files needs {' and '.join(missing)}: run `pip install gguf accelerate`")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): check its permissions") from error
    if magic != b"GGUF":
        raise CheckpointError(f"{path} is not a GGUF file (wrong magic bytes): download it again")
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}


def dequantizing() -> Any:
    """transformers 5.24 keeps GGUF weights packed unless told otherwise; versions without this class always dequantize."""
    config = getattr(transformers, "GgufConfig", None)
    return None if config is None else config(dequantize=True)


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Within this context transformers parses a GGUF file once and builds its table of tensor names once."""
    import gguf

    class Reader(gguf.GGUFReader):
        # As a plain array: slicing a numpy.memmap builds a new memmap each time, which is two thirds of the parsing.
        data = property(lambda self: self._data, lambda self, mapped: setattr(self, "_data", np.asarray(mapped)))

    with (
        _lock,
        mock.patch.object(gguf, "GGUFReader", functools.lru_cache(maxsize=1)(Reader)),
        mock.patch.object(gguf, "get_tensor_name_map", functools.lru_cache(maxsize=1)(gguf.get_tensor_name_map)),
    ):
        yield
