"""Trainer: trains a draft on packed rows with features of the target, computed in the same process or cached.

float32 parameters and optimizer state, bf16 autocast on CUDA (bf16 weights freeze norms: 78 % of their entries never move).
The schedule follows steps, or the elapsed share of a time budget. A run resumes exactly: batches are a function of the step.
"""

from __future__ import annotations

import copy
import io
import json
import math
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

import torch
from torch import Tensor

from flashdraft.checkpoint import save_draft
from flashdraft.draft import DFlashDraft
from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.quant.training import Form, round_while_training
from flashdraft.targets.target import Target
from flashdraft.train.anchors import draft_blocks
from flashdraft.train.data import Batch, Batches, FeatureCache
from flashdraft.train.distributed import World
from flashdraft.train.features import block_hidden, head_weight, packed_forward
from flashdraft.train.files import replacing, write_whole
from flashdraft.train.loss import BlockLoss, LossConfig, block_loss, chunk_rows
from flashdraft.train.metrics import Meter, read_metrics

PREFETCH, PREFETCH_CACHED = 8, 3  # batches prepared ahead by threads; with cached features one may hold a gigabyte
SAVE_SHARE = 0.02  # of the time may go into saving: a state of 12 GB is written less often than one of 100 MB


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
    evaluations: int = 10  # over the whole run, evenly by progress
    compile: bool = True  # on CUDA
    quantization: Form | None = None  # round as the draft will be quantized

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.max_seconds is None):
            raise ConfigError("training ends after a number of steps or after max_seconds: give exactly one")

    def rate(self, progress: float) -> float:
        """The learning rate at a progress of 0..1: linear warm-up, then a cosine down to final_rate of the peak."""
        if progress < self.warmup:
            return self.learning_rate * progress / self.warmup
        cosine = 0.5 * (1 + math.cos(math.pi * (progress - self.warmup) / (1 - self.warmup)))
        return self.learning_rate * (self.final_rate + (1 - self.final_rate) * cosine)


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


def prefetch(make: Callable[[int], Batch], first: int, pin: bool, ahead: int = PREFETCH) -> Generator[Batch]:
    """make(first), make(first + 1), ... prepared ahead by threads, in order."""
    with ThreadPoolExecutor(4) as pool:
        work: Callable[[int], Batch] = (lambda number: make(number).pinned()) if pin else make
        pending = [pool.submit(work, first + i) for i in range(ahead)]
        number = first + ahead
        try:
            while True:
                yield pending.pop(0).result()
                pending.append(pool.submit(work, number))
                number += 1
        finally:
            for future in pending:
                future.cancel()


def print_values(values: dict[str, Any]) -> None:
    print(json.dumps(values), flush=True)


class Trainer:
    """Trains `draft` in place. The state to resume from and metrics.jsonl go to `directory`, the draft to `draft_directory`.

    `report` is given every row of metrics.jsonl. `evaluate` measures the draft `config.evaluations` times in a run and at its
    end; what it returns becomes a row. Set `stop` (from a signal handler) to end after the update at hand, with a saved state.
    """

    def __init__(
        self,
        target: Target,
        draft: DFlashDraft,
        batches: Batches,
        config: TrainConfig,
        directory: Path,
        *,
        draft_directory: Path | None = None,
        world: World | None = None,
        report: Callable[[dict[str, Any]], None] = print_values,
        evaluate: Callable[[Trainer, bool], dict[str, Any]] | None = None,
    ) -> None:
        self.target, self.draft, self.batches, self.config, self.directory = target, draft, batches, config, directory
        self.draft_directory = draft_directory or directory / "draft"
        self.world, self.report, self.evaluate = world or World(), report, evaluate
        self.device = target.device
        self.weight, self.logit_scale = head_weight(target, draft), target.logit_scale
        target.capture(draft.config.target_layer_ids)
        draft.to(self.device, torch.float32).train()
        self.world.same_start(draft)
        if config.quantization is not None:
            round_while_training(draft, config.quantization)
        cuda = self.device.type == "cuda"
        self.optimizers = make_optimizers(draft, config, fused=cuda)
        self._draft_blocks: Callable[..., Tensor] = draft_blocks
        if cuda and config.compile:
            self._draft_blocks = torch.compile(draft_blocks, dynamic=False)
        self.step, self.elapsed, self.stop = 0, 0.0, False
        self._budget = config.max_seconds or 0.0
        self._meter = Meter(self.world)
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def progress(self) -> float:
        """0..1: the share of the steps or of the time that is done."""
        c = self.config
        return self.step / c.steps if c.steps is not None else min(self.elapsed / max(self._budget, 1e-9), 1.0)

    def hidden(self, batch: Batch, features: Tensor, windowed: bool = True) -> Tensor:
        """Hidden states of all blocks of a batch, [B, N, Z, H]; `windowed` False leaves out the draft's windows."""
        # Without gradients it would be compiled once more, for a minute; flex attention is compiled either way.
        blocks = self._draft_blocks if torch.is_grad_enabled() else draft_blocks
        return block_hidden(self.target, self.draft, batch, features, windowed, blocks)

    def choose(self, hidden: Tensor) -> Tensor:
        """The likeliest tokens [R] of hidden states [R, H]."""
        parts = hidden.to(self.weight.dtype).split(chunk_rows(len(self.weight)))
        return torch.cat([(part @ self.weight.T).argmax(-1) for part in parts])

    @property
    def cache(self) -> FeatureCache | None:
        return self.batches.cache

    def loss(self, batch: Batch) -> BlockLoss:
        features, last = packed_forward(self.target, batch)
        hidden = self.hidden(batch, features)[:, :, 1:].flatten(0, 2)[batch.rows]
        teacher, cap = last.flatten(0, 1) * self.logit_scale, self.target.final_logit_softcapping
        slots = batch.labels, batch.supervised, batch.rows
        return block_loss(hidden, teacher, batch.places, *slots, self.weight, self.config.loss, cap)

    def update(self, batches: Iterator[Batch], progress: float) -> None:
        """One update from this process's share of its rows."""
        self.draft.zero_grad(set_to_none=True)
        count = torch.zeros((), device=self.device)
        for _ in range(self.batches.parts):
            batch = next(batches)
            result = self.loss(batch.to(self.device))
            result.total.backward()
            count = count + result.counts.sum()
            self._meter.add(result, batch.tokens)
        # Rows are counted over all ranks and parts before the division, so that every row weighs the same.
        count = self.world.sum_gradients(self.draft.parameters(), count).clamp(min=1)
        for parameter in self.draft.parameters():
            if parameter.grad is not None:
                parameter.grad /= count
        self._meter.norm(torch.nn.utils.clip_grad_norm_(self.draft.parameters(), self.config.clip))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.config.rate(progress)
            optimizer.step()
        self.step += 1

    def train(self) -> bool:
        """Run to the end of the budget, from the last saved state if there is one; False if it was stopped before."""
        if self.step == 0:
            self.resume()
        cuda, c = self.device.type == "cuda", self.config
        start = saved = time.monotonic()
        start -= self.elapsed
        pause, compiling = c.save_seconds, cuda
        ahead = PREFETCH if self.batches.cache is None else PREFETCH_CACHED
        make, parts = self.batches.batch, self.batches.parts
        if self.step == 0:
            self._meter.restart()  # not to count the time before the first step
        with closing(prefetch(lambda i: make(*divmod(i, parts)), self.step * parts, cuda, ahead)) as stream:
            while True:
                progress, stop = self.world.agree(self.progress, self.stop)
                if progress >= 1 or stop:
                    break
                self.update(stream, progress)
                if self.step % c.log_every == 0:
                    self._log(progress)
                elif cuda and (compiling or self.step % 8 == 0):
                    torch.cuda.synchronize()  # the elapsed share of a time budget is that of work done, not of work queued
                if compiling:
                    # The first step compiles for up to 90 s: taken off the budget, or the schedule would skip its warm-up.
                    lost = time.monotonic() - start - self.elapsed
                    start, self._budget, compiling = start + lost, self._budget - lost, False
                    self._meter.start += lost
                self.elapsed = time.monotonic() - start
                # When to save is for rank 0 to say: every rank takes part in it.
                after, due = self.world.agree(self.progress, self.world.is_main and time.monotonic() - saved > pause)
                if self.evaluate is not None and int(after * c.evaluations) > int(progress * c.evaluations) and after < 1:
                    self._evaluate(final=False)
                    self.elapsed = time.monotonic() - start
                if due:
                    pause = max(c.save_seconds, self.save() / SAVE_SHARE)
                    saved = time.monotonic()
        if progress >= 1 and self._meter.steps:
            self._log(progress)
        self.save()
        if progress >= 1 and self.evaluate is not None:
            self._evaluate(final=True)
        return progress >= 1

    def _log(self, progress: float) -> None:
        values = self._meter.take()  # waits for the GPU
        if not math.isfinite(values["loss"]):
            raise ConfigError(
                f"the loss is not finite at step {self.step}: lower learning_rate, and start again (the last saved state is "
                "from before)"
            )
        where = {"step": self.step, "progress": self.progress, "epoch": self.step / self.batches.steps_per_epoch}
        self._write({**where, "lr": self.config.rate(progress), **values})

    def _evaluate(self, final: bool) -> None:
        assert self.evaluate is not None
        self._meter.pause()
        self._write({"step": self.step, "progress": self.progress, "heldout": self.evaluate(self, final), "final": final})
        self._meter.resume()

    def _write(self, values: dict[str, Any]) -> None:
        if not self.world.is_main:
            return
        values = {k: round(v, 5) if isinstance(v, float) and k != "lr" else v for k, v in values.items()}
        with (self.directory / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(values) + "\n")
        self.report(values)

    def save(self) -> float:
        """The draft in bf16, and the exact state to resume from, each whole or not at all; returns the seconds it took.

        Every rank takes part, rank 0 writes. Raises ConfigError for weights that are no longer finite, CheckpointError for a
        disk that is full; what was there stays.
        """
        begin, meter = time.monotonic(), self._meter.state()
        if not self.world.is_main:
            return 0.0
        if not torch.stack([p.isfinite().all() for p in self.draft.parameters()]).all():
            raise ConfigError(f"the draft's weights are not finite at step {self.step}: lower learning_rate, and start again")
        state = {
            "draft": self.draft.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "elapsed": self.elapsed,
            "meter": meter,
            "config": json.dumps(asdict(self.draft.config)),
        }
        path = self.directory / "state.pt"
        try:
            with replacing(path) as partial, partial.open("wb") as file:
                torch.save(state, file)
        except (OSError, RuntimeError) as error:
            reason = shorten(str(error), 120)
            raise CheckpointError(
                f"{path} cannot be written ({reason}): make room and resume, the last state is kept"
            ) from error
        save_draft(copy.deepcopy(self.draft).to(torch.bfloat16), self.draft_directory)
        return time.monotonic() - begin

    def resume(self) -> None:
        """Take up the saved state, if there is one; rows of metrics.jsonl behind it are dropped, without one all of them.

        The file is rank 0's, whose node alone may have it. Raises CheckpointError for what is no state, or another draft's.
        """
        path, data = self.directory / "state.pt", [b""]

        def read() -> None:
            if path.exists():
                try:
                    data[0] = path.read_bytes()
                except OSError as error:
                    raise CheckpointError(
                        f"{path} cannot be read ({error.strerror or error}): mend that, and resume"
                    ) from error

        self.world.main_first(read)
        if shared := self.world.bytes_of_main(data[0]):
            try:
                state = torch.load(io.BytesIO(shared), map_location="cpu", weights_only=True)
                if fits := state["config"] == json.dumps(asdict(self.draft.config)):
                    self._take_up(state)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever torch raises for a file that is none of its own
                raise CheckpointError(
                    f"{path} is cut short, or no state of a run: remove that file and give the same command again, which then "
                    "starts from the beginning"
                ) from error
            if not fits:
                raise CheckpointError(f"{path} belongs to a draft of another configuration: choose another directory")
        if self.world.is_main:
            self._cut_metrics()

    def _take_up(self, state: dict[str, Any]) -> None:
        self.draft.load_state_dict(state["draft"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._meter.load(state["meter"], self.device)
        self.step, self.elapsed = int(state["step"]), float(state["elapsed"])

    def _cut_metrics(self) -> None:
        """Rows that a killed process wrote after its last state go, and the last report, for the run is to go on."""
        path = self.directory / "metrics.jsonl"
        kept = [row for row in read_metrics(path) if row["step"] <= self.step and not row.get("final")] if self.step else []
        if not kept:
            return path.unlink(missing_ok=True)
        write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
