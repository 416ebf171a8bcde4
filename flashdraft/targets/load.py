"""Where targets come from: a local directory, a hub id, or a GGUF file with its tokenizer and chat template; and adapters."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any, cast

import torch
from safetensors import safe_open
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    __version__,
)

from flashdraft.errors import CheckpointError, ConfigError, FlashdraftError, UnsupportedModelError
from flashdraft.targets.discovery import decoder_layers, refuse_unsupported
from flashdraft.targets.gguf import dequantizing as dequantizing_gguf
from flashdraft.targets.gguf import gguf_arguments, reading
from flashdraft.targets.lora import CONFIG, WEIGHTS, LoraConfig, merge_lora
from flashdraft.targets.media import load_processor
from flashdraft.targets.quantized import (
    Quantized,
    dequantizing,
    left_out,
    quantization_of,
    refuse_packed,
    refuse_uneven_blocks,
    unpacked,
    without_quantization,
)
from flashdraft.targets.quiet import quiet
from flashdraft.targets.target import Target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ADAPTER_FILES = [CONFIG, WEIGHTS, "tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.jinja"]
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = {"BF16", "F16", "F32", "F64"}


def load_target(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    revision: str | None = None,
    lora: str | Path | None = None,
) -> Target:
    """Load a target: a directory in transformers' layout, a hub id, or a `.gguf` file (dequantized).

    dtype "auto" keeps the checkpoint's own. lora: an adapter in PEFT's layout, directory or hub id, merged into the weights.
    Raises CheckpointError for files that are missing or corrupt, UnsupportedModelError for a family that cannot be run
    losslessly or an adapter that cannot be merged, ConfigError for a bad dtype or a revision of what has none.
    """
    target = Target(load_model(name, dtype=dtype, revision=revision, lora=lora).to(device))  # type: ignore[arg-type]
    if target.media is not None:
        target.media.load = partial(load_processor, where=_source(name, revision))
    return target


def load_model(
    name: str | Path, *, dtype: str | torch.dtype = "auto", revision: str | None = None, lora: str | Path | None = None
) -> PreTrainedModel:
    """The transformers model of load_target, in host memory."""
    _check_dtype(dtype)
    adapter = None if lora is None else _adapter(lora)
    config_of_adapter = None if adapter is None else LoraConfig.from_json(str(lora), _read_json(adapter / CONFIG))
    where = _source(name, revision)
    with _loading(f"{name}: cannot load the model", "check its files or download them again", where):
        ask_hub(where)
        config = AutoConfig.from_pretrained(**where)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise UnsupportedModelError(f"{name}: {config.model_type} is not a causal language model, which a target must be")
        refuse_unsupported(config)
        refuse_unsupported(config.get_text_config())
        quantized = quantization_of(name, config)
        model, info = _read_model(name, config, where, quantized, resolve_dtype(dtype, config.get_text_config()))
        if quantized is None and "gguf_file" not in where:
            _refuse_codes(name, model, _safetensors(where))
    if quantized is not None:
        info["unexpected_keys"] = left_out(list(info.get("unexpected_keys") or ()))
    _refuse_misfits(name, model, info)
    if quantized is not None:
        refuse_packed(name, model)
    if adapter is not None and config_of_adapter is not None:
        merge_lora(model, config_of_adapter, adapter / WEIGHTS)
    return model


def _read_model(
    name: str | Path, config: Any, where: dict[str, Any], quantized: Quantized | None, dtype: torch.dtype
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model with plain weights of `dtype`, and what transformers reports on loading it."""
    # Told to ignore wrong shapes, it reports them all; otherwise its error names none.
    arguments: dict[str, Any] = dict(config=config, dtype=dtype, ignore_mismatched_sizes=True, output_loading_info=True)
    kind: Any = AutoModelForCausalLM
    if "gguf_file" in where:
        arguments["quantization_config"] = dequantizing_gguf()
    elif quantized is not None:
        files = _fetched(where)
        refuse_uneven_blocks(name, quantized, files)
        if quantized.unpacked_here:
            without_quantization(config)
            kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            arguments["state_dict"] = unpacked(name, quantized, files, dtype)
        else:
            dequantizing(config)
    if "state_dict" in arguments:  # which transformers takes without a place only
        model, info = kind.from_pretrained(None, **arguments)
        with contextlib.suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(where["pretrained_model_name_or_path"])
        return model, info
    return cast("tuple[PreTrainedModel, dict[str, Any]]", kind.from_pretrained(**where, **arguments))


def _fetched(where: dict[str, Any]) -> list[Path]:
    """The safetensors files of a target, downloaded if it is the hub's."""
    from huggingface_hub import snapshot_download

    if "revision" in where and not _safetensors(where):
        snapshot_download(
            where["pretrained_model_name_or_path"], revision=where["revision"], allow_patterns=["*.json", "*.safetensors"]
        )
    return _safetensors(where)


def load_tokenizer(name: str | Path, *, revision: str | None = None, lora: str | Path | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer, with its chat template, from the same places as load_target. Raises CheckpointError if there is none.

    Where the directory of the adapter `lora` has a tokenizer or a chat template, these are taken instead.
    """
    tokenizer = _own_tokenizer(name, _source(name, revision))
    if lora is None:
        return tokenizer
    adapter, template = _adapter(lora), tokenizer.chat_template
    if (adapter / "tokenizer_config.json").is_file():
        tokenizer = _own_tokenizer(lora, {"pretrained_model_name_or_path": str(adapter), "trust_remote_code": False})
        tokenizer.chat_template = tokenizer.chat_template or template
    elif (own := adapter / "chat_template.jinja").is_file():
        with _loading(f"{lora}: cannot read {own.name}", "save it as UTF-8", {}):
            tokenizer.chat_template = own.read_text(encoding="utf-8")
    return tokenizer


def _own_tokenizer(name: str | Path, where: dict[str, Any]) -> PreTrainedTokenizerBase:
    with _loading(f"{name}: no usable tokenizer", "add its tokenizer.json and tokenizer_config.json", where):
        ask_hub(where)
        tokenizer = AutoTokenizer.from_pretrained(**where)
        if len(tokenizer) <= len(tokenizer.all_special_tokens):  # without its files transformers makes an empty one
            raise CheckpointError(f"{name}: no usable tokenizer: add its tokenizer.json and tokenizer_config.json")
        return tokenizer


def resolve_dtype(dtype: str | torch.dtype, config: Any) -> torch.dtype:
    """The dtype to load in: for "auto" the configuration's own, bfloat16 if it names none that we serve."""
    _check_dtype(dtype)
    if isinstance(dtype, torch.dtype):
        return dtype
    own = getattr(config, "dtype", None) if dtype == "auto" else dtype
    own = DTYPES.get(own) if isinstance(own, str) else own
    return own if isinstance(own, torch.dtype) and own in DTYPES.values() else torch.bfloat16


def _check_dtype(dtype: object) -> None:
    if dtype not in ("auto", *DTYPES, *DTYPES.values()):
        raise ConfigError(f"dtype must be auto, {', '.join(DTYPES)}, got {dtype!r}")


def _adapter(lora: str | Path) -> Path:
    """The directory of an adapter: local, or in the hub's cache. Raises CheckpointError if it lacks its two files."""
    from huggingface_hub import snapshot_download

    text = str(lora)
    if not text:
        raise CheckpointError("the name of the adapter is empty: give its directory or a hub id (OWNER/NAME)")
    try:
        path = Path(lora).expanduser()
        hub = not path.exists() and not text.startswith((".", "/", "~")) and text.count("/") == 1
        if not hub and not path.is_dir():
            raise NotADirectoryError
    except (OSError, RuntimeError) as error:  # over-long names and homes of nobody too
        raise CheckpointError(
            f"{_shown(text)}: no such directory; give an adapter's directory or a hub id (OWNER/NAME)"
        ) from error
    if hub:
        where = {"pretrained_model_name_or_path": text, "revision": "main"}
        with _loading(f"{text}: cannot load the adapter", "check the name, the network and access", where):
            ask_hub(where, CONFIG)
            path = Path(snapshot_download(text, allow_patterns=_ADAPTER_FILES))
    if gone := [file for file in (CONFIG, WEIGHTS) if not (path / file).is_file()]:
        raise CheckpointError(f"{lora}: no {gone[0]}, so it is no LoRA adapter in PEFT's layout: save it with safetensors")
    return path


def adapter_hash(lora: str | Path) -> str:
    """32 hexadecimal digits that name the weights of an adapter. Raises CheckpointError where there are none."""
    return hashlib.blake2b((_adapter(lora) / WEIGHTS).read_bytes(), digest_size=16).hexdigest()


def _source(name: str | Path, revision: str | None) -> dict[str, Any]:
    """Arguments that tell transformers where to look. What looks like a path and is not there never becomes a hub look-up."""
    if not str(name):
        raise CheckpointError("the name of the target is empty: give a directory, a .gguf file or a hub id (OWNER/NAME)")
    try:
        return _found(name, revision)
    except (OSError, RuntimeError) as error:  # over-long names, homes of nobody, directories that may not be read
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(
            f"{_shown(name)} cannot be looked up ({reason}): give a directory, a .gguf file or a hub id (OWNER/NAME)"
        ) from error


def _shown(name: str | Path) -> str:
    return str(name) if len(str(name)) <= 200 else f"{str(name)[:200]}..."


def _found(name: str | Path, revision: str | None) -> dict[str, Any]:
    text, path = str(name), Path(name).expanduser()
    if revision is not None and (text.endswith(".gguf") or path.is_dir()):
        raise ConfigError(
            f"{name} is local and has no revision {revision!r}; revisions select hub versions: give the sub-directory instead"
        )
    # False, not the default: that one asks at the terminal whether to run a repository's code.
    arguments: dict[str, Any] = {"trust_remote_code": False}
    if text.endswith(".gguf"):
        return arguments | gguf_arguments(path)
    if path.is_dir():
        _check_directory(name, path)
        return arguments | {"pretrained_model_name_or_path": str(path)}
    if path.exists() or text.startswith((".", "/", "~")) or text.endswith((".json", ".safetensors")) or text.count("/") != 1:
        raise CheckpointError(
            f"{_shown(name)}: no such directory; give a directory in transformers' layout, a .gguf file or a hub id "
            "(OWNER/NAME)"
        )
    return arguments | {"pretrained_model_name_or_path": text, "revision": revision or "main"}


def ask_hub(where: dict[str, Any], filename: str = "config.json") -> None:
    """Raise OSError at once if the hub does not answer: transformers would ask six times in 25 s and print each failure."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if "revision" not in where:
        return
    file = {"repo_id": where["pretrained_model_name_or_path"], "filename": filename, "revision": where["revision"]}
    if isinstance(try_to_load_from_cache(**file), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(**file), timeout=10)
    except OSError:
        raise
    except Exception as error:  # a network that fails does so with an error of the HTTP library
        raise ConnectionError(str(error)) from error


def _check_directory(name: str | Path, path: Path) -> None:
    """What transformers would report late, or in many words."""
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{name} has no config.json: give a directory in transformers' layout, a .gguf file or a hub id")
    config = _read_json(path / "config.json")
    if "model_type" not in config:
        raise CheckpointError(f"{name}: its config.json has no model_type, so it is not one of transformers' layout")
    if not isinstance(config["model_type"], str) or config["model_type"] not in CONFIG_MAPPING:
        own_code = " (it comes with code of its own, which is never run)" if "auto_map" in config else ""
        raise UnsupportedModelError(
            f"{name}: transformers {__version__} knows no model_type {config['model_type']!r}{own_code}; upgrade it if "
            "the family is new"
        )
    shards = _shards(path / _INDEX) if (path / _INDEX).is_file() else []
    if gone := [_shown(shard) for shard in shards if not os.path.isfile(path / shard)]:  # is_file() raises for over-long names
        raise CheckpointError(f"{name}: {', '.join(gone[:3])}, named in {_INDEX}, is missing: copy or download it")


def _shards(index: Path) -> list[str]:
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(shard, str) for shard in names.values()):
        raise CheckpointError(f"{index} has no weight_map of tensor names to file names: copy or download it again")
    return sorted(set(names.values()))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of the encoding, or of JSON
        raise CheckpointError(f"{path} is not valid JSON ({error}): repair it or download it again") from error
    except RecursionError:
        raise CheckpointError(f"{path} is nested too deeply to be read: repair it or download it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object: repair it or download it again")
    return content


def _safetensors(where: dict[str, Any]) -> list[Path]:
    """The safetensors files that a model was just loaded from, in its directory or the hub's cache; [] if from others."""
    from huggingface_hub import try_to_load_from_cache

    root = where["pretrained_model_name_or_path"]

    def find(file: str) -> list[Path]:
        if "revision" not in where:
            return [path] if (path := Path(root) / file).is_file() else []
        cached = try_to_load_from_cache(root, file, revision=where["revision"])
        return [Path(cached)] if isinstance(cached, str) else []

    return find(_WEIGHTS) or [path for index in find(_INDEX) for shard in _shards(index) for path in find(shard)]


def _refuse_codes(name: str | Path, model: PreTrainedModel, files: list[Path]) -> None:
    """Refuse weights stored as integers or 8-bit floats that no quantization explains: the codes would be cast to values."""
    state = model.state_dict()
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - not a mapping
                # Some files keep masks and position numbers, under other names than .weight, that the model makes itself.
                wanted = state[key].is_floating_point() if key in state else key.endswith(".weight")
                if wanted and (dtype := opened.get_slice(key).get_dtype()) not in _FLOATS:
                    raise CheckpointError(
                        f"{name}: {key} is stored as {dtype}, and its config.json names no quantization to read it by: use "
                        "the unquantized target, or one whose quantization_config transformers reads"
                    )


def _refuse_misfits(name: str | Path, model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Refuse weights that are not those of the configuration: absent, of another shape, or without a place in the model."""
    shapes = [f"{key} {list(theirs)} instead of {list(ours)}" for key, theirs, ours in info.get("mismatched_keys") or ()]
    groups = {
        "missing": sorted(info.get("missing_keys") or ()),
        "of another shape": sorted(shapes),
        "without a place in this model": _homeless(model, sorted(info.get("unexpected_keys") or ())),
    }
    found = [f"{what}: {', '.join(keys[:3])}{' ...' if len(keys) > 3 else ''}" for what, keys in groups.items() if keys]
    if found:
        raise CheckpointError(
            f"{name}: the weights are not those of its config.json (tensors {'; '.join(found)}): download both again"
        )


def _homeless(model: PreTrainedModel, unexpected: list[str]) -> list[str]:
    """Tensors whose module is there but does not want them (a bias left out), and layers beyond the last.

    Others stay aside, as in transformers: encoders of other media, heads of other tasks, layers for multi-token prediction.
    """
    modules = dict(model.named_modules())
    layers = decoder_layers(model)
    prefix = next(key for key, module in modules.items() if module is layers) + "."
    spare = bool(getattr(model.config.get_text_config(), "num_nextn_predict_layers", 0))
    return [
        key
        for key in unexpected
        if (key.rpartition(".")[0] in modules and not key.endswith("inv_freq")) or (key.startswith(prefix) and not spare)
    ]


@contextlib.contextmanager
def _loading(failure: str, remedy: str, where: dict[str, Any]) -> Iterator[None]:
    """Load quietly, and turn whatever transformers, safetensors, tokenizers or gguf raise for bad files into one sentence."""
    parsing = reading() if "gguf_file" in where else contextlib.nullcontext()
    try:
        with quiet(), parsing:
            yield
    except FlashdraftError:
        raise
    # All of them: bad files surface as OSError, KeyError, SafetensorError, UnpicklingError, struct.error and more.
    except Exception as error:
        reason = shorten(str(error) or type(error).__name__, 200, placeholder=" ...")
        if "revision" in where and isinstance(error, OSError):
            failure = (
                f"{where['pretrained_model_name_or_path']} at revision {where['revision']} is neither a local directory nor"
            )
            failure, remedy = f"{failure} readable from the hub", "check the name, the network and access"
        raise CheckpointError(f"{failure} ({reason}): {remedy}") from error
