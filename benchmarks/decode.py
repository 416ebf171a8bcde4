"""The built-in pair end to end on a GPU: tokens/s with and without the draft by concurrency, and transformers' own generate.

    python benchmarks/decode.py [--concurrency 1 4 16 64] [--max-tokens 256] [--dtype bfloat16] [--draft DIR | --random-draft]

Greedy, the built-in prompts. Each arm answers as many prompts as there are places, --rounds times, at least LEAST_PROMPTS in
all; arms take turns. Latencies are of every request: time to the first token, and time between tokens (of a step, over the
tokens it brought).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from torch import nn
from versus_transformers import gguf_arguments

from flashdraft import LLM, SamplingParams, builtin
from flashdraft.engine.engine import Engine, EngineConfig
from flashdraft.engine.request import Output, Request
from flashdraft.prompts import read_prompts
from flashdraft.targets.load import DTYPES

LEAST_PROMPTS = 24


@dataclass
class Arm:
    """An engine and what it has done at one concurrency."""

    engine: Engine
    tokens: int = 0
    seconds: float = 0.0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)

    def answer(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        torch.cuda.synchronize()
        start = time.perf_counter()
        outputs = [self.engine.add(Request(list(ids), params)) for ids in prompts]
        seen: dict[int, tuple[int, float]] = {}
        while self.engine.has_work:
            for output in self.engine.step():
                self._note(output, seen, start)
        self.seconds += time.perf_counter() - start
        self.tokens += sum(len(output.tokens) for output in outputs)
        self.lengths += [length for output in outputs if (length := output.acceptance_length) is not None]
        return [output.tokens for output in outputs]

    def _note(self, output: Output, seen: dict[int, tuple[int, float]], start: float) -> None:
        now, count = time.perf_counter(), len(output.tokens)
        if id(output) not in seen:
            self.first.append(now - start)
        elif count > seen[id(output)][0]:
            before, then = seen[id(output)]
            self.between += [(now - then) / (count - before)] * (count - before)
        seen[id(output)] = count, now

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def randomize(draft: nn.Module) -> None:
    """Weights that know nothing, of the same spread: the draft that must not make anything slower."""
    for parameter in draft.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=float(parameter.float().std()))


def transformers_rate(target: str | None, dtype: torch.dtype, prompts: Sequence[list[int]], tokens: int) -> float:
    """Tokens/s of transformers' eager generate, one prompt at a time."""
    source = gguf_arguments() if target is None else {"pretrained_model_name_or_path": target}
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=dtype).eval().cuda()
    total, took = 0, 0.0
    with torch.inference_mode():
        for number, ids in enumerate(prompts):
            prompt = torch.tensor([ids], device="cuda")
            torch.cuda.synchronize()
            start = time.perf_counter()
            model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
            )
            torch.cuda.synchronize()
            if number:  # the first warms up
                total, took = total + tokens, took + time.perf_counter() - start
    return total / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=[*DTYPES], default="bfloat16")
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--random-draft", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    limits = dict(max_model_len=2048, gpu_memory_utilization=0.3, deterministic=arguments.deterministic)
    limits |= dict(enable_prefix_caching=False, async_scheduling=True)
    llm = LLM(arguments.target, arguments.draft, dtype=arguments.dtype, max_num_seqs=max(arguments.concurrency), **limits)
    config = EngineConfig(max_num_seqs=max(arguments.concurrency), **{**limits, "gpu_memory_utilization": 0.6})
    if arguments.random_draft:
        assert llm.engine.draft is not None
        randomize(llm.engine.draft)
        llm.engine = Engine(llm.target, llm.engine.draft, config)
    print(f"{llm.engine.fusion}; {llm.engine.memory}", flush=True)
    plain = Engine(llm.target, None, EngineConfig(**{**config.__dict__, "gpu_memory_utilization": 0.9}))
    prompts = [llm.render([{"role": "user", "content": p.turns[0]}]) for p in read_prompts(builtin.PROMPTS)]
    lines, found = [], []
    for number in arguments.concurrency:
        arms = {"plain": Arm(plain), "draft": Arm(llm.engine)}
        texts: dict[str, list[list[int]]] = {"plain": [], "draft": []}
        for turn in range(-1, max(arguments.rounds, -(-LEAST_PROMPTS // number))):
            batch = [prompts[(turn * number + i) % len(prompts)] for i in range(number)]
            for name in ("draft", "plain") if turn % 2 else ("plain", "draft"):
                texts[name] += arms[name].answer(batch, arguments.max_tokens)
            if turn < 0:  # the warm-up
                arms = {name: Arm(arm.engine) for name, arm in arms.items()}
        lines.append(f"concurrency {number}: {line(arms)}; {equal(texts)}")
        found.append({"concurrency": number, **{name: arm.rate for name, arm in arms.items()}, "equal": equal(texts)})
        print(lines[-1], flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps(found, indent=1))
    if not arguments.no_transformers:
        rate = transformers_rate(arguments.target, DTYPES[arguments.dtype], prompts[:4], 128)
        lines.append(f"transformers generate, one prompt at a time: {rate:.1f} tokens/s")
    print("\n".join(lines))
    print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}; transformers {transformers.__version__}")


def line(arms: dict[str, Arm]) -> str:
    off, draft = arms["plain"], arms["draft"]
    first = statistics.median(draft.first) / statistics.median(off.first)
    parts = [f"plain {off.rate:.0f}, draft {draft.rate:.0f} tokens/s, ratio {draft.rate / off.rate:.2f}, of TTFT {first:.2f}"]
    if draft.lengths:
        parts[0] += f", AL {statistics.mean(draft.lengths):.2f}"
    for name, arm in arms.items():
        ordered = sorted(arm.between)
        between = statistics.median(ordered), ordered[int(0.99 * len(ordered))]
        figures = (1e3 * x for x in (statistics.median(arm.first), *between))
        parts.append("{}: TTFT {:.1f}, between tokens {:.2f}, p99 {:.2f} ms".format(name, *figures))
    return "; ".join(parts)


def equal(texts: dict[str, list[list[int]]]) -> str:
    pairs = list(zip(texts["plain"], texts["draft"], strict=True))
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)} texts equal"


if __name__ == "__main__":
    main()
