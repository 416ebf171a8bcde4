"""`flashdraft eval`: servers, arms, a directory that can be resumed, results, exit code."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flashdraft import builtin
from flashdraft.client import Client, ServerError
from flashdraft.errors import ConfigError
from flashdraft.eval import display, report, results
from flashdraft.eval.local import files_hash, serving, weight_bytes
from flashdraft.eval.metrics import answered
from flashdraft.eval.provenance import draft_place, of_command, of_endpoint, of_pair, remember
from flashdraft.eval.records import Log
from flashdraft.eval.run import Arm, Runner, Served, Settings, conversations
from flashdraft.eval.suites import Suite, load_suite
from flashdraft.train.display import err
from flashdraft.train.files import locked, saying_what_is_wrong, write_whole
from flashdraft.train.hub import Loader

PASSED, BELOW, DIED = 0, 1, 3  # exit codes; 2 is an error that the user can mend
NO_BASELINE = (
    "this server cannot leave its draft out for a request: give --baseline with the address of the same target without one, "
    "or leave out --compare and --min-speedup"
)


@dataclass(frozen=True)
class Options:
    """What to measure. Either `endpoint` (with `baseline`: the same target without a draft), or a local pair.

    compare: with and without the draft; None: where that is possible. serve: options of `flashdraft serve`.
    """

    suite: str
    settings: Settings
    output: Path
    limit: int | None = None
    endpoint: str | None = None
    baseline: str | None = None
    model: str | None = None
    api_key: str | None = None
    target: str | None = None
    drafts: tuple[str, ...] = ()
    compare: bool | None = None
    serve: tuple[str, ...] = ()
    device: str | None = None
    min_al: float | None = None
    min_speedup: float | None = None


@dataclass
class Stage:
    """Arms that one server answers, or two."""

    arms: list[Arm]
    served: dict[str, Served] = field(default_factory=dict)  # by arm, of an endpoint
    arguments: tuple[str, ...] = ()  # of `flashdraft serve`, for a local pair


def run_eval(options: Options, *, load: Loader | None = None, before: Callable[[], None] = lambda: None) -> int:
    """Measure, write results.json, results.md and report.html, show them. Returns the exit code.

    before: called where there is something left to ask, ahead of the first server.
    """
    suite = load_suite(options.suite, load=load).limited(options.limit)
    stages = _of_endpoint(options) if options.endpoint else _of_pair(options, suite)
    with saying_what_is_wrong(options.output):
        options.output.mkdir(parents=True, exist_ok=True)
    lock = locked(options.output, "measuring into")
    try:
        found, failure = _run(options, suite, stages, before)
    finally:
        os.close(lock)
    display.show(found)
    display.out.print(f"{options.output}/report.html, results.md, results.json, answers.jsonl", style="dim", markup=False)
    if failure is not None:
        err.print(
            f"flashdraft: {failure}. {found['left']} answers are missing; what there is was kept: the same command goes on",
            style="red",
            markup=False,
        )
        return DIED
    if unknown := [gate for gate in found["gates"] if gate["passed"] is None]:
        raise ConfigError(display.gate_line(unknown[0]))
    return PASSED if all(gate["passed"] for gate in found["gates"]) else BELOW


def _run(
    options: Options, suite: Suite, stages: Sequence[Stage], before: Callable[[], None]
) -> tuple[dict[str, Any], ServerError | None]:
    """Results, which are written too, and what ended the run early."""
    begun = _remember(options, suite, stages)
    log = Log(options.output)
    try:
        failure = _measure(options, suite, stages, log, before)
    finally:
        log.close()
    found = _results(options, suite, stages, log, begun)
    with saying_what_is_wrong(options.output):
        # Names of a suite may hold halves of a surrogate pair, which no file in UTF-8 can.
        whole = json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        write_whole(options.output / "results.json", whole.encode(errors="replace"))
        write_whole(options.output / "results.md", display.markdown(found).encode(errors="replace"))
        if not report.write(found, options.output):
            err.print(report.NO_PLOTS, style="dim", markup=False)
    return found, failure


def _of_endpoint(options: Options) -> list[Stage]:
    assert options.endpoint is not None
    served = Served.at(Client(options.endpoint, api_key=options.api_key, retries=1), options.model)
    arm = Arm(served.model, "draft")
    stage = Stage([arm], {arm.name: served})
    wanted = options.compare or options.min_speedup is not None
    if options.baseline is None and not served.switches and wanted:
        raise ConfigError(NO_BASELINE)
    if options.compare is not False and (options.baseline or served.switches):
        plain = Arm(served.model, "none")
        other = served
        if options.baseline:
            client = Client(options.baseline, api_key=options.api_key, retries=1)
            other = Served.at(client, options.model if options.model in client.models() else None)
        stage.arms.append(plain)
        stage.served[plain.name] = other
    return [stage]


def _of_pair(options: Options, suite: Suite) -> list[Stage]:
    """Two stages a draft: acceptance is of steps that verify all proposals, speed of steps as they are served."""
    target = None if options.target in (None, builtin.NAME) else options.target
    drafts = options.drafts or ((builtin.NAME,) if target is None else ())
    if not drafts:
        raise ConfigError(f"give the draft of {options.target} with --draft")
    if len(set(drafts)) < len(drafts):
        raise ConfigError("--draft names the same draft twice: give each once")
    stages = []
    compare = options.compare is not False
    for draft in drafts:
        builtin.refuse_trained_on(suite.prompts, target, draft)
        places = ("--max-num-seqs", str(options.settings.concurrency))
        arguments = (*([target] if target else []), "--draft", draft, *places, *options.serve)
        stages.append(Stage([Arm(draft, "pinned")], arguments=(*arguments, "--no-adaptive-width")))
        stages.append(Stage([Arm(draft, "draft"), *([Arm(draft, "none")] if compare else [])], arguments=arguments))
    return stages


def _measure(
    options: Options, suite: Suite, stages: Sequence[Stage], log: Log, before: Callable[[], None]
) -> ServerError | None:
    """Ask what is left to ask. Returns what ended it early, once there are answers."""
    talks = conversations(suite, options.settings.samples)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(str(suite))
        runner = Runner(log, talks, options.settings, lambda record: progress.advance(task))
        left = {id(stage): sum(map(runner.left, stage.arms)) for stage in stages}
        progress.update(task, total=sum(left.values()))
        if any(left.values()):
            before()
        else:
            err.print(f"all answers are in {options.output} already: give another --output to measure again", markup=False)
        for number, stage in enumerate(stages):
            if not left[id(stage)]:
                continue
            try:
                with _servers(options, stage, number) as served:
                    runner.run([(arm, served[arm.name]) for arm in stage.arms])
            except ServerError as error:
                if not answered(log.answers.values()):
                    raise
                return error
    refused = [record["refused"] for record in log.answers.values() if "refused" in record]
    if refused and not answered(log.answers.values()):
        raise ConfigError(f"every request was refused: {refused[0]}")
    return None


@contextlib.contextmanager
def _servers(options: Options, stage: Stage, number: int) -> Iterator[Mapping[str, Served]]:
    if stage.served:
        yield stage.served
        return
    with serving(stage.arguments, options.output / f"server-{number}.log") as client:
        served = Served.at(client, None)
        yield {arm.name: served for arm in stage.arms}


def _remember(options: Options, suite: Suite, stages: Sequence[Stage]) -> dict[str, Any]:
    """What answers were asked for, and when first. Raises ConfigError for a directory of other answers."""
    now: dict[str, Any] = {"suite": {"name": suite.name, "digest": suite.digest, "limit": options.limit}}
    now["settings"] = asdict(options.settings)
    now["arms"] = [arm.name for stage in stages for arm in stage.arms]
    hashes = {draft: files_hash(draft_place(draft)) for draft in options.drafts or (builtin.NAME,)}
    # A server that was started anew may be somewhere else: its address does not matter.
    now["pair"] = {} if options.endpoint else {"target": options.target, "drafts": hashes, "serve": list(options.serve)}
    return remember(options.output, now)


def _results(options: Options, suite: Suite, stages: Sequence[Stage], log: Log, begun: Mapping[str, Any]) -> dict[str, Any]:
    arms = [arm for stage in stages for arm in stage.arms]
    runner = Runner(log, conversations(suite, options.settings.samples), options.settings, lambda record: None)
    left = sum(map(runner.left, arms))
    drafts = results.gather(log, arms)
    return {
        "schema": results.SCHEMA,
        "complete": left == 0,
        "left": left,
        "suite": {
            "name": suite.name,
            "digest": suite.digest,
            "limit": options.limit,
            "prompts": len(suite.prompts),
            "turns": suite.turns,
            "categories": suite.categories,
        },
        "settings": asdict(options.settings),
        "provenance": _provenance(options, stages, begun),
        "drafts": drafts,
        "costs": results.costs(drafts),
        "gates": results.gates(drafts, options.min_al, options.min_speedup),
    }


def _provenance(options: Options, stages: Sequence[Stage], begun: Mapping[str, Any]) -> dict[str, Any]:
    served = next((s for stage in stages for s in stage.served.values()), None)
    found = of_command(begun)
    if served is not None:
        return found | of_endpoint(served, options.baseline)
    found |= of_pair(options.target, options.device, options.serve)
    hashes = begun["pair"]["drafts"]
    return found | {"draft_hashes": hashes, "draft_bytes": {draft: weight_bytes(draft_place(draft)) for draft in hashes}}
