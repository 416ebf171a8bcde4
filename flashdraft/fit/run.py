"""`flashdraft fit`: from prompts to a draft ready to serve, within a time budget, stage by stage; a killed one goes on."""

from __future__ import annotations

import gc
import hashlib
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flashdraft.errors import ConfigError, counted
from flashdraft.fit.answers import derived_sampling, make_answers
from flashdraft.fit.budget import (
    LEAST_STEPS,
    MOST_EPOCHS,
    AnswerSpeed,
    Budget,
    TrainingSpeed,
    answer_speed,
    check_enough,
    seconds_,
    training_speed,
)
from flashdraft.fit.ledger import BEGUN, Ledger
from flashdraft.fit.ledger import NAME as LEDGER
from flashdraft.fit.ready import PUBLISHED, is_published, publish
from flashdraft.fit.worth import measure_worth
from flashdraft.llm import choose_device
from flashdraft.targets.load import load_target
from flashdraft.train import commands_synthesize as synthesis
from flashdraft.train.commands_train import RUN, plan_facts, train_job
from flashdraft.train.corpus import Corpus
from flashdraft.train.display import duration, err, out, show_facts
from flashdraft.train.distributed import World
from flashdraft.train.files import saying_what_is_wrong
from flashdraft.train.identity import are_of_others
from flashdraft.train.plan import EVAL_STEPS
from flashdraft.train.prepare import Job, Options, prepare, refuse_untrainable
from flashdraft.train.recipe import Recipe, read_recipe
from flashdraft.train.synthesize import SynthesisConfig

LEAST_PROMPTS = 10  # fewer leave nothing to hold out


@dataclass(frozen=True)
class FitOptions:
    """The command line of `flashdraft fit`. `sampling`: fields of SynthesisConfig, None for the target's own."""

    output: Path
    hours: float
    prompts: synthesis.Prompts
    where: synthesis.Where
    sampling: dict[str, Any]
    recipe: Path | None = None
    init: str | None = None

    def check(self) -> None:
        """Raises ConfigError for what cannot work, before anything is read."""
        self.prompts.check(self.where.target)
        if not 0 < self.hours < 24 * 365:
            raise ConfigError(f"--hours must be a time above 0 and below a year, got {self.hours:g}")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError("fit runs in one process: for several GPUs give `flashdraft train` to torchrun")
        with saying_what_is_wrong(self.output):
            if (self.output / "work" / LEDGER).exists():
                return
            if (self.output / "config.json").exists():
                raise ConfigError(f"{self.output} holds a model already: give another --output")
            if others := [name for name in PUBLISHED if (self.output / name).exists()]:
                raise ConfigError(f"{self.output} holds {others[0]}, which would be written over: give another --output")

    def config(self) -> SynthesisConfig:
        """How answers are sampled, but for what follows from the time. Raises ConfigError for values that cannot work."""
        named = {name: value for name, value in self.sampling.items() if value is not None}
        return SynthesisConfig(**{**synthesis.served_sampling(self.where), **named})


def run_fit(options: FitOptions) -> None:
    """Raises FlashdraftError for what the user can mend; exits with code 130 or 143 where it was stopped: the same call goes
    on."""
    options.check()
    recipe, config = read_recipe(options.recipe) if options.recipe else Recipe(), options.config()
    if recipe.eval.share == 0:
        raise ConfigError(f"{options.recipe}: [eval] share 0 leaves nothing to measure on: leave it out, or give more")
    answers = options.output / "work" / "answers"
    with synthesis.ending_on_terminate():
        corpus = synthesis.read_corpus(options.prompts, answers)
        if len(corpus) < LEAST_PROMPTS:
            raise ConfigError(f"too few prompts, {len(corpus)}: a draft takes at least {LEAST_PROMPTS}, and thousands pay")
        settings = {
            "prompts": prompts_hash(corpus),
            "target": [options.where.made_by, options.where.revision],
            "sampling": options.sampling,
        }
        synthesis.refuse_templateless(options.where)
        ledger = Ledger(options.output / "work", settings)
        try:
            Fit(options, recipe, config, corpus, ledger)()
        except (KeyboardInterrupt, SystemExit):
            spent, whole = duration(ledger.spent), duration(3600 * options.hours)
            err.print(f"stopped after {spent} of {whole}: the same command goes on", soft_wrap=True)
            raise
        finally:
            ledger.close()


def prompts_hash(corpus: Corpus) -> str:
    """32 hexadecimal digits that name the prompts, in whatever order and files they come."""
    return hashlib.blake2b(np.sort(corpus.hashes[corpus.order]).tobytes(), digest_size=16).hexdigest()


def release() -> None:
    """Give a GPU's memory back between two stages, each of which takes most of it, and decode in full precision again."""
    torch.set_float32_matmul_precision("highest")
    gc.collect()
    if torch.cuda.is_available():
        torch.compiler.reset()
        torch.cuda.empty_cache()


class Fit:
    """One fit: each stage is passed over if the ledger says that it is over."""

    def __init__(self, options: FitOptions, recipe: Recipe, config: SynthesisConfig, corpus: Corpus, ledger: Ledger) -> None:
        self.options, self.recipe, self.config, self.corpus, self.ledger = options, recipe, config, corpus, ledger
        self.whole = 3600.0 * options.hours
        work = options.output / "work"
        self.answers, self.training = work / "answers", work / "training"

    def __call__(self) -> None:
        done = self.ledger.found
        if "published" not in done or not is_published(self.options.output):
            if self.ledger.seconds:
                spent, whole = duration(self.ledger.spent), duration(self.whole)
                out.print(
                    f"going on: {spent} of {whole} are spent; finished so far: {', '.join(self._finished()) or 'nothing'}"
                )
            self._refuse_spent()
            if "answers" not in done:
                self._make_answers()
                release()
            if "training" not in done:
                self._train()
                release()
            if "worth" not in done:
                self._measure()
            publish(self.options.output, self.options.where, self.corpus, self.ledger)
            self.ledger.finish("published", {})
        self._say_ready()

    def _finished(self) -> list[str]:
        return [name for name in ("answers", "training") if name in self.ledger.found]

    def _refuse_spent(self) -> None:
        begun = elapsed_before(self.training / RUN / "state.pt") > 0  # then what there is can be finished
        if "training" not in self.ledger.found and not begun and self.ledger.spent >= self.whole:
            raise ConfigError(
                f"{duration(self.ledger.spent)} are spent and --hours {self.options.hours:g} is no more: give the same "
                "command with more hours, and it goes on"
            )

    # Stage 1 and 2: how fast it is here, and answers.

    def _training_speed(self) -> TrainingSpeed:
        """As measured, once for a target and a recipe."""
        where = self.options.where
        what = {"recipe": self.recipe.to_json(), "init": self.options.init, "target": where.made_by, "dtype": where.dtype}
        found = self.ledger.found.get("training speed")
        if found and found["of"] == what:
            return TrainingSpeed(**found["seconds"])
        with self.ledger.stage("timing"), err.status("loading the target and timing a training step"):
            start = time.monotonic()
            device = choose_device(where.device)
            target = load_target(where.source, dtype=where.dtype, device=device, revision=where.revision, lora=where.lora)
            refuse_untrainable(target, where.name)
            torch.set_float32_matmul_precision("high")  # as training has it
            speed = training_speed(target, time.monotonic() - start, self.recipe, self.options.init)
        del target
        release()
        self.ledger.finish("training speed", {"of": what, "seconds": asdict(speed)})
        return speed

    def _make_answers(self) -> None:
        found, where = self.ledger.found, self.options.where
        out.print("1 of 4: how fast is it here (loading, a training step, a few answers)", style="bold")
        training = self._training_speed()
        with self.ledger.stage("timing"), err.status("loading the target and timing some answers"):
            source = synthesis.open_source(where, self.config)
            if "answer speed" not in found:
                self.ledger.finish("answer speed", asdict(answer_speed(source, self.corpus, self.config)))
        speed = AnswerSpeed(**found["answer speed"])
        if BEGUN not in found:
            try:
                check_enough(self.whole, self.ledger.spent, training, speed)
            except ConfigError:
                self.ledger.forget()
                raise
            self.ledger.finish(BEGUN, {"spent": self.ledger.spent})
        budget = Budget.of(self.whole, found[BEGUN]["spent"], training)
        seconds = max(0.0, budget.answers_end - self.ledger.spent)
        if "sampling" not in found:
            self.ledger.finish("sampling", derived_sampling(self.config, self.corpus, seconds, speed))
        config = replace(self.config, **found["sampling"])
        show_facts("speed", self._speed_facts(training, speed) | self._plan_facts(budget))
        out.print(f"2 of 4: answers, for {duration(seconds)}", style="bold")
        synthesis.say_plan(source, self.corpus, config, where)
        with self.ledger.stage("answers"):
            counts = make_answers(source, self.corpus, self.answers, config, where, seconds=seconds, speed=speed)
        self.ledger.finish("answers", {"counts": counts})

    def _speed_facts(self, training: TrainingSpeed, answers: AnswerSpeed) -> dict[str, str]:
        tokens = answers.at_once / answers.step
        length = self.recipe.train.seq_length
        rows = f"{counted(training.rows, 'row')}{f' of {length:,} tokens' if length else ''}"
        return {
            "loading": seconds_(training.load),
            "answers": f"{tokens:,.0f} tokens/s, {answers.at_once:,} at once",
            "training": f"{seconds_(training.row * training.rows)} a step of {rows}",
        }

    def _plan_facts(self, budget: Budget) -> dict[str, str]:
        spent = self.ledger.spent
        parts = (budget.answers_end - spent, budget.training_end - budget.answers_end, budget.whole - budget.training_end)
        answers, training, rest = (duration(max(0.0, part)) for part in parts)
        return {"plan": f"answers {answers}, training {training}, measuring {rest}; {duration(spent)} are spent"}

    # Stage 3: training.

    def _train(self) -> None:
        speed, where = self._training_speed(), self.options.where
        options = Options(
            data=self.answers,
            output=self.training,
            target=where.target,
            recipe=self.options.recipe,
            init=self.options.init,
            dtype=where.dtype,
            device=where.device,
            revision=where.revision,
            lora=where.lora,
        )
        budget = Budget.of(self.whole, self.ledger.found[BEGUN]["spent"], speed)
        with self.ledger.stage("training"):
            torch.set_float32_matmul_precision("high")
            with err.status("loading the target and the answers"):
                job = prepare(options, self.recipe.with_budget(None, self.options.hours), World())
                if are_of_others(self.answers, job.target_hash):
                    raise ConfigError(
                        f"{self.answers} holds answers of other weights than this target's (as another dtype has them): give "
                        "the target and --dtype that it was begun with, or another --output"
                    )
                if not len(job.split.heldout):
                    raise ConfigError("no prompt is left to measure on that is new to the draft: give more prompts")
                job, text = self._timed(job, speed, budget)
            out.print("3 of 4: training", style="bold")
            show_facts("plan", plan_facts(job, World(), text))
            trainer, finished = train_job(job, self.training / RUN, World())
        if not finished:
            sys.exit(130)
        prompts = np.unique(job.split.heldout.prompt_hashes).tolist()
        self.ledger.finish("training", {"steps": trainer.step, "seconds": trainer.elapsed, "heldout_prompts": prompts})

    def _timed(self, job: Job, speed: TrainingSpeed, budget: Budget) -> tuple[Job, str]:
        """The job with a schedule that ends in time: by the clock, as the steps of one machine do not all take as long."""
        plan, train = job.plan, job.split.train
        step, tokens = speed.row * plan.rows, plan.rows * plan.seq_length
        # A forward pass over all anchors of all rows; it takes a third of what training on them takes.
        rows = len(job.split.heldout.tokens) / plan.seq_length + 1
        measuring = rows * plan.seq_length / plan.anchors * speed.row / 3
        before = elapsed_before(self.training / RUN / "state.pt")
        left = budget.training_end - self.ledger.spent - measuring - (0 if before else speed.first)
        left = min(left, MOST_EPOCHS * max(len(train.tokens) / tokens, 1.0) * step - before)
        seconds = before + max(left, 0.0)
        if seconds < LEAST_STEPS / 4 * step:
            raise ConfigError(
                f"{duration(self.ledger.spent)} are spent, and too little of --hours {self.options.hours:g} is left to train: "
                "give the same command with more hours, and it goes on"
            )
        steps = max(int(seconds / step), 1)
        evaluations = min(plan.config.evaluations, steps // EVAL_STEPS)
        config = replace(plan.config, max_seconds=seconds, evaluations=evaluations)
        text = f"about {counted(steps, 'step')} ({steps * tokens / len(train.tokens):.1f} epochs) in {duration(seconds)}"
        return replace(job, plan=replace(plan, config=config)), text

    # Stage 4: what it is worth.

    def _measure(self) -> None:
        out.print("4 of 4: with and without the draft, on prompts that it has not seen", style="bold")
        found = self.ledger.found
        prompts = self.corpus.read(self.corpus.beginning_with(np.array(found["training"]["heldout_prompts"], np.uint64)))
        config = replace(self.config, **found["sampling"])
        with self.ledger.stage("measuring"):
            seconds = self.whole - self.ledger.spent
            worth = measure_worth(self.options.where, self.training, str(self.options.output), prompts, config, seconds)
        self.ledger.finish("worth", worth)

    def _say_ready(self) -> None:
        output, where = self.options.output, self.options.where
        named = "" if where.target is None else f" --target {where.target}"
        named += "" if where.lora is None else f" --lora {where.lora}"
        spent, whole = duration(self.ledger.spent), duration(self.whole)
        out.print(f"ready in {spent} of {whole}: {output} (README.md has the figures)", style="bold", markup=False)
        ratio = self.ledger.found["worth"]["all"]["speedup"]
        if ratio < 1:
            out.print(f"with it decoding is {ratio:.2f} times as fast, so it does not pay yet: more hours and prompts help")
        out.print(f"  flashdraft chat{named} --draft {output}", markup=False)
        out.print(f"{output / 'work'} (answers, state) is not needed to serve", style="dim", markup=False)


def elapsed_before(state: Path) -> float:
    """Seconds trained by the run that left this state; 0 where there is none, or none that can be read."""
    if not state.exists():
        return 0.0
    try:
        return float(torch.load(state, map_location="cpu", mmap=True, weights_only=True)["elapsed"])
    except Exception:  # whatever torch raises; the trainer says what is wrong with the file
        return 0.0
