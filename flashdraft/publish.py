"""`flashdraft publish`: a draft's directory to a hub, its W4A4 revision as a branch of the same repository."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashdraft.checkpoint import load_draft, quantization
from flashdraft.config_json import is_draft_config, read_json
from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.model_files import CONFIG, INDEX, reason_of, revisions_of, weight_files

CARD = "README.md"
BRANCH = "w4a4"
EXTRA = (CARD, "training.json", "training_prompts.npy", "quantization.json", "curves.png")
REPO = re.compile(r"[\w.-]+/[\w.-]+")


def publish(
    directory: Path, repo: str, *, private: bool = False, report: Callable[[str], None] = print
) -> dict[str, list[str]]:
    """Upload a draft as `main`, its sub-directory w4a4 as branch `w4a4`, each with the card; what went up, by branch.

    All of it is loaded first, so that nothing is published that cannot be read. Raises CheckpointError for what is no draft and
    for what the hub refuses, ConfigError for a name that is none or a draft without a card.
    """
    if not REPO.fullmatch(repo):
        raise ConfigError(f"{repo!r} is no name of a repository: give OWNER/NAME")
    places = {"main": directory} | ({BRANCH: directory / BRANCH} if BRANCH in revisions_of(directory) else {})
    for place in places.values():
        _check(place)
    if not (directory / CARD).is_file():
        raise ConfigError(f"{directory} has no {CARD}, the card that is published with it: run `flashdraft card {directory}`")
    api, went = _api(), dict[str, list[str]]()
    names_of = {branch: _files(place) for branch, place in places.items()}
    algorithms = {branch: quantization(read_json(place / CONFIG)) for branch, place in places.items()}
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        for branch, place in places.items():
            names = names_of[branch]
            if branch != "main":
                api.create_branch(repo, branch=branch, exist_ok=True)
            report(f"uploading {', '.join(names)} to {repo} ({branch})")
            api.upload_folder(
                repo_id=repo,
                folder_path=place,
                revision=branch,
                allow_patterns=names,
                delete_patterns=["*.safetensors", INDEX],  # of an earlier draft, which readers would take along
                commit_message=f"A draft by flashdraft ({algorithms[branch] or 'unquantized'})",
            )
            if branch != "main" and CARD not in names:
                api.upload_file(
                    repo_id=repo,
                    path_or_fileobj=directory / CARD,
                    path_in_repo=CARD,
                    revision=branch,
                    commit_message="The card",
                )
                names.append(CARD)
            went[branch] = names
    except Exception as error:  # of the hub, the disk and the network, whose errors are those of the HTTP library
        raise CheckpointError(
            f"{repo} could not be published ({reason_of(error)}): check the name, the network and `hf auth login`"
        ) from error
    return went


def _check(place: Path) -> None:
    if not place.is_dir() or not is_draft_config(read_json(place / CONFIG)):
        raise CheckpointError(f"{place} is not the directory of a draft: give one that train, fit or quantize wrote")
    load_draft(place, packed=True)


def _files(place: Path) -> list[str]:
    """The files of a draft that belong on a hub; not its work, nor its revisions."""
    weights = [file.name for file in weight_files(place)]
    index = [INDEX] if len(weights) > 1 else []
    return [CONFIG, *weights, *index, *(name for name in EXTRA if (place / name).is_file() and name not in weights)]


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(library_name="flashdraft")
