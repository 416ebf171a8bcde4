"""Where a model's files are: a local directory or a hub id, its weight files, and what their headers say."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from flashdraft.config_json import read_json
from flashdraft.errors import CheckpointError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_HUB_ID = re.compile(r"(?!\.)[\w.-]+/[\w.-]+(?<!\.json)(?<!\.safetensors)")  # not ./x, nor a file that is missing


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its file's header describes it; reading this loads no weights."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' word: BF16, F32, U8, ...


def locate(path: str | Path, revision: str | None = None, *, weights: bool = True) -> Path:
    """The local directory of a model: a directory as it is, a hub id downloaded into the hub's cache.

    revision: a hub revision, or the sub-directory of a local model. weights: False fetches only the JSON files of a hub id.
    Raises CheckpointError where there is nothing.
    """
    folder = looked_up(path)
    if folder.name == CONFIG and folder.is_file():
        folder = folder.parent
    if folder.is_dir():
        if revision is None:
            return folder
        choices = list(revisions_of(folder))
        if revision not in choices:
            raise CheckpointError(
                f"{folder} has no revision {revision!r}: choose one of its sub-directories {choices or '(none)'}"
            )
        return folder / revision
    if folder.exists() or not _HUB_ID.fullmatch(str(path)):
        raise CheckpointError(
            f"{shown(path)} is not a directory: give one with {CONFIG} and {WEIGHTS}, or a hub id such as owner/name"
        )
    return _download(str(path), revision, weights)


def revisions_of(folder: Path) -> tuple[str, ...]:
    """The sub-directories of a local model that hold one themselves."""
    return tuple(sorted(place.parent.name for place in folder.glob(f"*/{CONFIG}")))


def looked_up(path: str | Path) -> Path:
    """`path` with ~ expanded. Raises CheckpointError for a name that no file can have (empty, over-long, of no user's home)."""
    if not str(path):
        raise CheckpointError("the name of the draft or target is empty: give a directory or a hub id such as owner/name")
    try:
        folder = Path(path).expanduser()
        folder.exists()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{shown(path)} cannot be looked up ({reason_of(error)}): give a directory or hub id") from error
    return folder


def shown(name: object) -> str:
    text = str(name)
    return text if len(text) <= 200 else f"{text[:200]}..."


def reason_of(error: Exception) -> str:
    """One line on an error, without the paths that an OSError repeats."""
    text = str(getattr(error, "strerror", None) or error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _download(hub_id: str, revision: str | None, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "training_prompts.npy"] if weights else ["*.json"]
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
    except Exception as error:  # of the hub, the disk and the network, whose errors are those of the HTTP library
        reason = reason_of(error)
        where = f"{hub_id} at revision {revision}" if revision else hub_id
        raise CheckpointError(
            f"{where} is neither a local directory nor readable from the hub ({reason}): check the name, the network and access"
        ) from error


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or else the files its index names; [] where there are neither."""
    if (single := folder / WEIGHTS).is_file():
        return [single]
    if not (folder / INDEX).is_file():
        return []
    names = read_json(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) and n == Path(n).name for n in names.values()):
        raise CheckpointError(f"{folder / INDEX} has no weight_map of tensor names to file names: download the draft again")
    files = [folder / name for name in sorted(set(names.values()))]
    if absent := [shown(file.name) for file in files if not os.path.isfile(file)]:  # is_file() raises for an over-long name
        raise CheckpointError(f"{folder} lacks {', '.join(absent)} of its {INDEX}: download the draft again")
    return files


def tensor_infos(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of a model directory by name, from the headers alone ({} without weight files)."""
    infos: dict[str, TensorInfo] = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    part = opened.get_slice(name)
                    infos[name] = TensorInfo(file, tuple(part.get_shape()), str(part.get_dtype()))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is corrupt or cut short ({error}): copy or download it again") from error
    return infos
