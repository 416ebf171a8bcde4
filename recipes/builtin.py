"""How the built-in draft was made: synthesize answers, train, evaluate on held-out prompts.

    python recipes/builtin.py synthesize --target DIR --work OUT --prompts FILE --exclude HELDOUT --seconds 400
    python recipes/builtin.py train      --target DIR --work OUT --seconds 480
    python recipes/builtin.py evaluate   --target DIR --work OUT --heldout HELDOUT --limit 200

FILE and HELDOUT are JSONL files of prompts, one or several each; without --prompts the target writes all prompts itself.
Commands can be given together. Each is resumable: synthesize goes on with the prompts that have no answers yet, train with the
last saved state. Without a GPU give --slots (how many answers are made side by side): the recipe's are for one of 141 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.numpy import save_file

from flashdraft.checkpoint import load_draft
from flashdraft.draft import DFlashConfig, DFlashDraft, count_parameters, default_layer_ids
from flashdraft.errors import ConfigError, FlashdraftError
from flashdraft.prompts import Prompt, read_prompts
from flashdraft.targets.load import load_target, load_tokenizer
from flashdraft.targets.target import Target
from flashdraft.train.data import Batches, Records, load_records, read_column
from flashdraft.train.loss import LossConfig
from flashdraft.train.rollout import Rollout, compile_small_modules
from flashdraft.train.synthesize import (
    Exclusions,
    Seed,
    SynthesisConfig,
    Synthesizer,
    select_prompts,
    training_hashes,
)
from flashdraft.train.trainer import TrainConfig, Trainer
from flashdraft.train.validation import acceptance, summary


def stop_ids(target: Target, tokenizer: Any) -> frozenset[int]:
    return target.eos_token_ids | ({tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set())


def prompts_of(paths: list[Path]) -> list[Prompt]:
    return [prompt for path in paths for prompt in read_prompts(path)]


def make_rollout(target: Target, tokenizer: Any, *, slots: int, max_len: int, max_new: int, seed: int = 0) -> Rollout:
    """A rollout, if its keys and values fit in the memory. Raises ConfigError, which says how many slots would."""
    own = [target.layer_specs[index] for index in target.storing_layers]
    slot_bytes = 2 * max_len * sum(spec.kv_heads * spec.key_size for spec in own) * target.dtype.itemsize
    if target.device.type == "cuda":
        memory, where = torch.cuda.mem_get_info(target.device)[0], "are free on the GPU"
    else:  # the other half is for the model, its activations and the system
        memory, where = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2, "are half of this machine's memory"
    if (slots + 1) * slot_bytes > memory:
        raise ConfigError(
            f"{slots:,} slots need {(slots + 1) * slot_bytes / 1e9:,.1f} GB for keys and values, and {memory / 1e9:,.1f} GB "
            f"{where}: give --slots {max(1, memory // slot_bytes - 1)} or fewer"
        )
    return Rollout(
        target,
        stop_ids(target, tokenizer),
        slots=slots,
        max_len=max_len,
        max_new=max_new,
        prefill_shape=(8, 2048) if target.device.type == "cuda" else (1, 2048),
        seed=seed,
    )


def synthesize(args: argparse.Namespace, recipe: dict[str, Any], target: Target, tokenizer: Any) -> None:
    s, start = recipe["synthesis"], time.monotonic()
    counts: Counter[str] = Counter()
    exclusions = Exclusions(prompts_of(args.exclude))
    prompts = select_prompts(prompts_of(args.prompts), exclusions, counts)
    rollout = make_rollout(
        target,
        tokenizer,
        slots=args.slots or s["slots"],
        max_len=s["max_len"],
        max_new=s["max_new"],
        seed=args.seed,
    )
    config = SynthesisConfig(
        samples=s["samples"],
        greedy_share=s["greedy_share"],
        temperatures=tuple(s["temperatures"]),
        max_new=s["max_new"],
        max_prompt=s["max_prompt"],
        seed=args.seed,
    )
    synthesizer = Synthesizer(rollout, tokenizer, config, exclusions, args.work / "answers")
    synthesizer.counts = counts
    report(args, "ready to generate", {"seconds": time.monotonic() - start, "prompts": len(prompts)})
    seeds = [Seed(row["text"], row["category"], row["weight"]) for row in recipe["seed"]]
    begin, budget = time.monotonic(), args.seconds - (time.monotonic() - start)
    made = synthesizer.self_prompts(seeds, args.self_prompts or s["self_prompts"], budget * 0.2)
    report(args, "self prompts", {"seconds": time.monotonic() - begin, "tokens": rollout.decoded_tokens, "kept": len(made)})
    for category in sorted({seed.category for seed in seeds}):
        examples = [prompt.turns[0] for prompt in made if prompt.category == category][:3]
        report(args, f"examples of {category}", {"texts": examples})
    everything = select_prompts([*prompts, *made], exclusions, counts)
    report(args, "prompts", {"count": len(everything), "seconds": time.monotonic() - begin})
    before, begin = rollout.decoded_tokens, time.monotonic()
    synthesizer.answer(everything, args.seconds - (time.monotonic() - start))
    seconds = time.monotonic() - begin
    tokens = rollout.decoded_tokens - before
    rate = {
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "prefill_tokens": rollout.prefill_tokens,
    }
    report(args, "answers", {**rate, **counts})
    (args.work / "synthesis.json").write_text(json.dumps({**rate, **counts}, indent=1))
    save_file({"hashes": training_hashes(args.work / "answers")}, args.work / "training_prompts.safetensors")


def new_draft(target: Target, tokenizer: Any, recipe: dict[str, Any]) -> DFlashDraft:
    d = recipe["draft"]
    return DFlashDraft(
        DFlashConfig.for_target(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            num_target_layers=target.num_layers,
            mask_token_id=tokenizer.convert_tokens_to_ids(d["mask_token"]),
            num_hidden_layers=d["num_hidden_layers"],
            target_layer_ids=default_layer_ids(target.num_layers, d["num_features"]),
            intermediate_size=d["intermediate_size"],
            num_attention_heads=d["num_attention_heads"],
            num_key_value_heads=d["num_key_value_heads"],
        )
    )


def make_trainer(
    args: argparse.Namespace, recipe: dict[str, Any], target: Target, draft: DFlashDraft, records: Records
) -> Trainer:
    t = recipe["train"]
    rows = args.rows or t["rows"]
    batches = Batches(
        records, seq_length=t["seq_length"], rows=rows, anchors=t["anchors"], block_size=draft.config.block_size, seed=args.seed
    )
    config = TrainConfig(
        max_seconds=args.seconds,
        learning_rate=t["learning_rate"],
        optimizer=t["optimizer"],
        final_rate=t["final_rate"],
        loss=LossConfig(beta=t["beta"]),
    )
    return Trainer(target, draft, batches, config, args.work)


def train(args: argparse.Namespace, recipe: dict[str, Any], target: Target, tokenizer: Any) -> None:
    torch.manual_seed(args.seed)
    draft = new_draft(target, tokenizer, recipe)
    everything = load_records(args.work / "answers")
    records = everything.without(draft.config.mask_token_id)
    trainer = make_trainer(args, recipe, target, draft, records)
    size = {"records": len(records), "with_mask_token": len(everything) - len(records), "answer_tokens": records.answer_tokens}
    report(args, "training", {**size, "rows": len(trainer.batches.rows), "parameters": count_parameters(draft)["all"]})
    trainer.train()
    figures = {
        "records": len(records),
        "tokens": len(records.tokens),
        "answer_tokens": records.answer_tokens,
        "prompts": len(set(read_column(args.work / "answers", "prompt_hash"))),
        "steps": trainer.step,
        "epochs": round(trainer.step / trainer.batches.steps_per_epoch, 3),
        "seconds": round(trainer.elapsed, 1),
        "context_tokens_seen": trainer.step * trainer.batches.rows_per_batch * trainer.batches.seq_length,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "recipe": {name: recipe[name] for name in ("draft", "synthesis", "train")},
    }
    (args.work / "training.json").write_text(json.dumps(figures, indent=1))
    report(args, "trained", {"steps": trainer.step, "seconds": trainer.elapsed})


def heldout_prompts(args: argparse.Namespace) -> list[Prompt]:
    """Up to `limit` prompts a file; the category is the file's name."""
    chosen = []
    for path in args.heldout:
        prompts = read_prompts(path)
        random.Random(0).shuffle(prompts)
        chosen += [Prompt(p.id, path.stem, p.turns) for p in prompts[: args.limit]]
    return select_prompts(chosen, Exclusions(), Counter())


def evaluate(args: argparse.Namespace, recipe: dict[str, Any], target: Target, tokenizer: Any) -> None:
    draft = load_draft(args.work / "draft")
    prompts, tables = heldout_prompts(args), {}
    hashes = set(training_hashes(args.work / "answers").tolist()) if (args.work / "answers").exists() else set()
    assert not hashes & {prompt.hash for prompt in prompts}, "held-out prompts were trained on"
    for name, greedy, temperature in (("greedy", 1.0, 0.0), ("temperature 1", 0.0, 1.0)):
        answers = args.work / f"heldout-{name.replace(' ', '-')}"
        rollout = make_rollout(
            target, tokenizer, slots=args.slots or 1024, max_len=2000, max_new=recipe["synthesis"]["max_new"]
        )
        config = SynthesisConfig(
            greedy_share=greedy, temperatures=(temperature, temperature), max_new=rollout.max_new, max_prompt=1350, seed=1
        )
        synthesizer = Synthesizer(rollout, tokenizer, config, Exclusions(), answers)
        synthesizer.answer(prompts, 120.0)
        del rollout, synthesizer.rollout
        torch.cuda.empty_cache()
        records = load_records(answers)
        trainer = make_trainer(args, recipe, target, draft, records)
        accepted = acceptance(
            trainer, records, seq_length=trainer.batches.seq_length, rows=trainer.batches.rows_per_batch, anchors=512
        )
        tables[name] = summary(accepted, records.categories)
        report(args, f"held-out, {name}", {**tables[name], "answers": dict(synthesizer.counts)})
    (args.work / "acceptance.json").write_text(json.dumps(tables, indent=1))


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
    parser.add_argument("commands", nargs="+", choices=["synthesize", "train", "evaluate"], help="run one after the other")
    parser.add_argument("--target", required=True, help="directory or .gguf file of the target")
    parser.add_argument("--work", type=Path, required=True, help="answers, states, logs and the draft go here")
    parser.add_argument("--recipe", type=Path, default=Path(__file__).with_suffix(".toml"))
    parser.add_argument("--prompts", type=Path, nargs="*", default=[])
    parser.add_argument("--exclude", type=Path, nargs="*", default=[], help="prompts never to train on")
    parser.add_argument("--heldout", type=Path, nargs="*", default=[])
    parser.add_argument("--limit", type=int, default=200, help="held-out prompts a file")
    parser.add_argument("--seconds", type=float, default=400.0, help="time budget of synthesize and of train")
    parser.add_argument("--slots", type=int, help="instead of the recipe's")
    parser.add_argument("--rows", type=int, help="instead of the recipe's")
    parser.add_argument("--self-prompts", type=int, help="instead of the recipe's")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    recipe = tomllib.loads(args.recipe.read_text())
    try:
        target, tokenizer = load(args)
        for command in args.commands:
            {"synthesize": synthesize, "train": train, "evaluate": evaluate}[command](args, recipe, target, tokenizer)
    except FlashdraftError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
