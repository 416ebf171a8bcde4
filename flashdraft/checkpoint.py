"""Drafts on disk: load_draft, save_draft, convert, and check_pair for the target they are to serve.

A draft is a directory with config.json (config_json.py; the Speculators layout in speculators.py) and safetensors weights
whose names are the parameter names of DFlashDraft. Format: docs/draft.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flashdraft import __version__
from flashdraft.config_json import config_sha256, dump_config, is_draft_config, parse_config, read_json
from flashdraft.draft import DFlashConfig, DFlashDraft
from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.model_files import (
    CONFIG,
    INDEX,
    WEIGHTS,
    TensorInfo,
    locate,
    looked_up,
    reason_of,
    shown,
    tensor_infos,
    weight_files,
)
from flashdraft.quant.export import PARTS
from flashdraft.quant.linear import expand, has_kernels
from flashdraft.quantized import (
    Expected,
    Quantization,
    dump_section,
    expected_tensors,
    place_quantized,
    quantization_of,
    scale_faults,
    section_of,
)
from flashdraft.speculators import Json, from_dflash, is_speculators

Layout = Literal["dflash", "speculators"]
_PREFIX = "model."  # of tensors, in files of other programs
STAMP = "config_sha256"  # key in the header of the weights: config_json.config_sha256 of the config.json saved with them


def read_config(path: str | Path, *, revision: str | None = None) -> DFlashConfig:
    """The configuration of a draft directory, a bare config.json, or a hub id (of which only the JSON files are fetched).

    Whether embeddings and head are the draft's own is read off the weight files where there are any.
    """
    folder = locate(path, revision, weights=False)
    raw = read_json(folder / CONFIG)
    # Of a hub id the index may be here without its shards: then the configuration has to do.
    infos = draft_tensors(folder) if Path(path).expanduser().exists() else {}
    return _parse(raw, infos, folder)


def draft_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of a draft by its name here, from the headers alone: some files call it `model.` and that name."""
    infos = tensor_infos(folder)
    if not any(name.startswith(_PREFIX) for name in infos):
        return infos
    names = {name: name.removeprefix(_PREFIX) for name in infos}
    if twice := sorted(name for name, count in Counter(names.values()).items() if count > 1):
        raise CheckpointError(
            f"{folder} holds {twice[0]} twice, with and without {_PREFIX!r} before it: export the draft again"
        )
    return {names[name]: info for name, info in infos.items()}


def _parse(raw: Json, infos: Mapping[str, TensorInfo], folder: Path) -> DFlashConfig:
    try:
        return parse_config(raw, infos or None)
    except (CheckpointError, ConfigError) as error:
        raise type(error)(f"{folder}: {error}") from error


def quantization(raw: Mapping[str, object]) -> str | None:
    """The name of a config.json's quantization, or None."""
    section = section_of(raw)
    return None if section is None else str(section.get("quant_algo") or section.get("quant_method") or "unnamed")


def load_draft(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    revision: str | None = None,
    packed: bool | None = False,
    stamped: bool = True,
) -> DFlashDraft:
    """Load a draft of either layout from a directory or a hub id.

    dtype: of all weights; None keeps the file's (the widest, if it mixes several). revision: a hub revision, or the
    sub-directory of a local draft. An NVFP4 draft is expanded to `dtype`, and rounds its inputs too if it is W4A4; `packed`
    leaves its linears as they are on disk, as QuantizedLinear (None: where there are kernels for them). `stamped` False takes
    weights that were saved with another configuration too.

    Raises CheckpointError for files that are absent, corrupt, not finite, quantized otherwise, of different saves, or that hold
    other tensors than config.json says (all of them named at once), ConfigError for a configuration that cannot work.
    """
    folder = locate(path, revision)
    raw = read_json(folder / CONFIG)
    infos = draft_tensors(folder)
    config = _parse(raw, infos, folder)
    if not infos:
        raise CheckpointError(f"{folder} has no weights: put {WEIGHTS}, or {INDEX} and its files, beside {CONFIG}")
    if (folder / "mask_embedding.pt").exists():
        raise CheckpointError(
            f"{folder} has a mask embedding of its own (mask_embedding.pt), which cannot be used: train without"
        )
    if stamped:
        _check_stamps(folder, config, infos)
    with torch.device("meta"):
        draft = DFlashDraft(config)
    tied = _is_tied(config, raw, infos)
    quantized = _quantization(folder, raw, draft, infos)
    expected = {n: e for n, e in expected_tensors(draft, quantized).items() if not (tied and n == "lm_head.weight")}
    problems = [*(quantized.faults if quantized else ()), *_mismatches(expected, infos)]
    if problems:
        raise CheckpointError(
            f"{folder}: the weights do not fit {CONFIG}: {'; '.join(problems)}. Use the {CONFIG} the weights were saved with"
        )
    stored = {f"{name}.{part}" for name in (quantized.names if quantized else ()) for part in ("weight", *PARTS)}
    tensors, dtype = _read_tensors(infos, dtype, device, stored)
    _check_values(folder, tensors, config)
    if tied:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    if quantized:
        place_quantized(draft, quantized)
    draft.load_state_dict(tensors, assign=True)
    if tied and draft.lm_head is not None and draft.embed_tokens is not None:
        draft.lm_head.weight = draft.embed_tokens.weight
    packed = has_kernels(torch.device(device), dtype) if packed is None else packed
    if quantized and not packed:
        expand(draft, dtype)
    return draft.eval()


def _quantization(folder: Path, raw: Json, draft: DFlashDraft, infos: Mapping[str, TensorInfo]) -> Quantization | None:
    section = section_of(raw)
    if section is not None and isinstance(section.get("quantization"), dict):
        raise CheckpointError(
            f"{folder}: its quantization_config is nested as in hf_quant_config.json, which other readers refuse too: move the "
            "keys under 'quantization' one level up (quant_algo, group_size, exclude_modules)"
        )
    try:
        return quantization_of(raw, draft, infos)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def _check_stamps(folder: Path, config: DFlashConfig, infos: Mapping[str, TensorInfo]) -> None:
    """Refuse weights that were saved with another configuration; those of other programs carry no stamp, and pass."""
    digest = config_sha256(config)
    for file in sorted({info.file for info in infos.values()}):
        with safe_open(file, framework="pt") as opened:
            stamp = (opened.metadata() or {}).get(STAMP, digest)
        if stamp != digest:
            raise CheckpointError(f"{folder}: {CONFIG} and {file.name} were not written together: save or copy the draft again")


def _is_tied(config: DFlashConfig, raw: Json, infos: Mapping[str, TensorInfo]) -> bool:
    """Whether the draft's own embeddings are its own head too; a head over a smaller vocabulary cannot be."""
    layer = raw.get("transformer_layer_config")
    tie = raw.get("tie_word_embeddings") or (layer.get("tie_word_embeddings") if isinstance(layer, dict) else None)
    own = config.has_own_lm_head and config.has_own_embeddings and config.draft_vocab_size is None
    return bool(tie and own) and "lm_head.weight" not in infos


def _mismatches(expected: Expected, infos: Mapping[str, TensorInfo]) -> list[str]:
    """What is wrong with the tensors of a file, one phrase for each kind of fault. t2d is checked against d2t, not loaded."""
    found = {name: info for name, info in infos.items() if not (name == "t2d" and "d2t" in expected)}
    missing = sorted(expected.keys() - found.keys())
    unexpected = sorted(found.keys() - expected.keys())
    shared = sorted(expected.keys() & found.keys())
    shapes = [
        f"{n} {list(found[n].shape)} instead of {list(expected[n][0])}" for n in shared if found[n].shape != expected[n][0]
    ]
    kinds = [f"{n} {found[n].dtype}" for n in shared if found[n].dtype not in expected[n][1]]
    faults = {"missing": missing, "unexpected": unexpected, "mis-shaped": shapes, "of the wrong type": kinds}
    return [f"{fault} {', '.join(names)}" for fault, names in faults.items() if names]


def _read_tensors(
    infos: Mapping[str, TensorInfo], dtype: torch.dtype | None, device: str | torch.device, stored: Collection[str]
) -> tuple[dict[str, Tensor], torch.dtype]:
    """All tensors, and the type they have; those of `stored` names stay of the type of the file."""
    tensors: dict[str, Tensor] = {}
    with ExitStack() as stack:
        files = {info.file for info in infos.values()}
        opened = {file: stack.enter_context(safe_open(file, framework="pt", device=str(device))) for file in files}
        stored_names = {file: set(handle.keys()) for file, handle in opened.items()}
        for name, info in infos.items():
            there = name if name in stored_names[info.file] else _PREFIX + name
            tensors[name] = opened[info.file].get_tensor(there)
    wanted = dtype
    for name, tensor in tensors.items():
        if dtype is None and tensor.is_floating_point() and name not in stored:
            wanted = tensor.dtype if wanted is None else torch.promote_types(wanted, tensor.dtype)
    assert wanted is not None, "a draft has norms, which are never quantized"
    cast = {name: t if name in stored else t.to(wanted if t.is_floating_point() else torch.long) for name, t in tensors.items()}
    return cast, wanted


def _check_values(folder: Path, tensors: dict[str, Tensor], config: DFlashConfig) -> None:
    """Refuse NaN, infinities and a token mapping that leaves the vocabulary; takes t2d out of the tensors."""
    # aminmax keeps NaN, allocates nothing and takes a tenth of isfinite's time: 0.5 s for the 1.03 G reference draft.
    floats = {name: t for name, t in tensors.items() if t.is_floating_point() and t.dtype != torch.float8_e4m3fn}
    bad = [name for name, tensor in floats.items() if not torch.stack(torch.aminmax(tensor)).isfinite().all()]
    if bad:
        raise CheckpointError(f"{folder}: {', '.join(bad)} hold NaN or infinite values: take an earlier checkpoint")
    if faults := scale_faults(tensors):
        raise CheckpointError(f"{folder}: {'; '.join(faults)}: quantize the draft again, or get it again")
    mask = tensors.pop("t2d", None)
    if (offsets := tensors.get("d2t")) is None:
        return
    ids = torch.arange(len(offsets), device=offsets.device) + offsets
    if ids.min() < 0 or ids.max() >= config.vocab_size or len(ids.unique()) != len(ids):
        raise CheckpointError(f"{folder}: d2t must map each draft id to its own id below {config.vocab_size}: export it again")
    if mask is not None and (len(mask) != config.vocab_size or mask.nonzero().flatten().tolist() != sorted(ids.tolist())):
        raise CheckpointError(f"{folder}: t2d does not mark the tokens that d2t maps to: export the draft again")


def save_draft(
    draft: DFlashDraft,
    path: str | Path,
    *,
    layout: Layout = "dflash",
    target: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write a draft to a directory, which then holds the old files or the new, each one whole.

    Over an old draft, the two files are renamed into place one after the other. The header of the weights names the
    configuration they belong to, so that what is left by a process killed in between is refused by load_draft, not misread.
    target: name or path of the target it was trained for; metadata: kept with it in the header of the weights. Other files of
    an existing directory stay. Raises CheckpointError if `path` holds something other than a draft or cannot be written.
    """
    folder = _destination(path)
    if layout not in ("dflash", "speculators"):
        raise ConfigError(f"unknown layout {layout!r}: choose 'dflash' or 'speculators'")
    raw = dump_config(draft.config, str(draft.norm.weight.dtype).removeprefix("torch."))
    if section := dump_section(draft, __version__):
        raw["quantization_config"] = section
    if layout == "speculators":
        raw = from_dflash(raw, target)
    # A tied head is written out: to readers, has_own_lm_head without the tensor is a head that was never set.
    tensors = {name: t.detach().cpu().contiguous() for name, t in draft.state_dict().items()}
    if draft.embed_tokens is not None and draft.lm_head is not None and draft.lm_head.weight is draft.embed_tokens.weight:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].clone()
    # Of the configuration as it will be read, in which rope_theta 500000 has become 500000.0.
    stamp = config_sha256(parse_config(raw, tensors))
    header = {**(metadata or {}), **({"target": target} if target else {}), "format": "pt", STAMP: stamp}
    if odd := [key for key, value in header.items() if not isinstance(key, str) or not isinstance(value, str)]:
        raise CheckpointError(f"the metadata of a draft are strings by name, and {odd[0]!r} is not: convert it with str()")
    try:
        _write(folder, tensors, header, json.dumps(raw, indent=1) + "\n")
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{shown(folder)} cannot be written ({reason_of(error)}): mend that or choose another directory"
        ) from error
    return folder


def _destination(path: str | Path) -> Path:
    """The directory to save to. Raises CheckpointError for what saving would damage, and for names that cannot be one."""
    folder = looked_up(path)
    try:
        if folder.is_symlink() and not folder.exists():
            raise CheckpointError(f"{folder} is a symbolic link that leads nowhere: remove it or choose another directory")
        other = folder.exists() and not folder.is_dir()
        if (folder / CONFIG).exists():
            other = other or not is_draft_config(read_json(folder / CONFIG))
        else:
            other = other or any(os.path.lexists(folder / name) for name in (WEIGHTS, INDEX))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read ({reason_of(error)}): choose another directory") from error
    if other:
        raise CheckpointError(
            f"{folder} holds something other than a draft, which saving would damage: choose another directory"
        )
    return folder


def _write(folder: Path, tensors: dict[str, Tensor], header: dict[str, str], config: str) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Not by the directory's own name, which may take all of the 255 bytes a name can have.
    stem = f".flashdraft-{hashlib.sha256(os.fsencode(folder.name)).hexdigest()[:16]}."
    for left in folder.parent.glob(f"{stem}*.tmp"):  # by a process that was killed while it saved: as large as the draft
        if not _is_running(int(left.name.removeprefix(stem).removesuffix(".tmp"))):
            shutil.rmtree(left, ignore_errors=True)
    scratch = folder.parent / f"{stem}{os.getpid()}.tmp"
    scratch.mkdir()
    try:
        save_file(tensors, scratch / WEIGHTS, metadata=header)
        (scratch / CONFIG).write_text(config, encoding="utf-8")
        shutil.copymode(scratch / CONFIG, scratch / WEIGHTS)  # safetensors makes it readable by its owner alone
        _install(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _is_running(process: int) -> bool:
    """Whether there is such a process beside this one; on Windows, where asking would end it, every other one is."""
    if process == os.getpid():
        return False
    if os.name == "nt":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        pass
    return True


def _install(scratch: Path, folder: Path) -> None:
    if not folder.exists():
        scratch.rename(folder)
        return
    stale = [file for file in weight_files(folder) if file.name != WEIGHTS] if (folder / INDEX).is_file() else []
    # Weights first, which can tell that an old config.json is not theirs; an old file without a stamp could not. Where there is
    # none, config.json first: weights alone would be taken for somebody else's by the next save.
    for name in (WEIGHTS, CONFIG) if (folder / CONFIG).exists() else (CONFIG, WEIGHTS):
        os.replace(scratch / name, folder / name)
    for file in [*stale, folder / INDEX]:
        file.unlink(missing_ok=True)


def convert(source: str | Path, destination: str | Path, layout: Layout, *, revision: str | None = None) -> Path:
    """Rewrite a draft in another layout: the same tensors, the same configuration, the header's metadata kept."""
    folder = locate(source, revision)
    draft = load_draft(folder, packed=True)
    with safe_open(weight_files(folder)[0], framework="pt") as opened:
        metadata = dict(opened.metadata() or {})
    raw = read_json(folder / CONFIG)
    section = raw.get("speculators_config") if is_speculators(raw) else None
    named = section.get("verifier") if isinstance(section, dict) else None
    target = metadata.get("target") or (named.get("name_or_path") if isinstance(named, dict) else None)
    return save_draft(draft, destination, layout=layout, target=target, metadata=metadata)


def check_pair(config: DFlashConfig, *, hidden_size: int, vocab_size: int, num_layers: int) -> None:
    """Raise ConfigError, in one sentence that names every misfit, if a draft cannot serve a target of these sizes.

    A target with more layers than num_target_layers passes: published drafts understate it, Speculators files omit it, and
    readers look only at the feature layers.
    """
    misfits = []
    if config.hidden_size != hidden_size:
        misfits.append(f"its hidden size is {config.hidden_size}, the target's {hidden_size}")
    if config.vocab_size != vocab_size:
        misfits.append(f"its vocabulary has {config.vocab_size} tokens, the target's {vocab_size}")
    if config.num_target_layers > num_layers:
        ids = list(config.target_layer_ids)
        misfits.append(f"it reads layers {ids} of {config.num_target_layers}, the target has {num_layers} layers")
    if config.mask_token_id >= vocab_size:
        misfits.append(f"its mask token {config.mask_token_id} is no row of the target's {vocab_size} embeddings")
    if misfits:
        raise ConfigError(
            f"the draft does not fit the target: {'; '.join(misfits)}. Use a draft that was trained for this target"
        )
