"""Rollout: many answers at once from one target, for synthesizing training data.

N slots hold one sequence each in contiguous keys and values. One decoding step moves every slot by one token; on CUDA the whole
step, sampling included, is a single captured graph, and the host looks at the slots only every `check_every` steps.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashdraft.engine.request import SamplingParams
from flashdraft.engine.sampling import SampleFilters, SampleTable, sample_line, sample_on_device, sample_sparse
from flashdraft.errors import ConfigError, RequestError, UnsupportedModelError
from flashdraft.kernels.packed_attention import DocumentAttention
from flashdraft.kernels.rollout import decode_attention, repetition
from flashdraft.targets.target import LayerSpec, Target
from flashdraft.train.jobs import LOOP_SHARE, LOOP_WINDOW, Answer, Finish, Job, Jobs


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

    `filters` names the filters that any job uses: what none does is not computed. A job's noise is keyed by its seed and the
    place of the token, as the engine's: on a CPU its answer does not depend on what else runs.
    Raises UnsupportedModelError for a target with windowed or soft-capped layers, or with heads that are no power of two on a
    GPU; ConfigError for more slots than there is memory for.
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
        filters: SampleFilters = SampleFilters(top_k=False, top_p=False, limit=False),  # noqa: B008 - frozen
    ) -> None:
        refuse_unsupported(target, max_len)
        if slots > (fitting := slots_that_fit(target, max_len)):
            raise ConfigError(
                f"{slots:,} slots of {max_len:,} tokens need {(slots + 1) * slot_bytes(target, max_len) / 1e9:,.1f} GB for "
                f"keys and values, more than {_WHERE[target.device.type == 'cuda']}: give at most {max(1, fitting):,}"
            )
        self.target, self.device, self.logit_scale = target, target.device, target.logit_scale
        self.slots, self.max_len, self.max_new = slots, max_len, max_new
        self.prefill_shape, self.check_every, self.filters = prefill_shape, check_every, filters
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
        greedy = sample_line(SamplingParams(temperature=0.0), 0, 0)
        self.lines = torch.tensor([greedy] * n, dtype=torch.float64, device=device)  # sampling parameters
        self.counts = torch.zeros(n, dtype=torch.int32, device=device)
        self.limits = torch.zeros(n, dtype=torch.int32, device=device)
        self.outputs = torch.zeros((n, self.max_new), dtype=torch.int32, device=device)
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
        table = SampleTable.from_lines(self.lines, self.counts.long(), self.filters)
        choice = sample_on_device(logits, table) if logits.is_cuda else sample_sparse(logits.float(), table)
        broken = choice < 0  # logits without a finite best
        choice = choice.clamp(min=0)
        self.looped |= self.active & broken
        active = self.active.clone()
        at = self.counts.clamp(max=self.max_new - 1).long()
        self.outputs[self._rows, at] = torch.where(active, choice.int(), self.outputs[self._rows, at])
        self.tokens.copy_(torch.where(active, choice, self.tokens))
        self.counts += active.int()
        self.positions += active.int()
        stopped = (choice[:, None] == self.stop_ids).any(-1)
        self.active.copy_(active & ~stopped & ~broken & (self.counts < self.limits))

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
    def run(self, jobs: Jobs) -> Iterator[Answer]:
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

    def _refill(self, jobs: Jobs) -> None:
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
        filtered = job.temperature > 0 and (
            (job.top_p < 1 and not self.filters.top_p) or (job.top_k > 0 and not self.filters.top_k)
        )
        assert not filtered, "a job uses a filter that was not announced"
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
        assign(self.lines, [sample_line(_params(job), job.seed, 0) for job in members])
        assign(self.limits, [min(job.max_new, self.max_len - len(job.prompt)) for job in members])
        self.counts[index] = 0
        self.looped[index] = False
        self.active[index] = True


def _params(job: Job) -> SamplingParams:
    return SamplingParams(temperature=job.temperature, top_p=job.top_p, top_k=job.top_k)


_WHERE = ("half of this machine's memory", "is free on the GPU")


def refuse_unsupported(target: Target, max_len: int) -> None:
    """Raises UnsupportedModelError for a target that rollouts cannot run."""
    for spec in target.layer_specs:
        if spec.softcap is not None or spec.sinks is not None or (spec.window is not None and spec.window < max_len):
            raise UnsupportedModelError("rollouts support targets with full attention and no soft cap only; use the engine")
        if target.device.type == "cuda" and (spec.key_size != spec.value_size or spec.key_size & (spec.key_size - 1)):
            raise UnsupportedModelError(f"rollouts on a GPU need heads of a power of two, not {spec.key_size}; use the engine")


def slot_bytes(target: Target, max_len: int) -> int:
    """Bytes of keys and values that one slot takes."""
    own = [target.layer_specs[index] for index in target.storing_layers]
    return 2 * max_len * sum(spec.kv_heads * spec.key_size for spec in own) * target.dtype.itemsize


def slots_that_fit(target: Target, max_len: int) -> int:
    """Slots there is memory for: on a GPU in what is free, on a CPU in half of the machine's, as models and steps need some."""
    if target.device.type == "cuda":
        memory = torch.cuda.mem_get_info(target.device)[0]
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return memory // slot_bytes(target, max_len) - 1


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
