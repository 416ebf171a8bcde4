"""On-policy validation: the exact acceptance length of greedy block decoding on recorded answers, without an engine.

The draft's proposals are computed for every anchor of an answer at once. Then the host walks as the engine would: at anchor a
the accepted proposals are the leading ones that equal the recorded tokens, and the next anchor is a + accepted + 1. For answers
the target chose greedily (or sampled with the same noise) this is what an engine commits, token by token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from flashdraft.draft import DFlashDraft
from flashdraft.targets.target import Target
from flashdraft.train.data import Batch, FeatureCache, Records, lay_out, make_batch, pack_rows
from flashdraft.train.distributed import World
from flashdraft.train.features import packed_forward
from flashdraft.train.trainer import Trainer

# Where anchors are counted as of one depth: their position, prompt included.
DEPTHS = (0, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


def walk(runs: list[int], last: int) -> list[int]:
    """Accepted proposals of each verify step over an answer of last + 1 tokens; runs[i] is the run at anchor i."""
    accepted, anchor = [], 0
    while anchor < last:
        accepted.append(min(runs[anchor], last - anchor - 1))
        anchor += accepted[-1] + 1
    return accepted


class Proposer(Protocol):
    """A draft on its target, as acceptance asks it."""

    @property
    def target(self) -> Target: ...
    @property
    def draft(self) -> DFlashDraft: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def world(self) -> World: ...
    @property
    def cache(self) -> FeatureCache | None: ...
    def hidden(self, batch: Batch, features: Tensor, windowed: bool = True) -> Tensor:
        """Hidden states of all blocks [B, N, Z, H]; `windowed` False leaves out the draft's windows."""

    def choose(self, hidden: Tensor) -> Tensor:
        """The likeliest tokens [R] of hidden states [R, H]."""


@torch.no_grad()
def leading_runs(
    trainer: Proposer, records: Records, rows: list[list[int]], seq_length: int, anchors: int, windowed: bool = True
) -> Tensor:
    """For every position of packed rows as an anchor, how many leading proposals equal the recorded tokens [B, S]."""
    layout = lay_out(records, rows, seq_length)
    size = trainer.draft.config.block_size
    runs = torch.zeros(layout[0].shape, dtype=torch.long)
    features = None if trainer.cache is None else trainer.cache.rows(records, rows, seq_length)[0].to(trainer.device)
    for start in range(0, seq_length, anchors):
        at = torch.arange(start, start + anchors).clamp(max=seq_length - 1).expand(len(rows), -1)
        batch = make_batch(layout, at, layout[3].gather(1, at), size)
        batch = batch.to(trainer.device)
        if features is None and (len(batch.rows) or trainer.target.group is not None):  # a group runs its target together
            features, _ = packed_forward(trainer.target, batch)
        if features is None or not len(batch.rows):
            continue
        hidden = trainer.hidden(batch, features, windowed)[:, :, 1:]
        # A slot's head is worth its time only behind slots that were right
        run = torch.zeros(at.shape, dtype=torch.long, device=trainer.device)
        for slot in range(size - 1):
            asked = ((run == slot) & batch.supervised[:, :, slot]).nonzero(as_tuple=True)
            if not len(asked[0]):
                break
            run[asked] += trainer.choose(hidden[:, :, slot][asked]) == batch.labels[:, :, slot][asked]
        runs.scatter_(1, at, run.cpu())
    return runs


def acceptance(
    trainer: Proposer, records: Records, *, seq_length: int, rows: int, anchors: int, windowed: bool = True
) -> list[list[int]]:
    """Accepted proposals of every verify step, for each record; a record of n answer tokens commits n - 1 of them in steps.

    The ranks of a run share the rows, and each returns all results. `windowed` False measures the draft without its windows.
    """
    trainer.draft.eval()
    packed = pack_rows(records.lengths, seq_length)
    found: dict[int, list[int]] = {}
    for base in range(0, len(packed), trainer.world.size * rows):
        first = base + trainer.world.rank * rows
        part = packed[first : first + rows]
        if not part and trainer.target.group is None:
            continue
        runs = leading_runs(trainer, records, part + [[]] * (rows - len(part)), seq_length, anchors, windowed)
        for b, members in enumerate(part):
            start = 0
            for index in members:
                length, prompt = int(records.lengths[index]), int(records.prompt_lengths[index])
                found[index] = walk(runs[b, start + prompt : start + length].tolist(), length - prompt - 1)
                start += length
    trainer.draft.train()
    for others in trainer.world.gather(found):
        found.update(others)
    return [found[index] for index in range(len(records))]


def by_position(accepted: list[list[int]], proposals: int) -> list[float]:
    """The share of verify steps that accepted at least k proposals, k = 1..proposals."""
    steps = np.array([a for record in accepted for a in record])
    return [round(float((steps >= k).mean()), 4) if len(steps) else 0.0 for k in range(1, proposals + 1)]


def by_depth(accepted: list[list[int]], prompt_lengths: Iterable[int]) -> dict[str, dict[str, float]]:
    """AL over the verify steps whose anchor's position lies in each range of DEPTHS."""
    positions, lengths = [], []
    for steps, prompt in zip(accepted, prompt_lengths, strict=True):
        positions.append(int(prompt) + np.concatenate(([0], np.cumsum(np.array(steps[:-1], dtype=np.int64) + 1))))
        lengths.append(np.array(steps, dtype=np.int64) + 1)
        positions[-1] = positions[-1][: len(steps)]
    if not positions:
        return {}
    depth, length = np.searchsorted(DEPTHS, np.concatenate(positions), side="right") - 1, np.concatenate(lengths)
    names = [*(f"{a}-{b - 1}" for a, b in pairwise(DEPTHS)), f"{DEPTHS[-1]}-"]
    return {
        names[d]: {"acceptance_length": round(float(length[depth == d].mean()), 4), "steps": int((depth == d).sum())}
        for d in np.unique(depth).tolist()
    }


def heldout_report(trainer: Trainer, records: Records, final: bool) -> dict[str, Any]:
    """AL on held-out answers: over all, by position, category, language, thinking and depth.

    The final one measures depth without the draft's windows too, where it has some that these records reach.
    """
    batches, proposals = trainer.batches, trainer.draft.config.num_proposals

    def measure(windowed: bool) -> list[list[int]]:
        return acceptance(
            trainer,
            records,
            seq_length=batches.seq_length,
            rows=batches.micro_rows,
            anchors=batches.anchors,
            windowed=windowed,
        )

    accepted = measure(True)
    thinking = ["on" if t else "off" for t in records.thinking.tolist()]
    report: dict[str, Any] = {
        **summary(accepted, ["all"] * len(records))["all"],
        "by_position": by_position(accepted, proposals),
        "by_category": summary(accepted, records.categories),
        "by_language": summary(accepted, records.languages),
        "by_thinking": summary(accepted, thinking),
        "by_depth": by_depth(accepted, records.prompt_lengths),
    }
    windows = [window for window in trainer.draft.config.windows if window is not None]
    if final and windows and records.lengths.max() > min(windows):
        report["by_depth_without_window"] = by_depth(measure(False), records.prompt_lengths)
    return report


def summary(accepted: list[list[int]], categories: Sequence[str]) -> dict[str, dict[str, float]]:
    """By category and over all: mean AL of requests, AL over all steps, and requests."""
    groups: dict[str, list[list[int]]] = {"all": []}
    for steps, category in zip(accepted, categories, strict=True):
        if steps:
            groups["all"].append(steps)
            if category != "all":
                groups.setdefault(category, []).append(steps)
    return {
        name: {
            "acceptance_length": round(sum(1 + sum(s) / len(s) for s in members) / len(members), 4),
            "over_steps": round(1 + sum(map(sum, members)) / sum(map(len, members)), 4),
            "requests": len(members),
        }
        for name, members in sorted(groups.items())
        if members
    }
