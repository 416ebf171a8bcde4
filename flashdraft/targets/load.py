"""Where targets come from: a local directory, a hub id, or a GGUF file with its tokenizer and chat template."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from flashdraft.errors import CheckpointError, ConfigError, UnsupportedModelError
from flashdraft.targets.target import ATTENTION, Target, refuse_unsupported

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_target(
    name: str | Path, *, dtype: str | torch.dtype = "auto", device: str | torch.device = "cpu", revision: str | None = None
) -> Target:
    """Load a target: a directory in transformers' layout, a hub id, or a `.gguf` file (dequantized).

    dtype "auto" keeps the checkpoint's own. Raises CheckpointError for files that are missing or corrupt, UnsupportedModelError
    for a family that cannot be run losslessly, ConfigError for a bad dtype.
    """
    where = _source(name, revision)
    with _loading(name):
        config = AutoConfig.from_pretrained(**where)
    text_config = config.get_text_config()
    refuse_unsupported(text_config)
    arguments: dict[str, Any] = {**where, "dtype": resolve_dtype(dtype, text_config), "attn_implementation": ATTENTION}
    if "gguf_file" in where:
        arguments["quantization_config"] = _gguf_config()
    with _loading(name):
        model, info = AutoModelForCausalLM.from_pretrained(**arguments, output_loading_info=True)
    _refuse_incomplete(name, info)
    return Target(model.to(device))


def load_tokenizer(name: str | Path, *, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer, with its chat template, from the same places as load_target. Raises CheckpointError if there is none."""
    with _loading(name, "tokenizer"):
        return AutoTokenizer.from_pretrained(**_source(name, revision))


def resolve_dtype(dtype: str | torch.dtype, config: Any) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        own = getattr(config, "dtype", None)
        own = DTYPES.get(own) if isinstance(own, str) else own
        return own if own in DTYPES.values() else torch.bfloat16
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be auto, {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]


def _source(name: str | Path, revision: str | None) -> dict[str, Any]:
    """Arguments that tell transformers where to look. A path that looks local but is not there never turns into a hub look-up."""
    text, path = str(name), Path(name).expanduser()
    if text.endswith(".gguf"):
        if not path.is_file():
            raise CheckpointError(f"{name}: no such GGUF file")
        _require("gguf", "accelerate")
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise CheckpointError(f"{name} is not a GGUF file (wrong magic bytes): download it again")
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{name} has no config.json: give a directory in transformers' layout, a .gguf file or a hub id")
        return {"pretrained_model_name_or_path": str(path)}
    if path.exists() or text.startswith((".", "/", "~")) or text.count("/") != 1:
        raise CheckpointError(f"{name}: no such directory; give a directory in transformers' layout, a .gguf file or a hub id (OWNER/NAME)")
    return {"pretrained_model_name_or_path": text, **({"revision": revision} if revision else {})}


def _require(*modules: str) -> None:
    missing = [m for m in modules if importlib.util.find_spec(m) is None]
    if missing:
        raise ConfigError(f"reading GGUF files needs {' and '.join(missing)}: run `pip install 'flashdraft[gguf]'`")


def _gguf_config() -> Any:
    """transformers 5.24 loads GGUF weights packed unless told to dequantize; earlier versions always dequantize."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return None
    return GgufConfig(dequantize=True)


def _refuse_incomplete(name: str | Path, info: dict[str, Any]) -> None:
    missing, mismatched = sorted(info.get("missing_keys") or ()), sorted(str(k) for k in info.get("mismatched_keys") or ())
    if missing or mismatched:
        what = [f"missing {', '.join(missing[:5])}"] if missing else []
        what += [f"of another shape {', '.join(mismatched[:5])}"] if mismatched else []
        raise CheckpointError(f"{name}: tensors {' and '.join(what)}; the weights do not belong to this config.json")


@contextlib.contextmanager
def _loading(name: str | Path, what: str = "model") -> Iterator[None]:
    """Turn what transformers and safetensors raise for bad files into one sentence; keep their progress bars quiet."""
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    level = logging.getLogger("transformers").level
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        yield
    except (UnsupportedModelError, CheckpointError, ConfigError):
        raise
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{name}: config.json is not valid JSON ({error})") from error
    except SafetensorError as error:
        raise CheckpointError(f"{name}: a safetensors file is corrupt or cut short ({error}); download it again") from error
    except (KeyError, ValueError, TypeError, OSError, RuntimeError, AttributeError, IndexError, EOFError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{name}: cannot load the {what}: {reason[:300]}") from error
    finally:
        logging.getLogger("transformers").setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
