"""`flashdraft serve` under load: a soak of mixed requests, a third of them cancelled; and what the server costs.

    python benchmarks/serve.py soak --requests 1000 --clients 64
    python benchmarks/serve.py overhead --dtype bfloat16 --concurrency 1 4 16 64 --max-tokens 128
    python benchmarks/serve.py overhead --engine-process both --stand-in --concurrency 1 16 64 --max-tokens 128 --rounds 3
    python benchmarks/serve.py draft --concurrency 1 2 4 8 16

`overhead`: the server and the engine by itself, each with the draft and without (plain); `draft`: the server's half of that.
`--engine-process both`: the server with its engine in a thread, and in a process. Each arm is `--seconds` in a steady state; of
several rounds, in which the arms take turns, the table has medians. Starts servers of its own (of the built-in pair unless
--target is given, or --stand-in, a pair without a GPU whose steps only take time: standin.py); prints a table, and JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from dataclasses import dataclass
from typing import Any

import psutil
import standin
from serve_client import ask, cpu_seconds, drink, family, metrics, server

from flashdraft import LLM, SamplingParams, builtin
from flashdraft.llm import Live
from flashdraft.prompts import read_prompts


def bodies(count: int, longest: int, chars: int = 10_000, seed: int = 0) -> list[dict[str, Any]]:
    """Mixed requests: greedy and sampled, short and long prompts and answers."""
    draw, prompts = random.Random(seed), read_prompts(builtin.PROMPTS)
    made = []
    for i in range(count):
        prompt = prompts[i % len(prompts)].turns[0][:chars]
        messages = [{"role": "user", "content": prompt * draw.choice((1, 1, 1, 4))}]
        body: dict[str, Any] = {"messages": messages, "max_tokens": draw.randint(1, longest), "seed": i}
        body["temperature"] = draw.choice((0.0, 0.0, 0.7, 1.0))
        if draw.random() < 0.2:
            body["stop"] = ["\n\n"]
        if draw.random() < 0.1:
            body["frequency_penalty"] = 0.5
        made.append(body)
    return made


async def soak(port: int, process: psutil.Process, args: argparse.Namespace) -> dict[str, Any]:
    kinds = bodies(args.kinds, args.max_tokens, args.prompt_chars)
    alone = [await ask(port, body) for body in kinds]
    draw, done, wrong, errors, left = random.Random(1), 0, 0, [], 0
    memory: list[int] = []  # bytes, behind each request
    queue = list(range(args.requests))
    print(f"{len(kinds)} requests answered alone, now {args.clients} clients", file=sys.stderr)

    async def client() -> None:
        nonlocal done, wrong, left
        while queue and time.perf_counter() - start < args.seconds:
            i = queue.pop() % len(kinds)
            leave = draw.randint(0, 12) if draw.random() < 1 / 3 else None
            reply = await ask(port, kinds[i], leave)
            done += 1
            left += reply.left
            if reply.error:
                errors.append(reply.error)
            elif not reply.left and (reply.text, reply.finish_reason, reply.tokens) != (
                alone[i].text,
                alone[i].finish_reason,
                alone[i].tokens,
            ):
                wrong += 1
            memory.append(sum(one.memory_info().rss for one in family(process)))

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(args.clients)))
    seconds = time.perf_counter() - start
    await asyncio.sleep(1)
    found = metrics(port)
    return {
        "requests": done,
        "left": left,
        "errors": errors[:5],
        "different_from_alone": wrong,
        "aborts": found.get('vllm:request_success_total{finished_reason="abort"}', 0),
        "running": found["vllm:num_requests_running"],
        "pages_leaked": found["flashdraft:pages"] - found["flashdraft:pages_free"],
        "memory_growth": memory[-1] / memory[done // 5] - 1,  # from a fifth of the requests on
        "seconds": seconds,
    }


@dataclass
class Window:
    """What a number of streams did in some seconds, after as many of warming up as it takes."""

    seconds: float
    tokens: float
    steps: float
    acceptance_length: float
    cpu_seconds: list[float]  # of the server's processes, or of this one

    def row(self) -> dict[str, Any]:
        return {
            "cpu_us_per_token": [round(1e6 * seconds / max(self.tokens, 1), 1) for seconds in self.cpu_seconds],
            "tokens_per_second": self.tokens / self.seconds,
            "ms_per_step": 1000 * self.seconds / max(self.steps, 1),
            "acceptance_length": self.acceptance_length,
        }


COUNTED = (
    "vllm:generation_tokens_total",
    "flashdraft:engine_steps_total",
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_accepted_tokens_total",
)


def greedy_bodies(max_tokens: int, **more: Any) -> list[dict[str, Any]]:
    """One short prompt after another, each answer of one length."""
    fixed = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0}
    return [{"messages": body["messages"], **fixed, **more} for body in bodies(len(read_prompts(builtin.PROMPTS)), 2)]


async def rate(port: int, process: psutil.Process, concurrency: int, args: argparse.Namespace, **body: Any) -> dict[str, Any]:
    """So many clients, each asking anew as soon as it is answered, by the server's own counters."""
    kinds, over, errors = greedy_bodies(args.max_tokens, **body), False, 0

    async def lane(i: int) -> None:
        nonlocal errors
        while not over:
            errors += not await drink(port, kinds[i % len(kinds)])
            i += concurrency

    async def counters() -> tuple[float, list[float]]:
        found = await asyncio.to_thread(metrics, port)
        return time.perf_counter(), [found.get(name, 0.0) for name in COUNTED]

    lanes = [asyncio.create_task(lane(i)) for i in range(concurrency)]
    await asyncio.sleep(args.warm_up)
    began, before = await counters()
    cpu = cpu_seconds(process)
    await asyncio.sleep(args.seconds)
    ended, after = await counters()
    cpu = [b - a for a, b in zip(cpu, cpu_seconds(process), strict=True)]
    over = True
    await asyncio.gather(*lanes)
    if errors:
        sys.exit(f"{errors} requests failed")
    tokens, steps, drafts, accepted = (b - a for a, b in zip(before, after, strict=True))
    return Window(ended - began, tokens, steps, 1 + accepted / drafts if drafts else 1.0, cpu).row()


def bare(llm: LLM, concurrency: int, args: argparse.Namespace, max_draft_tokens: int | None = None) -> dict[str, Any]:
    """The engine by itself with the same requests, their prompts rendered beforehand."""
    prompts = [llm.render(body["messages"]) for body in greedy_bodies(args.max_tokens)]
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
    live: list[Live] = []

    def add(i: int) -> Live:
        [one] = llm.prepare(prompts[i % len(prompts)], params, max_draft_tokens=max_draft_tokens)
        one.output = llm.engine.add(one.request)
        return one

    def run(seconds: float) -> Window:
        nonlocal added
        tokens = steps = drafts = accepted = 0
        tokens -= sum(len(one.output.tokens) for one in live)
        start, cpu = time.perf_counter(), time.process_time()
        while time.perf_counter() - start < seconds:
            llm.engine.step()
            steps += 1
            for i, one in enumerate(live):
                if one.output.finished:
                    tokens += len(one.output.tokens)
                    lengths = [c for c, d in zip(one.output.committed_per_step, one.output.drafted_per_step, strict=True) if d]
                    drafts, accepted = drafts + len(lengths), accepted + sum(lengths)
                    live[i], added = add(added), added + 1
        tokens += sum(len(one.output.tokens) for one in live)
        took, cpu = time.perf_counter() - start, time.process_time() - cpu
        return Window(took, tokens, steps, accepted / drafts if drafts else 1.0, [cpu])

    live += [add(i) for i in range(concurrency)]
    added = concurrency
    run(args.warm_up)
    found = run(args.seconds)
    for one in live:
        llm.engine.abort(one.request.id)
    llm.engine.settle()
    return found.row()


Found = dict[int, dict[str, list[dict[str, Any]]]]  # by streams and arm, what each round gave
SERVERS = {"auto": {"server": []}, "thread": {"thread": ["--no-engine-process"]}, "process": {"process": ["--engine-process"]}}
SERVERS["both"] = SERVERS["thread"] | SERVERS["process"]


def command(args: argparse.Namespace) -> list[str]:
    if args.stand_in:
        return [standin.__file__, "--slower", str(args.stand_in)]
    named = [*([args.target] if args.target else []), *(["--draft", args.draft] if args.draft else [])]
    return ["-m", "flashdraft", "serve", *named, "--dtype", args.dtype]


def measure_servers(found: Found, args: argparse.Namespace) -> None:
    for arm, options in SERVERS[args.engine_process].items():
        with server([*command(args), *options]) as (port, process):
            for n in args.concurrency:
                drafted = asyncio.run(rate(port, process, n, args))
                keep(found, n, arm, drafted)
                if drafted["acceptance_length"] > 1 and not args.stand_in:
                    plain = rate(port, process, n, args, speculation={"enabled": False})
                    keep(found, n, f"{arm}_plain", asyncio.run(plain))


def measure_bare(found: Found, args: argparse.Namespace) -> None:
    llm = standin.load(args.stand_in) if args.stand_in else LLM(args.target, args.draft, dtype=args.dtype)
    for n in args.concurrency:
        keep(found, n, "bare", bare(llm, n, args))
        if any(arm.endswith("_plain") for arm in found[n]):
            keep(found, n, "bare_plain", bare(llm, n, args, 0))


def keep(found: Found, streams: int, arm: str, one: dict[str, Any]) -> None:
    """With the rest, and onto the terminal at once: what was measured stays if the rest is cut off."""
    found.setdefault(streams, {}).setdefault(arm, []).append(one)
    print(line(streams, arm, one), file=sys.stderr, flush=True)


def rows(found: Found) -> list[dict[str, Any]]:
    """For each number of streams the arms' medians, and ratios of their tokens a second."""
    out: list[dict[str, Any]] = []
    for streams, arms in found.items():
        row = {arm: sorted(each, key=lambda one: one["tokens_per_second"])[len(each) // 2] for arm, each in arms.items()}
        ratios = {}
        for arm in row:
            for other in ("bare_plain" if arm.endswith("_plain") else "bare", f"{arm}_plain"):
                if other in row and other != arm:
                    ratios[f"{arm}/{other}"] = row[arm]["tokens_per_second"] / row[other]["tokens_per_second"]
        out.append({"concurrency": streams, **row, "ratios": ratios})
    return out


def table(results: list[dict[str, Any]]) -> str:
    """One line for each arm: tokens a second, ms a step, CPU."""
    lines = []
    for row in results:
        lines += [line(row["concurrency"], arm, row[arm]) for arm in row if arm not in ("concurrency", "ratios")]
        lines.append("              " + "  ".join(f"{name} {value:.3f}" for name, value in row["ratios"].items()))
    return "\n".join(lines)


def line(streams: int, arm: str, found: dict[str, Any]) -> str:
    cpu = " + ".join(f"{us:.0f}" for us in found["cpu_us_per_token"])
    return (
        f"{streams:4} streams  {arm:13}  {found['tokens_per_second']:8.0f} tokens/s  {found['ms_per_step']:6.2f} ms a step  "
        f"AL {found['acceptance_length']:.2f}  CPU {cpu} us a token"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("soak", "overhead", "draft"))
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--kinds", type=int, default=40)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[8])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prompt-chars", type=int, default=10_000, help="of a prompt in the soak, for small contexts")
    parser.add_argument(
        "--seconds",
        type=float,
        help="of each arm of overhead and draft (3); of the soak, behind which no request begins (3600)",
    )
    parser.add_argument("--engine-process", choices=SERVERS, default="auto", help="where the server's engine runs")
    parser.add_argument("--stand-in", type=float, nargs="?", const=1.0, metavar="SLOWER", help="standin.py")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds before them")
    args = parser.parse_args()
    args.seconds = args.seconds or (3600.0 if args.what == "soak" else 3.0)
    if args.what == "soak":
        options = next(iter(SERVERS[args.engine_process].values()))
        with server([*command(args), *options]) as (port, process):
            results = [asyncio.run(soak(port, process, args))]
    else:
        found: Found = {}
        for _ in range(args.rounds):
            measure_servers(found, args)
            if args.what == "overhead":
                measure_bare(found, args)
        results = rows(found)
        print(table(results), file=sys.stderr)
    print(json.dumps({"what": args.what, "cpus": os.cpu_count(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
