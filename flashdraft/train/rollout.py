"""Rollout: many answers at once from one target, for synthesizing training data.

N slots hold one sequence each in contiguous keys and values. One decoding step moves every slot by one token; on CUDA the whole
step, sampling included, is a single captured graph, and the host looks at the slots only every `check_every` steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from flashdraft.errors import RequestError, UnsupportedModelError
from flashdraft.kernels.packed_attention import DocumentAttention
from flashdraft.kernels.rollout import decode_attention, repetition, sample
from flashdraft.targets.target import LayerSpec, Target

Finish = Literal["stop", "length", "loop"]
# A slot whose last LOOP_WINDOW tokens repeat more than LOOP_SHARE of their 8-grams will not recover: small targets loop in a
# quarter of their greedy answers, and each would cost up to three times the tokens of a good answer.
LOOP_WINDOW, LOOP_SHARE = 192, 0.5


@dataclass
class Job:
    """One answer to generate. `tag` is the caller's own."""

    prompt: list[int]
    temperature: float = 0.0
    max_new: int = 512
    tag: Any = None


@dataclass(frozen=True)
class Answer:
    job: Job
    tokens: list[int]  # the stop token included
    finish: Finish


@dataclass
class _Packed:
    """Prompts side by side in rows [B, S] for one prefill."""

    rows: int
    length: int
    used: list[int] = field(default_factory=list)
    members: list[tuple[int, int, Job]] = field(default_factory=list)  # (row, start, job)

    def add(self, job: Job) -> bool:
        need = len(job.prompt) - 1
        for row, used in enumerate(self.used):
            if used + need <= self.length:
                self.members.append((row, used, job))
                self.used[row] += need
                return True
        return False

    @property
    def fill(self) -> float:
        return sum(self.used) / (self.rows * self.length)


class Rollout:
    """Generates answers for jobs. Memory: 2 * layers * (slots + 1) * kv heads * max_len * head size elements.

    Raises UnsupportedModelError for a target with windowed or soft-capped layers.
    """

    def __init__(
        self,
        target: Target,
        stop_ids: frozenset[int],
        *,
        slots: int,
        max_len: int,
        max_new: int,
        prefill_shape: tuple[int, int] = (8, 2048),
        check_every: int = 16,
        seed: int = 0,
    ) -> None:
        for spec in target.layer_specs:
            if spec.softcap is not None or spec.sinks is not None or (spec.window is not None and spec.window < max_len):
                raise UnsupportedModelError("rollouts support targets with full attention and no soft cap only; use the engine")
        self.target, self.device, self.logit_scale = target, target.device, target.logit_scale
        self.slots, self.max_len, self.max_new = slots, max_len, max_new
        self.prefill_shape, self.check_every, self.seed = prefill_shape, check_every, seed
        self.stop_ids = torch.tensor(sorted(stop_ids), device=self.device)
        self.steps = self.prefill_tokens = self.decoded_tokens = 0
        self._jobs: list[Job | None] = [None] * slots
        self._allocate()
        self._replay: Callable[[], None] = self._step
        if self.device.type == "cuda":
            self._replay = self._capture()

    def _allocate(self) -> None:
        n, device = self.slots, self.device
        self.caches = {  # one slot more: padding is written there
            index: tuple(
                torch.zeros((n + 1, spec.kv_heads, self.max_len, spec.key_size), dtype=self.target.dtype, device=device)
                for _ in range(2)
            )
            for index in self.target.storing_layers
            for spec in [self.target.layer_specs[index]]
        }
        self.tokens = torch.zeros(n, dtype=torch.long, device=device)
        self.positions = torch.zeros(n, dtype=torch.int32, device=device)
        self.active = torch.zeros(n, dtype=torch.bool, device=device)
        self.looped = torch.zeros(n, dtype=torch.bool, device=device)
        self.temperatures = torch.zeros(n, dtype=torch.float32, device=device)
        self.counts = torch.zeros(n, dtype=torch.int32, device=device)
        self.limits = torch.zeros(n, dtype=torch.int32, device=device)
        self.outputs = torch.zeros((n, self.max_new), dtype=torch.int32, device=device)
        self.step_counter = torch.zeros(1, dtype=torch.int32, device=device)
        self._rows = torch.arange(n, device=device)
        self._no_mask = torch.zeros((1, 1, 1, 1), device=device)

    def _forward(self, ids: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        with self.target.attending(attend):
            # A ready 4-D mask, ignored by our attention, keeps transformers from reading positions back from the GPU.
            out = self.target.decoder(
                input_ids=ids[None], position_ids=positions[None], attention_mask=self._no_mask, use_cache=False
            )
        return out.last_hidden_state[0]

    def _decode_attend(self, layer: int, spec: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_cache, v_cache = self.caches[spec.source]
        return decode_attention(q, k, v, k_cache[:-1], v_cache[:-1], self.positions, self.active, spec.scale)

    @torch.no_grad()
    def _step(self) -> None:
        """One token for every active slot. Nothing here depends on values the host would have to read."""
        hidden = self._forward(self.tokens, self.positions, self._decode_attend)
        logits = self.target.head(hidden) * self.logit_scale
        if (cap := self.target.final_logit_softcapping) is not None:
            logits = torch.tanh(logits / cap) * cap
        choice = sample(logits, self.temperatures, self.step_counter, self.seed << 20)
        active = self.active.clone()
        at = self.counts.clamp(max=self.max_new - 1).long()
        self.outputs[self._rows, at] = torch.where(active, choice, self.outputs[self._rows, at])
        self.tokens.copy_(torch.where(active, choice.long(), self.tokens))
        self.counts += active.int()
        self.positions += active.int()
        self.step_counter += 1
        stopped = (choice[:, None] == self.stop_ids).any(-1)
        self.active.copy_(active & ~stopped & (self.counts < self.limits))

    def _capture(self) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # compiles the kernels; no slot is active yet
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()
        return self.graph.replay

    @torch.no_grad()
    def run(self, jobs: deque[Job]) -> Iterator[Answer]:
        """Yield answers as they finish, until `jobs` is empty. The caller may append to (or clear) `jobs` in between."""
        checks = 0
        ready: list[Answer] = []
        while True:
            if not jobs and all(job is None for job in self._jobs):
                yield from ready  # the caller may add jobs as it takes these
                ready = []
                if not jobs:
                    return
            self._refill(jobs)
            for _ in range(self.check_every):
                self._replay()
            self.steps += self.check_every
            checks += 1
            yield from ready  # what the caller does with them overlaps with the GPU's work
            if checks % 4 == 0:
                self._stop_loops()
            ready = self._collect()

    def _stop_loops(self) -> None:
        if self.max_new < LOOP_WINDOW:
            return
        at = self.counts.long()[:, None] - LOOP_WINDOW + torch.arange(LOOP_WINDOW, device=self.device)
        recent = self.outputs.gather(1, at.clamp(min=0))
        looping = self.active & (self.counts >= LOOP_WINDOW) & (repetition(recent) > LOOP_SHARE)
        self.looped |= looping
        self.active &= ~looping

    def _collect(self) -> list[Answer]:
        active = self.active.tolist()
        done = [slot for slot, job in enumerate(self._jobs) if job is not None and not active[slot]]
        if not done:
            return []
        index = torch.tensor(done, device=self.device)
        tokens, counts, looped = self.outputs[index].tolist(), self.counts[index].tolist(), self.looped[index].tolist()
        stop = set(self.stop_ids.tolist())
        answers = []
        for slot, row, count, loop in zip(done, tokens, counts, looped, strict=True):
            job, self._jobs[slot] = self._jobs[slot], None
            assert job is not None
            finish: Finish = "loop" if loop else "stop" if row[count - 1] in stop else "length"
            answers.append(Answer(job, row[:count], finish))
            self.decoded_tokens += count
        return answers

    def _refill(self, jobs: deque[Job]) -> None:
        """Prefill as many jobs as there are free slots, in whole packs while the other slots are busy enough to wait."""
        free = [slot for slot, job in enumerate(self._jobs) if job is None]
        while free and jobs:
            packed = _Packed(*self.prefill_shape, used=[0] * self.prefill_shape[0])
            while jobs and len(packed.members) < len(free):
                job = jobs.popleft()
                self._check(job)
                if not packed.add(job):
                    jobs.appendleft(job)
                    break
            starved = len(packed.members) == len(free)
            if starved and packed.fill < 0.7 and len(free) < self.slots // 4:
                jobs.extendleft(job for _, _, job in reversed(packed.members))
                return
            slots = [free.pop() for _ in packed.members]
            self._prefill(packed, slots)

    def _check(self, job: Job) -> None:
        longest = min(self.max_len - 1, self.prefill_shape[1])
        if not 1 <= len(job.prompt) <= longest or not 1 <= job.max_new <= self.max_new:
            raise RequestError(
                f"a job of {len(job.prompt)} prompt and {job.max_new} new tokens does not fit: prompts of 1 to {longest}, "
                f"at most {self.max_new} new tokens"
            )

    def _prefill(self, packed: _Packed, slots: list[int]) -> None:
        """Write the keys and values of all but the last prompt token; decoding then begins with that token."""
        batch, length = self.prefill_shape
        ids = torch.zeros((batch, length), dtype=torch.long)
        positions, owner = torch.zeros_like(ids), torch.full_like(ids, self.slots)
        for slot, (row, start, job) in zip(slots, packed.members, strict=True):
            part = slice(start, start + len(job.prompt) - 1)
            ids[row, part] = torch.tensor(job.prompt[:-1])
            positions[row, part] = torch.arange(len(job.prompt) - 1)
            owner[row, part] = slot
            self._jobs[slot] = job
        ids, positions, owner = (x.to(self.device, non_blocking=True) for x in (ids, positions, owner))
        documents, at = DocumentAttention(owner), (owner.flatten(), positions.flatten())

        def attend(layer: int, spec: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if spec.source == layer:
                self.caches[layer][0][at[0], :, at[1]] = k
                self.caches[layer][1][at[0], :, at[1]] = v
            return documents(layer, spec, q, k, v)

        self._forward(ids.flatten(), positions.flatten(), attend)
        self.prefill_tokens += sum(packed.used)
        members = [job for _, _, job in packed.members]
        index = torch.tensor(slots, device=self.device)

        def assign(state: Tensor, values: list[Any]) -> None:
            state[index] = torch.tensor(values, dtype=state.dtype).to(self.device)

        assign(self.tokens, [job.prompt[-1] for job in members])
        assign(self.positions, [len(job.prompt) - 1 for job in members])
        assign(self.temperatures, [job.temperature for job in members])
        assign(self.limits, [min(job.max_new, self.max_len - len(job.prompt)) for job in members])
        self.counts[index] = 0
        self.looped[index] = False
        self.active[index] = True


def compile_small_modules(target: Target) -> None:
    """Fuse the element-wise kernels of norms and MLPs, which a small target's step is full of; matrix products stay."""
    for module in target.decoder.modules():
        if type(module).__name__.endswith(("RMSNorm", "MLP")):
            module.compile(dynamic=False)


def generate(rollout: Rollout, jobs: list[Job]) -> list[Answer]:
    """Answers in the order of the jobs."""
    order = {id(job): i for i, job in enumerate(jobs)}
    answers = sorted(rollout.run(deque(jobs)), key=lambda answer: order[id(answer.job)])
    return answers


__all__ = ["Answer", "Job", "Rollout", "compile_small_modules", "generate"]
