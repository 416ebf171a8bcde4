"""The options of `flashdraft compare`. Heavy imports live inside the command, as in cli.py."""
# ruff: noqa: PLC0415

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

RUN = "Directory that `flashdraft eval` wrote, or its results.json or answers.jsonl."
Drafts = Annotated[
    list[str] | None,
    Option(
        "--draft",
        help="Which draft of runs with several: once for both runs, twice for one of each. Without it those of one name.",
    ),
]


def compare(
    first: Annotated[Path, Argument(metavar="RUN", help=RUN)],
    second: Annotated[Path, Argument(metavar="RUN", help=RUN)],
    draft: Drafts = None,
    as_json: Annotated[bool, Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """The second run of `flashdraft eval` against the first: acceptance, speed, and what else differs between them."""
    from flashdraft.eval import difference_display, difference_runs

    found = difference_runs.compare(difference_runs.read_run(first), difference_runs.read_run(second), draft or ())
    if as_json:
        print(json.dumps(found, indent=1, allow_nan=False))
    else:
        difference_display.show(found)
