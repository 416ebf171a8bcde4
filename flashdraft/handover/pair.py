"""The pair to hand over: where another engine finds it, and what makes that engine refuse or misread it.

Nothing is run and no target weights are read; of a hub id the draft's files are fetched, as by `flashdraft inspect`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flashdraft import builtin
from flashdraft.belonging import of_another_target
from flashdraft.checkpoint import locate, tensor_infos, weight_files
from flashdraft.config_json import read_json
from flashdraft.draft import DFlashConfig
from flashdraft.errors import ConfigError
from flashdraft.inspection import Inspection, inspect_path
from flashdraft.model_files import CONFIG, INDEX

ON_THE_HUB = (
    "HuggingFaceTB/SmolLM2-135M-Instruct"  # the built-in target before it was rounded to the four bits of its GGUF file
)


@dataclass(frozen=True)
class Draft:
    """A draft that fits its target, by its files."""

    place: str  # a directory with `revision` resolved, or a hub id
    revision: str | None  # of a hub id
    proposals: int
    config: DFlashConfig
    raw: Mapping[str, object]  # its config.json
    tensors: frozenset[str]
    other_weights: tuple[str, ...]  # safetensors files beside its own, which readers would load with them
    report: Inspection


@dataclass(frozen=True)
class Pair:
    """A target in transformers' layout, its directory or hub id, with what its config.json states; and its draft."""

    target: str
    revision: str | None
    dtype: str | None
    architecture: str | None
    layers: int
    positions: int | None  # None: as many as one likes
    draft: Draft | None
    warning: str | None = None


def read_pair(
    target: str | None,
    revision: str | None,
    draft: str | None,
    draft_revision: str | None,
    proposals: int | None,
    engine: str,
) -> Pair:
    """Find the pair and check that it is one. Raises ConfigError or CheckpointError, one sentence with the remedy."""
    if target in (None, builtin.NAME) or str(target).endswith(".gguf"):
        ours = target in (None, builtin.NAME)
        remedy = f"; the built-in one is {ON_THE_HUB} there, and its draft is `--draft builtin`" if ours else ""
        raise ConfigError(
            f"{engine} reads no GGUF target{' as the built-in one is' if ours else ''}: give a directory in transformers' "
            f"layout or a hub id{remedy}"
        )
    assert target is not None
    own = Path(target).expanduser()
    if own.exists() and revision is not None:
        raise ConfigError(f"{target} is local and has no revision {revision!r}: give the sub-directory instead")
    name = str(own.resolve()) if own.exists() else target
    report = inspect_path(name, revision=revision)
    if report.kind != "target":
        raise ConfigError(f"{target} is a draft: give the target first, and this one with --draft")
    dtype = report.dtype.partition(",")[0] if report.dtype else None
    names = read_json(locate(name, revision, weights=False) / CONFIG).get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else None
    facts = (name, revision, dtype, architecture, report.layers, report.config["max_position_embeddings"])
    if draft is None:
        return Pair(*facts, None)
    found = _read_draft(str(builtin.draft_path()) if draft == builtin.NAME else draft, draft_revision, name, proposals)
    where = found.place if found.revision is None else draft
    return Pair(*facts, found, of_another_target(where, found.revision, None))


def refuse_split(draft: Draft, tensor_parallel: int) -> None:
    """Raise ConfigError for a draft whose heads do not come out even over so many GPUs."""
    heads, kv_heads = draft.config.num_attention_heads, draft.config.num_key_value_heads
    fewer, more = sorted((kv_heads, tensor_parallel))
    if heads % tensor_parallel or more % fewer:
        raise ConfigError(
            f"the draft's {heads} heads ({kv_heads} for keys) cannot be split over --tensor-parallel-size {tensor_parallel}: "
            "give a size that divides them"
        )


def _read_draft(draft: str, revision: str | None, target: str, proposals: int | None) -> Draft:
    local = Path(draft).expanduser().exists()
    report = inspect_path(draft, revision=revision, target=target)
    if report.misfit is not None:
        raise ConfigError(report.misfit)
    if report.faults:
        raise ConfigError(f"{draft}: config.json and weights disagree ({'; '.join(report.faults)}): quantize the draft again")
    folder = locate(draft, revision)
    files = weight_files(folder)
    if not files:
        raise ConfigError(f"{draft} has no weights: give the draft's directory")
    config = DFlashConfig(**report.config)
    most = config.block_size - 1
    if proposals is None:
        proposals = most
    if proposals < 1:
        raise ConfigError("num_speculative_tokens is 0: to serve the target alone give --no-draft")
    if proposals > most:
        raise ConfigError(
            f"num_speculative_tokens is {proposals}, and the draft was trained to propose {most}: other engines do not check "
            f"it, so give {most} or fewer"
        )
    indexed = (folder / INDEX).is_file()
    return Draft(
        place=str(folder.resolve()) if local else draft,
        revision=None if local else revision,
        proposals=proposals,
        config=config,
        raw=read_json(folder / CONFIG),
        tensors=frozenset(tensor_infos(folder)),
        other_weights=() if indexed else tuple(sorted(f.name for f in folder.glob("*.safetensors") if f not in files)),
        report=report,
    )
