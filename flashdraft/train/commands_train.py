"""`flashdraft train`: the plan, training, and the directory it leaves."""

from __future__ import annotations

import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flashdraft import builtin
from flashdraft.draft import count_parameters
from flashdraft.errors import ConfigError, counted
from flashdraft.targets.target import Target
from flashdraft.train import display
from flashdraft.train.curves import EXTRA, TensorBoard, draw_curves, require_tensorboard
from flashdraft.train.distributed import World, joined
from flashdraft.train.files import alone, saying_what_is_wrong
from flashdraft.train.metrics import read_metrics
from flashdraft.train.offline import CachedFeatures, CachePlan, build, release_layers
from flashdraft.train.plan import Measured, Plan, measure, memory_estimate
from flashdraft.train.prepare import Job, Options, prepare
from flashdraft.train.provenance import remember, write_provenance
from flashdraft.train.recipe import Recipe, read_recipe
from flashdraft.train.rollout import compile_small_modules
from flashdraft.train.trainer import Trainer
from flashdraft.train.validation import heldout_report

RUN = "run"  # of the output directory: state.pt, metrics.jsonl, run.json, TensorBoard's events


def run_train(options: Options) -> None:
    """Raises FlashdraftError for what the user can mend; exits with code 130 where it was interrupted, with a saved state."""
    recipe = (read_recipe(options.recipe) if options.recipe else Recipe()).with_budget(options.steps, options.hours)
    run = options.output / RUN
    if options.tensorboard:
        require_tensorboard()
    if not options.dry_run:
        _check_output(options, run)
    torch.set_float32_matmul_precision("high")
    with joined(options.device, options.target_parallel) as (world, device), _alone(options, world):
        loading = display.err.status(f"loading {options.target or 'the built-in target'}") if world.is_main else nullcontext()
        with loading:
            job = prepare(replace(options, device=device), recipe, world)
        if world.is_main:
            display.show_facts("plan", plan_facts(job, world))
        if options.dry_run:
            _dry_run(job, world)
            return
        trainer, finished = train_job(job, run, world)
    if world.is_main and finished:
        _say_what_next(options, trainer)
    if not finished:
        if world.is_main:
            display.err.print(f"stopped; the same command with --resume goes on (state in {run})", markup=False, soft_wrap=True)
        sys.exit(130)


def _check_output(options: Options, run: Path) -> None:
    output = options.output
    with saying_what_is_wrong(output):
        state, begun, model = (path.exists() for path in (run / "state.pt", run / "run.json", output / "config.json"))
        if output.exists() and not output.is_dir():
            raise ConfigError(f"{output} is a file: give a directory as --output")
    if state and not options.resume:
        raise ConfigError(f"{output} holds a run already: give --resume to go on with it, or another --output")
    if model and not state and not (options.resume and begun):
        raise ConfigError(f"{output} holds a model that is not of a run here: give another --output")


@contextmanager
def _alone(options: Options, world: World) -> Iterator[None]:
    """No other training in the same directory, which is rank 0's to see to; the lock ends with its process."""
    with ExitStack() as held:
        if not options.dry_run:
            world.main_first(lambda: held.enter_context(alone(options.output, "training in")))
        yield


def plan_facts(job: Job, world: World, budget: str | None = None) -> dict[str, str]:
    """The derived plan, for people; `budget` where they are to read something else than steps or hours."""
    c, p, t, config = job.draft.config, job.plan, job.target, job.plan.config
    train, memory = job.split.train, memory_estimate(job.target, job.draft, job.plan)
    packed = p.batches(train, c.block_size, world)
    epoch = packed.steps_per_epoch
    fill = len(train.tokens) / (len(packed.rows) * p.seq_length)
    mask = job.tokenizer.convert_ids_to_tokens(c.mask_token_id)
    windows = sorted({"none" if w is None else f"{w:,}" for w in c.windows})
    loss = config.loss
    weighting = {"dpace": f"D-PACE {loss.alpha:g}", "decay": f"decay {loss.gamma:g}", "none": "no weighting"}[loss.weighting]
    shared = f" of which {world.group.size} hold a target together" if world.group is not None else ""
    devices = f"{world.size} processes{shared}, " if world.size > 1 else ""
    if budget is None:
        steps = f"{counted(config.steps, 'step')} ({config.steps / epoch:.1f} epochs)" if config.steps else ""
        budget = steps or display.duration(config.max_seconds or 0.0)
    facts = {
        "target": f"hidden {t.hidden_size:,}, {t.num_layers} layers, vocabulary {t.vocab_size:,}, "
        f"{str(t.dtype).removeprefix('torch.')} on {devices}{t.device}",
        "data": f"{counted(len(job.everything), 'answer')} of "
        f"{counted(len(np.unique(job.everything.prompt_hashes)), 'prompt')}, "
        f"{job.everything.answer_tokens:,} answer tokens, {len(job.everything.tokens):,} with prompts",
        "held out": f"{counted(len(job.everything) - len(train), 'answer')}; measured: {len(job.split.often):,} each time, "
        f"{len(job.split.heldout):,} at the end",
        "draft": f"{count_parameters(job.draft)['all']:,} parameters: {counted(c.num_hidden_layers, 'layer')}, intermediate "
        f"{c.intermediate_size:,}, {c.num_attention_heads} heads and {c.num_key_value_heads} KV heads of {c.head_dim}; blocks "
        f"of {c.block_size}, window {', '.join(windows)}; features of layers {', '.join(map(str, c.target_layer_ids))}",
        "mask token": f"{mask} (id {c.mask_token_id}), in no answer"
        + (f"; from {job.options.init}" if job.options.init else ""),
        "rows": f"{len(packed.rows):,} of {p.seq_length:,} tokens, {fill:.0%} full, {counted(p.anchors, 'anchor')} each; "
        f"{p.rows} an update, {p.micro_rows} a forward pass",
        "training": f"{budget}, {config.optimizer}, learning rate {config.learning_rate:g}; beta {loss.beta:g}, {weighting}"
        + (f"; rounding for {config.quantization.upper()}" if config.quantization else ""),
        "memory": f"target {display.gigabytes(memory['target'])}, draft with gradients and optimizer "
        f"{display.gigabytes(memory['draft'])}, a pass about {display.gigabytes(memory['pass'])}",
    }
    if job.options.features == "offline":
        cache = CachePlan.of(t, c.target_layer_ids, job.everything, job.options.data)
        facts["features"] = (
            f"{cache.tokens:,} tokens x {cache.token_bytes / 1e3:.1f} kB = {display.gigabytes(cache.bytes)} in "
            + str(cache.directory)
        )
    return facts | {"note" + " " * i: note for i, note in enumerate(job.notes)}


@contextmanager
def ready(target: Target, plan: Plan) -> Iterator[None]:
    """Compiled where that pays; a GPU whose memory is full is said in one sentence."""
    if target.device.type == "cuda" and plan.config.compile and target.group is None:  # of a large one it gains little
        compile_small_modules(target)
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the GPU's memory is full: lower [train] micro_rows (now {plan.micro_rows}), anchors (now {plan.anchors}) or "
            f"seq_length (now {plan.seq_length}) of the recipe"
        ) from error


def _dry_run(job: Job, world: World) -> None:
    with ready(job.target, job.plan), tempfile.TemporaryDirectory() as scratch:
        batches = job.plan.batches(job.split.train, job.draft.config.block_size, world)
        trainer = Trainer(job.target, job.draft, batches, job.plan.config, Path(scratch), world=world)
        measured = measure(trainer)
    if world.is_main:
        display.show_facts("measured", measured_facts(job, measured, batches.steps_per_epoch))


def measured_facts(job: Job, measured: Measured, steps_per_epoch: int) -> dict[str, str]:
    config, seconds = job.plan.config, measured.seconds
    steps = config.steps or int((config.max_seconds or 0) / seconds)
    facts = {
        "a step": f"{seconds:.3g} s, {measured.tokens:,} context tokens: {measured.tokens / seconds:,.0f} tokens/s",
        "the run": f"{counted(steps, 'step')}, {steps / steps_per_epoch:.1f} epochs, {measured.tokens * steps:,} context "
        "tokens, about " + display.duration(steps * seconds),
    }
    if measured.peak_bytes is not None:
        facts["GPU memory"] = f"{display.gigabytes(measured.peak_bytes)} at most"
    return facts


def train_job(job: Job, run: Path, world: World) -> tuple[Trainer, bool]:
    """Train, from the state in `run` if there is one, and at the end report and write; False if stopped before."""

    def keep() -> None:
        with saying_what_is_wrong(run):
            remember(job, run)

    world.main_first(keep)
    with ready(job.target, job.plan):
        return _train(job, run, world)


def _train(job: Job, run: Path, world: World) -> tuple[Trainer, bool]:
    cache = _cached_features(job, world) if job.options.features == "offline" else None
    batches = job.plan.batches(job.split.train, job.draft.config.block_size, world, cache)
    final: dict[str, Any] = {}

    def evaluate(trainer: Trainer, at_end: bool) -> dict[str, Any]:
        report = heldout_report(trainer, job.split.heldout if at_end else job.split.often, at_end)
        final.update(report if at_end else {})
        return report

    trainer = Trainer(
        job.target,
        job.draft,
        batches,
        job.plan.config,
        run,
        draft_directory=job.options.output,
        world=world,
        evaluate=evaluate if len(job.split.heldout) else None,
    )
    trainer.resume()
    if trainer.step and world.is_main:
        display.err.print(f"resumed after step {trainer.step:,}", style="dim")
    board = TensorBoard(run, trainer.step) if job.options.tensorboard and world.is_main else None
    with display.Live(trainer.progress, job.plan.config.steps, quiet=not world.is_main) as live, _stopping(trainer, live):

        def report(row: dict[str, Any]) -> None:
            live.row(row)
            if board is not None:
                board.add(row)

        trainer.report = report
        with saying_what_is_wrong(run):
            finished = trainer.train()
    with saying_what_is_wrong(job.options.output):
        if board is not None:
            board.close()
        if finished and world.is_main:
            _finish(job, trainer, run, final)
    return trainer, finished


def _cached_features(job: Job, world: World) -> CachedFeatures:
    ids = job.draft.config.target_layer_ids
    job.target.capture(ids)
    plan = CachePlan.of(job.target, ids, job.everything, job.options.data)
    if world.is_main:
        plan.check_room()
        todo = f"{len(plan.missing)} of {len(plan.ranges)} shards to write" if plan.missing else "complete"
        display.err.print(
            f"features: {display.gigabytes(plan.bytes)} in {plan.directory}, {todo}", markup=False, soft_wrap=True
        )

    def report(done: int, count: int) -> None:
        if world.is_main:
            display.err.print(f"features: shard {done} of {count}", style="dim")

    plan.directory.mkdir(parents=True, exist_ok=True)
    build(
        plan,
        job.target,
        job.everything,
        seq_length=job.plan.seq_length,
        micro_rows=job.plan.micro_rows,
        world=world,
        report=report,
    )
    release_layers(job.target)
    return CachedFeatures(plan, job.everything)


@contextmanager
def _stopping(trainer: Trainer, live: display.Live) -> Iterator[None]:
    """SIGINT and SIGTERM end the run after the step at hand, with a saved state; a second one ends it at once."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: object) -> None:
        trainer.stop = True
        signal.signal(number, before[signal.Signals(number)])
        live.say("stopping after this step, with a saved state; once more ends at once")

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _finish(job: Job, trainer: Trainer, run: Path, heldout: dict[str, Any]) -> None:
    output = job.options.output
    write_provenance(job, trainer, heldout or None)
    if heldout:
        display.show_report(heldout)
    drawn = draw_curves(read_metrics(run / "metrics.jsonl"), output / "curves.png")
    if not drawn:
        display.err.print(f"no curves.png: it takes matplotlib ({EXTRA})", style="dim", markup=False)


def _say_what_next(options: Options, trainer: Trainer) -> None:
    target = None if options.target == builtin.NAME else options.target
    named = {"--target": target, "--lora": options.lora, "--draft": str(options.output)}
    given = [part for name, value in named.items() if value is not None for part in (name, value)]
    seconds = display.duration(trainer.elapsed)
    display.out.print(f"{counted(trainer.step, 'step')} in {seconds}; the draft is in {options.output}. Try it:", markup=False)
    display.out.print(f"  {shlex.join(('flashdraft', 'generate', '--compare', *given))}", markup=False, soft_wrap=True)
