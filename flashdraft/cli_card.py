"""The options of `flashdraft card`. Heavy imports live inside the command, as in cli.py."""
# ruff: noqa: PLC0415

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from flashdraft.errors import ConfigError


def card(
    draft: Annotated[str, Argument(metavar="DIR", help="The draft: its directory, a hub id, or `builtin`.")],
    results: Annotated[
        list[Path] | None, Option("--results", help="What `flashdraft eval` wrote of it: directories or results.json.")
    ] = None,
    bench: Annotated[list[Path] | None, Option("--bench", help="What `flashdraft bench` wrote of it.")] = None,
    facts: Annotated[
        Path | None, Option("--facts", help="TOML file of what no file of the draft says: licence, release date ...")
    ] = None,
    output: Annotated[Path | None, Option("--output", help="File to write; without it README.md beside the draft.")] = None,
    force: Annotated[bool, Option("--force", help="Write over a card that was written or edited by hand.")] = False,
    facts_template: Annotated[bool, Option("--facts-template", help="Print a file for --facts to fill in, and end.")] = False,
) -> None:
    """The model card of a draft, out of its files and of measured results; what nobody recorded becomes a TODO."""
    if not draft.strip() or (output is not None and not output.name):
        raise ConfigError(f"{'--output' if draft.strip() else 'the name of the draft'} is empty: give a name")
    if facts_template:
        from flashdraft.card.known import is_here, show_template

        if not is_here(draft):  # only what is fetched from a hub needs more of the program
            from flashdraft.checkpoint import locate

            draft = str(locate(draft))
        show_template(draft, facts)
        return
    from flashdraft.card.write import CardOptions, run_card

    run_card(CardOptions(draft, tuple(results or ()), tuple(bench or ()), facts, output, force))
