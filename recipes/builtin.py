"""The answers that the built-in draft learned from: to prompts from files, and to prompts that its target writes itself.

    python recipes/builtin.py --target TARGET --work OUT --prompts FILES --exclude SUITES --seconds 400
    flashdraft train TARGET --data OUT/answers --output DRAFT --recipe recipes/builtin.toml --hours 0.15
    python recipes/acceptance.py --target TARGET --draft DRAFT --suites SUITES

FILES and SUITES are JSONL files of prompts; without --prompts the target writes all of them. The same command again goes on
with the prompts that have no answers yet. Without a GPU give --slots (how many answers are made side by side): the recipe's are
for one of 141 GB.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flashdraft.errors import ConfigError, FlashdraftError
from flashdraft.prompts import Prompt, read_prompts
from flashdraft.targets.load import load_target, load_tokenizer
from flashdraft.targets.target import Target
from flashdraft.train import synthesize as train_synthesize
from flashdraft.train.corpus import Corpus, Exclusions, select_prompts
from flashdraft.train.rollout import compile_small_modules, slot_bytes, slots_that_fit
from flashdraft.train.self_prompts import Seed, self_prompts
from flashdraft.train.sources import Lengths, RolloutSource, make_rollout
from flashdraft.train.synthesize import SynthesisConfig


def prompts_of(paths: list[Path]) -> list[Prompt]:
    return [prompt for path in paths for prompt in read_prompts(path)]


def open_rollout(target: Target, tokenizer: Any, lengths: Lengths, slots: int) -> RolloutSource:
    """A rollout, if its keys and values fit in the memory. Raises ConfigError, which says how many slots would."""
    max_len = lengths.within(target.max_position_embeddings)
    if slots > (fitting := slots_that_fit(target, max_len)):
        where = "the GPU has free" if target.device.type == "cuda" else "half of this machine's memory"
        need = (slots + 1) * slot_bytes(target, max_len) / 1e9
        raise ConfigError(
            f"{slots:,} slots need {need:,.1f} GB for keys and values, more than {where}: give --slots {max(1, fitting)} "
            "or fewer"
        )
    return RolloutSource(make_rollout(target, tokenizer, lengths, slots=slots), tokenizer)


def synthesize(args: argparse.Namespace, recipe: dict[str, Any], target: Target, tokenizer: Any) -> None:
    s, start = recipe["synthesis"], time.monotonic()
    counts: Counter[str] = Counter()
    exclusions = Exclusions(prompts_of(args.exclude))
    prompts = select_prompts(prompts_of(args.prompts), exclusions, counts)
    source = open_rollout(target, tokenizer, Lengths(s["max_len"] - s["max_new"], s["max_new"]), args.slots or s["slots"])
    config = SynthesisConfig(
        samples=s["samples"],
        greedy_share=s["greedy_share"],
        temperatures=tuple(np.linspace(*s["temperatures"], 25).round(3).tolist()),
        max_tokens=s["max_new"],
        max_prompt_tokens=s["max_prompt"],
        seed=args.seed,
    )
    report(args, "ready to generate", {"seconds": time.monotonic() - start, "prompts": len(prompts)})
    made = written_prompts(args, recipe, source, counts, (args.seconds - (time.monotonic() - start)) * 0.2)
    corpus = Corpus.of_prompts([*prompts, *made], exclusions)
    report(args, "prompts", dict(corpus.counts))
    before, begin = source.rollout.decoded_tokens, time.monotonic()
    left = args.seconds - (begin - start)
    counts += train_synthesize.synthesize(
        source, corpus, args.work / "answers", config, target=str(args.target), max_seconds=left
    )
    seconds, tokens = time.monotonic() - begin, source.rollout.decoded_tokens - before
    rate = {"seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds}
    report(args, "answers", {**rate, "prefill_tokens": source.rollout.prefill_tokens, **counts})


def written_prompts(
    args: argparse.Namespace, recipe: dict[str, Any], source: RolloutSource, counts: Counter[str], seconds: float
) -> list[Prompt]:
    """The prompts that the target writes itself: once, as they would be others the next time."""
    path, begin = args.work / "self_prompts.jsonl", time.monotonic()
    if not path.exists():
        seeds = [Seed(row["text"], row["category"], row["weight"]) for row in recipe["seed"]]
        count = recipe["synthesis"]["self_prompts"] if args.self_prompts is None else args.self_prompts
        made = self_prompts(source, seeds, count, seconds=seconds, counts=counts, seed=args.seed)
        path.write_text("".join(json.dumps(prompt.to_row()) + "\n" for prompt in made))
        tokens = source.rollout.decoded_tokens
        report(args, "self prompts", {"seconds": time.monotonic() - begin, "tokens": tokens, "kept": len(made)})
        for category in sorted({seed.category for seed in seeds}):
            report(args, f"examples of {category}", {"texts": [p.turns[0] for p in made if p.category == category][:3]})
    return read_prompts(path) if path.stat().st_size else []


def load(args: argparse.Namespace) -> tuple[Target, Any]:
    torch.set_float32_matmul_precision("high")
    target = load_target(args.target, device="cuda" if torch.cuda.is_available() else "cpu", dtype=args.dtype)
    if target.device.type == "cuda" and not args.no_compile:
        compile_small_modules(target)
    return target, load_tokenizer(args.target)


def report(args: argparse.Namespace, what: str, values: dict[str, Any]) -> None:
    line = json.dumps(
        {"what": what, **{k: round(v, 2) if isinstance(v, float) else v for k, v in values.items()}}, ensure_ascii=False
    )
    print(line, flush=True)
    with (args.work / "log.jsonl").open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="directory or .gguf file of the target")
    parser.add_argument("--work", type=Path, required=True, help="answers and log go here")
    parser.add_argument("--recipe", type=Path, default=Path(__file__).with_suffix(".toml"))
    parser.add_argument("--prompts", type=Path, nargs="*", default=[])
    parser.add_argument("--exclude", type=Path, nargs="*", default=[], help="prompts never to train on")
    parser.add_argument("--seconds", type=float, default=400.0, help="time budget")
    parser.add_argument("--slots", type=int, help="instead of the recipe's")
    parser.add_argument("--self-prompts", type=int, help="instead of the recipe's")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    recipe = tomllib.loads(args.recipe.read_text())
    try:
        synthesize(args, recipe, *load(args))
    except FlashdraftError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
