"""The draft that a card is of, as its own files describe it: revisions, sizes, training.json, quantization.json, target."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from flashdraft import builtin
from flashdraft.card.known import is_builtin_draft, target_of
from flashdraft.card.markdown import at, one_line
from flashdraft.checkpoint import CONFIG, locate, tensor_infos, weight_files
from flashdraft.config_json import is_draft_config, read_json
from flashdraft.errors import CheckpointError
from flashdraft.eval.local import files_hash
from flashdraft.inspection import Inspection, inspect_path
from flashdraft.model_files import revisions_of

MAIN = "main"
SCALES = (".weight_scale", ".weight_scale_2", ".input_scale")


@dataclass(frozen=True)
class Revision:
    """One form of the draft: the directory itself, or a sub-directory such as w4a4."""

    name: str
    folder: Path
    inspection: Inspection
    digest: str  # as in the provenance of results (eval/local.py)


@dataclass(frozen=True)
class Subject:
    """Everything that is read off a directory. training, quantization: {} without such a file."""

    name: str
    folder: Path
    revisions: tuple[Revision, ...]  # the directory itself first
    training: dict[str, Any]
    quantization: dict[str, Any]
    target: str | None  # a hub id; None where none is named
    target_words: str | None  # the target as the files name it
    is_builtin: bool  # the draft in the package
    of_builtin_target: bool

    @property
    def main(self) -> Inspection:
        return self.revisions[0].inspection

    @property
    def proposals(self) -> int:
        return int(self.main.config["block_size"]) - 1

    @property
    def lora(self) -> str | None:
        name = at(self.training, "lora", "name")
        return one_line(name) if isinstance(name, str) else None

    @property
    def target_revision(self) -> str | None:
        found = self.training.get("target_revision")
        return one_line(found) if isinstance(found, str) else None

    @classmethod
    def read(cls, path: str, *, name: str | None = None, training: dict[str, Any] | None = None) -> Subject:
        """name, training: of a directory that is not complete yet.

        Raises CheckpointError for what is no draft, is damaged, or holds other tensors than its config.json says.
        """
        is_builtin = is_builtin_draft(path)
        folder = builtin.draft_path() if is_builtin else locate(path)
        if not is_draft_config(read_json(folder / CONFIG)):
            raise CheckpointError(f"{folder} holds no draft: give the directory that train, fit or quantize wrote")
        others = [r for r in revisions_of(folder) if is_draft_config(read_json(folder / r / CONFIG))]
        revisions = tuple(_revision(n, folder if n == MAIN else folder / n) for n in (MAIN, *others))
        training = _optional(folder / "training.json") if training is None else training
        quantization = _optional(folder / "quantization.json")
        target = target_of(folder, weight_files(folder)[0], training, quantization, is_builtin)
        return cls(
            name=name or ("builtin" if is_builtin else folder.resolve().name if Path(path).exists() else path),
            folder=folder,
            revisions=revisions,
            training=training,
            quantization=quantization,
            target=target.hub_id,
            target_words=target.words,
            is_builtin=is_builtin,
            of_builtin_target=target.is_builtin,
        )


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _revision(name: str, folder: Path) -> Revision:
    infos = tensor_infos(folder)
    if not infos:
        raise CheckpointError(f"{folder} has no weights: a card is written of a whole draft")
    found = inspect_path(folder)
    faults = list(found.faults)
    held = sum(
        prod(info.shape) * (2 if info.dtype == "U8" else 1)  # two values of four bits a byte
        for name, info in infos.items()
        if not name.endswith(SCALES) and name not in ("d2t", "t2d")
    )
    stated = found.parameters["all"]
    # A head tied to the draft's own embeddings is counted by the configuration, and stored once.
    tied = found.parameters["lm_head"] if "lm_head.weight" not in infos else 0
    if held not in (stated, stated - tied):
        faults.append(f"the tensors hold {held:,} parameters, {CONFIG} describes {stated:,}")
    if faults:
        raise CheckpointError(f"{folder}: {'; '.join(faults)}. Use the {CONFIG} the weights were saved with")
    return Revision(name, folder, found, str(files_hash(str(folder))))
