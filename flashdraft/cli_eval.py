"""The options of `flashdraft eval`. Heavy imports live inside the command, as in cli.py."""
# ruff: noqa: PLC0415

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option, Typer
from typer.core import TyperCommand
from typer.main import get_command

from flashdraft import cli_options as shared
from flashdraft.errors import ConfigError

MAX_TOKENS = 4096
SHORTER = {"mini": 64, "throughput": 512}  # mini takes two minutes on a CPU; 7k and its answer fit into a context of 8,192

PREPARE_HINT = "`flashdraft eval prepare speed-bench` fetches the prompts of SPEED-Bench: see `flashdraft eval prepare --help`."
SUITE = (
    "mini, throughput (or throughput:1k, 4k, 7k), mt-bench, gsm8k, math500, humaneval, mbpp, ifeval, spec-bench, speed-bench, "
    "speed-bench:throughput_1k ..., or a JSONL or parquet file."
)
Endpoint = Annotated[str | None, Option(help="Address of an OpenAI-compatible server: this one, vLLM, SGLang ...")]
Baseline = Annotated[
    str | None, Option(help="Address of the same target without a draft, for servers that cannot leave it out themselves.")
]
Drafts = Annotated[
    list[str] | None, Option("--draft", help="Directory or hub id of a draft, or `builtin`; several are measured in turn.")
]
Compare = Annotated[
    bool | None,
    Option(
        "--compare/--no-compare",
        help="Also answer without the draft, for the speed-up. Without either: where the server or --baseline can.",
    ),
]
Think = Annotated[
    bool | None, Option("--thinking/--no-thinking", help="enable_thinking for the chat template, which else decides.")
]
Output = Annotated[
    Path | None, shared.output("Directory of answers and results; the same command goes on in it. Without it eval-SUITE.")
]
MinAL = Annotated[float | None, Option("--min-al", help="Exit with code 1 where the acceptance length is below this.")]
MinSpeedup = Annotated[float | None, Option("--min-speedup", help="Exit with code 1 where the speed-up is below this.")]


def evaluate(
    suite: Annotated[str, Argument(help=SUITE)],
    endpoint: Endpoint = None,
    baseline: Baseline = None,
    model: Annotated[str | None, Option(help="The target's name at --endpoint; without it the only one there.")] = None,
    api_key_env: Annotated[str | None, Option(help="Environment variable with the key for --endpoint.")] = None,
    target: shared.TargetOption = None,
    draft: Drafts = None,
    compare: Compare = None,
    thinking: Think = None,
    concurrency: Annotated[int, Option(min=1, max=4096, help="Requests at once.")] = 16,
    max_tokens: Annotated[
        int | None, Option("--max-tokens", min=1, help="Longest answer; 4096, for mini 64, for throughput 512.")
    ] = None,
    limit: Annotated[int | None, Option(min=1, help="Only so many prompts, the categories in turn.")] = None,
    samples: Annotated[int, Option(min=1, max=10_000, help="Answers a prompt.")] = 1,
    temperature: Annotated[float, Option(min=0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float | None, Option("--top-p", help="Without it the server's default.")] = None,
    top_k: Annotated[int | None, Option("--top-k", help="Without it the server's default.")] = None,
    seed: Annotated[int, Option(help="Other seeds, other samples.")] = 0,
    output: Output = None,
    min_al: MinAL = None,
    min_speedup: MinSpeedup = None,
    dtype: shared.Dtype = "auto",
    device: shared.Device = None,
    revision: shared.Revision = None,
    lora: shared.Lora = None,
    max_model_len: Annotated[int | None, Option(help="Longest prompt and answer together, in tokens.")] = None,
    gpu_memory_utilization: shared.MemoryShare = 0.9,
) -> None:
    """Acceptance length and speed-up of a draft over a suite of prompts. Can be stopped at any point, and goes on."""
    from flashdraft.eval.command import Options, run_eval
    from flashdraft.eval.run import Settings

    shared.refuse_unfit(endpoint=endpoint, baseline=baseline, model=model, target=target, draft=draft)
    shared.refuse_unfit(revision=revision, lora=lora, device=device, gpu_memory_utilization=gpu_memory_utilization)
    shared.refuse_unfit(temperature=temperature, top_p=top_p, min_al=min_al, min_speedup=min_speedup)
    share = gpu_memory_utilization if gpu_memory_utilization != 0.9 else None
    loaded = {"--dtype": dtype if dtype != "auto" else None, "--device": device, "--revision": revision, "--lora": lora}
    serve = shared.as_arguments({**loaded, "--max-model-len": max_model_len, "--gpu-memory-utilization": share})
    if endpoint and (target or draft or serve):
        raise ConfigError("--endpoint names a server that has its pair already: leave out --target, --draft and how they load")
    if (baseline or model or api_key_env) and not endpoint:
        raise ConfigError("--baseline, --model and --api-key-env are of a server: give --endpoint, too")
    if compare is False and min_speedup is not None:
        raise ConfigError("--min-speedup needs the target without the draft: leave out --no-compare")
    length = max_tokens or SHORTER.get(suite.lower().partition(":")[0], MAX_TOKENS)
    settings = Settings(length, temperature, top_p, top_k, seed, samples, thinking, concurrency)
    options = Options(suite, settings, output or Path(f"eval-{Path(suite).stem.replace(':', '-')}"), limit, compare=compare)
    if endpoint:
        options = replace(options, endpoint=endpoint, baseline=baseline, model=model, api_key=shared.key_from(api_key_env))
    else:
        name, _ = shared.device_of(device)
        options = replace(options, target=target, drafts=tuple(draft or ()), serve=serve, device=name)
    warn = shared.nothing if endpoint else shared.warn_of_load
    if code := run_eval(replace(options, min_al=min_al, min_speedup=min_speedup), before=warn):
        sys.exit(code)


_prepare = Typer(add_completion=False, pretty_exceptions_enable=False)


@_prepare.command()
def prepare(
    name: Annotated[str, Argument(help="speed-bench.")],
    config: Annotated[
        str, Option(help="qualitative, throughput_1k, throughput_2k, throughput_8k, throughput_16k or throughput_32k.")
    ] = "qualitative",
    output: Annotated[Path | None, Option(help="JSONL file to write. Without it speed-bench-CONFIG.jsonl.")] = None,
) -> None:
    """Fetch the prompts that a suite publishes as placeholders from their sources, into a file that is a suite.

    SPEED-Bench is licensed for evaluation only. Some of its sources ask for a login to the hub, some are gigabytes.
    """
    from flashdraft.eval import prepare as preparing

    preparing.run_prepare(name, config, output)


class EvalCommand(TyperCommand):
    """`eval SUITE`, and `eval prepare NAME`, which is another command; a suite in a file named so is ./prepare."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        if args[:1] == ["prepare"]:
            return get_command(_prepare).make_context(f"{info_name} prepare", args[1:], parent=parent, **extra)
        return super().make_context(info_name, args, parent=parent, **extra)
