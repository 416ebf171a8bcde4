"""What of the facts the files of a draft say already, read without PyTorch, so that a file of facts is printed at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from flashdraft import builtin
from flashdraft.card.facts import REPO, read_facts, template
from flashdraft.card.markdown import at
from flashdraft.errors import CheckpointError
from flashdraft.speculators import is_speculators
from flashdraft.train.files import read_object

BUILTIN_ON_THE_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class NamedTarget:
    """The target as files name it. hub_id: None where none is named; words: without the path it had."""

    hub_id: str | None
    words: str | None
    is_builtin: bool


def is_builtin_draft(path: str) -> bool:
    return path == builtin.NAME or Path(path).resolve() == builtin.DRAFT


def is_here(path: str) -> bool:
    """Whether nothing has to be fetched from a hub."""
    return is_builtin_draft(path) or Path(path).expanduser().is_dir()


def target_of(
    folder: Path, weights: Path | None, training: Mapping[str, Any], quantization: Mapping[str, Any], builtin_draft: bool
) -> NamedTarget:
    """weights: the first file of them, whose header may name the target, too."""
    header: dict[str, str] = {}
    if weights is not None:
        try:
            with safe_open(weights, framework="np") as opened:
                header = opened.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{weights} is corrupt or cut short ({error}): copy or download it again") from error
    words = str(quantization.get("target") or "").partition(" with adapter ")[0]
    verifier = at(read_object(folder / "config.json"), "speculators_config", "verifier", "name_or_path")
    # The surest first.
    names = [
        name
        for name in (training.get("target"), verifier, header.get("target"), words)
        if isinstance(name, str) and name.strip()
    ]
    own = builtin_draft or builtin.NAME in names
    on_hub = [name for name in names if REPO.fullmatch(name) and not name.startswith(".") and not Path(name).exists()]
    if own:
        return NamedTarget(BUILTIN_ON_THE_HUB, BUILTIN_ON_THE_HUB, True)
    return NamedTarget(on_hub[0] if on_hub else None, _without_path(names[0]) if names else None, False)


def _without_path(name: str) -> str:
    """Where a target lay on the machine it was trained on is nobody's business: its last part will do."""
    return Path(name).name if Path(name).is_absolute() or name.startswith(("~", ".")) else name


def known_facts(target: str | None, is_builtin: bool) -> dict[str, str]:
    """Facts that follow from the files."""
    found = {"base_model": target} if target else {}
    # The package's licence is that of its draft too.
    own = {"name": "SmolLM2-135M-Instruct-DFlash", "license": "apache-2.0", "developer": "the flashdraft authors"}
    return found | (own if is_builtin else {})


def show_template(draft: str, facts: Path | None) -> None:
    """A file of facts to fill in, on standard output. draft: a directory, or `builtin`. Raises CheckpointError for no draft."""
    own = is_builtin_draft(draft)
    folder = builtin.draft_path() if own else Path(draft).expanduser()
    raw = read_object(folder / "config.json") or {}
    if not (is_speculators(raw) or "dflash_config" in raw or "DFlash" in str(raw.get("architectures"))):
        raise CheckpointError(f"{folder} holds no draft: give the directory that train, fit or quantize wrote")
    training, quantization = (read_object(folder / f"{name}.json") or {} for name in ("training", "quantization"))
    weights = min(folder.glob("*.safetensors"), default=None)
    known = known_facts(target_of(folder, weights, training, quantization, own).hub_id, own)
    print(template({**known, **(read_facts(facts) if facts else {})}), end="")
