"""The options of `flashdraft fit`. Heavy imports live inside the command, as in cli.py."""
# ruff: noqa: PLC0415

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from flashdraft.cli_synthesize import Lora


def fit(
    output: Annotated[Path, Option("--output", help="Directory for the draft; answers and state are in its `work`.")],
    hours: Annotated[float, Option("--hours", help="Time for all of it; what earlier starts of the same fit spent counts.")],
    target: Annotated[str | None, Argument(help="Directory, hub id or .gguf file; without it the built-in target.")] = None,
    prompts: Annotated[
        list[Path] | None, Option("--prompts", help="JSONL files of {turns: [...]}, {messages: [...]} or {prompt: ...}.")
    ] = None,
    dataset: Annotated[str | None, Option(help="Hub data set with prompts, NAME or NAME:CONFIGURATION.")] = None,
    split: Annotated[str, Option(help="Splits of --dataset, separated by commas.")] = "train",
    dataset_revision: Annotated[str | None, Option(help="Revision of --dataset.")] = None,
    limit: Annotated[int | None, Option(min=1, help="Only so many prompts, drawn from all.")] = None,
    exclude: Annotated[
        list[Path] | None, Option(help="Prompt files to keep out: the same prompts, and what shares 13 words in a row.")
    ] = None,
    recipe: Annotated[Path | None, Option("--recipe", help="TOML file; what it leaves out is derived.")] = None,
    init: Annotated[str | None, Option("--init", help="Draft to start from: directory, hub id, or `builtin`.")] = None,
    draft: Annotated[str | None, Option(help="Draft that speeds up the answers: directory, hub id, or `builtin`.")] = None,
    thinking: Annotated[
        str | None, Option(help="on, off or mixed (every other answer): enable_thinking for the chat template.")
    ] = None,
    temperature: Annotated[
        list[float] | None,
        Option(
            help="As it will be served: one or several, of which each answer draws one; without it the target's own, or 0.7."
        ),
    ] = None,
    max_tokens: Annotated[int, Option("--max-tokens", help="Longest answer, in tokens; shorter where time is short.")] = 1024,
    dtype: Annotated[str, Option(help="auto (the checkpoint's own), bfloat16, float16 or float32.")] = "auto",
    device: Annotated[str | None, Option(help="cpu or cuda; without it the GPU if there is one.")] = None,
    revision: Annotated[str | None, Option(help="Revision of the target on the hub.")] = None,
    lora: Lora = None,
) -> None:
    """From prompts to a draft ready to serve, in a given time: answers, training, measuring. Can be stopped, and goes on."""
    from flashdraft.fit.run import FitOptions, run_fit
    from flashdraft.train.commands_synthesize import Prompts, Where

    temperatures = tuple(temperature) if temperature else None
    run_fit(
        FitOptions(
            output=output,
            hours=hours,
            prompts=Prompts(prompts or (), dataset, split, dataset_revision, exclude or (), limit),
            where=Where(target=target, draft=draft, dtype=dtype, device=device, revision=revision, lora=lora),
            sampling={"temperatures": temperatures, "thinking": thinking, "max_tokens": max_tokens},
            recipe=recipe,
            init=init,
        )
    )
