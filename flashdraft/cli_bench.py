"""The options of `flashdraft bench`. Heavy imports live inside the command, as in cli.py."""
# ruff: noqa: PLC0415

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from typer import Option
from typer.core import TyperCommand

from flashdraft import cli_eval as evaluating
from flashdraft import cli_options as shared
from flashdraft.cli_options import spread
from flashdraft.errors import ConfigError

LISTS = frozenset({"--concurrency", "--prompt-tokens", "--request-rate"})


class BenchCommand(TyperCommand):
    """`--concurrency 1 4` is `--concurrency 1 --concurrency 4`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread(args, LISTS))


Concurrency = Annotated[list[int] | None, Option(help="Requests at once, one or several; without it 1 2 4 8 16.")]
Rate = Annotated[list[float] | None, Option("--request-rate", help="Instead: requests a second, at random times (Poisson).")]
Tokens = Annotated[
    list[int] | None,
    Option("--prompt-tokens", help="Prompts of random words with exactly so many tokens, one length or several."),
]
Prompts = Annotated[
    str | None,
    Option(help="Real prompts: mini, mt-bench ..., or a JSONL or parquet file. Without either, mini and 1024 tokens."),
]
Sweep = Annotated[bool, Option("--sweep", help="Double the concurrency until that gives less than 5 % more tokens/s.")]
Requests = Annotated[
    int | None, Option("--requests", help="Requests of a round at each load; without it at least 8, and two waves.")
]
Output = Annotated[
    Path | None, shared.output("Directory of requests and results; the same command goes on in it. Without it bench.")
]
Compare = Annotated[bool, Option("--compare/--no-compare", help="Also without the draft: speed-up and break-even.")]
MinSpeedup = Annotated[
    float | None, Option("--min-speedup", help="Exit with code 1 where the speed-up is below this at any load.")
]


def bench(
    target: shared.TargetOption = None,
    draft: Annotated[str | None, Option("--draft", help="Directory or hub id of its draft, or `builtin`.")] = None,
    endpoint: evaluating.Endpoint = None,
    baseline: evaluating.Baseline = None,
    model: Annotated[str | None, Option(help="The target's name at --endpoint; without it the only one there.")] = None,
    api_key_env: Annotated[str | None, Option(help="Environment variable with the key for --endpoint.")] = None,
    concurrency: Concurrency = None,
    request_rate: Rate = None,
    sweep: Sweep = False,
    prompt_tokens: Tokens = None,
    prompts: Prompts = None,
    max_tokens: Annotated[int, Option("--max-tokens", help="Longest answer; of random words every answer.")] = 128,
    requests: Requests = None,
    seconds: Annotated[float | None, Option("--seconds", help="Instead: seconds of a round at each load.")] = None,
    rounds: Annotated[int, Option("--rounds", help="Rounds at each load; with and without the draft take turns.")] = 3,
    compare: Compare = True,
    temperature: Annotated[float, Option("--temperature", help="0 is greedy.")] = 0.0,
    seed: Annotated[int, Option(help="Other seeds, other words and samples.")] = 0,
    output: Output = None,
    min_speedup: MinSpeedup = None,
    max_num_seqs: Annotated[
        int | None, Option("--max-num-seqs", help="Requests that a local pair runs at once; else as many as are measured.")
    ] = None,
    dtype: shared.Dtype = "auto",
    device: shared.Device = None,
    revision: shared.Revision = None,
    lora: shared.Lora = None,
    max_model_len: Annotated[int | None, Option(help="Longest prompt and answer together, in tokens.")] = None,
    gpu_memory_utilization: shared.MemoryShare = 0.9,
) -> None:
    """Latency and throughput by load and prompt length, with the draft and without. Can be stopped, and goes on."""
    from flashdraft.eval.bench import run_bench
    from flashdraft.eval.bench_options import Options
    from flashdraft.eval.bench_run import Settings

    shared.refuse_unfit(endpoint=endpoint, baseline=baseline, model=model, target=target, draft=draft, prompts=prompts)
    shared.refuse_unfit(revision=revision, lora=lora, device=device, gpu_memory_utilization=gpu_memory_utilization)
    shared.refuse_unfit(temperature=temperature, min_speedup=min_speedup)
    share = gpu_memory_utilization if gpu_memory_utilization != 0.9 else None
    loaded = {"--dtype": dtype if dtype != "auto" else None, "--device": device, "--revision": revision, "--lora": lora}
    serve = shared.as_arguments({**loaded, "--max-model-len": max_model_len, "--gpu-memory-utilization": share})
    if endpoint and (target or draft or serve or max_num_seqs):
        raise ConfigError("--endpoint names a server that has its pair already: leave out --target, --draft and how they load")
    if (baseline or model or api_key_env) and not endpoint:
        raise ConfigError("--baseline, --model and --api-key-env are of a server: give --endpoint, too")
    if concurrency and request_rate:
        raise ConfigError("--concurrency and --request-rate are two kinds of load: give one of them")
    settings = Settings(max_tokens, temperature, seed, rounds, requests, seconds, bool(request_rate))
    options = Options(
        settings=settings,
        output=output or Path("bench"),
        loads=tuple(request_rate or concurrency or ()) or None,
        prompt_tokens=tuple(prompt_tokens or ()) or None,
        prompts=prompts,
        sweep=sweep,
        compare=compare,
        min_speedup=min_speedup,
    )
    if endpoint:
        key = shared.key_from(api_key_env)
        options = replace(options, endpoint=endpoint, baseline=baseline, model=model, api_key=key)
    else:
        name, gpu = shared.device_of(device)
        options = replace(options, target=target, draft=draft, serve=serve, device=name, gpu=gpu, max_num_seqs=max_num_seqs)
    if code := run_bench(options, before=shared.nothing if endpoint else shared.warn_of_load):
        sys.exit(code)
