"""`flashdraft serve` under load: a soak of mixed requests, a third of them cancelled; and what the server costs.

    python benchmarks/serve.py soak --requests 1000 --clients 64
    python benchmarks/serve.py overhead --dtype bfloat16 --concurrency 1 4 16 64 --max-tokens 128
    python benchmarks/serve.py draft --concurrency 1 2 4 8 16

`overhead`: the server and the engine by itself, each with the draft and without (plain); `draft`: the server's half of that.
Each arm is `--seconds` in a steady state. Starts a server of its own (the built-in pair unless --target is given); prints a
table, and JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil

from flashdraft import LLM, SamplingParams, builtin
from flashdraft.llm import Live
from flashdraft.prompts import read_prompts


@dataclass
class Reply:
    """What one streamed request gave. `left`: the client closed the connection on purpose."""

    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    left: bool = False
    acceptance: dict[str, Any] = field(default_factory=dict)


async def ask(port: int, body: dict[str, Any], leave_after: int | None = None) -> Reply:
    """One streamed chat completion over a plain socket, which costs less than a client library; `leave_after` n chunks."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    reply = Reply()
    try:
        data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        )
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        seen = 0
        async for event in events(reader):
            seen += 1
            if leave_after is not None and seen > leave_after:
                reply.left = True
                return reply
            read_event(event, reply)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return reply


async def events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    status = await reader.readline()
    if b" 200 " not in status:
        body = (await reader.read()).rpartition(b"\r\n")[2]
        yield {"error": {"message": f"{status.decode().strip()} {body.decode(errors='replace')}"}}
        return
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def read_event(event: dict[str, Any], reply: Reply) -> None:
    if "error" in event:
        reply.error = event["error"]["message"]
    for choice in event.get("choices", []):
        reply.text += choice["delta"].get("content") or ""
        reply.finish_reason = choice["finish_reason"] or reply.finish_reason
    if event.get("usage"):
        reply.tokens = event["usage"]["completion_tokens"]
        reply.acceptance = event.get("metrics", {}).get("speculative_decoding", {})


@contextlib.contextmanager
def server(arguments: list[str]) -> Iterator[tuple[int, psutil.Process]]:
    """A server in a process of its own: its port and process."""
    command = [sys.executable, "-m", "flashdraft", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    port = 0
    try:
        assert process.stderr is not None
        for line in process.stderr:
            print(line, end="", file=sys.stderr)
            if found := re.search(r"listening on http://[^ ]*:(\d+)", line):
                port = int(found[1])
            if " ready: " in line:
                break
        else:
            sys.exit("the server did not start")
        # The rest of the log must be read, or the server would wait for it.
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        yield port, psutil.Process(process.pid)
        process.terminate()
        if process.wait(60) != 0:
            sys.exit(f"the server ended with code {process.returncode}")
        drain.wait(10)
    finally:
        process.kill()


def metrics(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        lines = response.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


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
            memory.append(process.memory_info().rss)

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

    def row(self) -> dict[str, float]:
        return {
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


async def rate(port: int, concurrency: int, args: argparse.Namespace, **body: Any) -> dict[str, float]:
    """So many clients, each asking anew as soon as it is answered, by the server's own counters."""
    kinds, over, errors = greedy_bodies(args.max_tokens, **body), False, 0

    async def lane(i: int) -> None:
        nonlocal errors
        while not over:
            reply = await ask(port, kinds[i % len(kinds)])
            errors += reply.finish_reason is None
            i += concurrency

    async def counters() -> tuple[float, list[float]]:
        found = await asyncio.to_thread(metrics, port)
        return time.perf_counter(), [found.get(name, 0.0) for name in COUNTED]

    lanes = [asyncio.create_task(lane(i)) for i in range(concurrency)]
    await asyncio.sleep(args.warm_up)
    began, before = await counters()
    await asyncio.sleep(args.seconds)
    ended, after = await counters()
    over = True
    await asyncio.gather(*lanes)
    if errors:
        sys.exit(f"{errors} requests failed")
    tokens, steps, drafts, accepted = (b - a for a, b in zip(before, after, strict=True))
    return Window(ended - began, tokens, steps, 1 + accepted / drafts if drafts else 1.0).row()


def bare(llm: LLM, concurrency: int, args: argparse.Namespace, max_draft_tokens: int | None = None) -> dict[str, float]:
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
        start = time.perf_counter()
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
        return Window(time.perf_counter() - start, tokens, steps, accepted / drafts if drafts else 1.0)

    live += [add(i) for i in range(concurrency)]
    added = concurrency
    run(args.warm_up)
    found = run(args.seconds)
    for one in live:
        llm.engine.abort(one.request.id)
    llm.engine.settle()
    return found.row()


def served_rows(port: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for n in args.concurrency:
        rows.append({"concurrency": n})
        keep(rows[-1], "server", asyncio.run(rate(port, n, args)))
        if rows[-1]["server"]["acceptance_length"] > 1:
            keep(rows[-1], "server_plain", asyncio.run(rate(port, n, args, speculation={"enabled": False})))
    return rows


def keep(row: dict[str, Any], arm: str, found: dict[str, float]) -> None:
    """Into the row, and onto the terminal at once: what was measured stays if the rest is cut off."""
    row[arm] = found
    print(line(row["concurrency"], arm, found), file=sys.stderr, flush=True)


def add_bare(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    llm = LLM(args.target, args.draft, dtype=args.dtype)
    for row in rows:
        keep(row, "bare", bare(llm, row["concurrency"], args))
        if "server_plain" in row:
            keep(row, "bare_plain", bare(llm, row["concurrency"], args, 0))


def add_ratios(row: dict[str, Any]) -> None:
    """Of tokens a second: the server to the engine by itself, and with the draft to without it."""
    for name, above, below in (
        ("server/bare", "server", "bare"),
        ("server/bare, plain", "server_plain", "bare_plain"),
        ("draft/plain, server", "server", "server_plain"),
        ("draft/plain, bare", "bare", "bare_plain"),
    ):
        if above in row and below in row:
            row[name] = row[above]["tokens_per_second"] / row[below]["tokens_per_second"]


def table(rows: list[dict[str, Any]]) -> str:
    """One line for each arm: tokens a second and ms a step."""
    lines = []
    for row in rows:
        for arm in ("server", "bare", "server_plain", "bare_plain"):
            if arm in row:
                lines.append(line(row["concurrency"], arm, row[arm]))
        lines.append("              " + "  ".join(f"{name} {value:.3f}" for name, value in row.items() if "/" in name))
    return "\n".join(lines)


def line(streams: int, arm: str, found: dict[str, float]) -> str:
    return (
        f"{streams:4} streams  {arm:12}  {found['tokens_per_second']:8.0f} tokens/s  {found['ms_per_step']:6.2f} ms a step  "
        f"AL {found['acceptance_length']:.2f}"
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
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds before them")
    args = parser.parse_args()
    args.seconds = args.seconds or (3600.0 if args.what == "soak" else 3.0)
    arguments = [
        *([args.target] if args.target else []),
        *(["--draft", args.draft] if args.draft else []),
        "--dtype",
        args.dtype,
    ]
    if args.what == "soak":
        with server(arguments) as (port, process):
            results = [asyncio.run(soak(port, process, args))]
    else:
        with server(arguments) as (port, _):
            results = served_rows(port, args)
        if args.what == "overhead":
            add_bare(results, args)
        for row in results:
            add_ratios(row)
        print(table(results), file=sys.stderr)
    print(json.dumps({"what": args.what, "cpus": os.cpu_count(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
