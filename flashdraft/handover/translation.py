"""The options of `flashdraft serve` as another engine's: the same, under another name, or refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashdraft.errors import ConfigError

# Said of the pair, the key and the hand-over itself; the last two are what these engines always do: verify every proposal, and
# run in processes of their own.
ELSEWHERE = frozenset(
    {
        "target",
        "draft",
        "no_draft",
        "speculative_config",
        "revision",
        "api_key",
        "api_key_file",
        "config",
        "engine",
        "dry_run",
        "no_adaptive_width",
        "engine_process",
    }
)


@dataclass(frozen=True)
class Given:
    """What was on the command line of `serve`: options by parameter name, API keys, what stood behind `--`."""

    options: Mapping[str, Any]
    keys: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    dry_run: bool = False


@dataclass(frozen=True)
class Table:
    """How an engine takes our options, by parameter name; every option of `serve` is in one of these, or in ELSEWHERE."""

    engine: str
    same: frozenset[str]  # also what has a name of its own here
    renamed: Mapping[str, str]
    refused: Mapping[str, str]  # the reason, which may say what to do instead
    special: frozenset[str] = frozenset()  # translated by the engine's own module

    def arguments(self, options: Mapping[str, Any]) -> list[str]:
        """Those of `same` and `renamed`. Raises ConfigError for one of `refused`, by its name."""
        out: list[str] = []
        for name, value in options.items():
            if reason := self.refused.get(name):
                raise ConfigError(f"{option(name)} cannot be handed over to {self.engine}: {reason}")
            if name in self.renamed or name in self.same:
                out += _argument(self.renamed.get(name, option(name)), value)
        return out

    def refuse_behind(self, behind: tuple[str, ...], own: Mapping[str, str]) -> None:
        """Raise ConfigError for an argument behind `--` that the hand-over writes itself. own: theirs -> ours."""
        for argument in behind:
            name = argument.partition("=")[0].replace("_", "-")
            if name in own:
                raise ConfigError(f"{name} is written by the hand-over: give {own[name]} before `--` instead")


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _argument(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [name] if value else [f"--no-{name.removeprefix('--')}"]
    if isinstance(value, list | tuple):
        return [name, *map(str, value)]
    return [name, f"{value:g}" if isinstance(value, float) else str(value)]


def check_json(options: Mapping[str, Any], *names: str) -> None:
    """Raise ConfigError for one of these options that is no JSON object."""
    for name in names:
        try:
            valid = name not in options or isinstance(json.loads(options[name]), dict)
        except (ValueError, RecursionError):
            valid = False
        if not valid:
            raise ConfigError(f"{option(name)} must be a JSON object, got {options[name]!r}")
