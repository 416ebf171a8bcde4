"""The same prompts with and without the draft, in interleaved rounds: tokens/s, acceptance, and whether the texts are
identical."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers

from flashdraft import __version__
from flashdraft.engine.request import SamplingParams
from flashdraft.llm import LLM, Completion
from flashdraft.prompts import LOOP, Prompt, repetition

ONE_ROW_EVERY = 4  # every so many prompts are also decoded without row padding, to show what the padding costs


@dataclass(frozen=True)
class Turn:
    """One answer: tokens/s of each arm over `tokens` tokens (prefill included), and how the draft did."""

    prompt: str
    category: str
    tokens: int
    seconds_on: float
    seconds_off: float
    seconds_one_row: float | None  # plain decoding without padded rows
    identical: bool
    repetition: float
    committed_per_step: list[int]

    @property
    def loops(self) -> bool:
        return self.repetition > LOOP


@dataclass(frozen=True)
class Summary:
    """Totals over some answers. Speeds in tokens/s; acceptance_length is the mean over requests, pooled over steps beside
    it."""

    answers: int
    tokens: int
    tokens_per_second_on: float
    tokens_per_second_off: float
    speedup: float
    acceptance_length: float | None  # None where nothing was drafted
    acceptance_length_pooled: float | None
    acceptance_by_position: list[float]
    identical: int


@dataclass(frozen=True)
class Comparison:
    turns: list[Turn]
    num_proposals: int
    row_padding_cost: float | None  # time of padded plain decoding over time of 1-row plain decoding
    setup: dict[str, Any]

    def summary(self, turns: Sequence[Turn] | None = None) -> Summary | None:
        """Summary of some of the answers (all if None), or None of none."""
        turns = self.turns if turns is None else turns
        if not turns:
            return None
        tokens = sum(t.tokens for t in turns)
        on, off = sum(t.seconds_on for t in turns), sum(t.seconds_off for t in turns)
        steps = [c for t in turns for c in t.committed_per_step]
        drafted = [t for t in turns if t.committed_per_step]
        return Summary(
            answers=len(turns),
            tokens=tokens,
            tokens_per_second_on=tokens / on,
            tokens_per_second_off=tokens / off,
            speedup=off / on,
            acceptance_length=fmean(fmean(t.committed_per_step) for t in drafted) if drafted else None,
            acceptance_length_pooled=fmean(steps) if steps else None,
            acceptance_by_position=[
                sum(c > k for c in steps) / len(steps) if steps else 0.0 for k in range(1, self.num_proposals + 1)
            ],
            identical=sum(t.identical for t in turns),
        )

    def by_category(self) -> dict[str, Summary]:
        names = list(dict.fromkeys(t.category for t in self.turns))
        found = {name: self.summary([t for t in self.turns if t.category == name]) for name in names}
        return {name: summary for name, summary in found.items() if summary is not None}

    @property
    def differing(self) -> list[str]:
        """The prompts of which some answer differs, each once."""
        return list(dict.fromkeys(t.prompt for t in self.turns if not t.identical))

    def without_loops(self) -> Summary | None:
        return self.summary([t for t in self.turns if not t.loops])

    def to_json(self) -> dict[str, Any]:
        """Everything, with plain types."""
        clean = self.without_loops()
        whole = self.summary()
        return {
            "setup": self.setup,
            "all": asdict(whole) if whole else None,
            "without_loops": asdict(clean) if clean else None,
            "by_category": {name: asdict(s) for name, s in self.by_category().items()},
            "row_padding_cost": self.row_padding_cost,
            "turns": [{**asdict(t), "loops": t.loops} for t in self.turns],
        }


def compare(
    llm: LLM,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    rounds: int = 1,
    report: Callable[[Turn], None] = lambda turn: None,
    names: Mapping[str, str | None] | None = None,
    template: Callable[[Prompt], Mapping[str, Any]] = lambda prompt: {},
) -> Comparison:
    """Answer every prompt, turn by turn, with the draft and without, the arms taking turns at going first.

    Prefix caches are off, so that no round profits from the one before. names: what the setup is to say of the pair.
    template: chat_template_kwargs of a prompt.
    """
    about = {**(names or {}), **setup(llm), "load_average": load_average()}
    params = replace(params, seed=params.resolved_seed(), n=1)  # both arms draw with the same noise
    on = LLM.from_parts(llm.tokenizer, llm.engine)
    config = asdict(llm.engine.config)
    off = llm.without_draft(**{**config, "kv_cache_share": 1.0})  # of what the engine with the draft has left
    on_cpu = llm.target.device.type == "cpu"
    # Rows are padded by an engine that runs each step to its end, and cost something on the CPU.
    one_row = llm.without_draft(**{**config, "row_multiple": 1}) if on_cpu and not config["async_scheduling"] else None
    warm = replace(params, max_tokens=8, min_tokens=0)
    for arm in filter(None, (on, off, one_row)):
        arm.chat([{"role": "user", "content": prompts[0].turns[0]}], warm)
    turns = []
    for round_ in range(rounds):
        for number, prompt in enumerate(prompts):
            on_first = (number + round_) % 2 == 0
            padded = one_row if number % ONE_ROW_EVERY == 0 else None
            for turn in _one_conversation(prompt, params, on, off, padded, on_first, template(prompt)):
                turns.append(turn)
                report(turn)
    sampled = [t for t in turns if t.seconds_one_row]
    cost = sum(t.seconds_off for t in sampled) / sum(t.seconds_one_row or 0.0 for t in sampled) if sampled else None
    return Comparison(turns, llm.engine.scheduler.num_proposals, cost, {**about, "sampling": asdict(params)})


def _one_conversation(
    prompt: Prompt,
    params: SamplingParams,
    on: LLM,
    off: LLM,
    one_row: LLM | None,
    on_first: bool,
    template: Mapping[str, Any],
) -> list[Turn]:
    turns: list[Turn] = []
    messages = prompt.opening
    for text in prompt.turns:
        messages.append({"role": "user", "content": text})
        order = (on, off) if on_first else (off, on)
        timed = {id(arm): _timed(arm, messages, params, template) for arm in order}
        answer, seconds_on = timed[id(on)]
        plain, seconds_off = timed[id(off)]
        turns.append(
            Turn(
                prompt=prompt.id,
                category=prompt.category,
                tokens=len(plain.token_ids),
                seconds_on=seconds_on,
                seconds_off=seconds_off,
                seconds_one_row=_timed(one_row, messages, params, template)[1] if one_row else None,
                identical=answer.text == plain.text and answer.token_ids == plain.token_ids,
                repetition=repetition(plain.token_ids),
                committed_per_step=[c for c, d in zip(answer.committed_per_step, answer.drafted_per_step, strict=True) if d],
            )
        )
        messages.append({"role": "assistant", "content": plain.text})
    return turns


def _timed(
    arm: LLM, messages: list[dict[str, str]], params: SamplingParams, template: Mapping[str, Any]
) -> tuple[Completion, float]:
    start = time.perf_counter()
    [output] = arm.chat(messages, params, chat_template_kwargs=template)
    seconds = time.perf_counter() - start
    arm.engine.pool.flush()
    return output.outputs[0], seconds


def setup(llm: LLM) -> dict[str, Any]:
    """What a figure needs beside it: device, threads, dtype, versions."""
    device = llm.target.device
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "device_type": device.type,
        "threads": torch.get_num_threads(),
        "dtype": str(llm.target.dtype).removeprefix("torch."),
        "flashdraft": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def load_average() -> float | None:
    """Programs that ran or waited for a core, mean over the last minute; None where the system does not say."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def processor() -> str:
    """The processor's name and its number of cores."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        name = f"{names[0]}, {len(names)} cores" if names else name
    return name
