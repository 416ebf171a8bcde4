"""Options that several commands share, and those that take several values."""
# ruff: noqa: PLC0415

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option
from typer.core import TyperCommand

from flashdraft.errors import ConfigError

# The target and how it is loaded.
TargetArgument = Annotated[
    str | None, Argument(help="Directory, hub id or .gguf file; without it, or `builtin`, the built-in target.")
]
TargetOption = Annotated[
    str | None, Option("--target", help="Directory, hub id or .gguf file; without it, or `builtin`, the built-in one.")
]
Dtype = Annotated[str, Option(help="auto (the checkpoint's own), bfloat16, float16 or float32.")]
Device = Annotated[str | None, Option(help="cpu or cuda; without it the GPU if there is one.")]
Revision = Annotated[str | None, Option(help="Revision of the target on the hub.")]
Lora = Annotated[str | None, Option("--lora", help="LoRA adapter, merged into the target at load: directory or hub id.")]
DraftRevision = Annotated[str | None, Option(help="Revision of the draft: on the hub, or a sub-directory of a local draft.")]
MemoryShare = Annotated[float, Option(help="Share of a GPU's memory that models, steps and KV cache take.")]

# Prompts, and how they are answered.
PromptFiles = Annotated[
    list[Path] | None, Option("--prompts", help="JSONL files of {turns: [...]}, {messages: [...]} or {prompt: ...}.")
]
Dataset = Annotated[str | None, Option(help="Hub data set with prompts, NAME or NAME:CONFIGURATION.")]
Splits = Annotated[str, Option("--split", help="Splits of --dataset, separated by commas.")]
DatasetRevision = Annotated[str | None, Option(help="Revision of --dataset.")]
Exclude = Annotated[
    list[Path] | None, Option(help="Prompt files to keep out: the same prompts, and what shares 13 words in a row.")
]
Limit = Annotated[int | None, Option(min=1, help="Only so many prompts, drawn from all.")]
Thinking = Annotated[str | None, Option(help="on, off or mixed (every other answer): enable_thinking for the chat template.")]
Temperatures = Annotated[
    list[float] | None,
    Option(
        help="As it will be served: one or several, of which each answer draws one; without it the target's own, or 0.7. "
        "0 is greedy."
    ),
]

# Training.
RecipeFile = Annotated[Path | None, Option("--recipe", help="TOML file; what it leaves out is derived.")]
Init = Annotated[str | None, Option("--init", help="Draft to start from: directory, hub id, or `builtin`.")]


def output(help: str) -> Any:
    """--output, a directory; of `--output "$UNSET"` the parser would make the working directory."""
    return Option("--output", metavar="<directory>", parser=_directory, help=help)


def _directory(text: str) -> Path:
    if not text.strip():
        raise ConfigError("the name of --output is empty: give a directory, which is made where there is none")
    return Path(text)


def refuse_unfit(**options: Any) -> None:
    """Raises ConfigError for an option that is empty, as of `--endpoint "$UNSET"`, which is not as if it were left out, and
    for nan and inf. options: by their Python names."""
    for name, given in options.items():
        option = f"--{name.replace('_', '-')}"
        for value in given if isinstance(given, list | tuple) else (given,):
            if isinstance(value, str) and not value.strip():
                raise ConfigError(f"{option} is empty: give it a value, or leave it out")
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{option} must be a number, got {value:g}")


LISTS = frozenset({"--prompts", "--exclude", "--temperature", "--calibration", "--ignore", "--results", "--bench"})


class ListOptions(TyperCommand):
    """A command with options that take several values: `--prompts a b` is `--prompts a --prompts b`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        refuse_empty(args)
        return super().parse_args(ctx, spread(args, LISTS))


def refuse_empty(args: list[str]) -> None:
    """Raises ConfigError for `--draft "$UNSET"`, which is not as if the option were left out, nor the working directory."""
    option = ""
    for arg in args:
        if arg.startswith("--"):
            option, _, value = arg.partition("=")
            if "=" in arg and not value.strip():
                raise ConfigError(f"{option} is empty: give it a value, or leave it out")
        elif option and not arg.strip():
            raise ConfigError(f"{option} is empty: give it a value, or leave it out")


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


def as_arguments(given: Mapping[str, object]) -> tuple[str, ...]:
    """As on a command line, without what is None."""
    return tuple(part for name, value in given.items() if value is not None for part in (name, str(value)))


def key_from(variable: str | None) -> str | None:
    if variable is not None and not os.environ.get(variable):
        raise ConfigError(f"the environment variable {variable} of --api-key-env is not set")
    return os.environ[variable] if variable else None


def device_of(device: str | None) -> tuple[str, bool]:
    """The name of the device of a local pair, and whether it is a GPU."""
    import torch

    from flashdraft.compare import processor

    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name(), True
    return processor(), False


def warn_of_load() -> None:
    """Where other programs are busy on this machine; called when something is about to be measured on it."""
    from flashdraft.terminal import warn_of_load

    warn_of_load()


def nothing() -> None:
    """Of a server elsewhere, whose load is not this machine's."""
