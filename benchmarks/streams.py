"""The built-in pair on a CPU at 1 to 16 streams: with its draft, as served and with all proposals verified, and without one.

    python benchmarks/streams.py [--streams 1 2 4 8 16] [--temperature 0.7] [--dtype float32] [--seconds 20] [--random-draft]

Arms take turns by quarters of a second, on the built-in prompts with answers of 96 to 159 tokens. Steps that also read a prompt
are not timed. Tokens are counted by the clock and by the processor time of the engine's thread, which does its share of every
parallel loop: on a machine with other programs the ratios of that hold, those of the clock do not.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass, field

import torch
from decode import randomize

from flashdraft import LLM, SamplingParams, builtin
from flashdraft.checkpoint import load_draft
from flashdraft.draft import DFlashDraft
from flashdraft.engine.engine import Engine, EngineConfig
from flashdraft.engine.request import Output, Request
from flashdraft.prompts import read_prompts

TURN = 0.25  # seconds


@dataclass
class Arm:
    """An engine that always has so many requests, and what its decoding steps have done."""

    engine: Engine
    streams: int
    temperature: float
    prompts: list[list[int]]
    live: list[Output] = field(default_factory=list)
    begun: int = 0
    ended: int = 0  # tokens of requests that are no longer live
    tokens: int = 0
    clock: float = 0.0
    thread: float = 0.0
    widths: Counter[int] = field(default_factory=Counter)

    def fill(self) -> None:
        for output in [o for o in self.live if o.finished]:
            self.live.remove(output)
            self.ended += len(output.tokens)
        while len(self.live) < self.streams:
            length = 96 + (self.begun * 29) % 64
            params = SamplingParams(temperature=self.temperature, max_tokens=length, ignore_eos=True, seed=self.begun)
            self.live.append(self.engine.add(Request(list(self.prompts[self.begun % len(self.prompts)]), params)))
            self.begun += 1

    def count(self) -> int:
        return self.ended + sum(len(output.tokens) for output in self.live)

    def run(self, seconds: float, timed: bool = True) -> None:
        left = seconds
        while left > 0:
            self.fill()
            scheduler = self.engine.scheduler
            decodes = not scheduler.waiting and all(sequence.decoding for sequence in scheduler.running)
            before, start, thread = self.count(), time.perf_counter(), time.thread_time()
            self.engine.step()
            if not decodes:
                continue
            took = time.perf_counter() - start
            left -= took
            if timed:
                self.tokens += self.count() - before
                self.clock += took
                self.thread += time.thread_time() - thread
                self.widths.update(o.drafted_per_step[-1] for o in self.live if o.drafted_per_step)

    @property
    def mean_width(self) -> float:
        return sum(width * steps for width, steps in self.widths.items()) / max(1, self.widths.total())


def arms(llm: LLM, draft: DFlashDraft, args: argparse.Namespace, streams: int) -> dict[str, Arm]:
    prompts = [llm.render([*p.opening, {"role": "user", "content": p.turns[0]}]) for p in read_prompts(builtin.PROMPTS)]
    kinds = {"none": (None, None), "all": (draft, False), "adaptive": (draft, True)}
    limits = dict(max_num_seqs=streams, max_model_len=2048, enable_prefix_caching=False)
    engines = {name: Engine(llm.target, own, EngineConfig(adaptive_width=w, **limits)) for name, (own, w) in kinds.items()}
    return {name: Arm(engine, streams, args.temperature, prompts) for name, engine in engines.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each arm, besides a fifth of that to warm up")
    parser.add_argument("--random-draft", action="store_true", help="weights that know nothing")
    args = parser.parse_args()
    llm = LLM(draft=False, device="cpu", dtype=args.dtype, max_num_seqs=1)
    draft = load_draft(builtin.draft_path(), dtype=llm.target.dtype, device="cpu").requires_grad_(False)
    if args.random_draft:
        torch.manual_seed(0)
        randomize(draft)
    for streams in args.streams:
        measured = arms(llm, draft, args, streams)
        for arm in measured.values():
            arm.run(args.seconds / 5, timed=False)
        for turn in range(round(args.seconds / TURN)):
            for arm in list(measured.values())[:: 1 if turn % 2 else -1]:
                arm.run(TURN)
        plain = measured["none"]
        line = [f"{streams} streams: none {plain.tokens / plain.clock:.1f} tokens/s"]
        for name in ("all", "adaptive"):
            arm = measured[name]
            ratios = [arm.tokens / a * b / plain.tokens for a, b in ((arm.clock, plain.clock), (arm.thread, plain.thread))]
            line.append(f"{name} {ratios[0]:.2f} (thread {ratios[1]:.2f}) at width {arm.mean_width:.1f}")
        print(", ".join(line), flush=True)


if __name__ == "__main__":
    main()
