"""The directory that a fit leaves: the draft, training.json with all that made it, and README.md, its model card."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flashdraft.card.write import card_of
from flashdraft.compare import processor
from flashdraft.errors import CheckpointError
from flashdraft.fit.ledger import Ledger
from flashdraft.train.commands_synthesize import Where
from flashdraft.train.commands_train import RUN
from flashdraft.train.corpus import Corpus
from flashdraft.train.files import replacing, saying_what_is_wrong, write_whole
from flashdraft.train.metrics import read_metrics
from flashdraft.train.records import HEADER

MOST_POINTS = 200  # of a curve in training.json
PUBLISHED = ("model.safetensors", "training_prompts.npy", "curves.png", "training.json", "README.md", "config.json")


def publish(output: Path, where: Where, corpus: Corpus, ledger: Ledger) -> None:
    """Write the directory, config.json last: what is killed before is no draft yet, and is written again."""
    training = output / "work" / "training"
    with _reading(training):
        figures = json.loads((training / "training.json").read_text(encoding="utf-8"))
        figures |= provenance(output / "work", where, corpus, ledger)
        config = (training / "config.json").read_text(encoding="utf-8")
    card = card_of(training, name=output.resolve().name, training=figures)
    with saying_what_is_wrong(output):
        for name in PUBLISHED[:3]:
            if (training / name).exists():
                with replacing(output / name) as partial:
                    shutil.copyfile(training / name, partial)
        write_whole(output / "training.json", json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
        write_whole(output / "README.md", card)
        write_whole(output / "config.json", config)


def is_published(output: Path) -> bool:
    """Whether all is there that serving takes."""
    return all((output / name).exists() for name in ("model.safetensors", "config.json"))


@contextmanager
def _reading(training: Path) -> Iterator[None]:
    """Turns files of earlier stages that are gone or damaged into one sentence."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"a file of {training.parent} is gone or damaged ({error}): begin anew with another --output"
        ) from error


def provenance(work: Path, where: Where, corpus: Corpus, ledger: Ledger) -> dict[str, Any]:
    """What training.json holds beside what training itself wrote there."""
    header = json.loads((work / "answers" / HEADER).read_text(encoding="utf-8"))
    metrics = work / "training" / RUN / "metrics.jsonl"
    if not (rows := read_metrics(metrics)):
        raise ValueError(f"{metrics.name} has no rows")
    left_out = {name.removeprefix("prompts "): n for name, n in corpus.counts.items() if name.startswith("prompts ")}
    return {
        "target": where.name,
        "prompts": {"hash": ledger.settings["prompts"], "count": len(corpus), "left_out": left_out},
        "answers": {"sampling": header["sampling"], "counts": header["counts"], "draft": where.draft},
        "fit": {"seconds": {name: round(s, 1) for name, s in ledger.seconds.items()}, "machine": processor()},
        "speed": ledger.found["worth"],
        "curves": curves(rows),
        "command": shlex.join(["flashdraft", *sys.argv[1:]]),
    }


def curves(rows: list[dict[str, Any]]) -> dict[str, list[list[float]]]:
    """Loss and AL over steps, [step, value] each, thinned to MOST_POINTS."""
    trained = [row for row in rows if "loss" in row]
    thin = trained[:: len(trained) // MOST_POINTS + 1]
    return {
        "loss": [[row["step"], row["loss"]] for row in thin],
        "expected_al": [[row["step"], row["expected_al"]] for row in thin],
        "heldout_al": [[row["step"], row["heldout"]["over_steps"]] for row in rows if "heldout" in row],
    }
