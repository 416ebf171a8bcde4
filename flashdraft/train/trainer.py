"""Trainer: trains a draft on packed rows with features computed by the target in the same process.

float32 parameters and optimizer state, bf16 autocast on CUDA (bf16 weights freeze norms: 78 % of their entries never move).
The schedule follows steps, or the elapsed share of a time budget. A run resumes exactly: batches are a function of the step.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from flashdraft.checkpoint import save_draft
from flashdraft.draft import DFlashDraft
from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.kernels.packed_attention import DocumentAttention
from flashdraft.targets.target import Target
from flashdraft.train.anchors import block_ids, block_positions, draft_blocks, draft_masks
from flashdraft.train.data import Batch, Batches
from flashdraft.train.loss import BlockLoss, LossConfig, block_loss

PREFETCH = 8  # batches prepared ahead by threads


@dataclass(frozen=True)
class TrainConfig:
    """Exactly one of steps and max_seconds ends a run; the cosine schedule follows it."""

    steps: int | None = None
    max_seconds: float | None = None
    learning_rate: float = 1e-3
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: matrices by Muon, norms by AdamW
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    warmup: float = 0.04
    final_rate: float = 0.1
    loss: LossConfig = field(default_factory=LossConfig)
    log_every: int = 50
    save_seconds: float = 60.0
    compile: bool = True  # on CUDA

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.max_seconds is None):
            raise ConfigError("training ends after a number of steps or after max_seconds: give exactly one")

    def rate(self, progress: float) -> float:
        """The learning rate at a progress of 0..1: linear warm-up, then a cosine down to final_rate of the peak."""
        if progress < self.warmup:
            return self.learning_rate * progress / self.warmup
        cosine = 0.5 * (1 + math.cos(math.pi * (progress - self.warmup) / (1 - self.warmup)))
        return self.learning_rate * (self.final_rate + (1 - self.final_rate) * cosine)


@torch.no_grad()
def packed_forward(target: Target, batch: Batch) -> tuple[Tensor, Tensor]:
    """Features [B, S, n*H] of the captured layers and the last hidden states [B, S, H] of packed rows, without pages."""
    with target.attending(DocumentAttention(batch.documents)):
        # a ready 4-D mask, ignored by our attention, keeps transformers from inspecting the positions
        out = target.decoder(
            input_ids=batch.ids.flatten()[None],
            position_ids=batch.positions.flatten()[None],
            attention_mask=torch.zeros((1, 1, 1, 1), device=batch.ids.device),
            use_cache=False,
        )
    features = target.take_features()
    assert features is not None, "capture the draft's feature layers first"
    return features.view(*batch.ids.shape, -1), out.last_hidden_state[0].view(*batch.ids.shape, -1)


def head_weight(target: Target, draft: DFlashDraft) -> Tensor:
    """The frozen head [V, H] that training uses. Raises ConfigError for a draft that would train one of its own."""
    if draft.lm_head is not None or draft.embed_tokens is not None or draft.config.logit_scale != 1.0:
        raise ConfigError(
            "training uses the target's head and embeddings: a draft with its own head, embeddings or logit scale"
        )
    return target.model.get_output_embeddings().weight.detach()


def make_optimizers(draft: DFlashDraft, config: TrainConfig, fused: bool) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices (scaled to the step size of AdamW) and AdamW for the norms."""
    matrices = [p for p in draft.parameters() if p.ndim == 2 and config.optimizer == "muon"]
    others = [p for p in draft.parameters() if p.ndim != 2 or config.optimizer != "muon"]
    made: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, lr=config.learning_rate, betas=config.betas, weight_decay=0.0, fused=fused)
    ]
    if matrices:
        made.append(torch.optim.Muon(matrices, lr=config.learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    return made


def prefetch(make: Callable[[int], Batch], first: int, pin: bool) -> Iterator[Batch]:
    """make(first), make(first + 1), ... prepared ahead by threads, in order."""
    with ThreadPoolExecutor(4) as pool:
        work: Callable[[int], Batch] = (lambda step: make(step).pinned()) if pin else make
        pending = [pool.submit(work, first + i) for i in range(PREFETCH)]
        step = first + PREFETCH
        try:
            while True:
                yield pending.pop(0).result()
                pending.append(pool.submit(work, step))
                step += 1
        finally:
            for future in pending:
                future.cancel()


class Trainer:
    """Trains `draft` in place; its files and the state to resume from go to `directory`."""

    def __init__(self, target: Target, draft: DFlashDraft, batches: Batches, config: TrainConfig, directory: Path) -> None:
        self.target, self.draft, self.batches, self.config, self.directory = target, draft, batches, config, directory
        self.device = target.device
        self.weight, self.logit_scale = head_weight(target, draft), target.logit_scale
        target.capture(draft.config.target_layer_ids)
        draft.to(self.device, torch.float32).train()
        cuda = self.device.type == "cuda"
        self.optimizers = make_optimizers(draft, config, fused=cuda)
        self._draft_blocks: Callable[..., Tensor] = draft_blocks
        if cuda and config.compile:
            self._draft_blocks = torch.compile(draft_blocks, dynamic=False)
        self.step, self.elapsed = 0, 0.0
        directory.mkdir(parents=True, exist_ok=True)

    def hidden(self, batch: Batch, features: Tensor) -> Tensor:
        """Hidden states of all blocks of a batch, [B, N, Z, H]."""
        c = self.draft.config
        ids = block_ids(batch.ids, batch.anchors, c.block_size, c.mask_token_id)
        slots = block_positions(batch.positions, batch.anchors, c.block_size)
        masks = draft_masks(self.draft, batch.anchors, batch.documents, batch.positions)
        embeddings = self.target.embed_rows(ids).float()  # keeps the residual stream in float32 under autocast
        mixed = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=mixed):
            given = features if mixed else features.float()
            hidden = self._draft_blocks(self.draft, given, batch.positions, embeddings, slots, masks)
        return hidden.unflatten(1, (-1, c.block_size))

    def loss(self, batch: Batch) -> BlockLoss:
        features, last = packed_forward(self.target, batch)
        hidden = self.hidden(batch, features)[:, :, 1:].flatten(0, 2)[batch.rows]
        proposals = batch.labels.shape[-1]
        at = (batch.anchors[:, :, None] + torch.arange(proposals, device=self.device)).clamp(max=batch.ids.shape[1] - 1)
        at = at + torch.arange(len(at), device=self.device)[:, None, None] * batch.ids.shape[1]
        # The target's choice of token a + k is made at a + k - 1.
        teacher = last.flatten(0, 1)[at.flatten()[batch.rows]] * self.logit_scale
        cap = self.target.final_logit_softcapping
        return block_loss(hidden, teacher, batch.labels, batch.supervised, batch.rows, self.weight, self.config.loss, cap)

    def train(self) -> None:
        """Run to the end of the budget, from the last saved state if there is one."""
        self.resume()
        start, c, budget = time.monotonic() - self.elapsed, self.config, self.config.max_seconds or 0.0
        compiling = True
        saved, tokens, window_start, meter = time.monotonic(), 0, time.monotonic(), _Meter()
        for batch in prefetch(self.batches.batch, self.step, self.device.type == "cuda"):
            progress = self.step / c.steps if c.steps is not None else self.elapsed / max(budget, 1e-9)
            if progress >= 1:
                break
            result = self.loss(batch.to(self.device))
            self.draft.zero_grad(set_to_none=True)
            result.loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.draft.parameters(), c.clip)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = c.rate(progress)
                optimizer.step()
            self.step += 1
            tokens += batch.ids.numel()
            meter.add(result, norm)
            if self.step % c.log_every == 0:
                values = meter.take()  # waits for the GPU
                seconds = time.monotonic() - window_start
                self._log(progress, {**values, "tokens_per_second": round(tokens / seconds)})
                tokens, window_start = 0, time.monotonic()
            elif self.step % 8 == 0 and self.device.type == "cuda":
                torch.cuda.synchronize()  # the elapsed share of a time budget is that of work done, not of work queued
            if (
                compiling
            ):  # the first step compiles for up to 90 s: taken off the budget, or the schedule would skip its warm-up
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                lost = time.monotonic() - start - self.elapsed
                start, budget, compiling = start + lost, budget - lost, False
            self.elapsed = time.monotonic() - start
            if time.monotonic() - saved > c.save_seconds:
                self.save()
                saved = time.monotonic()
        self.save()

    def _log(self, progress: float, values: dict[str, Any]) -> None:
        where = {"step": self.step, "progress": progress, "epoch": self.step / self.batches.steps_per_epoch}
        values = {**where, "lr": self.config.rate(progress), **values}
        line = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in values.items()})
        with (self.directory / "metrics.jsonl").open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def save(self) -> None:
        """The draft in bf16 under directory/draft, and the exact state beside it."""
        save_draft(copy.deepcopy(self.draft).to(torch.bfloat16), self.directory / "draft")
        state = {
            "draft": self.draft.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "elapsed": self.elapsed,
            "config": json.dumps(asdict(self.draft.config)),
        }
        partial = self.directory / "state.partial"
        torch.save(state, partial)
        partial.rename(self.directory / "state.pt")

    def resume(self) -> None:
        """Take up the saved state, if there is one."""
        path = self.directory / "state.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["config"] != json.dumps(asdict(self.draft.config)):
            raise CheckpointError(f"{path} belongs to a draft of another configuration: choose another directory")
        self.draft.load_state_dict(state["draft"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.elapsed = state["step"], state["elapsed"]


class _Meter:
    """Sums of measures, kept on the device until they are asked for."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.steps = 0

    def add(self, result: BlockLoss, norm: Tensor) -> None:
        self.steps += 1
        for name in ("loss", "hits", "counts", "overlap", "expected_al"):
            value = getattr(result, name).detach()
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.sums["grad_norm"] = self.sums.get("grad_norm", torch.zeros_like(norm)) + norm.detach()

    def take(self) -> dict[str, Any]:
        accuracy = (self.sums["hits"] / self.sums["counts"].clamp(min=1)).tolist()
        means = {name: (self.sums[name] / self.steps).item() for name in ("loss", "overlap", "expected_al", "grad_norm")}
        self.sums, self.steps = {}, 0
        return {**means, "accuracy": [round(a, 4) for a in accuracy]}
