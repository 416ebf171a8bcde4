"""Engine: requests of token ids in, outputs of token ids out, through a target and, if there is one, its draft."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import torch

from flashdraft.draft import DFlashDraft
from flashdraft.engine.cache import CacheManager, PagePool, kv_shapes
from flashdraft.engine.device_runner import DeviceRunner
from flashdraft.engine.forward import TILE_ROWS
from flashdraft.engine.media import check_media
from flashdraft.engine.memory import (
    CHUNK,
    PAGE_SIZE,
    MemoryReport,
    measure,
    refuse_heads,
    refuse_old,
    release_unused,
    saying_what_is_full,
)
from flashdraft.engine.pages import PageTables
from flashdraft.engine.request import Output, Request
from flashdraft.engine.runner import Runner
from flashdraft.engine.sampling import check_token_ids
from flashdraft.engine.scheduler import Batch, Flight, Scheduler
from flashdraft.engine.state import DeviceLimits
from flashdraft.engine.width import WidthPolicy
from flashdraft.errors import ConfigError, FlashdraftError, RequestError
from flashdraft.kernels.attention import KEY_PAD
from flashdraft.kernels.fused import FusedOptions
from flashdraft.kernels.linear import GATE_UP, KV, make_rows_stable, pack_linears
from flashdraft.quant.linear import expand
from flashdraft.targets.fused import FusionReport, fuse
from flashdraft.targets.target import Target


@dataclass(frozen=True)
class EngineConfig:
    """Limits of an engine. Raises ConfigError for values that cannot work.

    max_num_seqs: sequences that run at once (None: 16). max_num_batched_tokens: prompt tokens a step, decoding sequences not
    counted (None: 256, or what the target's images need). num_speculative_tokens: proposals verified a step (None: all the
    draft makes; 0: none). kv_cache_memory_bytes (None: enough for max_num_seqs sequences of max_model_len on the CPU, up to 2
    GiB; on a GPU 85 % of what is free). row_multiple: the rows of a step are padded to it, which makes a token's bits
    independent of how many are verified.

    adaptive_width: how many proposals are verified follows from what is accepted and what a step costs, which is timed at the
    start. None: where steps are CUDA graphs, and on the CPU for what serves (`LLM`; an `Engine` by itself verifies all). True
    is refused where a step's time cannot be foretold.

    proposal_noise: how much of the target's noise proposals see where a request samples (proposals.py), 0.01 to 1; 0: none, the
    draft's likeliest tokens. The text does not depend on it.

    kv_cache_share: of the memory left for the KV cache of a GPU, the part that this engine takes; below 1 where another engine
    is to start beside it.

    async_scheduling: steps run from state on the device, each launched before the host has seen the one before; on a GPU in
    fused kernels and CUDA graphs. None: on a GPU, not on the CPU, where there is nothing to overlap. Of it alone:
    enforce_eager, no CUDA graphs; deterministic, on a GPU too text does not depend on the draft, its width or the batch, bit
    for bit; gpu_memory_utilization, the share of a GPU that models, steps and KV cache take together, those of this process's
    earlier engines included; and on a GPU 64 sequences and 2,048 tokens by default.
    """

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    num_speculative_tokens: int | None = None
    page_size: int = PAGE_SIZE
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_share: float = 1.0
    enable_prefix_caching: bool = True
    row_multiple: int = 8
    proposal_noise: float = 0.7
    async_scheduling: bool | None = None
    enforce_eager: bool = False
    adaptive_width: bool | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in ("page_size", "row_multiple"):
            _check(name, getattr(self, name), 1)
        for name, low in _OPTIONAL.items():
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), low)
        for name in _OF_ASYNC_SCHEDULING:
            is_given = getattr(self, name) != EngineConfig.__dataclass_fields__[name].default
            if is_given and self.async_scheduling is not None and not self.async_scheduling:
                raise ConfigError(
                    f"{name} is an option of async_scheduling, which is off (by default on the CPU): set async_scheduling=True "
                    "as well, or leave it out"
                )
        for name in ("gpu_memory_utilization", "kv_cache_share"):
            share = getattr(self, name)
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
                raise ConfigError(f"{name} must be a number above 0 and at most 1, got {share!r}")
        noise = self.proposal_noise
        if isinstance(noise, bool) or not isinstance(noise, int | float) or not (noise == 0 or 0.01 <= noise <= 1):
            raise ConfigError(f"proposal_noise must be 0 or a number from 0.01 to 1, got {noise!r}")
        if KEY_PAD % self.page_size:
            raise ConfigError(f"page_size must divide {KEY_PAD}, got {self.page_size}")

    def on(self, device: torch.device) -> EngineConfig:
        """The same, with async_scheduling decided for a target there.

        Raises ConfigError for options of async_scheduling where that is off, and for a GPU that it cannot use.
        """
        ahead = device.type == "cuda" if self.async_scheduling is None else self.async_scheduling
        if ahead and device.type == "cuda":
            refuse_old(device)
        return replace(self, async_scheduling=ahead)

    def for_serving(self, device: torch.device) -> EngineConfig:
        """The same, with adaptive_width decided, too: on the CPU it is on unless it was given."""
        config = self.on(device)
        can = device.type == "cpu" and not config.async_scheduling
        return replace(config, adaptive_width=True) if can and config.adaptive_width is None else config


_OF_ASYNC_SCHEDULING = ("enforce_eager", "deterministic", "gpu_memory_utilization")
_OPTIONAL = {
    "max_model_len": 2,
    "num_speculative_tokens": 0,
    "kv_cache_memory_bytes": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
}


def _for_inference(draft: DFlashDraft, target: Target, packed: bool) -> DFlashDraft:
    """The draft in the target's dtype and place; the caller's own is left as it was. packed: NVFP4 weights stay."""
    draft = copy.deepcopy(draft).to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    if not packed:
        expand(draft, target.dtype)
    pack_linears(draft, (KV, GATE_UP))  # queries come from the block alone, keys and values from the context too
    return draft


def _check(name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{name} must be an integer of at least {low}, got {value!r}")


class Engine:
    """Serves requests step by step; text for a request is the same with any draft, any width, any batch, or none.

    Takes objects, never paths. `add` queues, `step` advances everything by one verify step (and chunks of prompts), `abort`
    ends. `config` is the one given, with async_scheduling decided. Raises ConfigError and UnsupportedModelError for what cannot
    work, a GPU with too little memory among them.
    """

    def __init__(self, target: Target, draft: DFlashDraft | None = None, config: EngineConfig | None = None) -> None:
        self.config = (config or EngineConfig()).on(target.device)
        with saying_what_is_full():
            self._build(target, draft, self.config)

    def _build(self, target: Target, draft: DFlashDraft | None, config: EngineConfig) -> None:
        self.fusion: FusionReport | None = None  # which of the target's layers run in fused kernels
        if config.async_scheduling and target.device.type == "cuda":
            refuse_heads(kv_shapes(target, draft))
            release_unused()
            self.fusion = fuse(target, FusedOptions(deterministic=config.deterministic))
            if config.deterministic and self.fusion.kept:
                raise ConfigError(
                    f"deterministic needs every layer of the target in fused kernels, so turn it off: {self.fusion}"
                )
        make_rows_stable(target.model, leave=() if target.media is None else target.media.modules)
        if draft is not None:
            draft = _for_inference(draft, target, bool(config.async_scheduling))
        self.target, self.draft = target, draft
        self.max_model_len = self._model_len()
        self.block_size = draft.config.block_size if draft is not None else 1
        proposals = self.block_size - 1
        if config.num_speculative_tokens is not None:
            if config.num_speculative_tokens > proposals and draft is not None:
                raise ConfigError(
                    f"num_speculative_tokens {config.num_speculative_tokens} is more than this draft's {proposals} proposals: "
                    f"give {proposals} or fewer"
                )
            proposals = min(proposals, config.num_speculative_tokens)
        if config.async_scheduling:
            proposals = min(proposals, TILE_ROWS - 1)  # attention takes the rows that verify a sequence together
        limits = DeviceLimits(
            max_num_seqs=config.max_num_seqs or (64 if self._ahead_on_gpu else 16),
            max_num_batched_tokens=config.max_num_batched_tokens or self._batched_tokens(),
            max_model_len=self.max_model_len,
            num_proposals=proposals if draft is not None else 0,
            enforce_eager=config.enforce_eager,
            deterministic=config.deterministic,
            proposal_noise=config.proposal_noise,
        )
        self.memory: MemoryReport | None = None  # where a GPU's memory went
        self.pool = self._pool(config.kv_cache_memory_bytes or self._memory_for_pages(limits))
        self.cache = CacheManager(self.pool, enable_prefix_caching=config.enable_prefix_caching)
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            num_proposals=proposals,
            max_prefills=limits.max_prefills if config.async_scheduling else 1,
        )
        self.runner = self._runner(limits)
        self._flights: list[Flight] = []  # launched and not committed: one between steps
        self._stepping = False

    @property
    def _ahead_on_gpu(self) -> bool:
        return bool(self.config.async_scheduling) and self.target.device.type == "cuda"

    def _batched_tokens(self) -> int:
        """Prompt tokens a step unless told: an image that sees itself whole is computed in one."""
        longest = 0 if self.target.media is None else self.target.media.longest_whole_image
        return max(longest, CHUNK if self._ahead_on_gpu else 256)

    def _pool(self, num_bytes: int) -> PagePool:
        shapes, target = kv_shapes(self.target, self.draft), self.target
        return PagePool(
            shapes,
            page_size=self.config.page_size,
            num_bytes=num_bytes,
            dtype=target.dtype,
            device=target.device,
            zeroed=not self.config.async_scheduling,
        )

    def _runner(self, limits: DeviceLimits) -> Runner | DeviceRunner:
        config = self.config
        runner: Runner | DeviceRunner
        if not config.async_scheduling:
            tables = PageTables(self.pool, limits.max_num_seqs, self.max_model_len + self.block_size)
            runner = Runner(self.target, self.draft, self.pool, tables, config.row_multiple, config.proposal_noise)
        else:
            runner = DeviceRunner(self.target, self.draft, self.pool, limits)
            runner.warm_up()
        if limits.num_proposals and self._adapts(runner):
            self.scheduler.policy = WidthPolicy(limits.num_proposals, runner.measure())
        return runner

    def _adapts(self, runner: Runner | DeviceRunner) -> bool:
        wanted = self.config.adaptive_width
        if isinstance(runner, DeviceRunner):
            can, default = runner.captures, True
        else:
            can, default = self.target.device.type == "cpu", False
        if wanted and not can:
            raise ConfigError(
                "adaptive_width needs step times to go by, and has them for CUDA graphs and, without async_scheduling, on the "
                "CPU: leave it out here"
            )
        return can and (default if wanted is None else wanted)

    def _memory_for_pages(self, limits: DeviceLimits) -> int:
        """Bytes: on a GPU what is left once a step has been measured, on the CPU what the sequences can need, up to 2 GiB."""
        if self._ahead_on_gpu:
            smallest = self._pool(1)

            def rehearse() -> None:
                DeviceRunner(self.target, self.draft, smallest, replace(limits, enforce_eager=True)).rehearse()

            least = CacheManager(smallest).bytes_for(self.max_model_len + self.block_size, limits.max_num_batched_tokens)
            utilization, share = self.config.gpu_memory_utilization, self.config.kv_cache_share
            self.memory = measure(self.target.device, rehearse, utilization, least, share)
            return self.memory.pages
        if self.target.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.target.device)
            return int(0.85 * free * self.config.kv_cache_share)
        per_token = sum(shape.elements(1) for shape in kv_shapes(self.target, self.draft))
        # Half as much again: windowed groups hold partial pages, and units of unequal groups leave gaps.
        tokens = limits.max_num_seqs * (self.max_model_len + 2 * KEY_PAD)
        return min(2 << 30, math.ceil(1.5 * tokens * per_token * self.target.dtype.itemsize))

    def _model_len(self) -> int:
        limit = self.target.max_position_embeddings
        wanted = self.config.max_model_len or limit
        if wanted > limit:
            raise ConfigError(f"max_model_len {wanted} is more than the {limit} positions the target was made for: lower it")
        if self.draft is not None and wanted > self.draft.config.max_position_embeddings:
            raise ConfigError(
                f"max_model_len {wanted} is more than the draft's {self.draft.config.max_position_embeddings} positions: "
                "lower it"
            )
        return wanted

    def check(self, request: Request) -> None:
        """Raises RequestError if a request can never be served."""
        self.check_tokens(request.prompt)
        check_media(request, self.target, self.scheduler.max_num_batched_tokens)
        check_token_ids(request.params, self.target.vocab_size)
        self.scheduler.check(request)

    def check_tokens(self, prompt: list[int]) -> None:
        """Raises RequestError for what is no token of the target's."""
        vocab = self.target.vocab_size
        wrong = [t for t in prompt if not isinstance(t, int) or isinstance(t, bool) or not 0 <= t < vocab]
        if wrong:
            raise RequestError(f"prompt token {wrong[0]!r} is not an id of the target's vocabulary, 0 to {vocab - 1}")

    def add(self, request: Request) -> Output:
        """Queue a request; its Output fills as steps run. Raises RequestError if it can never be served."""
        self.check(request)
        if request.seed is None:
            request.seed = request.params.resolved_seed()
        return self.scheduler.add(request)

    def step(self) -> list[Output]:
        """One step; returns the outputs that changed. With async_scheduling these are those of the step before, while the
        one just launched runs.
        """
        if self._stepping:
            raise FlashdraftError("Engine.step was called from a hook of a request: return from the hook first")
        self._stepping = True
        try:
            changed = self._step()
        finally:
            self._stepping = False
        return list({id(output): output for output in changed}.values())

    def _step(self) -> list[Output]:
        changed: list[Output] = []
        if len(self._flights) > 1 or (self._flights and self.runner.waits_for_host(self.scheduler.candidates)):
            changed += self.settle()
        batch = self.scheduler.schedule(under_way=bool(self._flights))
        if batch is None:
            changed += self.settle()
            batch = self.scheduler.schedule()
            assert batch is not None
        flight = self._launch(batch)
        if flight is not None:
            self._flights.append(flight)
        return changed + self._commit(1 if flight is not None and self.runner.asynchronous else 0)

    def _launch(self, batch: Batch) -> Flight | None:
        if batch.empty:
            return None
        try:
            return self.runner.launch(batch)
        except BaseException:
            self.scheduler.cancel(batch)
            raise

    def settle(self) -> list[Output]:
        """Wait for the step under way, if there is one, and commit it; returns the outputs that changed."""
        return self._commit(0)

    def _commit(self, leaving: int) -> list[Output]:
        """All steps under way but the last `leaving`. One whose awaiting was interrupted stays, and is awaited again."""
        changed: list[Output] = []
        while len(self._flights) > leaving:
            result = self.runner.collect(self._flights[0])
            del self._flights[0]
            changed += self.scheduler.commit(result)
        return changed

    def abort(self, request_id: str) -> bool:
        """End a request and free its pages; True if it was running or waiting."""
        return self.scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def check_idle(self) -> None:
        """An integrity check for when nothing runs: every unit of KV memory is free or in the prefix cache."""
        assert not self.has_work
        assert self.pool.available_units == self.pool.num_units, (
            f"{self.pool.num_units - self.pool.available_units} units of KV memory leaked"
        )
