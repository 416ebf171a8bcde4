"""From the command line of `flashdraft serve --engine ...` to that engine, in place of this process."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from flashdraft.handover import sglang, vllm
from flashdraft.handover.pair import read_pair
from flashdraft.handover.translation import Given

ENGINES = {"vllm": vllm, "sglang": sglang}

__all__ = ["ENGINES", "Given", "hand_over"]


def hand_over(engine: str, given: Given, speculation: Mapping[str, Any]) -> None:
    """Check the engine, the pair and the options; print the command on standard output and, unless it is a dry run, become it.

    Raises ConfigError or CheckpointError, one sentence with the remedy, before anything is started.
    """
    own = ENGINES[engine]
    program, note = own.program(given.dry_run)
    draft = speculation.get("model")
    target = given.options.get("target")
    pair = read_pair(
        target,
        given.options.get("revision"),
        None if draft is False else draft,
        speculation.get("revision"),
        speculation.get("num_speculative_tokens"),
        own.TABLE.engine,
    )
    named = {**given.options}
    named.setdefault("served_model_name", [target])  # as typed: the engine is given the resolved path
    command = own.command(program, pair, Given(named, given.keys, given.behind, given.dry_run), speculation)
    for line in (note, pair.warning):
        if line is not None:
            print(f"flashdraft: {line}", file=sys.stderr)
    print(command.shown())
    if not given.dry_run:
        command.execute()
