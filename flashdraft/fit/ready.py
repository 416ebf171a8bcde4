"""The directory that a fit leaves: the draft, training.json with all that made it, and README.md, its model card."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flashdraft import __version__, builtin
from flashdraft.compare import processor
from flashdraft.errors import CheckpointError, counted
from flashdraft.fit.ledger import Ledger
from flashdraft.train.commands_synthesize import Where
from flashdraft.train.commands_train import RUN
from flashdraft.train.corpus import Corpus
from flashdraft.train.display import duration, positions
from flashdraft.train.files import replacing, saying_what_is_wrong, write_whole
from flashdraft.train.metrics import read_metrics
from flashdraft.train.records import HEADER

BUILTIN_ON_THE_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
MOST_POINTS = 200  # of a curve in training.json
PUBLISHED = ("model.safetensors", "training_prompts.npy", "curves.png", "training.json", "README.md", "config.json")


def publish(output: Path, where: Where, corpus: Corpus, ledger: Ledger) -> None:
    """Write the directory, config.json last: what is killed before is no draft yet, and is written again."""
    training = output / "work" / "training"
    with _reading(training):
        figures = json.loads((training / "training.json").read_text(encoding="utf-8"))
        figures |= provenance(output / "work", where, corpus, ledger)
        config = json.loads((training / "config.json").read_text(encoding="utf-8"))
    with saying_what_is_wrong(output):
        for name in PUBLISHED[:3]:
            if (training / name).exists():
                with replacing(output / name) as partial:
                    shutil.copyfile(training / name, partial)
        write_whole(output / "training.json", json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
        write_whole(output / "README.md", card(figures, config, where, output.resolve().name))
        write_whole(output / "config.json", (training / "config.json").read_text(encoding="utf-8"))


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


def card(figures: Mapping[str, Any], config: Mapping[str, Any], where: Where, name: str) -> str:
    """The model card."""
    target = BUILTIN_ON_THE_HUB if where.name == builtin.NAME else where.name
    front = ["library_name: flashdraft", "tags: [dflash, speculative-decoding]"]
    if not Path(target).exists():
        front.insert(0, f"base_model: {target}")
    proposals = config["block_size"] - 1
    return "\n".join(
        [
            "---",
            *front,
            "---",
            f"# {name}: a DFlash draft for {target}",
            "",
            f"{figures['draft_parameters']:,} parameters. It guesses the next {proposals} tokens of its target in one forward "
            "pass; the target checks all of them in one of its own, so that the text stays the target's and arrives sooner.",
            "",
            *_worth(figures),
            *_use(where, target, proposals),
            *_made(figures),
        ]
    )


def _worth(figures: Mapping[str, Any]) -> list[str]:
    """Figures of held-out prompts."""
    held, speed = figures["heldout"], figures["speed"]
    whole, setup, sampling = speed["all"], speed["setup"], speed["setup"]["sampling"]
    rows = [
        f"| {kind} {name or '(none)'} | {group['requests']:,} | {group['acceptance_length']:.2f} |"
        for kind, key in (("category", "by_category"), ("language", "by_language"), ("thinking", "by_thinking"))
        for name, group in held[key].items()
        if name != "all"
    ]
    length = whole["acceptance_length"]
    decoded = "" if length is None else f", {length:.2f} tokens a step"
    return [
        "## What it is worth",
        "",
        "Acceptance length (AL: tokens a step of the target, its own included) on answers of the target to prompts that were "
        "held out of training, mean over answers:",
        "",
        "| answers of | answers | AL |",
        "|---|---|---|",
        *rows,
        f"| **all** | {held['requests']:,} | **{held['acceptance_length']:.2f}** |",
        "",
        f"Accepted by position: {positions(held['by_position'])}.",
        "",
        f"Decoding {counted(whole['answers'], 'answer')} to such prompts one at a time, {whole['tokens']:,} tokens at "
        f"temperature {sampling['temperature']:g}: **{whole['tokens_per_second_on']:.1f} tokens/s** with this draft{decoded}, "
        f"{whole['tokens_per_second_off']:.1f} without, ratio {whole['speedup']:.2f}; {whole['identical']} of "
        f"{whole['answers']} texts identical. {setup['device']}, {setup['dtype']}, torch {setup['torch']}.",
        "",
    ]


def _use(where: Where, target: str, proposals: int) -> list[str]:
    named = "" if where.name == builtin.NAME else f" --target {target}"
    named += "" if where.lora is None else f" --lora {where.lora}"
    lora = "" if where.lora is None else f', lora="{where.lora}"'
    argument = "" if where.name == builtin.NAME else f'"{target}", '
    speculative = json.dumps({"method": "dflash", "model": "DIR", "num_speculative_tokens": proposals})
    return [
        "## Use",
        "",
        "`DIR` is this directory.",
        "",
        "```",
        f"flashdraft chat{named} --draft DIR",
        f"flashdraft generate{named} --draft DIR --compare",
        f"vllm serve {target} --speculative-config '{speculative}'",
        "```",
        "",
        "```python",
        "from flashdraft import LLM",
        "",
        f'llm = LLM({argument}draft="DIR"{lora})',
        "```",
        "",
    ]


def _made(figures: Mapping[str, Any]) -> list[str]:
    data, training, prompts = figures["data"], figures["training"], figures["prompts"]
    sampling, seconds = figures["answers"]["sampling"], sum(figures["fit"]["seconds"].values())
    temperatures = ", ".join(f"{t:g}" for t in sampling["temperatures"])
    return [
        "## How it was made",
        "",
        "```",
        figures["command"],
        "```",
        "",
        f"By flashdraft {__version__} in {duration(seconds)}: {counted(data['records'], 'answer')} of the target to "
        f"{counted(prompts['count'], 'prompt')} (hash `{prompts['hash']}`), temperature {temperatures}; trained on "
        f"{data['records_trained_on']:,} of them, {data['answer_tokens']:,} answer tokens, for "
        f"{counted(training['steps'], 'step')} ({training['epochs']:.1f} epochs). `training.json` has the settings, "
        "counts, curves and versions; `training_prompts.npy` the hashes of the prompts trained on.",
        "",
    ]
