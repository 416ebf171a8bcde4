"""The plan of a run: what the recipe leaves open, derived from the target, the data and the device."""

from __future__ import annotations

import time
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from flashdraft.draft import DFlashConfig, DFlashDraft, default_layer_ids
from flashdraft.errors import ConfigError
from flashdraft.targets.target import Target
from flashdraft.train.data import Batches, FeatureCache, Records
from flashdraft.train.distributed import World
from flashdraft.train.loss import LossConfig, chunk_rows
from flashdraft.train.recipe import DraftRecipe, Recipe
from flashdraft.train.trainer import TrainConfig, Trainer, prefetch

EPOCHS, LEAST_STEPS = 3, 100  # of a run whose recipe gives neither steps nor hours
# Hidden values (tokens x H) of one forward pass: 16 rows of 2,048 for a 135M target, 2 for hidden 2,560.
MICRO_VALUES = {"cuda": 20e6, "cpu": 2.5e6}
SEQ_LENGTH = 2048
ROWS = {"cuda": 16, "cpu": 4}  # an update: 64 to 128 answers
ANCHOR_TOKENS = {"cuda": 4, "cpu": 16}  # tokens of a row for one anchor
EVAL_STEPS = 10  # updates between two evaluations, at least
EVAL_RECORDS = {"cuda": 256, "cpu": 8}


@dataclass(frozen=True)
class Split:
    """Records to train on, and records to measure on: `often` each time, all of `heldout` at the end."""

    train: Records
    heldout: Records
    often: Records


def choose_mask_token(named: str | int | None, records: Records, tokenizer: PreTrainedTokenizerBase, target: Target) -> int:
    """An existing embedding row that never occurs in the data and ends or fills nothing; the recipe's own, if it names one.

    Raises ConfigError for a named one that occurs, or that is an eos, bos, pad or unk token.
    """
    counts = np.bincount(records.tokens, minlength=target.vocab_size)
    own = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    reserved = {*target.eos_token_ids, *(token for token in own if isinstance(token, int))}
    vocabulary = tokenizer.get_vocab()
    if named is not None:
        token = vocabulary.get(named, -1) if isinstance(named, str) else named
        remedy = "leave out mask_token, and one that never occurs is chosen"
        if not 0 <= token < target.vocab_size:
            raise ConfigError(f"[draft] mask_token {named!r} is no token of the target: {remedy}")
        if token in reserved:
            raise ConfigError(f"[draft] mask_token {named!r} is the target's eos, bos, pad or unk token: {remedy}")
        if counts[token]:
            raise ConfigError(f"[draft] mask_token {named!r} occurs {counts[token]:,} times in the data: {remedy}")
        return token
    template = str(getattr(tokenizer, "chat_template", None) or "")
    special = set(tokenizer.all_special_tokens) | {str(t) for t in getattr(tokenizer, "added_tokens_encoder", {})}
    free = [
        (_mask_rank(text, special), -token, token)
        for text, token in vocabulary.items()
        if token < target.vocab_size and not counts[token] and token not in reserved and text not in template
    ]
    if not free:
        raise ConfigError("every token of the vocabulary occurs in the data, so none can be the mask: train on fewer answers")
    return min(free)[2]


def _mask_rank(text: str, special: set[str]) -> int:
    """Tokens made for nothing else first, those that mark thinking, tools or turns after ordinary words."""
    if text not in special:
        return 2
    spare = ("mask", "reserved", "unused", "extra", "placeholder", "repo", "file", "fim")
    return 0 if any(word in text.lower() for word in spare) else 3


def draft_config(recipe: DraftRecipe, target: Target, mask_token: int) -> DFlashConfig:
    named = {name: value for name, value in asdict(recipe).items() if value is not None}
    named.pop("mask_token", None)
    options: dict[str, Any] = {}
    layers = named.get("num_hidden_layers", 5)
    if (window := named.pop("sliding_window", None)) is not None:
        options["window"] = window or None
    if (causal := named.pop("causal", None)) is not None:
        options["causal"] = (causal,) * layers
    if (ids := named.get("target_layer_ids")) is not None:
        named["target_layer_ids"] = tuple(ids)
    else:
        count = named.setdefault("num_features", _most_features(target.num_layers))
        default_layer_ids(target.num_layers, count)  # more than there are layers would be taken for as many
    named.setdefault("num_features", 1)  # with layers that are named it decides nothing
    return DFlashConfig.for_target(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_target_layers=target.num_layers,
        mask_token_id=mask_token,
        **options,
        **named,
    )


def _most_features(num_layers: int) -> int:
    """Five feature layers, or as many as can be spread over a target of few layers."""
    for count in range(5, 1, -1):
        with suppress(ConfigError):
            default_layer_ids(num_layers, count)
            return count
    return 1


def split_records(records: Records, recipe: Recipe, device: str, seen: np.ndarray | None = None) -> Split:
    """Hold out a share of the prompts: 2 %, less of many (2,000 prompts are enough), more of few (8 prompts, or a fifth).

    `seen` uint64: hashes of prompts that are never held out, for the draft to start from was trained on them.
    """
    fresh = records.prompt_hashes if seen is None else np.setdiff1d(records.prompt_hashes, seen)
    prompts = len(np.unique(fresh))
    share, least = recipe.eval.share, min(8, prompts // 5)
    if share is None:
        share = min(0.02, 2000 / prompts) if prompts > 1 else 0.0
    else:
        least = min(1, max(prompts - 1, 0)) if share > 0 else 0
    train, heldout = records.split(share, least, seen)
    often = recipe.eval.records or EVAL_RECORDS[device]
    rank = np.argsort(np.argsort(heldout.prompt_hashes, kind="stable"))
    if not len(train):
        raise ConfigError("all answers were held out for evaluation, none is left to train on: make more answers")
    return Split(train, heldout.select(rank < 4 * often), heldout.select(rank < often))


@dataclass(frozen=True)
class Plan:
    """Everything a run needs beside the target, the draft and the records."""

    config: TrainConfig
    rows: int
    micro_rows: int
    seq_length: int
    anchors: int
    seed: int
    trim: bool

    def batches(self, records: Records, block_size: int, world: World, cache: FeatureCache | None = None) -> Batches:
        return Batches(
            records,
            seq_length=self.seq_length,
            rows=self.rows,
            anchors=self.anchors,
            block_size=block_size,
            seed=self.seed,
            micro_rows=self.micro_rows,
            rank=world.rank,
            ranks=world.size,
            cache=cache,
            trim=self.trim,
        )


def row_length(recipe: Recipe, target: Target) -> int:
    """Tokens of a packed row. Raises ConfigError where the target's positions end before."""
    length = recipe.train.seq_length or min(SEQ_LENGTH, target.max_position_embeddings)
    if (anchors := recipe.train.anchors or 1) > length:
        raise ConfigError(f"[train] anchors must be at most seq_length, got {anchors} for {length}: lower it")
    if length > target.max_position_embeddings:
        raise ConfigError(
            f"[train] seq_length {length} is more than the {target.max_position_embeddings} positions of the target: lower it"
        )
    return length


def make_plan(recipe: Recipe, target: Target, draft: DFlashDraft, records: Records, world: World) -> Plan:
    """`records` are those to train on, each of at most row_length() tokens."""
    t, length, device = recipe.train, row_length(recipe, target), target.device.type
    packed = max(int(records.lengths.sum()) // length, 1)
    # At least eight updates an epoch.
    rows = t.rows or max(min(ROWS[device], packed // 8) // world.size * world.size, world.size)
    anchors = t.anchors or max(length // ANCHOR_TOKENS[device], 1)
    if t.learning_rate is None:
        t = replace(t, learning_rate=2e-3 if target.hidden_size < 1024 else 1e-3 if target.hidden_size < 2048 else 6e-4)
    steps, hours = t.steps, t.hours
    if steps is None and hours is None:
        steps = max(EPOCHS * (packed // rows), LEAST_STEPS)
    assert t.learning_rate is not None
    log_every = t.log_every or (max(1, min(50, steps // 100)) if steps else 20 if device == "cuda" else 2)
    config = TrainConfig(
        steps=steps,
        max_seconds=None if hours is None else hours * 3600,
        learning_rate=t.learning_rate,
        optimizer=t.optimizer,
        betas=(t.betas[0], t.betas[1]),
        clip=t.clip,
        warmup=t.warmup,
        final_rate=t.final_rate,
        loss=LossConfig(t.beta, t.weighting, t.alpha, t.gamma or draft.config.block_size / 2),
        log_every=log_every,
        save_seconds=t.save_seconds,
        evaluations=recipe.eval.evaluations if steps is None else min(recipe.eval.evaluations, steps // EVAL_STEPS),
        compile=t.compile,
        quantization=t.quantization,
    )
    plan = Plan(config, rows, t.micro_rows or 1, length, anchors, t.seed, trim=device != "cuda")
    return plan if t.micro_rows else replace(plan, micro_rows=_fitting_rows(plan, target, draft, max(rows // world.size, 1)))


def _fitting_rows(plan: Plan, target: Target, draft: DFlashDraft, mine: int) -> int:
    """Of a process's rows an update, how many one forward pass takes: what is usual for the device, and fits its memory."""
    usual = MICRO_VALUES[target.device.type] / (plan.seq_length * target.hidden_size)
    room = 0.6 * torch.cuda.mem_get_info(target.device)[0] if target.device.type == "cuda" else float("inf")
    for count in range(min(mine, int(usual)), 1, -1):
        needed = memory_estimate(target, draft, replace(plan, micro_rows=count))
        if mine % count == 0 and needed["pass"] + needed["draft"] <= room:
            return count
    return 1


def memory_estimate(target: Target, draft: DFlashDraft, plan: Plan) -> dict[str, float]:
    """Bytes: the target's weights, the draft with gradients and optimizer, and what one forward and backward pass adds.

    The bytes of a pass were counted on what autograd keeps for a draft of hidden size 2,560 (813 kB a slot, 146 kB a token);
    compiled it keeps less.
    """
    c = draft.config
    size = sum(p.numel() for p in draft.parameters())
    state = 4 if plan.config.optimizer == "muon" else 8
    tokens, slots = plan.micro_rows * plan.seq_length, plan.micro_rows * plan.anchors * c.block_size
    heads = (c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
    a_slot = c.num_hidden_layers * (27 * c.hidden_size + 8 * c.intermediate_size + 8 * heads)
    kept_keys = 20 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
    a_token = c.hidden_size * (2 * c.num_features + 10) + kept_keys
    kept = (tokens * a_token + slots * a_slot) * (1.0 if target.device.type == "cuda" else 1.5)
    return {
        "target": sum(p.numel() * p.element_size() for p in target.model.parameters()),
        "draft": size * (8 + state),
        "pass": kept + 3 * 4 * chunk_rows(c.vocab_size) * c.vocab_size,
    }


@dataclass(frozen=True)
class Measured:
    """A few steps, timed: seconds an update, real context tokens of it, and the peak of GPU memory, if there is one."""

    seconds: float
    tokens: int
    peak_bytes: int | None


def measure(trainer: Trainer, steps: int = 3) -> Measured:
    """Time updates after one that warms up (and compiles)."""
    cuda, parts = trainer.device.type == "cuda", trainer.batches.parts
    tokens, seconds = 0, 0.0
    with closing(prefetch(lambda i: trainer.batches.batch(*divmod(i, parts)), 0, cuda, 2)) as stream:
        for step in range(1 + steps):
            if step == 1:
                trainer._meter.restart()
                if cuda:
                    torch.cuda.synchronize()
                start = time.monotonic()
            trainer.update(stream, 0.5)
        if cuda:
            torch.cuda.synchronize()
        seconds = (time.monotonic() - start) / steps
        tokens = trainer._meter.tokens // steps
    return Measured(seconds, tokens * trainer.world.size, torch.cuda.max_memory_allocated() if cuda else None)


__all__ = [
    "Measured",
    "Plan",
    "Split",
    "choose_mask_token",
    "draft_config",
    "make_plan",
    "measure",
    "memory_estimate",
    "row_length",
    "split_records",
]
