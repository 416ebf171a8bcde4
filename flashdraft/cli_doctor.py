"""The options of `flashdraft doctor`. Heavy imports live inside the command, as in cli.py."""
# ruff: noqa: PLC0415

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from flashdraft import cli_options as shared


def doctor(
    target: Annotated[str, Argument(help="Directory, hub id or .gguf file, or `builtin`.")],
    draft: Annotated[str, Argument(help="The draft whose guesses are not accepted: directory or hub id, or `builtin`.")],
    prompts: Annotated[
        Path | None, Option("--prompts", help="JSONL file of prompts as the target is asked; without it the built-in ones.")
    ] = None,
    limit: Annotated[int, Option(help="Only so many prompts, the categories in turn.")] = 24,
    max_tokens: Annotated[int, Option("--max-tokens", help="Longest answer, in tokens.")] = 64,
    thinking: Annotated[
        bool | None, Option("--thinking/--no-thinking", help="enable_thinking for the template, as it is served.")
    ] = None,
    json_file: Annotated[Path | None, Option("--json", help="Write what was found to this file too.")] = None,
    dtype: shared.Dtype = "auto",
    device: shared.Device = None,
    revision: shared.Revision = None,
    draft_revision: shared.DraftRevision = None,
    lora: shared.Lora = None,
) -> None:
    """Why a draft's guesses are not accepted, and what mends it; changes no file. Exit code 1 if anything was found."""
    from flashdraft.doctor.run import DoctorOptions, run_doctor
    from flashdraft.train.commands_synthesize import Where

    where = Where(target=target, draft_revision=draft_revision, dtype=dtype, device=device, revision=revision, lora=lora)
    run_doctor(DoctorOptions(draft, where, prompts, limit, max_tokens, thinking, json_file))
