"""Engine: requests of token ids in, outputs of token ids out, through a target and, if there is one, its draft."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch

from flashdraft.draft import DFlashDraft
from flashdraft.engine.cache import CacheManager, PagePool
from flashdraft.engine.pages import PageTables
from flashdraft.engine.request import Output, Request
from flashdraft.engine.runner import Runner, kv_shapes
from flashdraft.engine.sampling import check_token_ids
from flashdraft.engine.scheduler import Scheduler
from flashdraft.errors import ConfigError, RequestError
from flashdraft.kernels.attention import KEY_PAD
from flashdraft.kernels.linear import GATE_UP, KV, make_rows_stable
from flashdraft.targets.target import Target


@dataclass(frozen=True)
class EngineConfig:
    """Limits of an engine. Raises ConfigError for values that cannot work.

    num_speculative_tokens: proposals verified a step (None: all the draft makes; 0: none). kv_cache_memory in bytes (None:
    enough for max_num_seqs sequences of max_model_len on the CPU up to 2 GiB, 85 % of what is free on a GPU). row_multiple:
    rows of a sequence are padded to it, which makes a token's bits independent of how many are verified.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 256
    num_speculative_tokens: int | None = None
    page_size: int = 16
    kv_cache_memory: int | None = None
    prefix_caching: bool = True
    row_multiple: int = 8

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "page_size", "row_multiple"):
            _check(name, getattr(self, name), 1)
        for name, low in (("max_model_len", 2), ("num_speculative_tokens", 0), ("kv_cache_memory", 1)):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), low)
        if KEY_PAD % self.page_size:
            raise ConfigError(f"page_size must divide {KEY_PAD}, got {self.page_size}")


def _for_inference(draft: DFlashDraft, target: Target) -> DFlashDraft:
    """The draft in the target's dtype and place; the caller's own is left as it was."""
    draft = copy.deepcopy(draft).to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    make_rows_stable(draft, (KV, GATE_UP))  # queries come from the block alone, keys and values from the context too
    return draft


def _check(name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{name} must be an integer of at least {low}, got {value!r}")


class Engine:
    """Serves requests step by step; text for a request is the same with any draft, any width, any batch, or none.

    Takes objects, never paths. `add` queues, `step` advances everything by one verify step (and one prefill chunk), `abort`
    ends.
    """

    def __init__(self, target: Target, draft: DFlashDraft | None = None, config: EngineConfig | None = None) -> None:
        self.config = config = config or EngineConfig()
        make_rows_stable(target.model)
        if draft is not None:
            draft = _for_inference(draft, target)
        self.target, self.draft = target, draft
        self.max_model_len = self._model_len()
        self.block_size = draft.config.block_size if draft is not None else 1
        proposals = self.block_size - 1
        if config.num_speculative_tokens is not None:
            if config.num_speculative_tokens > proposals and draft is not None:
                raise ConfigError(
                    f"num_speculative_tokens {config.num_speculative_tokens} is more than this draft's {proposals} proposals"
                )
            proposals = min(proposals, config.num_speculative_tokens)
        self.pool = PagePool(
            kv_shapes(target, draft),
            page_size=config.page_size,
            num_bytes=config.kv_cache_memory or self._default_memory(),
            dtype=target.dtype,
            device=target.device,
        )
        self.cache = CacheManager(self.pool, prefix_caching=config.prefix_caching)
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            num_proposals=proposals,
        )
        tables = PageTables(self.pool, config.max_num_seqs, self.max_model_len + self.block_size)
        self.runner = Runner(target, draft, self.pool, tables, config.row_multiple)

    def _model_len(self) -> int:
        limit = self.target.max_position_embeddings
        wanted = self.config.max_model_len or limit
        if wanted > limit:
            raise ConfigError(f"max_model_len {wanted} is more than the {limit} positions that the target was made for")
        if self.draft is not None and wanted > self.draft.config.max_position_embeddings:
            raise ConfigError(
                f"max_model_len {wanted} is more than the draft's {self.draft.config.max_position_embeddings} positions"
            )
        return wanted

    def _default_memory(self) -> int:
        if self.target.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.target.device)
            return int(0.85 * free)
        per_token = 0
        for shape in kv_shapes(self.target, self.draft):
            per_token += shape.elements(1)
        # Half as much again: windowed groups hold partial pages, and units of unequal groups leave gaps.
        tokens = self.config.max_num_seqs * (self.max_model_len + 2 * KEY_PAD)
        return min(2 << 30, math.ceil(1.5 * tokens * per_token * self.target.dtype.itemsize))

    def check(self, request: Request) -> None:
        """Raises RequestError if a request can never be served."""
        vocab = self.target.vocab_size
        wrong = [t for t in request.prompt if not isinstance(t, int) or isinstance(t, bool) or not 0 <= t < vocab]
        if wrong:
            raise RequestError(f"prompt token {wrong[0]!r} is not an id of the target's vocabulary, 0 to {vocab - 1}")
        if request.media:
            raise RequestError("this target takes no media: leave out images and audio")
        check_token_ids(request.params, vocab)
        self.scheduler.check(request)

    def add(self, request: Request) -> Output:
        """Queue a request; its Output fills as steps run. Raises RequestError if it can never be served."""
        self.check(request)
        if request.seed is None:
            request.seed = request.params.resolved_seed()
        return self.scheduler.add(request)

    def step(self) -> list[Output]:
        """One step; returns the outputs that changed."""
        batch = self.scheduler.schedule()
        result = self.runner.run(batch)
        return self.scheduler.commit(result)

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
