"""`flashdraft doctor`: why a draft's guesses are not accepted."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flashdraft import builtin
from flashdraft.belonging import of_another_target
from flashdraft.checkpoint import check_pair
from flashdraft.doctor.arms import TARGET, TOKENIZER, Arm, Ids, arms, asking, usable
from flashdraft.doctor.files import Files, empty_products, notes, suspicious_norms
from flashdraft.doctor.measuring import Answer, Bench, Measure, answer, unchanged
from flashdraft.doctor.mending import mend
from flashdraft.doctor.report import Finding, Report, show
from flashdraft.doctor.search import Forms, Gain, search
from flashdraft.doctor.variations import HEAD, NORM, Variation, apply, candidates, overflow
from flashdraft.engine.engine import Engine, EngineConfig
from flashdraft.errors import ConfigError, FlashdraftError, counted
from flashdraft.llm import LLM, choose_device
from flashdraft.prompts import read_prompts, repetition
from flashdraft.quantize.proposing import computing
from flashdraft.targets import load_target, load_tokenizer
from flashdraft.targets.target import Target
from flashdraft.terminal import round_robin
from flashdraft.train.commands_synthesize import Where
from flashdraft.train.display import duration, err
from flashdraft.train.files import write_whole
from flashdraft.train.identity import target_hash, tokenizer_hash

QUICK = 4  # every so manieth anchor is looked at, to choose whose verify steps to follow
LOW = 1.5  # an acceptance length that is worth little, whatever the target
SHARE = 0.75  # of the acceptance length after training, below which another target or tokenizer is to blame
ARM_GAIN = 0.15  # of the acceptance length, between different answers
LOOP = 0.3  # an answer with more repetition is easy to guess
LEAST_PLAIN = 6  # answers that do not loop, to compare those alone


@dataclass(frozen=True)
class DoctorOptions:
    """The command line of `flashdraft doctor`."""

    draft: str
    where: Where
    prompts: Path | None = None
    limit: int = 24
    max_tokens: int = 64
    thinking: bool | None = None
    json: Path | None = None

    def check(self) -> None:
        if self.limit < 2 or self.max_tokens < 2:
            raise ConfigError("--limit and --max-tokens are at least 2: fewer answers or tokens tell nothing")
        if self.json is not None and (self.json.is_dir() or not self.json.absolute().parent.is_dir()):
            raise ConfigError(f"--json {self.json} cannot be written: give a file in a directory that is there")


def run_doctor(options: DoctorOptions) -> None:
    """Exits with code 1 if anything was found. Raises FlashdraftError for what keeps it from being measured."""
    begun = time.monotonic()
    report = Doctor(options)()
    report.facts["seconds"] = round(time.monotonic() - begun, 1)
    show(report)
    if options.json is not None:
        try:
            write_whole(options.json, json.dumps(report.to_json(), indent=1, ensure_ascii=False) + "\n")
        except OSError as error:
            raise ConfigError(f"--json {options.json} cannot be written ({error.strerror or error}): give another") from error
    err.print(f"done in {duration(time.monotonic() - begun)}", style="dim")
    if report.findings:
        sys.exit(1)


class Doctor:
    """One pair, loaded, and what was measured of it."""

    def __init__(self, options: DoctorOptions) -> None:
        options.check()
        self.options, where = options, options.where
        self.prompts = round_robin(read_prompts(options.prompts or builtin.PROMPTS), options.limit)
        self.files = Files.of(options.draft, where.draft_revision)
        draft = self.files.load()
        with err.status("loading the pair"):
            self.target = self._load(where)
            self.tokenizer = load_tokenizer(where.source, revision=where.revision, lora=where.lora)
        t = self.target
        check_pair(draft.config, hidden_size=t.hidden_size, vocab_size=t.vocab_size, num_layers=t.num_layers)
        self.draft = computing(draft.to(t.device), t.dtype)
        self.variations: list[Variation] = []
        self.known: dict[tuple[frozenset[Variation], bool], Measure] = {}

    def __call__(self) -> Report:
        ids = asking(self.tokenizer, self.options.thinking)
        answers, self.bench = self._answers(self.target, ids)
        base = self._ask((), False)
        if base.broken:
            self.variations.append(overflow(self.draft, base.broken))
        self._say_plan()
        config = self.draft.config
        stamped = self.files.is_stamped_otherwise(config)
        start = self.files.as_stamped(config, self.variations) if stamped else ()
        forms = search(self._ask, self.variations, self._is_low, start)
        report = Report(self._facts(answers), base, config.num_proposals)
        report.tried = [(v.cause, v.says, self._ask((v,), True).mean) for v in self.variations]
        forms = self._arms(report, answers, forms)
        report.findings[:0] = [self._finding(forms, one) for one in forms]
        report.mended = self._ask(forms, False) if forms else None
        self._by_files(report, stamped and not start, self._ask(forms, False).mean)
        return report

    def _load(self, where: Where) -> Target:
        device = choose_device(where.device)
        return load_target(where.source, dtype=where.dtype, device=device, revision=where.revision, lora=where.lora)

    def _answers(self, target: Target, ids: Ids) -> tuple[list[Answer], Bench]:
        """Greedy answers to the prompts, and the features on them."""
        asked = [ids(prompt) for prompt in self.prompts]
        if not all(usable(one, target.vocab_size) for one in asked):
            raise ConfigError("the tokenizer makes ids that are none of the target's tokens: give the target's own tokenizer")
        room = max(map(len, asked)) + self.options.max_tokens
        # Rows are not padded: a step of one row a sequence is several times as fast, and a near-tie may fall as it likes.
        config = EngineConfig(max_model_len=room, max_num_seqs=len(asked), async_scheduling=False, row_multiple=1)
        what = f"{counted(len(asked), 'answer')} of up to {self.options.max_tokens} tokens"

        def say(seconds: float) -> None:
            err.print(f"{what}: about {duration(seconds)} more", style="dim", markup=False)

        with err.status(what):
            with unchanged(target):
                llm = LLM.from_parts(self.tokenizer, Engine(target, None, config))
                answers = answer(llm, asked, self.options.max_tokens, say)
            if target is self.target and not self.variations:
                longest = max(len(a.prompt) + len(a.tokens) for a in answers)
                self.variations = candidates(self.draft, target, self.files.windows, longest)
            wanted = {i for v in self.variations for name, ids in v.config if name == "target_layer_ids" for i in ids}  # type: ignore[attr-defined]
            bench = Bench(target, answers, [*self.draft.config.target_layer_ids, *wanted])
        if all(len(a.tokens) < 2 for a in answers):
            raise ConfigError("the target's answers are of one token each, which tell nothing of a draft: give other --prompts")
        return answers, bench

    def _ask(self, forms: Forms, quick: bool) -> Measure:
        key = (frozenset(forms), quick)
        if key not in self.known:
            self.known[key] = self._measure(self.bench, forms, QUICK if quick else 1)
        return self.known[key]

    def _measure(self, bench: Bench, forms: Forms, every: int = 1) -> Measure:
        return bench.measure(apply(self.draft, forms, bench.target), every)

    def _say_plan(self) -> None:
        start = time.monotonic()
        self._ask((), True)
        seconds = (time.monotonic() - start) * (len(self.variations) + 2 * QUICK)
        err.print(f"{len(self.variations)} variations to measure: about {duration(seconds)}", style="dim")

    def _is_low(self, mean: float) -> bool:
        trained = self.files.trained_length
        return mean < LOW or (trained is not None and mean < trained / 2)

    def _facts(self, answers: Sequence[Answer]) -> dict[str, Any]:
        o = self.options
        return {
            "target": o.where.made_by,
            "draft": o.draft,
            "prompts": str(o.prompts or "built-in"),
            "answer_tokens": sum(len(a.tokens) for a in answers),
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "device": str(self.target.device),
            "torch": torch.__version__,
        }

    def _finding(self, forms: Forms, one: Variation) -> Finding:
        rest = tuple(v for v in forms if v is not one)
        gain = Gain.of(self._ask(rest, False), self._ask(forms, False))
        return Finding(one.cause, one.says, mend(self.files, self.draft.config, forms, one), gain)

    def _arms(self, report: Report, answers: Sequence[Answer], forms: Forms) -> Forms:
        """Add what asking otherwise, or another target, shows of the draft as it is now; what is right with it then.

        From what raises acceptance on, the answers are those.
        """
        weights = target_hash(self.target)
        for arm in arms(self.files, self.tokenizer, self.options.where, self.options.thinking, weights):
            now, before = self._ask(forms, False), (self.bench, self.known)
            try:
                theirs, self.bench = self._arm(arm)
            except FlashdraftError as error:
                report.notes.append(f"{arm.cause}: not measured ({error})")
                continue
            self.known = {}
            better = search(self._ask, self.variations, self._is_low, forms) if self._is_low(now.mean) else forms
            found = self._ask(better, False)
            pairs = zip(answers, theirs, strict=True)
            plain = np.array([max(repetition(a.tokens), repetition(b.tokens)) <= LOOP for a, b in pairs])
            plain |= plain.sum() < LEAST_PLAIN
            gain = Gain.between(now, found, plain, ARM_GAIN)
            report.tried.append((arm.cause, arm.says, found.mean))
            if gain.sure:
                report.findings.append(Finding(arm.cause, arm.says, [arm.mend], gain))
                forms, answers = better, theirs
            else:
                self.bench, self.known = before
        return forms

    def _arm(self, arm: Arm) -> tuple[list[Answer], Bench]:
        target = self.target
        if arm.where is not None:
            target = self._load(arm.where)
            c = self.draft.config
            check_pair(c, hidden_size=target.hidden_size, vocab_size=target.vocab_size, num_layers=target.num_layers)
        return self._answers(target, arm.ids)

    def _by_files(self, report: Report, misfit: bool, mean: float) -> None:
        """Add what the files alone say. misfit: the weights were saved with a configuration that no variation explains."""
        files, config, folder = self.files, self.draft.config, self.files.folder
        found, restore = report.findings, f"copy the draft as it was trained to {folder} again"
        if files.head_flag is not None:
            has = "hold" if not files.head_flag else "lack"
            says = f"has_own_lm_head is {str(files.head_flag).lower()}, and the weights {has} lm_head.weight"
            found.append(
                Finding(HEAD, says, [f"in {folder / 'config.json'} set has_own_lm_head to {str(not files.head_flag).lower()}"])
            )
        if misfit:
            found.append(Finding("config.json", "it is not the one that the weights were saved with", [restore]))
        if ones := suspicious_norms(self.draft):
            found.append(
                Finding(NORM, f"{', '.join(ones)}: all weights are exactly 1, a norm that was never loaded", [restore])
            )
        if empty := empty_products(self.draft):
            found.append(Finding("weights", f"{', '.join(empty)}: all weights are 0", [restore]))
        report.notes += notes(files, config, self.target.num_layers, self.target.max_position_embeddings)
        if (window := min((w for w in config.windows if w), default=0)) >= self.bench.longest:
            report.notes.append(f"the window of {window:,} is longer than these answers, so that it was not tested")
        named = {finding.cause for finding in found}
        trained = files.trained_length
        short = mean < LOW or (trained is not None and mean < SHARE * trained)
        for cause, says, remedy in self._others():
            if short and cause not in named:
                found.append(Finding(cause, says, [remedy]))
            elif cause not in named:
                report.notes.append(f"{says}; acceptance is as after training")
        if not found and self._is_low(mean):
            says = "little is accepted, and nothing that was tried accepts more: the draft does not know this target's answers"
            remedy = self._train_on
            found.append(Finding("training", says, [remedy]))

    @property
    def _train_on(self) -> str:
        name, folder = self.options.where.name, self.files.folder
        return f"train on: `flashdraft train {name} --init {folder} --data ANSWERS --output DIR`"

    def _others(self) -> list[tuple[str, str, str]]:
        """(cause, sentence, remedy) where training.json names another tokenizer or other weights."""
        files, where = self.files, self.options.where
        found = []
        if files.stated("tokenizer_hash") not in (None, tokenizer_hash(self.tokenizer)):
            says = "the tokenizer or its chat template is not the one that the draft was trained with (training.json)"
            found.append((TOKENIZER, says, "restore the tokenizer's files and chat template beside the target, or train again"))
        adapter = of_another_target(files.folder, None, where.lora)
        if files.stated("target_hash") not in (None, target_hash(self.target)) or adapter is not None:
            says = adapter or f"the target's weights are not those of {files.stated('target')}, which the draft was trained for"
            remedy = f"serve that target, or {self._train_on}"
            found.append((TARGET, says, remedy))
        return found
