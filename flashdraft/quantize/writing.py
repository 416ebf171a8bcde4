"""The directory that `flashdraft quantize` leaves: made whole in its `work`, then put in place, config.json last."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from flashdraft.card.write import NAME as CARD
from flashdraft.card.write import card_of, is_handwritten
from flashdraft.checkpoint import save_draft, weight_files
from flashdraft.draft import DFlashDraft
from flashdraft.errors import ConfigError
from flashdraft.model_files import CONFIG, INDEX, WEIGHTS
from flashdraft.train.files import saying_what_is_wrong, write_whole

WORK = "work"  # of the output directory: the target's answers, which the same command goes on with
W4A4 = "w4a4"  # the sub-directory, and the branch on a hub
COPIED = ("training.json", "training_prompts.npy")  # whom the draft belongs to, and what it was trained on


def stage_of(output: Path) -> Path:
    """Where the directory is made; it is there while it is being put in place."""
    return output / WORK / "whole"


def refuse_others(output: Path, w4a4: bool) -> None:
    """Raises ConfigError for a directory that holds a model, or a w4a4 that would be taken for a revision of the draft."""
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output {output} is a file: give a directory, which is made where there is none")
    ours = stage_of(output).is_dir()  # of a run that was stopped while it put its files in place
    weights = any(os.path.lexists(output / name) for name in (WEIGHTS, INDEX))
    if (output / CONFIG).exists() or (weights and not ours):
        raise ConfigError(f"{output} holds a model already: give another --output")
    if os.path.lexists(output / W4A4) and not (ours and w4a4):
        raise ConfigError(
            f"{output / W4A4} is there already and would be taken for a revision of this draft: remove it, or give another "
            "--output"
        )


def save_forms(forms: Mapping[str, DFlashDraft], source: Path, output: Path, target: str) -> dict[str, int]:
    """Save every revision of a draft for the output directory, with what `source` says of it; bytes of weights by revision."""
    stage, sizes = stage_of(output), dict[str, int]()
    with saying_what_is_wrong(output):
        shutil.rmtree(stage, ignore_errors=True)
        for revision in forms:
            place = _place(stage, revision)
            place.mkdir(parents=True)
            for name in COPIED:
                with suppress(FileNotFoundError):
                    shutil.copyfile(source / name, place / name)
    for revision, form in forms.items():
        save_draft(form, _place(stage, revision), target=target)
        sizes[revision] = sum(file.stat().st_size for file in weight_files(_place(stage, revision)))
    return sizes


def put_in_place(output: Path) -> None:
    """Add the card and move all of it, main's config.json last: what is killed before is no draft yet, and is made again."""
    stage = stage_of(output)
    with saying_what_is_wrong(output):
        if not is_handwritten(output / CARD):
            write_whole(stage / CARD, card_of(stage, name=output.resolve().name))
        files = [path for path in stage.rglob("*") if path.is_file()]
        for file in sorted(files, key=lambda path: (path.name == CONFIG, path.parent == stage)):
            place = output / file.relative_to(stage)
            place.parent.mkdir(exist_ok=True)
            os.replace(file, place)
        shutil.rmtree(stage)


def _place(stage: Path, revision: str) -> Path:
    return stage if revision == "main" else stage / revision
