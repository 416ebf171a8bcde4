"""`flashdraft quantize`: from a draft and prompts to NVFP4 revisions of it, with what they lose."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from flashdraft import builtin
from flashdraft.checkpoint import check_pair, load_draft, locate, quantization, read_config, weight_files
from flashdraft.config_json import read_json
from flashdraft.draft import DFlashDraft
from flashdraft.errors import ConfigError, counted
from flashdraft.llm import choose_device
from flashdraft.quant.calibrate import Statistics, calibrate
from flashdraft.quant.quantize import (
    KEPT_OUT_OF_W4A4,
    LinearReport,
    Settings,
    check_quantizable,
    input_scales,
    quantize_linears,
)
from flashdraft.quantize.measure import Arm, arm
from flashdraft.quantize.proposing import (
    Guesses,
    LastFeatures,
    Rows,
    acceptance_of,
    calibration_run,
    computing,
    with_own_head,
    with_quantized,
    without_head,
)
from flashdraft.quantize.report import show_report, write_report
from flashdraft.quantize.writing import W4A4, WORK, put_in_place, refuse_others, save_forms, stage_of
from flashdraft.targets import load_target, load_tokenizer
from flashdraft.targets.target import Target
from flashdraft.train.commands_synthesize import Prompts, Where, ending_on_terminate, open_source, read_corpus
from flashdraft.train.data import Records, load_records, pack_rows
from flashdraft.train.display import PLAIN_SECONDS, duration, err
from flashdraft.train.files import alone, saying_what_is_wrong
from flashdraft.train.prepare import compare_target, compare_tokenizer, refuse_untrainable, trained_prompts
from flashdraft.train.synthesis_report import displaying
from flashdraft.train.synthesize import SynthesisConfig, synthesize

ANCHORS = 32  # of a row measured at once: chunks that lie in the prompt are skipped


@dataclass(frozen=True)
class QuantizeOptions:
    """The command line of `flashdraft quantize`."""

    draft: str
    where: Where
    prompts: Prompts
    output: Path
    own_head: bool = False
    w4a4: bool = False
    settings: Settings = Settings()  # noqa: RUF009 - frozen
    ignore: Sequence[str] = ()
    heldout: int = 512
    max_tokens: int = 128

    @property
    def directory(self) -> Path | None:
        """Of answers that are there already; None where prompts are to be answered."""
        return self.prompts.files[0] if self.prompts.files[0].is_dir() else None


@dataclass
class Result:
    """What one run found."""

    arms: list[Arm]
    layers: dict[str, list[LinearReport]]  # by revision
    bytes: dict[str, int]  # of weight files, by revision
    facts: dict[str, Any]


@ending_on_terminate()
def run_quantize(options: QuantizeOptions) -> None:
    """Raises FlashdraftError for what the user can mend."""
    folder, draft = _check(options)
    with alone(options.output, "quantizing into"):
        refuse_others(options.output, options.w4a4)  # it may have been made since
        _quantize(options, folder, draft)


def _quantize(options: QuantizeOptions, folder: Path, draft: DFlashDraft) -> None:
    begun, notes = time.monotonic(), list[str]()
    records, heldout = _answers(options, folder, notes)
    device = choose_device(options.where.device)
    with err.status("loading the pair"):
        target = load_target(
            options.where.source,
            dtype=options.where.dtype,
            device=device,
            revision=options.where.revision,
            lora=options.where.lora,
        )
        refuse_untrainable(target, options.where.name)
        sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "num_layers": target.num_layers}
        check_pair(draft.config, **sizes)
        if options.directory:
            largest = max(int(part.tokens.max(initial=0)) for part in (records, heldout))
            compare_target(options.directory, largest, target, notes)
    draft = draft.to(device)
    original = with_own_head(draft, target) if options.own_head else draft
    check_quantizable(original, options.ignore)
    rows = Rows.of(records, device, draft.config.block_size)
    with _Bars() as bars:
        forms, layers = _quantized_forms(options, target, original, records, rows, bars)
        arms = _measure(target, draft, forms, heldout, bars) if len(heldout) else []
    sizes_on_disk = {"before": sum(file.stat().st_size for file in weight_files(folder))}
    sizes_on_disk |= save_forms(forms, folder, options.output, options.where.name)
    facts = {
        "draft": options.draft,
        "target": options.where.made_by,
        "method": options.settings.method,
        "damping": options.settings.damping,
        "calibration": f"{len(records):,} answers, {len(records.tokens):,} tokens",
        "held out": f"{len(heldout):,} answers, {heldout.answer_tokens:,} answer tokens",
        "device": str(device),
        "seconds": round(time.monotonic() - begun, 1),
        "notes": notes,
    }
    result = Result(arms, layers, sizes_on_disk, facts)
    with saying_what_is_wrong(options.output):
        write_report(result, stage_of(options.output))
    put_in_place(options.output)
    show_report(result, options.output)
    err.print(f"done in {duration(time.monotonic() - begun)}", style="dim")


def _check(options: QuantizeOptions) -> tuple[Path, DFlashDraft]:
    """What can be known before the target is loaded and answers; the draft, and its directory."""
    options.where.check()
    directories = [path for path in options.prompts.files if path.is_dir()]
    if directories and len(options.prompts.files) > 1:
        raise ConfigError(
            f"--calibration {directories[0]} is a directory of answers, which goes alone: give it or prompt files"
        )
    if not directories:
        options.prompts.check(options.where.target or "builtin")
    refuse_others(options.output, options.w4a4)
    draft_path = builtin.draft_path() if options.draft == builtin.NAME else options.draft
    folder = locate(draft_path, options.where.draft_revision)
    if (folder / "training.json").exists():
        read_json(folder / "training.json")  # it goes into the card, at the very end
    config = read_config(folder)
    if named := quantization(read_json(folder / "config.json")):
        raise ConfigError(f"{options.draft} is quantized already ({named}): give the draft that it was made from")
    if options.own_head and config.has_own_lm_head:
        raise ConfigError(f"{options.draft} has an output head of its own, which is quantized anyway: leave out --own-head")
    draft = load_draft(folder).requires_grad_(False)
    with torch.device("meta"):
        shapes = DFlashDraft(config.with_(has_own_lm_head=config.has_own_lm_head or options.own_head))
    check_quantizable(shapes, {*options.ignore, *(KEPT_OUT_OF_W4A4 if options.w4a4 else ())})
    return folder, draft


def _answers(options: QuantizeOptions, folder: Path, notes: list[str]) -> tuple[Records, Records]:
    """The target's answers to calibrate with, and those of other prompts, new to the draft too, to measure on."""
    if directory := options.directory:
        where = options.where
        compare_tokenizer(directory, load_tokenizer(where.source, revision=where.revision, lora=where.lora), notes)
    else:
        directory = options.output / WORK
        config = SynthesisConfig(temperatures=(0.0,), max_tokens=options.max_tokens)
        corpus = read_corpus(options.prompts, directory)
        with err.status("loading the target"):
            source = open_source(replace(options.where, draft=None), config)
        err.print(f"{counted(len(corpus), 'prompt')}, answered {source.describe()}", markup=False)
        with displaying(directory, None) as display:
            made_by, revision = options.where.made_by, options.where.revision
            synthesize(source, corpus, directory, config, target=made_by, revision=revision, report=display)
        del source  # with its target, whose layers the engine has fused
        gc.collect()
    records = load_records(directory)
    config_of_draft = read_config(folder)
    kept = records.without(config_of_draft.mask_token_id)
    kept = kept.select(kept.lengths >= kept.prompt_lengths + 2)
    seen = trained_prompts(str(folder), notes)
    fresh = np.setdiff1d(kept.prompt_hashes, seen)
    least = min(options.heldout, len(fresh), len(np.unique(kept.prompt_hashes)) // 2)
    if least < options.heldout:
        prompts = len(np.unique(kept.prompt_hashes))
        notes.append(f"{counted(least, 'prompt')} held out: of {prompts:,}, {len(fresh):,} are new to the draft")
    calibration, heldout = kept.split(0.0, least, seen)
    if not len(calibration):
        raise ConfigError("no answer is left to calibrate with: give more prompts")
    return calibration, heldout


def _quantized_forms(
    options: QuantizeOptions, target: Target, original: DFlashDraft, records: Records, rows: Rows, bars: _Bars
) -> tuple[dict[str, DFlashDraft], dict[str, list[LinearReport]]]:
    """The draft as it will be saved, by revision, and how each of its linears came out."""
    base = computing(original, torch.float32)
    guesses = Guesses(target, base)

    def statistics(label: str, rounded: dict[str, Tensor] | None) -> dict[str, Statistics]:
        bar = bars.add(label)
        return calibrate(base, calibration_run(guesses, records, rows, bar), rounded)

    forms: dict[str, DFlashDraft] = {}
    reports: dict[str, list[LinearReport]] = {}

    def make(revision: str, seen: dict[str, Statistics], scales: dict[str, Tensor] | None) -> None:
        ignore = {*options.ignore, *(KEPT_OUT_OF_W4A4 if scales else ())}
        bar, done = bars.add(f"quantizing {revision}"), list[str]()
        count = len(check_quantizable(base, ignore))

        def report(name: str) -> None:
            done.append(name)
            bar(len(done), count)

        layers, reports[revision] = quantize_linears(
            base, seen, options.settings, ignore=ignore, scales_of_inputs=scales, report=report
        )
        forms[revision] = with_quantized(original, layers)

    seen = statistics("calibrating", None)
    make("main", seen, None)
    if options.w4a4:
        scales = input_scales(seen)
        del seen
        make(W4A4, statistics("calibrating, inputs rounded", scales), scales)
    return forms, reports


def _measure(target: Target, draft: DFlashDraft, forms: dict[str, DFlashDraft], heldout: Records, bars: _Bars) -> list[Arm]:
    """Every form of the draft on the same answers, in the target's type as the engine; one with a head of its own also with
    the target's.
    """
    rows = replace(Rows.of(heldout, target.device, draft.config.block_size), anchors=ANCHORS)
    own = any(form.lm_head is not None for form in forms.values()) and draft.lm_head is None
    todo = {"unquantized": draft}
    for revision, form in forms.items():
        name = "W4A16" if revision == "main" else "W4A4"
        if own:
            todo[f"{name}, target's head"] = without_head(form)
        todo[f"{name}, own head" if own else name] = form
    cache, bar = LastFeatures(target), bars.add("acceptance")
    guesses = {name: Guesses(target, computing(form, target.dtype), cache=cache) for name, form in todo.items()}
    accepted: dict[str, list[list[int]]] = {name: [] for name in todo}
    packed = pack_rows(heldout.lengths, rows.length)
    for done, first in enumerate(range(0, len(packed), rows.at_once), 1):
        members = np.isin(np.arange(len(heldout)), [i for row in packed[first : first + rows.at_once] for i in row])
        part = heldout.select(members)
        for name, one in guesses.items():  # the target computes the features of a part once
            accepted[name] += acceptance_of(one, part, rows)
        bar(done, -(-len(packed) // rows.at_once))
    reference = accepted["unquantized"]
    return [arm(name, steps, None if steps is reference else reference) for name, steps in accepted.items()]


class _Bars:
    """Progress on standard error, a bar for each stage; plain lines where there is no terminal."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=err, disable=not err.is_terminal)
        self._said = time.monotonic()

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def add(self, label: str) -> Callable[[int, int], None]:
        task = self._progress.add_task(label, total=None)

        def update(done: int, count: int) -> None:
            self._progress.update(task, completed=done, total=count)
            if not err.is_terminal and (done == count or time.monotonic() - self._said > PLAIN_SECONDS):
                self._said = time.monotonic()
                err.print(f"{label}: {done:,} of {count:,}")

        return update
