"""What is in a draft or a target: configuration, parameters by part, size on disk, and whether the two fit each other.

Weights are never loaded: sizes come from the headers of safetensors and GGUF files, counts from the configuration on the meta
device.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from flashdraft.checkpoint import (
    CONFIG,
    TensorInfo,
    check_pair,
    draft_tensors,
    locate,
    quantization,
    read_config,
    tensor_infos,
    weight_files,
)
from flashdraft.config_json import read_json, resembles_draft
from flashdraft.draft import DFlashConfig, DFlashDraft, count_parameters
from flashdraft.engine.cache import shapes_of
from flashdraft.engine.memory import request_bytes
from flashdraft.errors import CheckpointError, ConfigError, UnsupportedModelError
from flashdraft.model_files import revisions_of
from flashdraft.quant.export import ALGORITHMS
from flashdraft.quant.groups import fused_groups
from flashdraft.quantized import quantization_of
from flashdraft.speculators import is_speculators
from flashdraft.targets.gguf import gguf_arguments, reading
from flashdraft.targets.load import resolve_dtype
from flashdraft.targets.quiet import quiet
from flashdraft.targets.shapes import layer_specs_of

_DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn",
    "I8": "int8",
    "I32": "int32",
    "I64": "int64",
}


@dataclass(frozen=True)
class PairCheck:
    """One size of a draft against its target's."""

    what: str
    draft: int
    target: int
    verdict: Literal["fits", "differs", "misfit"]  # "differs" can be served


@dataclass(frozen=True)
class Inspection:
    """A draft or a target as its files describe it. Parameters are counts; sizes on disk are bytes."""

    path: str
    kind: Literal["draft", "target"]
    layout: Literal["dflash", "speculators", "transformers", "gguf"]
    config: dict[str, Any]
    parameters: dict[str, int]  # by part, "all" last
    layers: int
    parameters_per_layer: int | None  # None where layers differ
    dtype: str | None  # None: neither weights nor config say; of a GGUF file its tensor types
    quantization: str | None
    size_on_disk: int | None  # None: no weights there
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    feature_layers: tuple[int, ...] = ()  # of a draft
    quantized: tuple[str, ...] = ()  # linears in NVFP4, by the names readers run them under
    unquantized: tuple[str, ...] = ()  # of a draft with such linears, those that are not
    faults: tuple[str, ...] = ()  # where quantization_config and the tensors disagree
    revisions: tuple[str, ...] = ()  # sub-directories that `revision` selects
    target: str | None = None  # the target of the pair check
    pair: tuple[PairCheck, ...] = ()
    misfit: str | None = None  # why the pair cannot work
    memory: int | None = None  # bytes of a target's weights when it is loaded, which dequantizes them
    request_tokens: int | None = None  # of one request of the longest context, and the bytes of KV cache it takes in a target's
    request_memory: int | None = None  # own dtype, with the draft it is checked against; None for a draft alone

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, under the same names."""
        return asdict(self)


def inspect_path(
    path: str | Path,
    *,
    revision: str | None = None,
    target: str | Path | None = None,
    max_model_len: int | None = None,
) -> Inspection:
    """Describe a draft directory, a bare config.json, a target directory, a GGUF file or a hub id.

    target: a target directory, GGUF file or hub id to check a draft against, of which only the configuration is read; a
    misfit is reported, not raised. Of a hub id only JSON files are fetched, unless it is a draft, whose weights are.
    max_model_len: tokens of the request whose KV cache is told, without it as many as there are positions; then a target whose
    layers cannot be served is an UnsupportedModelError.
    """
    place = _place(path, revision)
    raw = read_json(place / CONFIG) if place.is_dir() else {}
    if not resembles_draft(raw):
        if target is not None:
            raise ConfigError(f"{path} is a target, and only a draft can be checked against one: give the draft first")
        report = _inspect_target(str(path), place) if place.is_dir() else _inspect_gguf(str(path), place)
        return _with_request(report, _target_config(place), None, max_model_len)
    local = Path(path).expanduser().exists()
    folder = place if local else locate(path, revision)
    report = _inspect_draft(str(path), folder)
    if target is None:
        if max_model_len is not None:
            raise ConfigError(f"the memory of a request is its target's too: give --target beside --max-model-len for {path}")
        return report
    config, theirs = read_config(folder), _target_config(_place(str(target)))
    report = _with_pair(report, config, str(target), theirs)
    return report if report.misfit else _with_request(report, theirs, config, max_model_len)


def _place(path: str | Path, revision: str | None = None) -> Path:
    """The directory or GGUF file of a model; of a hub id, the directory with its JSON files.

    What looks like a path and is not there is never looked up on the hub. Raises CheckpointError where there is nothing.
    """
    text = str(path)
    home = os.path.expanduser(text)
    if text.endswith(".gguf"):
        if not os.path.isfile(home):  # unlike Path.is_file(), False for an over-long name
            raise CheckpointError(f"{text[:200]}: no such GGUF file")
        if revision is not None:
            raise ConfigError(f"{path} is a file and has no revision {revision!r}: leave out --revision")
        return Path(home)
    local = text.startswith((".", "~", "/")) or text.endswith((".json", ".safetensors"))
    if local and not os.path.exists(home):
        raise CheckpointError(
            f"{text[:200]}: no such file or directory; give a directory, a {CONFIG}, a .gguf file or a hub id (OWNER/NAME)"
        )
    return locate(path, revision, weights=False)


def _inspect_draft(path: str, folder: Path) -> Inspection:
    raw = read_json(folder / CONFIG)
    config = read_config(folder)
    with torch.device("meta"):
        draft = DFlashDraft(config)
    infos = draft_tensors(folder)
    parameters = count_parameters(draft)
    found = quantization_of(raw, draft, infos) if infos and quantization(raw) in ALGORITHMS else None
    return Inspection(
        path=path,
        kind="draft",
        layout="speculators" if is_speculators(raw) else "dflash",
        config=asdict(config),
        parameters=parameters,
        layers=config.num_hidden_layers,
        parameters_per_layer=parameters["layers"] // config.num_hidden_layers,
        dtype=_dtype(infos.values()) or _stated_dtype(raw),
        quantization=quantization(raw),
        size_on_disk=_size(folder),
        windows=config.windows,
        causal=config.causal,
        feature_layers=config.target_layer_ids,
        quantized=tuple(fused_groups(found.names)) if found else (),
        unquantized=tuple(fused_groups(found.rest)) if found else (),
        faults=found.faults if found else (),
        revisions=revisions_of(folder),
    )


def _target_config(place: Path) -> Any:
    """The transformers configuration of a target's text model (the model itself where it is text only)."""
    gguf = place.suffix == ".gguf"
    where = gguf_arguments(place) if gguf else {"pretrained_model_name_or_path": place}
    try:
        # False, not the default: that one asks at the terminal whether to run a repository's code.
        with quiet(), reading() if gguf else contextlib.nullcontext():
            return AutoConfig.from_pretrained(**where, trust_remote_code=False).get_text_config()
    # All of them: what a configuration cannot hold surfaces as OSError, KeyError, TypeError, AttributeError and more.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if gguf:
            raise CheckpointError(f"{place} holds no model that transformers can read ({reason}): download it again") from error
        raise CheckpointError(
            f"{place / CONFIG} is neither a draft's nor a model's that transformers knows ({reason}): give a draft or a target"
        ) from error


def _inspect_target(path: str, folder: Path) -> Inspection:
    raw = read_json(folder / CONFIG)
    infos = tensor_infos(folder) if Path(path).expanduser().exists() else {}
    return replace(
        _describe_target(path, folder),
        dtype=_dtype(infos.values()) or _stated_dtype(raw),
        quantization=quantization(raw),
        size_on_disk=_size(folder) if infos else None,
    )


def _inspect_gguf(path: str, file: Path) -> Inspection:
    report = _describe_target(path, file)
    types: Counter[str] = Counter()
    with reading():
        import gguf

        for tensor in gguf.GGUFReader(file).tensors:
            types[tensor.tensor_type.name] += int(tensor.n_elements)
    return replace(
        report,
        layout="gguf",
        dtype=", ".join(_DTYPES.get(kind, kind) for kind, _ in types.most_common()),
        quantization=None if types.keys() <= _DTYPES.keys() else "GGUF",
        size_on_disk=file.stat().st_size,
    )


def _describe_target(path: str, place: Path) -> Inspection:
    """What the configuration of a target says, in a directory or a GGUF file; of the weights nothing."""
    config = _target_config(place)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise CheckpointError(f"{place} holds a {config.model_type}, which is no causal language model: give one") from error
    parts, by_layer = _target_parts(model, config.num_hidden_layers)
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return Inspection(
        path=path,
        kind="target",
        layout="transformers",
        config={
            "model_type": config.model_type,
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_hidden_layers,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": getattr(config, "max_position_embeddings", None),
        },
        parameters=parts,
        layers=config.num_hidden_layers,
        parameters_per_layer=by_layer.pop() if len(by_layer) == 1 else None,
        dtype=None,
        quantization=None,
        size_on_disk=None,
        windows=tuple(config.sliding_window if kind == "sliding_attention" else None for kind in types),
        causal=(True,) * config.num_hidden_layers,
        memory=parts["all"] * resolve_dtype("auto", config).itemsize,
    )


def _target_parts(model: nn.Module, layers: int) -> tuple[dict[str, int], set[int]]:
    """Parameters by part (a tied head counts once, as embeddings), and the different sizes of its layers."""
    parts = dict.fromkeys(("embeddings", "layers", "norms", "lm_head", "other"), 0)
    sizes: Counter[int] = Counter()
    for name, parameter in model.named_parameters():
        pieces = name.split(".")
        if "layers" in pieces[:-1]:
            sizes[int(pieces[pieces.index("layers") + 1])] += parameter.numel()
            part = "layers"
        elif "embed" in name or "wte" in pieces:
            part = "embeddings"
        elif pieces[0] == "lm_head":
            part = "lm_head"
        else:
            part = "norms" if "norm" in pieces[-2] else "other"
        parts[part] += parameter.numel()
    return {**parts, "all": sum(parts.values())}, {sizes[i] for i in range(layers)}


def _with_request(report: Inspection, target: Any, draft: DFlashConfig | None, wanted: int | None) -> Inspection:
    """With the KV cache of one request of the longest context, or of `wanted` tokens, as an engine on a GPU lays it out."""
    positions = [target.max_position_embeddings] if getattr(target, "max_position_embeddings", None) else []
    longest = min([*positions, *([draft.max_position_embeddings] if draft else [])], default=None)
    if wanted is not None and longest is not None and wanted > longest:
        raise ConfigError(f"--max-model-len {wanted} is more than the {longest} positions there are: lower it")
    tokens = wanted or longest
    if tokens is None:
        return report
    try:
        shapes = shapes_of(layer_specs_of(target), draft)
    except UnsupportedModelError:
        if wanted is not None:
            raise
        return report
    block = draft.block_size if draft else 1
    memory = request_bytes(shapes, resolve_dtype("auto", target), tokens + block)
    return replace(report, request_tokens=tokens, request_memory=memory)


def _with_pair(report: Inspection, config: DFlashConfig, target: str, theirs: Any) -> Inspection:
    hidden, vocab, layers = theirs.hidden_size, theirs.vocab_size, theirs.num_hidden_layers
    positions = getattr(theirs, "max_position_embeddings", None) or config.max_position_embeddings

    def verdict(**changed: int) -> Literal["fits", "misfit"]:
        """Whether the draft fits when only the named size is the target's."""
        own = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size, "num_layers": config.num_target_layers}
        try:
            check_pair(config, **{**own, **changed})
        except ConfigError:
            return "misfit"
        return "fits"

    layers_verdict = "differs" if layers > config.num_target_layers else verdict(num_layers=layers)
    rows = (
        PairCheck("hidden size", config.hidden_size, hidden, verdict(hidden_size=hidden)),
        PairCheck("vocabulary", config.vocab_size, vocab, verdict(vocab_size=vocab)),
        PairCheck("target layers", config.num_target_layers, layers, layers_verdict),
        PairCheck("mask token below", config.mask_token_id, vocab, "fits" if config.mask_token_id < vocab else "misfit"),
        # No misfit here, where positions are computed; readers that tabulate them lose all acceptance past the end.
        PairCheck(
            "positions",
            config.max_position_embeddings,
            positions,
            "fits" if config.max_position_embeddings >= positions else "differs",
        ),
    )
    try:
        check_pair(config, hidden_size=hidden, vocab_size=vocab, num_layers=layers)
        misfit = None
    except ConfigError as error:
        misfit = str(error)
    return replace(report, target=target, pair=rows, misfit=misfit)


def _dtype(infos: Iterable[TensorInfo]) -> str | None:
    """The types of the weights, the one of most elements first."""
    counts: Counter[str] = Counter()
    for info in infos:
        counts[info.dtype] += torch.Size(info.shape).numel()
    return ", ".join(_DTYPES.get(dtype, dtype) for dtype, _ in counts.most_common()) or None


def _stated_dtype(raw: dict[str, Any]) -> str | None:
    stated = raw.get("dtype", raw.get("torch_dtype"))
    return str(stated) if stated else None


def _size(folder: Path) -> int | None:
    return sum(file.stat().st_size for file in weight_files(folder)) or None
