"""Where answers come from: the engine, with a draft or without, or a rollout; and which of the two for a target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from flashdraft import builtin
from flashdraft.checkpoint import check_pair, load_draft, read_config
from flashdraft.draft import DFlashDraft
from flashdraft.engine.engine import Engine, EngineConfig
from flashdraft.engine.memory import saying_what_is_full
from flashdraft.engine.request import FinishReason, Output, Request, SamplingParams
from flashdraft.engine.sampling import SampleFilters
from flashdraft.errors import ConfigError, UnsupportedModelError
from flashdraft.llm import LLM, choose_device
from flashdraft.prompts import repetition
from flashdraft.targets import Target, load_target, load_tokenizer
from flashdraft.train.identity import target_hash
from flashdraft.train.jobs import LOOP_SHARE, LOOP_STRIDE, LOOP_WINDOW, Answer, Finish, Job, Jobs, Source
from flashdraft.train.rollout import Rollout, compile_small_modules, refuse_unsupported, slots_that_fit

Generator = Literal["auto", "engine", "rollout"]
SLOTS = 3072  # of a rollout on a GPU: 198k tokens/s of a 135M target on one H200
SLOTS_ON_CPU = 32
# Of an engine. A 135M target on one core, tokens per second of its time at temperature 0.7: 110 for 32 sequences, 61 for 5; in
# 8 rows a sequence, which nothing but a draft needs, 50 (the texts were equal, 32 of 32); with its draft 56.
SEQUENCES_ON_CPU = 64


@dataclass(frozen=True)
class Lengths:
    """Tokens of the longest prompt and the longest answer."""

    prompt: int
    answer: int

    def within(self, limit: int) -> int:
        """Longest prompt and answer together, for a target of so many positions."""
        return min(limit, self.prompt + self.answer)


class EngineSource:
    """Answers by the engine: with a draft several tokens a step, and for a seed the same text with any draft or none."""

    model: str | None = None
    target_hash: str | None = None

    def __init__(self, llm: LLM) -> None:
        self.tokenizer, self.engine = llm.tokenizer, llm.engine
        self.max_len: int | None = llm.engine.max_model_len
        self._stop_ids = stop_ids(llm.target, llm.tokenizer)
        seqs = llm.engine.scheduler.max_num_seqs
        self._places = seqs + max(1, seqs // 4)  # some wait, so that no step runs with a place empty

    def describe(self) -> str:
        draft = "with" if self.engine.draft is not None else "without"
        return f"by the engine {draft} a draft, {self.engine.scheduler.max_num_seqs:,} at once"

    def run(self, jobs: Jobs) -> Iterator[Answer]:
        """See Source."""
        live: dict[str, tuple[Job, LoopWatch]] = {}
        try:
            while jobs or live:
                while len(live) < self._places and jobs:
                    self._add(jobs.popleft(), live)
                for output in self.engine.step():
                    if output.finished and (found := live.pop(output.request.id, None)):
                        yield _answer(output, *found)
        finally:
            for request in live:
                self.engine.abort(request)

    def _add(self, job: Job, live: dict[str, tuple[Job, LoopWatch]]) -> None:
        params = SamplingParams(temperature=job.temperature, top_p=job.top_p, top_k=job.top_k, max_tokens=job.max_new)
        watch = LoopWatch()
        request = Request(job.prompt, params, stop_ids=self._stop_ids, on_token=watch, seed=job.seed)
        self.engine.add(request)
        live[request.id] = job, watch


class LoopWatch:
    """Ends an answer that repeats itself (jobs.LOOP_WINDOW): serves as Request.on_token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.looped = False

    def __call__(self, token: int) -> FinishReason | None:
        self.tokens.append(token)
        count = len(self.tokens)
        if count >= LOOP_WINDOW and count % LOOP_STRIDE == 0:
            self.looped = repetition(self.tokens[-LOOP_WINDOW:]) > LOOP_SHARE
        return "stop" if self.looped else None


def _answer(output: Output, job: Job, watch: LoopWatch) -> Answer:
    if output.error is not None:
        raise output.error
    finish: Finish = "loop" if watch.looped else "length" if output.finish_reason == "length" else "stop"
    return Answer(job, output.tokens, finish)


class RolloutSource:
    """Answers by a rollout: one token a step for thousands of sequences, for targets with full attention."""

    model: str | None = None
    target_hash: str | None = None

    def __init__(self, rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> None:
        self.rollout, self.tokenizer = rollout, tokenizer
        self.max_len: int | None = rollout.max_len

    def describe(self) -> str:
        return f"by a rollout, {self.rollout.slots:,} at once"

    def run(self, jobs: Jobs) -> Iterator[Answer]:
        """See Source."""
        return self.rollout.run(jobs)


def stop_ids(target: Target, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    return target.eos_token_ids | ({tokenizer.eos_token_id} - {None})


def load_source(
    target: str | Path | None,
    lengths: Lengths,
    *,
    draft: str | Path | None = None,
    generator: Generator = "auto",
    sampling: Sequence[SamplingParams] = (),
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    revision: str | None = None,
    draft_revision: str | None = None,
    lora: str | Path | None = None,
    max_num_seqs: int | None = None,
    gpu_memory_utilization: float = 0.9,
) -> Source:
    """Load a target and choose what makes its answers. target: that of LLM; draft: one is used only if it is named, "builtin"
    for the built-in target's; `sampling`: all there is to be.

    "auto" is a rollout on a GPU without a draft, where it supports the target, else the engine. Raises what loading raises,
    UnsupportedModelError for a rollout of a target that has none.
    """
    place = choose_device(device)
    name = builtin.target_path() if target in (None, builtin.NAME) else target
    assert name is not None
    rollout = generator == "rollout" or (generator == "auto" and place.type == "cuda" and draft is None)
    if rollout and draft is not None:
        raise ConfigError("a rollout uses no draft: leave the draft out, or let the engine make the answers")
    draft = builtin.draft_path() if draft == builtin.NAME else draft
    if not rollout and draft:
        read_config(draft, revision=draft_revision)  # a wrong draft is refused before the target is read
    with saying_what_is_full():
        model = load_target(name, dtype=dtype, device=place, revision=revision, lora=lora)
        weights = target_hash(model)  # before the engine fuses them
        tokenizer = load_tokenizer(name, revision=revision, lora=lora)
        if rollout:
            try:
                refuse_unsupported(model, lengths.within(model.max_position_embeddings))
            except UnsupportedModelError:
                if generator == "rollout":
                    raise
            else:
                if place.type == "cuda":
                    torch.set_float32_matmul_precision("high")
                    compile_small_modules(model)
                rolled = RolloutSource(make_rollout(model, tokenizer, lengths, sampling, max_num_seqs), tokenizer)
                rolled.target_hash = weights
                return rolled
        loaded = _load_draft(draft, model, draft_revision) if draft and not rollout else None
    config = EngineConfig(
        max_model_len=lengths.within(model.max_position_embeddings),
        max_num_seqs=max_num_seqs or (None if place.type == "cuda" else SEQUENCES_ON_CPU),
        gpu_memory_utilization=gpu_memory_utilization,
        row_multiple=1 if loaded is None else 8,
    ).for_serving(place)
    source = EngineSource(LLM.from_parts(tokenizer, Engine(model, loaded, config)))
    source.target_hash = weights
    return source


def _load_draft(draft: str | Path, target: Target, revision: str | None) -> DFlashDraft:
    sizes = dict(hidden_size=target.hidden_size, vocab_size=target.vocab_size, num_layers=target.num_layers)
    check_pair(read_config(draft, revision=revision), **sizes)
    return load_draft(draft, dtype=target.dtype, device=target.device, revision=revision, packed=None)


def make_rollout(
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    lengths: Lengths,
    sampling: Sequence[SamplingParams] = (),
    slots: int | None = None,
) -> Rollout:
    """A rollout for such lengths and sampling, with `slots` or as many as are worth it and fit."""
    cuda, max_len = target.device.type == "cuda", lengths.within(target.max_position_embeddings)
    return Rollout(
        target,
        stop_ids(target, tokenizer),
        slots=slots or max(1, min(SLOTS if cuda else SLOTS_ON_CPU, int(0.85 * slots_that_fit(target, max_len)))),
        max_len=max_len,
        max_new=min(lengths.answer, max_len),
        prefill_shape=(8 if cuda else 1, max(2048, lengths.prompt)),
        filters=SampleFilters.of(sampling),
    )
