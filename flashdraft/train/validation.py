"""On-policy validation: the exact acceptance length of greedy block decoding on recorded answers, without an engine.

The draft's proposals are computed for every anchor of an answer at once. Then the host walks as the engine would: at anchor a
the accepted proposals are the leading ones that equal the recorded tokens, and the next anchor is a + accepted + 1. For answers
the target chose greedily (or sampled with the same noise) this is what an engine commits, token by token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashdraft.train.data import Records, lay_out, make_batch, pack_rows
from flashdraft.train.trainer import Trainer, packed_forward


def walk(runs: list[int], last: int) -> list[int]:
    """Accepted proposals of each verify step over an answer of last + 1 tokens; runs[i] is the run at anchor i."""
    accepted, anchor = [], 0
    while anchor < last:
        accepted.append(min(runs[anchor], last - anchor - 1))
        anchor += accepted[-1] + 1
    return accepted


@torch.no_grad()
def leading_runs(trainer: Trainer, records: Records, rows: list[list[int]], seq_length: int, anchors: int) -> Tensor:
    """For every position of packed rows as an anchor, how many leading proposals equal the recorded tokens [B, S]."""
    layout = lay_out(records, rows, seq_length)
    size = trainer.draft.config.block_size
    runs = torch.zeros(layout[0].shape, dtype=torch.long)
    features = None
    for start in range(0, seq_length, anchors):
        at = torch.arange(start, start + anchors).clamp(max=seq_length - 1).expand(len(rows), -1)
        batch = make_batch(layout, at, layout[3].gather(1, at), size)
        if not len(batch.rows):
            continue
        batch = batch.to(trainer.device)
        if features is None:
            features, _ = packed_forward(trainer.target, batch)
        hidden = trainer.hidden(batch, features)[:, :, 1:].flatten(0, 2)[batch.rows].to(trainer.weight.dtype)
        chosen = torch.cat([(part @ trainer.weight.T).argmax(-1) for part in hidden.split(4096)])
        correct = torch.zeros(batch.labels.numel(), dtype=torch.long, device=trainer.device)
        correct[batch.rows] = (chosen == batch.labels.flatten()[batch.rows]).long()
        runs.scatter_(1, at, correct.view(batch.labels.shape).cumprod(-1).sum(-1).cpu())
    return runs


def acceptance(trainer: Trainer, records: Records, *, seq_length: int, rows: int, anchors: int) -> list[list[int]]:
    """Accepted proposals of every verify step, for each record; a record of n answer tokens commits n - 1 of them in steps."""
    trainer.draft.eval()
    packed = pack_rows(records.lengths, seq_length)
    results: list[list[int]] = [[] for _ in range(len(records))]
    for first in range(0, len(packed), rows):
        part = packed[first : first + rows]
        runs = leading_runs(trainer, records, part + [[]] * (rows - len(part)), seq_length, anchors)
        for b, members in enumerate(part):
            start = 0
            for index in members:
                length, prompt = int(records.lengths[index]), int(records.prompt_lengths[index])
                results[index] = walk(runs[b, start + prompt : start + length].tolist(), length - prompt - 1)
                start += length
    trainer.draft.train()
    return results


def summary(accepted: list[list[int]], categories: list[str]) -> dict[str, dict[str, float]]:
    """By category and over all: mean AL of requests, AL over all steps, and requests."""
    groups: dict[str, list[list[int]]] = {}
    for steps, category in zip(accepted, categories, strict=True):
        if steps:
            groups.setdefault(category, []).append(steps)
            groups.setdefault("all", []).append(steps)
    return {
        name: {
            "acceptance_length": round(sum(1 + sum(s) / len(s) for s in members) / len(members), 4),
            "over_steps": round(1 + sum(map(sum, members)) / sum(map(len, members)), 4),
            "requests": len(members),
        }
        for name, members in sorted(groups.items())
    }
