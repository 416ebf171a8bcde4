"""How the target that thinks was made: a LoRA on the built-in target that follows a template with enable_thinking.

    python recipes/thinking.py --output DIR [--prompts FILES] [--target DIR] [--seconds 140]
    python recipes/thinking.py --output DIR --merged TARGET

The first answers prompts with the target itself, puts templated reasoning before the answers, trains the adapter on both modes
and measures on held-out prompts how many answers are well-formed. FILES are JSONL files of prompts or directories of such;
without them prompts are made from thinking.toml. DIR holds the adapter, provenance.json, report.md, the held-out answers, and
answers.jsonl, which is not asked again. The second writes the target with the adapter merged, as a directory that every command
takes. A draft for it: thinking_draft.toml.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import sys
import time
import tomllib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from thinking_texts import Answered, choose, exercise, files_of, kind_of, shortened, thoughts, well_formed
from torch import Tensor, nn
from torch.nn import functional as F

from flashdraft import LLM, builtin
from flashdraft.engine.engine import Engine, EngineConfig
from flashdraft.errors import ConfigError, FlashdraftError
from flashdraft.prompts import repetition
from flashdraft.targets.discovery import switch_attention
from flashdraft.targets.load import load_target, load_tokenizer
from flashdraft.targets.lora import LoraConfig
from flashdraft.targets.quiet import quiet
from flashdraft.train.conversations import Renderer
from flashdraft.train.jobs import Job, Source
from flashdraft.train.sources import EngineSource, Lengths, RolloutSource, make_rollout

PADDING = 0  # <|endoftext|>, which no example holds
AIM = 0.97  # of the answers, in each mode


def open_source(args: argparse.Namespace, lengths: Lengths, lora: Path | None = None) -> Source:
    """What makes answers: on a GPU a rollout of thousands at once, else the engine, which is sooner ready."""
    target = load_target(args.target_path, device=args.device, lora=lora)
    tokenizer = load_tokenizer(args.target_path, lora=lora)
    if args.generator == "engine":
        limit = lengths.within(target.max_position_embeddings)
        config = EngineConfig(max_model_len=limit, max_num_seqs=args.max_num_seqs or 32, row_multiple=1)
        return EngineSource(LLM.from_parts(tokenizer, Engine(target, None, config)))
    return RolloutSource(make_rollout(target, tokenizer, lengths, slots=args.max_num_seqs), tokenizer)


def release() -> None:
    """Give a GPU's memory back between two stages."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def asked(source: Source, prompts: Sequence[str], longest: int, **template: Any) -> deque[Job]:
    """Greedy answers to be made."""
    renderer = Renderer(source.tokenizer)
    ids = renderer.encode([renderer.render([{"role": "user", "content": text}], template) for text in prompts])
    tags = ((text, template.get("enable_thinking")) for text in prompts)
    return deque(Job(one, max_new=longest, tag=tag) for one, tag in zip(ids, tags, strict=True))


def text_of(source: Source, tokens: list[int]) -> str:
    return str(source.tokenizer.decode(tokens, skip_special_tokens=True))


def answered(args: argparse.Namespace, prompts: Sequence[str], data: dict[str, Any]) -> list[Answered]:
    """The target's own greedy answers, kept in answers.jsonl, until their share of the time is over; answers that loop or hold
    nothing whole are left out."""
    path, end = args.output / "answers.jsonl", args.begun + data["answers_until"] * args.seconds
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith("\n")]  # what was killed may have left half a line
    rows = {row["prompt"]: row for row in map(json.loads, whole)}
    if new := [text for text in prompts if text not in rows]:
        longest = data["max_answer_tokens"]
        source = open_source(args, Lengths(512, longest))
        print(f"{len(new)} prompts, {source.describe()}, after {args.spent():.0f} s", flush=True)
        jobs = asked(source, new, longest)
        path.write_text("".join(whole), encoding="utf-8")
        with path.open("a", encoding="utf-8") as file:
            for count, one in enumerate(source.run(jobs), 1):
                row = {"prompt": one.job.tag[0], "answer": text_of(source, one.tokens), "finished": one.finish == "stop"}
                row["repetition"] = 1.0 if one.finish == "loop" else round(repetition(one.tokens), 3)
                rows[row["prompt"]] = row
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                if count % 1000 == 0 or count == len(new):
                    print(f"answers: {count} of {len(new)}, {args.spent():.0f} s", flush=True)
                if time.monotonic() > end:
                    break
    kept = []
    for row in (rows[text] for text in prompts if text in rows):
        # An answer that began to loop late has a good beginning, which is all that is taken of it.
        answer = shortened(row["answer"], row["finished"], data["max_answer_chars"])
        if answer and repetition(answer.split()) <= 0.1 and (row["repetition"] <= 0.3 or "```" not in answer):
            kept.append(Answered(row["prompt"], thoughts(row["prompt"], args.recipe["reasoning"]), answer))
    if not kept:
        raise ConfigError("no answer of the target is whole and free of loops: give other --prompts or more --seconds")
    return kept


def examples(tokenizer: Any, items: Sequence[Answered], second_turns: float, seed: int) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, output ids) of every item in both modes, some after a first turn; the output ends with <|im_end|>."""
    rng, renderer = random.Random(seed), Renderer(tokenizer)
    prompts: list[str] = []
    outputs: list[str] = []
    for item in items:
        for thinking in (True, False):
            messages = [{"role": "user", "content": item.prompt}]
            if rng.random() < second_turns:
                before = rng.choice(items)
                messages = [
                    {"role": "user", "content": before.prompt},
                    {"role": "assistant", "content": before.answer},
                    *messages,
                ]
            prompts.append(renderer.render(messages, {"enable_thinking": thinking}))
            outputs.append(f"<think>\n{item.reasoning}\n</think>\n\n{item.answer}" if thinking else item.answer)
    pairs = zip(renderer.encode(prompts), renderer.encode(outputs), strict=True)
    return [(prompt, [*output, tokenizer.eos_token_id]) for prompt, output in pairs]


class LoraLinear(nn.Module):
    """x W^T + scale (x A^T) B^T with W frozen; A and B in float32, multiplied in the dtype of x."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.a = nn.Parameter(torch.empty(rank, base.in_features, device=base.weight.device))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, device=base.weight.device))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.a.to(x.dtype).T) @ self.b.to(x.dtype).T * self.scale


def attach(model: nn.Module, config: LoraConfig) -> dict[str, LoraLinear]:
    """Put a LoraLinear in the place of every linear module that the configuration names."""
    names = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and config.targets_module(name)]
    layers = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        layers[name] = LoraLinear(model.get_submodule(name), config.rank_of(name), config.scale_of(name))
        setattr(model.get_submodule(parent), leaf, layers[name])
    return layers


def batches(made: Sequence[tuple[list[int], list[int]]], tokens: int, rng: random.Random) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch of (ids, labels) [rows, S], right-padded, at most `tokens` a batch; rows of a batch have about one length."""
    order = sorted(rng.sample(range(len(made)), len(made)), key=lambda i: sum(map(len, made[i])) // 16)
    groups: list[list[int]] = [[]]
    for i in order:
        if (len(groups[-1]) + 1) * sum(map(len, made[i])) > tokens and groups[-1]:
            groups.append([])
        groups[-1].append(i)
    for group in rng.sample(groups, len(groups)):
        width = max(sum(map(len, made[i])) for i in group)
        ids, labels = torch.full((len(group), width), PADDING), torch.full((len(group), width), -100)
        for row, i in enumerate(group):
            prompt, output = made[i]
            ids[row, : len(prompt) + len(output)] = torch.tensor(prompt + output)
            labels[row, len(prompt) : len(prompt) + len(output)] = torch.tensor(output)
        yield ids, labels


def train(args: argparse.Namespace, made: list[tuple[list[int], list[int]]], config: LoraConfig) -> dict[str, Any]:
    """Train the adapter and save it; returns what the provenance says of it."""
    t = args.recipe["train"]
    target = load_target(args.target_path, dtype="bfloat16", device=args.device)
    model: Any = target.model
    switch_attention(model, "sdpa")
    torch.manual_seed(args.seed)
    layers, rng = attach(model, config), random.Random(args.seed)
    parameters = [p for layer in layers.values() for p in (layer.a, layer.b)]
    optimizer = torch.optim.AdamW(parameters, lr=t["learning_rate"], betas=(0.9, 0.98), weight_decay=0.0)
    plan = [batch for _ in range(t["epochs"]) for batch in batches(made, args.batch_tokens, rng)]
    begin, losses, seen = time.monotonic(), [], 0
    free = args.begun + args.recipe["data"]["training_until"] * args.seconds - begin
    for step, (ids, labels) in enumerate(plan, 1):
        done = max(step / len(plan), (time.monotonic() - begin) / max(free, 1e-9))
        if done > 1:
            break
        rate = min(step / (t["warmup"] * len(plan)), 1.0) * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = t["learning_rate"] * rate
        hidden = model.get_decoder()(input_ids=ids.to(args.device), use_cache=False).last_hidden_state[:, :-1]
        rows = labels[:, 1:].to(args.device) != -100
        logits = model.get_output_embeddings()(hidden[rows]).float()
        loss = F.cross_entropy(logits, labels[:, 1:].to(args.device)[rows])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, t["clip"])
        optimizer.step()
        losses.append(loss.item())
        seen += int((ids != PADDING).sum())
        if step % 20 == 0 or step == len(plan):
            recent = sum(losses[-20:]) / len(losses[-20:])
            print(f"step {step} of {len(plan)}, loss {recent:.3f}, {time.monotonic() - begin:.0f} s", flush=True)
    if not losses:
        raise ConfigError("no time is left to train: give more --seconds, and the answers are taken from answers.jsonl")
    save(args, config, layers)
    return {
        "steps": len(losses),
        "seconds": round(time.monotonic() - begin, 1),
        "tokens": seen,
        "first_loss": round(sum(losses[:20]) / len(losses[:20]), 3),
        "last_loss": round(sum(losses[-20:]) / len(losses[-20:]), 3),
        "parameters": sum(p.numel() for p in parameters),
    }


def save(args: argparse.Namespace, config: LoraConfig, layers: dict[str, LoraLinear]) -> None:
    """The adapter in PEFT's layout, in bfloat16."""
    tensors = {}
    for name, layer in layers.items():
        for side, value in (("A", layer.a), ("B", layer.b)):
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = value.detach().to("cpu", torch.bfloat16).contiguous()
    save_file(tensors, args.output / "adapter_model.safetensors", metadata={"format": "pt"})
    (args.output / "adapter_config.json").write_text(json.dumps(peft_config(args.recipe), indent=1) + "\n")
    (args.output / "chat_template.jinja").write_text(args.recipe["template"].lstrip("\n"), encoding="utf-8")


def peft_config(recipe: dict[str, Any]) -> dict[str, Any]:
    fixed = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct"}
    rest = {"bias": "none", "lora_dropout": 0.0, "use_rslora": False, "fan_in_fan_out": False, "inference_mode": True}
    return {**fixed, **recipe["adapter"], **rest}


def measure(args: argparse.Namespace, prompts: Sequence[str], data: dict[str, Any]) -> dict[str, Any]:
    """Of greedy answers to held-out prompts in each mode: how many are well-formed, and what the others are."""
    longest = data["max_measured_tokens"]
    source = open_source(args, Lengths(512, longest), args.output)
    jobs = asked(source, prompts, longest, enable_thinking=True) + asked(source, prompts, longest, enable_thinking=False)
    rows: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for one in source.run(jobs):
        (prompt, thinking), text = one.job.tag, text_of(source, one.tokens)
        whole = well_formed(text, True, thinking)
        end = "good" if whole and one.finish == "stop" else "another form" if not whole else one.finish
        row = {"prompt": prompt, "text": text, "end": end, "whole": whole, "tokens": len(one.tokens), "kind": kind_of(prompt)}
        rows[thinking].append(row)
    table: dict[str, Any] = {"prompts": len(prompts)}
    for thinking, found in rows.items():
        name, count = ("on" if thinking else "off"), len(found)
        good = Counter(row["kind"] for row in found if row["end"] == "good")
        table[name] = {
            "well_formed": round(good.total() / count, 4),
            "well_formed_or_cut": round(sum(row["whole"] for row in found) / count, 4),
            "others": dict(Counter(row["end"] for row in found if row["end"] != "good")),
            "by_kind": {k: f"{good[k]} of {n}" for k, n in sorted(Counter(row["kind"] for row in found).items())},
            "mean_tokens": round(sum(row["tokens"] for row in found) / count, 1),
        }
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found)
        (args.output / f"held_out_{name}.jsonl").write_text(lines, encoding="utf-8")
    return table


def report(args: argparse.Namespace, provenance: dict[str, Any]) -> None:
    """Write provenance.json and report.md, and print the summary."""
    (args.output / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n")
    held, training = provenance["held_out"], provenance["training"]
    lines = [
        "# A target that thinks",
        "",
        f"{provenance['data']['examples']:,} examples, {training['steps']:,} steps of training in {training['seconds']:.0f} s, "
        f"loss {training['first_loss']} to {training['last_loss']}; {provenance['seconds']:.0f} s in all, "
        f"{provenance['device']}.",
        "",
        f"Greedy answers to {held['prompts']} held-out prompts, at most {args.recipe['data']['max_measured_tokens']} tokens:",
        "",
        "| | well-formed | of the form, but cut | others | mean tokens | by kind |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("on", "off"):
        row = held[name]
        others, kinds = (", ".join(f"{k} {v}" for k, v in row[key].items()) for key in ("others", "by_kind"))
        cut = row["well_formed_or_cut"] - row["well_formed"]
        shares = f"{row['well_formed']:.1%} | {cut:.1%} | {others or 'none'}"
        lines.append(f"| thinking {name} | {shares} | {row['mean_tokens']} | {kinds} |")
    text = "\n".join(lines) + "\n"
    (args.output / "report.md").write_text(text, encoding="utf-8")
    print(text)
    shares = ", ".join(f"thinking {name} {held[name]['well_formed']:.1%}" for name in ("on", "off"))
    good = min(held[name]["well_formed"] for name in ("on", "off")) >= AIM
    print(f"well-formed: {shares} ({'reached' if good else 'missed'}: {AIM:.0%}); {args.output}, {provenance['seconds']:.0f} s")


def make(args: argparse.Namespace) -> None:
    data = args.recipe["data"]
    config = LoraConfig.from_json("thinking.toml", peft_config(args.recipe))
    prompts, held = choose(args, data)
    rng = random.Random(args.seed)
    held_exercises = [exercise(rng) for _ in range(len(held) // 5)]
    asked_later = {one.prompt for one in held_exercises}
    exercises = [one for one in (exercise(rng) for _ in range(data["arithmetic"])) if one.prompt not in asked_later]
    items = [*answered(args, prompts, data), *exercises]
    release()
    tokenizer = load_tokenizer(args.target_path)
    tokenizer.chat_template = args.recipe["template"].lstrip("\n")
    made = examples(tokenizer, items, data["second_turns"], args.seed)
    tokens = sum(len(p) + len(o) for p, o in made)
    print(f"{len(items)} items, {len(made)} examples, {tokens} tokens, after {args.spent():.0f} s", flush=True)
    figures = train(args, made, config)
    release()
    quality = measure(args, [*held[: len(held) - len(held_exercises)], *(one.prompt for one in held_exercises)], data)
    provenance = {
        "what": "LoRA on the built-in target (SmolLM2-135M-Instruct, Apache-2.0): recipes/thinking.py",
        "data": {
            "prompts": [path.name for path in args.prompts] or "self-made",
            "answered_by_the_target": len(items) - len(exercises),
            "exercises": len(exercises),
            "examples": len(made),
        },
        "training": figures,
        "held_out": quality,
        "seconds": round(args.spent(), 1),
        "seed": args.seed,
        "recipe": {key: args.recipe[key] for key in ("adapter", "data", "train")},
        "device": torch.cuda.get_device_name() if torch.device(args.device).type == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    report(args, provenance)


def merge(args: argparse.Namespace) -> None:
    """Write the merged target with its tokenizer and template as a directory in transformers' layout."""
    model = load_target(args.target_path, lora=args.output).model
    with quiet():
        model.save_pretrained(args.merged)
        load_tokenizer(args.target_path, lora=args.output).save_pretrained(args.merged)
    print(f"{args.merged} holds the target with the adapter of {args.output} merged")


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory of the adapter")
    parser.add_argument("--merged", type=Path, help="only merge the adapter in --output into the target and write it here")
    parser.add_argument("--target", help="directory of the built-in target; without it its GGUF file")
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="JSONL files, or directories of them")
    parser.add_argument("--limit", type=int, help="prompts to answer, instead of the recipe's")
    parser.add_argument("--held-out", type=int, default=400 if gpu else 100, help="prompts to measure on")
    parser.add_argument("--seconds", type=float, default=140.0 if gpu else 3600.0, help="time for all of it")
    parser.add_argument("--max-num-seqs", type=int, help="answers made at once")
    parser.add_argument("--batch-tokens", type=int, default=16384 if gpu else 4096, help="of a step of training")
    parser.add_argument("--generator", choices=["engine", "rollout"], default="rollout" if gpu else "engine")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--recipe", type=Path, default=Path(__file__).with_suffix(".toml"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.begun = time.monotonic()
    args.spent = lambda: time.monotonic() - args.begun
    args.recipe = tomllib.loads(args.recipe.read_text(encoding="utf-8"))
    args.recipe["data"]["prompts"] = args.limit or args.recipe["data"]["prompts"]
    try:
        args.prompts = files_of(args.prompts)
        args.target_path = args.target or builtin.target_path()
        args.output.mkdir(parents=True, exist_ok=True)
        merge(args) if args.merged else make(args)
    except FlashdraftError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
