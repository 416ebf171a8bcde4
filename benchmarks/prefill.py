"""Prompts on random weights of Gemma 4 E4B's shape: what a long one costs requests beside it, and time to first tokens.

    python benchmarks/prefill.py [--prompt 16384] [--running 4] [--chunk 512 2048] [--alone 128 1024 8192] [--output FILE]

A chunk is max_num_batched_tokens. Requests decode with the reference draft, of whose proposals ACCEPTED of step.py are taken in
turn; then the prompt arrives, so often as --arrivals says (0: not at all). Steps are wall clock between returns of step():
before it, up to its first token, and after it. `alone`: time to the first token of an engine that does nothing else, with and
without the draft. `floor`: products of the prompt at PEAK, attention left out. `of the matrix rate`: products and attention of
the target, over that time and the rate of one large product in this run. Needs a GPU with 40 GB or more.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from kernel_cases import Machine
from kernel_times import product_rate
from step import ACCEPTED, BANDWIDTH, VARIANTS, FixedAcceptance, floor, full_shape, reference_draft, take_variant

import flashdraft.engine.engine as engine_module
from flashdraft.draft import DFlashDraft
from flashdraft.engine.engine import Engine, EngineConfig
from flashdraft.engine.request import Output, Request, SamplingParams
from flashdraft.targets.target import Target

PEAK = 989e12  # bfloat16 operations a second of an H200, by its data sheet
SETTLING = 4  # steps that are not counted once requests come or go


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=16384)
    parser.add_argument("--running", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024, help="tokens of the prompts of the running requests")
    parser.add_argument("--chunk", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--alone", type=int, nargs="+", default=[128, 1024, 8192])
    parser.add_argument("--steps", type=int, default=200, help="before an arrival, and after it")
    parser.add_argument("--arrivals", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=7, help="of a prompt alone")
    parser.add_argument("--layers", type=int, default=42)
    parser.add_argument("--variant", choices=[*VARIANTS], default="default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU, and PyTorch finds none")
    take_variant(arguments.variant)
    device = torch.device(arguments.device)
    target, draft = full_shape(device, arguments.layers), reference_draft(device, arguments.layers)
    engine_module.DeviceRunner = FixedAcceptance
    report, least = Report(arguments.output), Floor.of(target, draft)
    rate = 1e6 * product_rate(Machine(device, shrink=1 if device.type == "cuda" else 32))
    for chunk in arguments.chunk:
        alone: dict[str, dict[int, float]] = {}
        for kind, pair in (("draft", draft), ("plain", None)):
            engine = engine_of(target, pair, chunk, arguments)
            print(f"chunk {chunk}, {kind}: {engine.fusion}; {engine.memory}", flush=True)
            if pair is not None and arguments.arrivals:
                report.beside(chunk, arguments.prompt, least, **beside(engine, arguments))
            alone[kind] = {tokens: first_token(engine, tokens, arguments.repeats) for tokens in arguments.alone}
            del engine
            gc.collect()  # before the next one asks how much memory is free
        for tokens in arguments.alone:
            report.alone(chunk, tokens, least, alone["plain"][tokens], alone["draft"][tokens])
            needed = tokens * least.plain + attention_operations(target, tokens)
            report.share(chunk, tokens, needed, alone["plain"][tokens], rate)
    print("\n".join(["", *report.lines]))
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}; torch {torch.__version__}; transformers {transformers.__version__}")


def attention_operations(target: Target, tokens: int) -> float:
    """Of queries times keys and weights times values that a causal layer sees, its window counted."""
    total = 0.0
    for spec in target.layer_specs:
        window = min(spec.window or tokens, tokens)
        pairs = window * (window + 1) / 2 + (tokens - window) * window
        total += 2.0 * spec.heads * (spec.key_size + spec.value_size) * pairs
    return total


def engine_of(target: Target, draft: DFlashDraft | None, chunk: int, arguments: argparse.Namespace) -> Engine:
    longest = max(arguments.prompt, *arguments.alone) + 64
    # A step is up to max(ACCEPTED) + 1 tokens of a request, and they may not end before the last step.
    steps = arguments.arrivals * (2 * (arguments.steps + SETTLING) + arguments.prompt // chunk + 2 * SETTLING)
    limits = EngineConfig(
        max_model_len=max(longest, arguments.context + (max(ACCEPTED) + 1) * steps + 64),
        max_num_seqs=arguments.running + 1,
        max_num_batched_tokens=chunk,
        enable_prefix_caching=False,
        adaptive_width=False,
        async_scheduling=True,
    )
    return Engine(target, draft, limits)


def request(tokens: int, most: int | None, seed: int) -> Request:
    ids = torch.randint(0, 1000, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Request(ids, SamplingParams(temperature=0, max_tokens=most, ignore_eos=True))


def timed(engine: Engine) -> float:
    """Milliseconds of a step."""
    begin = time.perf_counter()
    engine.step()
    return 1e3 * (time.perf_counter() - begin)


def until_first(engine: Engine, output: Output) -> list[float]:
    """Milliseconds of the steps up to an output's first token."""
    times = []
    while not output.tokens:
        times.append(timed(engine))
    return times


def beside(engine: Engine, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of steps before, during and after every prefill of the prompt, and its times to the first token."""
    running = [request(arguments.context, None, seed) for seed in range(arguments.running)]
    outputs = [engine.add(each) for each in running]
    while not all(len(output.tokens) > 2 for output in outputs):
        engine.step()
    found: dict[str, list[float]] = {"before": [], "during": [], "after": [], "first": []}
    for arrival in range(arguments.arrivals):
        found["before"] += steps(engine, arguments.steps)
        long = engine.add(request(arguments.prompt, 1, 1000 + arrival))
        times = until_first(engine, long)
        found["during"] += times
        found["first"].append(sum(times))
        found["after"] += steps(engine, arguments.steps)
    assert not any(output.finished for output in outputs), "a running request ended: raise max_model_len"
    for each in running:
        engine.abort(each.id)
    engine.settle()
    engine.pool.flush()
    return found


def steps(engine: Engine, count: int) -> list[float]:
    for _ in range(SETTLING):
        engine.step()
    return [timed(engine) for _ in range(count)]


def first_token(engine: Engine, tokens: int, repeats: int) -> float:
    """Milliseconds to the first token of a prompt alone: the median of some, after one that does not count."""
    found = []
    for repeat in range(repeats + 1):
        output = engine.add(request(tokens, 1, 2000 + repeat))
        found.append(sum(until_first(engine, output)))
        while engine.has_work:
            engine.step()
        engine.settle()
    return statistics.median(found[1:])


@dataclass(frozen=True)
class Floor:
    """Operations a prompt's token takes in products, and milliseconds in which weights are read, without and with the draft."""

    plain: float
    draft: float
    read: float

    @classmethod
    def of(cls, target: Target, draft: DFlashDraft) -> Floor:
        # A weight of 2 bytes is a multiplication and an addition for every row; the head has one row.
        floors, head = floor(target, draft), target.model.get_output_embeddings().weight.numel() * 2
        plain = floors["verify"] / 1e3 * BANDWIDTH - head
        return cls(plain, plain + floors["append"] / 1e3 * BANDWIDTH, floors["verify"])

    def of_prompt(self, tokens: int, draft: bool) -> float:
        """Milliseconds."""
        return max(self.read, tokens * (self.draft if draft else self.plain) / PEAK * 1e3)


class Report:
    """Lines for the end of the run, and all figures in a file as they come."""

    def __init__(self, output: Path | None) -> None:
        self.output = output
        self.lines: list[str] = []
        self.found: list[dict[str, Any]] = []

    def beside(self, chunk: int, prompt: int, least: Floor, first: list[float], **times: list[float]) -> None:
        middle, bound = statistics.median(first), least.of_prompt(prompt, draft=True)
        line = f"chunk {chunk}, {prompt} tokens beside others: first token after {middle:.1f} ms (floor {bound:.1f})"
        figures = {name: (statistics.median(t), ordered(t, 0.99), max(t)) for name, t in times.items()}
        spread = "; ".join("{} {:.2f} {:.2f} {:.2f}".format(name, *f) for name, f in figures.items())
        self._add(f"{line}; steps in ms, median p99 max: {spread}", chunk=chunk, first=first, bound=bound, **times)

    def alone(self, chunk: int, tokens: int, least: Floor, plain: float, draft: float) -> None:
        bounds = [least.of_prompt(tokens, draft=drafts) for drafts in (False, True)]
        line = f"chunk {chunk}, {tokens} tokens alone: first token after {plain:.2f} ms (floor {bounds[0]:.2f}), "
        line += f"with the draft {draft:.2f} (floor {bounds[1]:.2f}), ratio {draft / plain:.3f}"
        self._add(line, chunk=chunk, tokens=tokens, plain=plain, draft=draft, bounds=bounds)

    def share(self, chunk: int, tokens: int, needed: float, milliseconds: float, rate: float) -> None:
        reached = needed / milliseconds * 1e3
        line = f"chunk {chunk}, {tokens} tokens alone: {needed / 1e12:.1f} TFLOP at {reached / 1e12:.0f} TFLOP/s, "
        line += f"{reached / rate:.3f} of the matrix rate ({rate / 1e12:.0f})"
        self._add(line, chunk=chunk, tokens=tokens, needed=needed, reached=reached, rate=rate)

    def _add(self, line: str, **figures: object) -> None:
        print(line, flush=True)
        self.lines.append(line)
        self.found.append({"line": line, **figures})
        if self.output:
            self.output.write_text(json.dumps(self.found, indent=1))


def ordered(times: list[float], share: float) -> float:
    return sorted(times)[int(share * len(times))]


if __name__ == "__main__":
    main()
