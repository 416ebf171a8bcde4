"""What a benchmark measures, out of the options of its command: loads, prompts, servers and arms."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashdraft import builtin
from flashdraft.client import Client
from flashdraft.errors import ConfigError
from flashdraft.eval.bench_prompts import Workload
from flashdraft.eval.bench_run import MOST, MOST_REQUESTS, Settings
from flashdraft.eval.run import Arm, Served
from flashdraft.eval.suites import load_suite
from flashdraft.train.hub import Loader

MOST_OF = {"--rounds": 1000, "--requests": MOST_REQUESTS, "--seconds": 86_400, "--request-rate": 10_000}
MOST_OF |= {"--prompt-tokens": 10_000_000}
LEAST_RATE = 0.001  # requests a second: of fewer a round takes days
CONCURRENCY, PROMPT_TOKENS, SUITE = (1, 2, 4, 8, 16), (1024,), "mini"
SWEPT_TOKENS, SWEPT_ON_CPU = (128, 1024, 4096), (128, 1024)  # those that the context holds
NO_BASELINE = (
    "{} cannot leave its draft out for a request: give --baseline with the address of the same target without one, or "
    "--no-compare to measure it as it is"
)
NO_DRAFT = (
    "{} serves its target without a draft, so that there is nothing to compare: start it with --draft, or give --no-compare"
)


@dataclass(frozen=True)
class Options:
    """What to measure. Either `endpoint` (with `baseline`: the same target without a draft), or a local pair.

    loads: requests at once, or, with settings.by_rate, a second; None: the usual ones, of a sweep as many as help. prompts: a
    suite or file. max_num_seqs: requests that a local pair runs at once. serve: options of `flashdraft serve`.
    """

    settings: Settings
    output: Path
    loads: tuple[float, ...] | None = None
    prompt_tokens: tuple[int, ...] | None = None
    prompts: str | None = None
    sweep: bool = False
    endpoint: str | None = None
    baseline: str | None = None
    model: str | None = None
    api_key: str | None = None
    target: str | None = None
    draft: str | None = None
    compare: bool = True
    max_num_seqs: int | None = None
    serve: tuple[str, ...] = ()
    device: str | None = None
    gpu: bool = False
    min_speedup: float | None = None

    @property
    def usual(self) -> tuple[float, ...]:
        """Loads, unless it is a sweep."""
        return tuple(sorted(set(self.loads or CONCURRENCY)))


def check(options: Options) -> None:
    """Raises ConfigError for numbers that cannot be, and options that contradict each other."""
    s = options.settings
    name = "--request-rate" if s.by_rate else "--concurrency"
    numbers = {name: options.loads or (), "--prompt-tokens": options.prompt_tokens or ()}
    numbers |= {"--max-tokens": (s.max_tokens,), "--rounds": (s.rounds,), "--max-num-seqs": (options.max_num_seqs or 1,)}
    numbers |= {"--requests": (1 if s.requests is None else s.requests,), "--seconds": (1 if s.seconds is None else s.seconds,)}
    for option, values in numbers.items():
        if wrong := [value for value in values if not 0 < value < float("inf")]:
            raise ConfigError(f"{option} must be more than 0, got {wrong[0]:g}")
        if (largest := max(values, default=0)) > MOST_OF.get(option, math.inf):
            raise ConfigError(f"{option} must be at most {MOST_OF[option]:,}, got {largest:g}")
    if s.by_rate and min(options.usual) < LEAST_RATE:
        raise ConfigError(f"--request-rate must be at least {LEAST_RATE:g}, got {min(options.usual):g}")
    if s.temperature < 0:
        raise ConfigError(f"--temperature must be 0 or more, got {s.temperature:g}")
    if s.requests is not None and s.seconds is not None:
        raise ConfigError("--requests and --seconds both say how long a round is: give one of them")
    if options.sweep and options.loads is not None:
        raise ConfigError("--sweep finds its concurrency itself: leave out --concurrency and --request-rate")
    if options.min_speedup is not None and not options.compare:
        raise ConfigError("--min-speedup needs the target without the draft: leave out --no-compare")
    most = 1 if options.sweep else max(options.usual)
    if not s.by_rate and most > MOST:
        raise ConfigError(f"--concurrency {most:g} is more than this program sends at once, {MOST}")
    if not s.by_rate and s.requests is not None and s.requests < most:
        raise ConfigError(f"--requests {s.requests} never has {most:g} at once: give at least as many as --concurrency")
    if not s.by_rate and options.max_num_seqs is not None and options.max_num_seqs < most:
        raise ConfigError(
            f"--concurrency {most:g} is more than the {options.max_num_seqs} requests that --max-num-seqs lets the server run "
            "at once: lower the one or raise the other"
        )


def workloads_of(options: Options, load: Loader | None) -> list[Workload]:
    neither = options.prompts is None and options.prompt_tokens is None
    name = SUITE if neither else options.prompts
    slow = options.endpoint is None and not options.gpu
    usual = PROMPT_TOKENS if not options.sweep else SWEPT_ON_CPU if slow else SWEPT_TOKENS
    sizes = options.prompt_tokens or (usual if neither else ())
    found = [] if name is None else [Workload(suite=load_suite(name, load=load))]
    return [*found, *(Workload(tokens=size) for size in sorted(set(sizes)))]


def fitting(options: Options, workloads: Sequence[Workload], servers: Iterable[Served]) -> list[Workload]:
    """Without lengths that nobody asked for and the context does not hold. Raises ConfigError for those that were."""
    known = [(context, served) for served in servers if (context := _card(served).get("max_model_len"))]
    if not known:
        return list(workloads)
    context, served = min(known, key=lambda pair: int(pair[0]))
    answer = options.settings.max_tokens
    long = [w for w in workloads if w.tokens is not None and w.tokens + answer > context]
    if not long and answer < context:
        return list(workloads)
    if options.prompt_tokens is None and options.sweep and answer < context:
        return [w for w in workloads if w not in long]
    most = f"--prompt-tokens {max(w.tokens or 0 for w in long)} and " if long else ""
    remedy = "lower them" if options.endpoint else "lower them or raise --max-model-len"
    raise ConfigError(
        f"{most}--max-tokens {answer} do not fit into the {context:,} tokens of context at {served.client.base}: {remedy}"
    )


def _card(served: Served) -> Mapping[str, Any]:
    """What /v1/models says of the model beside its name."""
    try:
        models = json.loads(served.client.text("/v1/models") or "{}")["data"]
        return next((card for card in models if card["id"] == served.model), {})
    except (ValueError, KeyError, TypeError):
        return {}


def endpoints(options: Options) -> dict[str, Served]:
    """By kind of arm."""
    assert options.endpoint is not None
    with_draft = Served.at(Client(options.endpoint, api_key=options.api_key, retries=1), options.model)
    if not options.compare:
        return {"draft": with_draft}
    if options.baseline is None:
        if not with_draft.switches:
            raise ConfigError(NO_BASELINE.format(with_draft.client.base))
        if _card(with_draft).get("num_speculative_tokens") == 0:
            raise ConfigError(NO_DRAFT.format(with_draft.client.base))
        return {"draft": with_draft, "none": with_draft}
    client = Client(options.baseline, api_key=options.api_key, retries=1)
    if client.base == with_draft.client.base:
        raise ConfigError("--endpoint and --baseline are the same server, so that there is nothing to compare")
    if with_draft.switches and _card(with_draft).get("num_speculative_tokens") == 0:
        raise ConfigError(NO_DRAFT.format(with_draft.client.base))
    return {"draft": with_draft, "none": Served.at(client, options.model if options.model in client.models() else None)}


def arms_of(options: Options, served: Mapping[str, Served] | None) -> list[Arm]:
    name = draft_of(options) if served is None else served["draft"].model
    return [Arm(name, "draft"), *([Arm(name, "none")] if options.compare else [])]


def draft_of(options: Options) -> str:
    draft = options.draft or (builtin.NAME if options.target in (None, builtin.NAME) else None)
    if draft is None:
        raise ConfigError(f"give the draft of {options.target} with --draft")
    return draft


def limit_of(options: Options) -> int | None:
    """How many requests a local pair runs at once."""
    if options.endpoint:
        return None
    usual = 64 if options.gpu else 16  # as `flashdraft serve`
    return options.max_num_seqs or (usual if options.sweep or options.settings.by_rate else int(max(options.usual)))


def serve_arguments(options: Options, workloads: Sequence[Workload], limit: int) -> tuple[str, ...]:
    """Of `flashdraft serve`. Raises ConfigError for prompts that the draft was trained on."""
    target = None if options.target in (None, builtin.NAME) else options.target
    draft = draft_of(options)
    for workload in workloads:
        if workload.suite is not None:
            builtin.refuse_trained_on(workload.suite.prompts, target, draft)
    return (*([target] if target else []), "--draft", draft, "--max-num-seqs", str(limit), *options.serve)
