"""The options of `flashdraft fit`. Heavy imports live inside the command, as in cli.py."""
# ruff: noqa: PLC0415

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from flashdraft import cli_options as shared


def fit(
    output: Annotated[Path, shared.output("Directory for the draft; answers and state are in its `work`.")],
    hours: Annotated[float, Option("--hours", help="Time for all of it; what earlier starts of the same fit spent counts.")],
    target: shared.TargetArgument = None,
    prompts: shared.PromptFiles = None,
    dataset: shared.Dataset = None,
    split: shared.Splits = "train",
    dataset_revision: shared.DatasetRevision = None,
    limit: shared.Limit = None,
    exclude: shared.Exclude = None,
    recipe: shared.RecipeFile = None,
    init: shared.Init = None,
    draft: Annotated[str | None, Option(help="Draft that speeds up the answers: directory, hub id, or `builtin`.")] = None,
    thinking: shared.Thinking = None,
    temperature: shared.Temperatures = None,
    max_tokens: Annotated[int, Option("--max-tokens", help="Longest answer, in tokens; shorter where time is short.")] = 1024,
    dtype: shared.Dtype = "auto",
    device: shared.Device = None,
    revision: shared.Revision = None,
    lora: shared.Lora = None,
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
