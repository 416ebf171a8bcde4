"""The options of `flashdraft synthesize`. Heavy imports live inside the command, as in cli.py."""
# ruff: noqa: PLC0415

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option
from typer.core import TyperCommand

Lora = Annotated[str | None, Option("--lora", help="LoRA adapter, merged into the target at load: directory or hub id.")]
Temperatures = Annotated[
    list[float] | None,
    Option(help="One or several, of which each answer draws one; without it the target's own, or 0.7. 0 is greedy."),
]
LISTS = frozenset({"--prompts", "--exclude", "--temperature"})


class ListOptions(TyperCommand):
    """A command with options that take several values: `--prompts a b` is `--prompts a --prompts b`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread(args, LISTS))


def spread(args: list[str], options: Collection[str]) -> list[str]:
    """The arguments with each of these options repeated before each of its values, which end at the next option."""
    out: list[str] = []
    option, values = "", 0
    for arg in args:
        if arg.startswith("-") and arg != "-":
            option, values = (arg if arg in options else ""), 0
        elif option:
            values += 1
            out += [option] if values > 1 else []
        out.append(arg)
    return out


def synthesize(
    output: Annotated[Path, Option("--output", help="Directory of the answers; the same command goes on in it.")],
    target: Annotated[str | None, Argument(help="Directory, hub id or .gguf file; without it the built-in target.")] = None,
    prompts: Annotated[
        list[Path] | None, Option("--prompts", help="JSONL files of {turns: [...]}, {messages: [...]} or {prompt: ...}.")
    ] = None,
    dataset: Annotated[str | None, Option(help="Hub data set with prompts, NAME or NAME:CONFIGURATION.")] = None,
    split: Annotated[str, Option(help="Splits of --dataset, separated by commas.")] = "train",
    dataset_revision: Annotated[str | None, Option(help="Revision of --dataset.")] = None,
    exclude: Annotated[
        list[Path] | None, Option(help="Prompt files to keep out: the same prompts, and what shares 13 words in a row.")
    ] = None,
    limit: Annotated[int | None, Option(min=1, help="Only so many prompts, drawn from all.")] = None,
    samples: Annotated[int, Option(min=1, help="Answers a prompt.")] = 1,
    temperature: Temperatures = None,
    top_p: Annotated[float | None, Option("--top-p", help="Without it the target's own, or 1.")] = None,
    top_k: Annotated[int | None, Option("--top-k", help="0: all. Without it the target's own, or 0.")] = None,
    greedy_share: Annotated[float, Option(help="Share of the answers at temperature 0, at most one a prompt.")] = 0.0,
    thinking: Annotated[
        str | None, Option(help="on, off or mixed (every other answer): enable_thinking for the chat template.")
    ] = None,
    max_tokens: Annotated[int, Option("--max-tokens", help="Longest answer, in tokens.")] = 1024,
    max_prompt_tokens: Annotated[int, Option(help="Longer prompts are left out.")] = 1024,
    max_repetition: Annotated[float, Option(help="Answers that repeat more of their 8-grams are left out.")] = 0.3,
    seed: Annotated[int, Option(help="Other seeds, other samples.")] = 0,
    hours: Annotated[float | None, Option(help="No answer begins after so long.")] = None,
    draft: Annotated[
        str | None,
        Option(help="Draft of the target, `builtin` for the built-in one's: faster where few answers are made at once."),
    ] = None,
    generator: Annotated[
        str, Option(help="engine, rollout (no draft, full attention, many at once), or auto: a rollout on a GPU.")
    ] = "auto",
    endpoint: Annotated[str | None, Option(help="Address of an OpenAI-compatible server that serves the target.")] = None,
    model: Annotated[str | None, Option(help="The target's name at --endpoint; without it the only one there.")] = None,
    api_key_env: Annotated[str | None, Option(help="Environment variable with the key for --endpoint.")] = None,
    concurrency: Annotated[int, Option(min=1, max=4096, help="Requests to --endpoint at once.")] = 64,
    mask_token: Annotated[str | None, Option(help="Count the records that hold this token.")] = None,
    max_num_seqs: Annotated[int | None, Option(min=1, help="Answers made at once.")] = None,
    dtype: Annotated[str, Option(help="auto (the checkpoint's own), bfloat16, float16 or float32.")] = "auto",
    device: Annotated[str | None, Option(help="cpu or cuda; without it the GPU if there is one.")] = None,
    revision: Annotated[str | None, Option(help="Revision of the target on the hub.")] = None,
    draft_revision: Annotated[str | None, Option(help="Revision of the draft.")] = None,
    lora: Lora = None,
    gpu_memory_utilization: Annotated[float, Option(help="Share of a GPU's memory that the engine takes.")] = 0.9,
) -> None:
    """Answer prompts by the target itself: the data that its draft is trained on. Can be stopped at any point, and goes on."""
    from flashdraft.train import commands_synthesize as command

    where = command.Where(
        target=target,
        draft=draft,
        generator=generator,
        endpoint=endpoint,
        model=model,
        api_key_env=api_key_env,
        concurrency=concurrency,
        revision=revision,
        draft_revision=draft_revision,
        lora=lora,
        dtype=dtype,
        device=device,
        max_num_seqs=max_num_seqs,
        gpu_memory_utilization=gpu_memory_utilization,
    )
    options = dict(
        samples=samples,
        temperatures=tuple(temperature) if temperature else None,
        top_p=top_p,
        top_k=top_k,
        greedy_share=greedy_share,
        thinking=thinking,
        max_tokens=max_tokens,
        max_prompt_tokens=max_prompt_tokens,
        max_repetition=max_repetition,
        seed=seed,
    )
    chosen = command.Prompts(prompts or (), dataset, split, dataset_revision, exclude or (), limit)
    command.run_synthesis(where, chosen, options, output, mask_token, hours)
