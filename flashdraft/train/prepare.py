"""A training job: target, draft and data, loaded and checked in the order in which a mistake shows soonest."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from flashdraft import builtin
from flashdraft.checkpoint import check_pair, load_draft, locate, quantization
from flashdraft.config_json import read_json
from flashdraft.draft import DFlashConfig, DFlashDraft, count_parameters
from flashdraft.errors import CheckpointError, ConfigError, UnsupportedModelError
from flashdraft.llm import choose_device
from flashdraft.targets.load import load_model, load_target, load_tokenizer
from flashdraft.targets.target import Target
from flashdraft.train.data import Records, load_records
from flashdraft.train.distributed import World
from flashdraft.train.identity import are_of_others, check_tokenizer, target_hash, tokenizer_hash
from flashdraft.train.plan import Plan, Split, choose_mask_token, draft_config, make_plan, row_length, split_records
from flashdraft.train.recipe import DraftRecipe, Recipe
from flashdraft.train.sharded import load_sharded
from flashdraft.train.shards import place_of

# Of a draft directory: hashes of the prompts it was trained on. No .safetensors: vLLM takes every such file for weights.
TRAINED_ON = "training_prompts.npy"
LOST_TO_MASK = 0.01  # of the answers may be left out for holding the mask token of a draft to start from


@dataclass(frozen=True)
class Options:
    """The command line of `flashdraft train`."""

    data: Path
    output: Path
    target: str | None = None
    recipe: Path | None = None
    init: str | None = None
    features: Literal["online", "offline"] = "online"
    resume: bool = False
    dry_run: bool = False
    tensorboard: bool = False
    steps: int | None = None
    hours: float | None = None
    dtype: str = "auto"
    device: str | None = None
    revision: str | None = None
    lora: str | None = None
    target_parallel: int = 1  # processes that hold one target together


@dataclass(frozen=True)
class Job:
    """All that a run is made of, loaded, checked and derived."""

    options: Options
    recipe: Recipe
    target: Target
    tokenizer: PreTrainedTokenizerBase
    draft: DFlashDraft
    everything: Records
    split: Split
    plan: Plan
    notes: list[str]  # what was done to the data, in sentences
    data_digest: str
    target_hash: str
    seen: np.ndarray  # uint64: hashes of the prompts that the draft to start from was trained on


def prepare(options: Options, recipe: Recipe, world: World) -> Job:
    """Load, check and derive, in the order in which a mistake shows soonest."""
    source = builtin.target_path() if options.target in (None, builtin.NAME) else options.target
    assert source is not None
    notes: list[str] = []
    tokenizer = load_tokenizer(source, revision=options.revision, lora=options.lora)
    everything = load_records(options.data)
    compare_tokenizer(options.data, tokenizer, notes)
    digest = everything.digest()
    device = choose_device(options.device)
    target = _load(options, source, device, world)
    refuse_untrainable(target, str(options.target))
    world.refuse_different(digest, f"{options.data} holds other answers on another node: copy the same ones to all of them")
    weights = compare_target(options.data, int(everything.tokens.max()), target, notes)
    world.refuse_different(weights, f"{source} is another target on another node: copy the same one to all of them")
    torch.manual_seed(recipe.train.seed)
    draft, everything = _draft_and_data(options, recipe, target, tokenizer, everything, notes)
    length = row_length(recipe, target)
    before, cut, everything = len(everything), int((everything.lengths > length).sum()), everything.cut(length)
    lost = before - len(everything)
    if cut:
        notes.append(f"answers longer than {length:,} tokens (seq_length): {cut:,}, cut there; {lost:,} of them left out")
    elif lost:
        notes.append(f"answers of fewer than two tokens: {lost:,}, left out")
    if not len(everything):
        raise ConfigError(f"no answer of {options.data} can be trained on: raise seq_length, or make more answers")
    everything = replace(everything, origins=everything.starts[:-1])
    seen = np.zeros(0, np.uint64) if options.init is None else trained_prompts(options.init, notes)
    split = split_records(everything, recipe, device.type, seen)
    if not len(split.heldout) and recipe.eval.share != 0:
        notes.append("nothing is held out, for there is no prompt to spare that is new to the draft: its AL is not measured")
    plan = make_plan(recipe, target, draft, split.train, world)
    return Job(options, recipe, target, tokenizer, draft, everything, split, plan, notes, digest, weights, seen)


def _load(options: Options, source: str | Path, device: torch.device, world: World) -> Target:
    where: dict[str, Any] = dict(dtype=options.dtype, revision=options.revision, lora=options.lora)
    if world.group is None:
        return load_target(source, device=device, **where)
    return load_sharded(lambda: load_model(source, **where), device, world)


def refuse_untrainable(target: Target, name: str) -> None:
    """Raises UnsupportedModelError for a target whose forward pass over packed rows would not be its own."""
    if any(spec.softcap is not None or spec.sinks is not None for spec in target.layer_specs):
        raise UnsupportedModelError(
            f"{name}: its attention has a soft cap or sinks, which packed rows do not know: choose another target, "
            "for this one cannot be trained for yet"
        )


def compare_tokenizer(directory: Path, tokenizer: PreTrainedTokenizerBase, notes: list[str]) -> None:
    """Raises CheckpointError for answers made for another tokenizer; a note where they do not say which."""
    if not check_tokenizer(directory, tokenizer_hash(tokenizer)):
        notes.append("shards do not say which tokenizer made them, so that it was not checked")


def compare_target(directory: Path, largest: int, target: Target, notes: list[str]) -> str:
    """The target's hash; a note where the answers are of others. Raises CheckpointError if it lacks their `largest` token."""
    if largest >= target.vocab_size:
        raise CheckpointError(
            f"{place_of(directory, largest)} holds token {largest:,} and the target's vocabulary ends at "
            f"{target.vocab_size - 1:,}: take answers of this target"
        )
    weights = target_hash(target)
    if are_of_others(directory, weights):
        notes.append(
            "answers were made by another target with the same tokenizer (or in another dtype): those of its own are best"
        )
    return weights


def trained_prompts(init: str, notes: list[str]) -> np.ndarray:
    """Hashes uint64 of the prompts that the draft to start from was trained on, as it says itself; a note where it does not."""
    path = (builtin.draft_path() if init == builtin.NAME else locate(init)) / TRAINED_ON
    if not path.is_file():
        notes.append(f"{init} has no {TRAINED_ON}, so that held-out prompts may be ones it was trained on")
        return np.zeros(0, np.uint64)
    return builtin.read_hashes(path)


def first_draft(init: str, recipe: Recipe, target: Target) -> DFlashDraft:
    """The draft to start from. Raises ConfigError where it is quantized or does not fit the target, or the recipe has sizes."""
    if recipe.draft != DraftRecipe():
        raise ConfigError("--init brings the sizes of the draft: leave out the recipe's [draft], or --init")
    folder = builtin.draft_path() if init == builtin.NAME else locate(init)
    if named := quantization(read_json(folder / "config.json")):
        raise ConfigError(f"{init} is quantized ({named}), which cannot be trained: start from the draft it was made from")
    draft = load_draft(folder, dtype=torch.float32)
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "num_layers": target.num_layers}
    check_pair(draft.config, **sizes)
    return draft


def refuse_too_large(config: DFlashConfig, target: Target) -> None:
    """Raises ConfigError for a draft whose weights, gradients and optimizer state (16 bytes each) are more than the memory."""
    with torch.device("meta"):
        needed = 16 * count_parameters(DFlashDraft(config))["all"]
    cuda = target.device.type == "cuda"
    room = torch.cuda.mem_get_info(target.device)[1] if cuda else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > room:
        raise ConfigError(
            f"[draft] of {needed / 16:,.0f} parameters takes {needed / 1e9:,.1f} GB to train, and the memory is "
            f"{room / 1e9:,.1f} GB: lower num_hidden_layers or intermediate_size"
        )


def _draft_and_data(
    options: Options,
    recipe: Recipe,
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    records: Records,
    notes: list[str],
) -> tuple[DFlashDraft, Records]:
    """A new draft, or the one to start from, and the records without its mask token."""
    if options.init is None:
        mask = choose_mask_token(recipe.draft.mask_token, records, tokenizer, target)
        config = draft_config(recipe.draft, target, mask)
        refuse_too_large(config, target)
        return DFlashDraft(config), records
    draft = first_draft(options.init, recipe, target)
    kept = records.without(draft.config.mask_token_id)
    if lost := len(records) - len(kept):
        if lost > LOST_TO_MASK * len(records):
            raise ConfigError(
                f"{lost:,} of {len(records):,} answers hold the mask token {draft.config.mask_token_id} of {options.init}: "
                "train a new draft (without --init), which takes another"
            )
        notes.append(f"answers that hold the draft's mask token: {lost:,}, left out")
    return draft, kept
