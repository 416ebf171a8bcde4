"""Training speed in real context tokens, and its memory.

    python benchmarks/train.py                     the built-in target: real (unpadded) context tokens/s
    python benchmarks/train.py --data DIR          the same on answers of your own, else random ones of 254 tokens in the mean
    python benchmarks/train.py --gpus 2            one GPU and two at the same update: how many times as fast (torchrun inside)
    python benchmarks/train.py --e4b               Gemma 4 E4B's text shape with recipes/gemma4-e4b.toml: memory, and days
    python benchmarks/train.py --memory            peak above weights and optimizer state: V 262,144, H 2,560, 4 rows of 2,048

The speed is with one anchor for at most 1.6 real tokens, the memory with 256 anchors a row. On a CPU both shrink, to be tried
out. Prints one table.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from step import full_shape
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from flashdraft import builtin
from flashdraft.draft import DFlashConfig, DFlashDraft, count_parameters
from flashdraft.targets.load import load_target
from flashdraft.targets.target import Target
from flashdraft.train.data import Batches, Records, load_records
from flashdraft.train.distributed import World, joined
from flashdraft.train.plan import Plan, draft_config, make_plan, memory_estimate
from flashdraft.train.recipe import Recipe, parse_recipe, read_recipe
from flashdraft.train.rollout import compile_small_modules
from flashdraft.train.trainer import Trainer, prefetch

MEAN_TOKENS = 254  # of the answers that the built-in draft was first tried on, prompts included
E4B_TOKENS = 1000  # assumed, as docs/scaling.md does


def random_records(vocab_size: int, count: int, longest: int, mean: int = MEAN_TOKENS) -> Records:
    """Answers of so many tokens in the mean, three quarters of them generated."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.gamma(2.0, mean / 2, count).astype(int), 16, longest)
    pairs = [
        (rng.integers(20, vocab_size, n // 4).tolist(), rng.integers(20, vocab_size, n - n // 4).tolist()) for n in lengths
    ]
    return Records.from_lists(pairs)


def big_target(device: torch.device, small: bool) -> Target:
    """Random weights in the shape that decides the memory: hidden 2,560, vocabulary 262,144. Layers keep nothing: eight do."""
    config = LlamaConfig(
        hidden_size=256 if small else 2560,
        intermediate_size=512 if small else 10240,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32 if small else 256,
        vocab_size=8192 if small else 262_144,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    with device:
        return Target(LlamaForCausalLM(config).to(torch.bfloat16), check=False)


def make_draft(target: Target, layers: int) -> DFlashDraft:
    return DFlashDraft(
        DFlashConfig.for_target(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            num_target_layers=target.num_layers,
            mask_token_id=4,
            num_hidden_layers=layers,
        )
    )


def make_trainer(
    target: Target, draft: DFlashDraft, records: Records, plan: Plan, directory: Path, world: World | None = None
) -> Trainer:
    world = world or World()
    return Trainer(target, draft, plan.batches(records, 8, world), plan.config, directory, world=world)


def timed(trainer: Trainer, warm: int, steps: int) -> tuple[float, int, int]:
    """Seconds an update; real tokens and anchors of `steps` updates, of this process."""
    batches: Batches = trainer.batches
    cuda, parts = trainer.device.type == "cuda", batches.parts
    tokens = anchors = 0
    with closing(prefetch(lambda i: batches.batch(*divmod(i, parts)), 0, cuda)) as stream:
        for step in range(warm + steps):
            if step == warm:
                trainer._meter.restart()
                if cuda:
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                start = time.perf_counter()
            trainer.update(stream, 0.5)
        tokens, anchors = trainer._meter.tokens, int(trainer._meter.sums["counts"][0])  # waits for the GPU
    return (time.perf_counter() - start) / steps, tokens, anchors


def print_profile(trainer: Trainer) -> None:
    """Where two more updates spend their time, the longest first."""
    cuda = trainer.device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=kinds) as found:
        timed(trainer, 0, 2)
    order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=90))


def reference_pair(args: argparse.Namespace, device: torch.device) -> tuple[Target, DFlashDraft, Records, Recipe]:
    """Gemma 4 E4B's text shape and the reference draft, random; answers of 1,000 tokens in the mean, prompts included."""
    recipe = read_recipe(Path(__file__).parent.parent / "recipes" / "gemma4-e4b.toml")
    layers = 42 if device.type == "cuda" else 12  # a try on a small machine
    target = full_shape(device, layers)
    if layers != 42:
        recipe = replace(recipe, draft=replace(recipe.draft, target_layer_ids=[2, 5, 11], intermediate_size=512))
    given = {"rows": args.rows, "seq_length": args.seq_length, "anchors": args.anchors, "micro_rows": args.micro_rows}
    train = replace(recipe.train, steps=1000, **{key: value for key, value in given.items() if value})
    draft = DFlashDraft(draft_config(recipe.draft, target, 4))
    records = random_records(target.vocab_size, 20_000 if device.type == "cuda" else 20, train.seq_length, E4B_TOKENS)
    return target, draft, records, replace(recipe, train=train)


def built_in_pair(args: argparse.Namespace, device: torch.device) -> tuple[Target, DFlashDraft, Records, Recipe]:
    cuda = device.type == "cuda"
    target = load_target(args.target or builtin.target_path(), device=device)
    records = load_records(args.data) if args.data else random_records(target.vocab_size, 20_000 if cuda else 200, 2048)
    length = args.seq_length or (2048 if cuda else 512)
    train = {"rows": args.rows or (16 if cuda else 1), "seq_length": length, "anchors": args.anchors or int(length / 1.6)}
    recipe = parse_recipe({"train": {**train, "steps": 1000}})
    return target, make_draft(target, args.layers), records.without(4).cut(length), recipe


def speed(args: argparse.Namespace, device: torch.device, world: World) -> dict[str, float]:
    """Measured figures, over all processes."""
    cuda = device.type == "cuda"
    target, draft, records, recipe = (reference_pair if args.e4b else built_in_pair)(args, device)
    plan = make_plan(recipe, target, draft, records, world)
    if args.micro_rows:
        plan = replace(plan, micro_rows=args.micro_rows)
    if cuda:
        compile_small_modules(target)
    steps = args.steps or (30 if cuda else 2)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = make_trainer(target, draft, records, plan, Path(scratch), world)
        seconds, tokens, anchors = timed(trainer, 5 if cuda else 1, steps)
        if args.profile:
            print_profile(trainer)
    tokens, anchors = world.sum(torch.tensor([tokens, anchors])).tolist()
    return {
        "parameters": count_parameters(trainer.draft)["all"],
        "rows": plan.rows,
        "length": plan.seq_length,
        "micro_rows": plan.micro_rows,
        "tokens_an_anchor": tokens / anchors,
        "seconds": seconds,
        "tokens": tokens / steps,
        "peak": torch.cuda.max_memory_allocated() if cuda else 0,
        "answer_tokens": float(records.lengths.mean()),
    }


def speed_table(found: dict[str, float]) -> dict[str, str]:
    padded, seconds = found["rows"] * found["length"], found["seconds"]
    per_token = seconds / found["tokens"]
    return {
        "draft parameters": f"{found['parameters']:,}",
        "rows x tokens, rows a pass": f"{found['rows']} x {found['length']:,}, {found['micro_rows']}",
        "real tokens for one anchor": f"{found['tokens_an_anchor']:.2f}",
        "rows full": f"{found['tokens'] / padded:.0%}",
        "a step": f"{1000 * seconds:,.0f} ms",
        "real context tokens/s": f"{found['tokens'] / seconds:,.0f}",
        "padded context tokens/s": f"{padded / seconds:,.0f}",
        "memory at most": f"{found['peak'] / 1e9:.1f} GB" if found["peak"] else "not measured on a CPU",
        "an epoch of 3.7 million such answers": f"{3.7e6 * found['answer_tokens'] * per_token / 86400:,.1f} days",
    }


def scaling(args: argparse.Namespace, device: torch.device) -> dict[str, str]:
    """The same update on one GPU and on several, each in processes of their own."""
    options = [word for word in sys.argv[1:] if not word.startswith("--gpus=")]
    if "--gpus" in options:
        at = options.index("--gpus")
        del options[at : at + 2]
    if not args.rows:
        options += ["--rows", str((16 if device.type == "cuda" else 2) * args.gpus)]
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for count in (1, args.gpus):
            path = Path(scratch) / f"{count}.json"
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
            command = [sys.executable, *(torchrun if count > 1 else []), __file__, *options, "--json", str(path)]
            if status := subprocess.run(command, check=False).returncode:
                sys.exit(status)
            found[count] = json.loads(path.read_text())
    one, many = found[1], found[args.gpus]
    return {f"1 process: {name}": value for name, value in speed_table(one).items()} | {
        f"{args.gpus} processes: a step": f"{1000 * many['seconds']:,.0f} ms, {many['micro_rows']} rows a pass",
        f"{args.gpus} processes: real context tokens/s": f"{many['tokens'] / many['seconds']:,.0f}",
        "times as fast": f"{one['seconds'] / many['seconds'] * many['tokens'] / one['tokens']:.2f}",
    }


def memory(args: argparse.Namespace, device: torch.device) -> dict[str, str]:
    cuda = device.type == "cuda"
    target = big_target(device, small=not cuda)
    length = 2048 if cuda else 256
    records = random_records(target.vocab_size, 400, length)
    recipe = parse_recipe({"train": {"rows": 4, "seq_length": length, "anchors": 256 if cuda else 32, "steps": 100}})
    draft = make_draft(target, args.layers)
    plan = make_plan(recipe, target, draft, records, World())
    if args.micro_rows:
        plan = replace(plan, micro_rows=args.micro_rows)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = make_trainer(target, draft, records, plan, Path(scratch))
        timed(trainer, 1, 1)  # makes the optimizer's state, and compiles
        trainer.draft.zero_grad(set_to_none=True)
        held = torch.cuda.memory_allocated() if cuda else 0
        seconds, _, _ = timed(trainer, 0, 3)
    peak = torch.cuda.max_memory_allocated() - held if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    estimate = memory_estimate(target, trainer.draft, plan)
    return {
        "vocabulary, hidden": f"{target.vocab_size:,}, {target.hidden_size:,}",
        "draft parameters": f"{count_parameters(trainer.draft)['all']:,}",
        "rows x tokens, rows a pass, anchors": f"{plan.rows} x {plan.seq_length:,}, {plan.micro_rows}, {plan.anchors}",
        "weights and optimizer state": f"{held / 1e9:.2f} GB" if cuda else "not measured on a CPU",
        "peak above them" if cuda else "peak of the process": f"{peak / 1e9:.2f} GB",
        "estimate of --dry-run for a pass": f"{estimate['pass'] / 1e9:.2f} GB",
        "a step": f"{1000 * seconds:,.0f} ms",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--e4b", action="store_true")
    parser.add_argument("--target", help="directory or .gguf file; without it the built-in one")
    parser.add_argument("--data", type=Path, help="directory of answers; without it random ones")
    parser.add_argument("--layers", type=int, default=5, help="of the draft")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--micro-rows", type=int)
    parser.add_argument("--seq-length", type=int)
    parser.add_argument("--anchors", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--profile", action="store_true", help="also where updates spend their time")
    parser.add_argument("--device")
    parser.add_argument("--gpus", type=int, default=1, help="compare one with so many; on a CPU so many processes")
    parser.add_argument("--json", type=Path, help="write the measured figures there instead of a table")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if args.gpus > 1:
        table = scaling(args, device)
    elif args.memory:
        table = memory(args, device)
    else:
        with joined(args.device) as (world, own):
            found = speed(args, torch.device(own or device), world)
        if not world.is_main:
            return
        if args.json:
            args.json.write_text(json.dumps(found))
            return
        table = speed_table(found)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    print(f"| {name}, torch {torch.__version__} | |\n|---|---|")
    for key, value in table.items():
        print(f"| {key} | {value} |")


if __name__ == "__main__":
    main()
