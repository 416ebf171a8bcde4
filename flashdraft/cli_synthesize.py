"""The options of `flashdraft synthesize`. Heavy imports live inside the command, as in cli.py."""
# ruff: noqa: PLC0415

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from flashdraft import cli_options as shared
from flashdraft.cli_options import Lora


def synthesize(
    output: Annotated[Path, shared.output("Directory of the answers; the same command goes on in it.")],
    target: shared.TargetArgument = None,
    prompts: shared.PromptFiles = None,
    dataset: shared.Dataset = None,
    split: shared.Splits = "train",
    dataset_revision: shared.DatasetRevision = None,
    exclude: shared.Exclude = None,
    limit: shared.Limit = None,
    samples: Annotated[int, Option(min=1, help="Answers a prompt.")] = 1,
    temperature: shared.Temperatures = None,
    top_p: Annotated[float | None, Option("--top-p", help="Without it the target's own, or 1.")] = None,
    top_k: Annotated[int | None, Option("--top-k", help="0: all. Without it the target's own, or 0.")] = None,
    greedy_share: Annotated[float, Option(help="Share of the answers at temperature 0, at most one a prompt.")] = 0.0,
    thinking: shared.Thinking = None,
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
    endpoint: Annotated[
        list[str] | None,
        Option(help="Address of an OpenAI-compatible server that serves the target; once for each of several."),
    ] = None,
    model: Annotated[str | None, Option(help="The target's name at --endpoint; without it the only one there.")] = None,
    api_key_env: Annotated[str | None, Option(help="Environment variable with the key for --endpoint.")] = None,
    concurrency: Annotated[
        int | None, Option(min=1, max=4096, help="Requests to each --endpoint at once, at most; without it 64.")
    ] = None,
    mask_token: Annotated[str | None, Option(help="Count the records that hold this token.")] = None,
    max_num_seqs: Annotated[int | None, Option(min=1, help="Answers made at once.")] = None,
    dtype: shared.Dtype = "auto",
    device: shared.Device = None,
    revision: shared.Revision = None,
    draft_revision: shared.DraftRevision = None,
    lora: Lora = None,
    gpu_memory_utilization: shared.MemoryShare = 0.9,
) -> None:
    """Answer prompts by the target itself: the data that its draft is trained on. Can be stopped at any point, and goes on."""
    from flashdraft.train import commands_synthesize as command

    where = command.Where(
        target=target,
        draft=draft,
        generator=generator,
        endpoints=endpoint or (),
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
