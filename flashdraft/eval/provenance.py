"""What a measurement must be told of beside its figures: what was asked for, by which command, of which pair, where."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashdraft import __version__, builtin
from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.eval.local import files_hash
from flashdraft.eval.run import Served
from flashdraft.train.files import read_object, saying_what_is_wrong, write_whole

RUN = "run.json"
USER = re.compile(r"(?<=://)[^/@\s]*@")  # of an address, perhaps with a password
LOGS = ("answers.jsonl", "requests.jsonl")


def remember(output: Path, now: Mapping[str, Any]) -> dict[str, Any]:
    """run.json of a directory: `now`, what is asked for, and when and under which load it first was.

    Raises ConfigError for a directory that was begun with something else, CheckpointError for a damaged one.
    """
    path = output / RUN
    before = read_object(path)
    if before is None and path.exists():
        raise CheckpointError(f"{path} is damaged, so that nobody knows what was measured: choose another --output")
    if before is None and (logs := [name for name in LOGS if (output / name).is_file() and (output / name).stat().st_size]):
        raise CheckpointError(
            f"{output} holds {logs[0]} without the {RUN} that says what was measured: choose another --output"
        )
    if before is not None:
        if changed := [name for name in now if before.get(name) != now[name]]:
            raise ConfigError(
                f"{output} was begun with other settings ({', '.join(changed)}): give the same ones, or another --output"
            )
        return before
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    begun = {**now, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "load_average": load}
    with saying_what_is_wrong(output):
        write_whole(path, json.dumps(begun, indent=1))
    return begun


def draft_place(name: str) -> str:
    """Directory or hub id of a draft."""
    return str(builtin.draft_path()) if name == builtin.NAME else name


def of_command(begun: Mapping[str, Any]) -> dict[str, Any]:
    """Of any measurement. begun: as from `remember`; the load average is that of the machine when it began."""
    return {
        "started": begun.get("started"),
        "load_average": begun.get("load_average"),
        "command": USER.sub("", shlex.join(["flashdraft", *sys.argv[1:]])),
        "flashdraft": __version__,
        "python": platform.python_version(),
    }


def of_endpoint(served: Served, baseline: str | None) -> dict[str, Any]:
    """Of a server's machine and versions only what it says itself is known."""
    version = served.client.text("/version")
    return {
        "endpoint": USER.sub("", served.client.base),
        "baseline": baseline and USER.sub("", baseline),
        "model": served.model,
        "engine": served.engine,
        "engine_version": version and version.strip()[:100],
    }


def of_pair(target: str | None, device: str | None, serve: Sequence[str]) -> dict[str, Any]:
    """Of a local pair, but for its draft. serve: options of `flashdraft serve`."""
    name = target or builtin.NAME
    return {
        "target": name,
        "target_hash": files_hash(str(builtin.target_path()) if name == builtin.NAME else name),
        "engine": "flashdraft",
        "device": device,
        "serve": list(serve),
        **{package: importlib.metadata.version(package) for package in ("torch", "transformers")},
    }
