"""Acceptance length of a draft by suite, category and language: real decoding, beside what training expects of the same text.

    python recipes/acceptance.py [--target TARGET --draft DRAFT] --suites FILES [--temperatures 0 0.7] [--limit 200]
        [--max-tokens 512] [--output FILE.json]

FILES are JSONL files of prompts, a suite each; conversations are answered turn by turn. All proposals of a step are verified,
whatever it costs. AL is the mean over answers of the tokens a verify step commits; answers that repeat themselves are left out
and counted. Without --draft the target's built-in draft is measured. Sampled answers are decoded with proposals that see the
target's noise, and once more with greedy proposals, which is what training expects figures of.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from flashdraft import LLM, builtin
from flashdraft.checkpoint import load_draft
from flashdraft.engine.memory import release_unused
from flashdraft.engine.request import Output, Request, SamplingParams
from flashdraft.prompts import Prompt, read_prompts, repetition
from flashdraft.targets import load_target
from flashdraft.train.conversations import Conversation, Renderer, draw
from flashdraft.train.corpus import language
from flashdraft.train.data import Batches, Records
from flashdraft.train.sources import stop_ids
from flashdraft.train.trainer import TrainConfig, Trainer
from flashdraft.train.validation import acceptance

MAX_REPETITION = 0.3  # of an answer's 8-grams
GREEDY_PROPOSALS = ", greedy proposals"
SEQ_LENGTH = 2048  # of the rows that training's own measure packs answers into


@dataclass(frozen=True)
class Answered:
    """One answer of a suite, and what the engine said of it."""

    suite: str
    category: str
    lang: str
    output: Output

    @property
    def loops(self) -> bool:
        return repetition(self.output.tokens) > MAX_REPETITION

    @property
    def counts(self) -> bool:
        """An answer of one token has no verify step."""
        return len(self.output.tokens) > 1 and not self.loops


def decode(llm: LLM, prompts: list[tuple[str, Prompt]], temperature: float, max_tokens: int) -> list[Answered]:
    """Answers to every turn of the prompts, each (suite, prompt)."""
    renderer, stop = Renderer(llm.tokenizer), stop_ids(llm.target, llm.tokenizer)
    engine, longest = llm.engine, llm.engine.max_model_len
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    waiting = [(suite, Conversation(prompt, 0, temperature, None)) for suite, prompt in prompts]
    answered: list[Answered] = []
    while waiting:
        asked: dict[str, tuple[str, Conversation]] = {}
        for suite, talk in waiting:
            (ids,) = renderer.encode([renderer.render(talk.messages, {})])
            if len(ids) + max_tokens <= longest:
                request = Request(ids, params, stop_ids=stop, seed=draw(talk.prompt.hash, talk.turn, "acceptance"))
                engine.add(request)
                asked[request.id] = suite, talk
        waiting = []
        for output in finished(llm, len(asked)):
            suite, talk = asked[output.request.id]
            answered.append(Answered(suite, talk.prompt.category, language(talk.prompt), output))
            if not talk.is_last and not answered[-1].loops:
                said = (*talk.answers, renderer.content(output.request.prompt, output.tokens))
                waiting.append((suite, Conversation(talk.prompt, 0, temperature, None, said)))
    return answered


def finished(llm: LLM, count: int) -> list[Output]:
    found: list[Output] = []
    while len(found) < count:
        found += [output for output in llm.engine.step() if output.finished]
    for output in found:
        if output.error is not None:
            raise output.error
    return found


def expected(args: argparse.Namespace, answers: list[Answered]) -> dict[int, float]:
    """What training's measure gives for the same texts: AL by id() of the answer. The pair is loaded anew, as training does."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = builtin.draft_path() if args.draft == builtin.NAME else args.draft
    target = load_target(args.target or builtin.target_path(), dtype=args.dtype, device=device)
    draft, records = load_draft(path), Records.from_lists([(a.output.request.prompt, a.output.tokens) for a in answers])
    sizes: dict[str, int] = dict(seq_length=SEQ_LENGTH, rows=8 if device == "cuda" else 1, anchors=512)
    batches = Batches(records, **sizes, block_size=draft.config.block_size, seed=0)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(target, draft, batches, TrainConfig(steps=1), Path(scratch))
        accepted = acceptance(trainer, records, **sizes)
    return {id(answer): 1 + float(np.mean(steps)) for answer, steps in zip(answers, accepted, strict=True)}


def real(answer: Answered) -> float:
    """Tokens a verify step committed, without the last one: it is cut off where the answer ends, in training's measure too."""
    return float(np.mean(answer.output.committed_per_step))


def table(answers: list[Answered], of_training: dict[int, float]) -> dict[str, Any]:
    """By suite, suite and category, and language: AL, what training expected, answers, and how many looped."""
    groups: dict[str, list[Answered]] = defaultdict(list)
    for answer in answers:
        names = ["all", answer.suite, f"{answer.suite}: {answer.category}", f"language {answer.lang}"]
        for name in names:
            groups[name].append(answer)
    made: dict[str, Any] = {}
    for name, members in sorted(groups.items()):
        counted = [a for a in members if a.counts]
        made[name] = {"answers": len(counted), "looping": sum(a.loops for a in members)}
        if counted:
            lengths = np.array([real(a) for a in counted])
            made[name] |= {
                "acceptance_length": round(float(lengths.mean()), 3),
                "standard_error": round(float(lengths.std() / len(lengths) ** 0.5), 3),
            }
            if id(counted[0]) in of_training:
                made[name]["expected_by_training"] = round(float(np.mean([of_training[id(a)] for a in counted])), 3)
    return made


def suites(args: argparse.Namespace) -> list[tuple[str, Prompt]]:
    """Up to `limit` prompts a suite, drawn evenly."""
    chosen = []
    for path in args.suites:
        prompts = read_prompts(path)
        random.Random(0).shuffle(prompts)
        chosen += [(path.stem, prompt) for prompt in prompts[: args.limit]]
    return chosen


def limits(args: argparse.Namespace) -> dict[str, Any]:
    """Of the engine: acceptance is of steps that verify all proposals."""
    return {"max_num_seqs": args.max_num_seqs, "adaptive_width": False}


def show(arm: str, rows: dict[str, Any]) -> None:
    print(f"\n{arm:32}     AL   ±     training expects  answers  looping")
    for name, row in rows.items():
        if "acceptance_length" in row and (":" not in name or row["answers"] >= 20):
            training = f"{row['expected_by_training']:14.2f}" if "expected_by_training" in row else " " * 14
            print(
                f"{name:32} {row['acceptance_length']:6.2f} {row['standard_error']:5.2f} {training} "
                f"{row['answers']:12,} {row['looping']:8,}"
            )


def decode_all(args: argparse.Namespace, prompts: list[tuple[str, Prompt]]) -> dict[str, list[Answered]]:
    """Answers by arm: every temperature, and the sampled ones again with greedy proposals."""
    sampled = [temperature for temperature in args.temperatures if temperature > 0]
    decoded: dict[str, list[Answered]] = {}
    for noise, temperatures, suffix in ((None, args.temperatures, ""), (0.0, sampled, GREEDY_PROPOSALS)):
        if not temperatures:
            continue
        options = {} if noise is None else {"proposal_noise": noise}
        llm = LLM(args.target, draft=args.draft, dtype=args.dtype, **limits(args), **options)
        for temperature in temperatures:
            begun, arm = time.perf_counter(), f"temperature {temperature:g}{suffix}"
            decoded[arm] = decode(llm, prompts, temperature, args.max_tokens)
            print(f"{arm}: {time.perf_counter() - begun:.0f} s", flush=True)
        del llm
        release_unused()
    return decoded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--draft", default=builtin.NAME)
    parser.add_argument("--suites", type=Path, nargs="+", default=[builtin.PROMPTS])
    parser.add_argument("--limit", type=int, default=200, help="prompts a suite")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", type=Path, help="all figures as JSON")
    args = parser.parse_args()
    prompts, found = suites(args), dict[str, Any]()
    decoded = decode_all(args, prompts)
    greedy = [arm for arm in decoded if arm.endswith(GREEDY_PROPOSALS) or arm == "temperature 0"]
    of_training = expected(args, [a for arm in greedy for a in decoded[arm] if a.counts])
    for arm, answers in decoded.items():
        found[arm] = table(answers, of_training)
        show(arm, found[arm])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {torch.get_num_threads()} threads"
    found["run"] = {
        "device": device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "max_tokens": args.max_tokens,
        "limit": args.limit,
        "suites": dict(Counter(suite for suite, _ in prompts)),
    }
    if args.output:
        args.output.write_text(json.dumps(found, indent=1) + "\n")
    print(", ".join(f"{name} {value}" for name, value in found["run"].items()))


if __name__ == "__main__":
    main()
