"""`flashdraft synthesize`: from the options to a source of answers, a corpus of prompts and a run over them."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rich.markup import escape

from flashdraft import builtin
from flashdraft.client import Client
from flashdraft.engine.request import SamplingParams
from flashdraft.errors import ConfigError, counted
from flashdraft.prompts import read_prompts
from flashdraft.targets import load_tokenizer
from flashdraft.targets.load import adapter_hash, ask_hub
from flashdraft.train.conversations import Renderer
from flashdraft.train.corpus import Corpus, Exclusions
from flashdraft.train.endpoint import EndpointSource
from flashdraft.train.hub import fetch_prompts
from flashdraft.train.jobs import Source
from flashdraft.train.sources import Generator, Lengths, load_source
from flashdraft.train.synthesis_report import displaying, err, show_summary
from flashdraft.train.synthesize import SynthesisConfig, count_token, refuse_empty, synthesize

GENERATION_CONFIG = "generation_config.json"
DEFAULT_TEMPERATURE = 0.7  # of a target whose generation_config.json names none


@dataclass(frozen=True)
class Prompts:
    """Where prompts come from, and which are not to be answered."""

    files: Sequence[Path] = ()
    dataset: str | None = None
    splits: str = "train"
    dataset_revision: str | None = None
    exclude: Sequence[Path] = ()
    limit: int | None = None

    @property
    def split_names(self) -> list[str]:
        return [split.strip() for split in self.splits.split(",") if split.strip()]

    def check(self, target: str | None) -> None:
        """Raises ConfigError where there are none, and where the target was written behind the files and would be one."""
        if not self.files and not self.dataset:
            raise ConfigError("there are no prompts: give --prompts FILES or --dataset NAME")
        if self.dataset and not self.split_names:
            raise ConfigError("--split names no split of --dataset: give some, separated by commas")
        for path in (*self.files, *self.exclude):
            named = path.is_dir() or path.suffix == ".gguf" or (not path.exists() and path.suffix not in (".jsonl", ".json"))
            if target is None and named:
                raise ConfigError(
                    f"{path} is no prompt file: if it is the target, give it before --prompts and the other options that take "
                    f"several values, as in `{path} --prompts FILES`"
                )


@dataclass(frozen=True)
class Where:
    """What makes the answers: a pair in this process, or servers."""

    target: str | None = None
    draft: str | None = None
    generator: str = "auto"
    endpoints: Sequence[str] = ()
    model: str | None = None
    api_key_env: str | None = None
    concurrency: int | None = None  # 64
    revision: str | None = None
    draft_revision: str | None = None
    lora: str | None = None
    dtype: str = "auto"
    device: str | None = None
    max_num_seqs: int | None = None
    gpu_memory_utilization: float = 0.9

    @property
    def name(self) -> str:
        """The target, as the records name it: the same for the same target, from whichever directory it is asked for."""
        if self.target in (None, builtin.NAME):
            return builtin.NAME
        path = Path(str(self.target)).expanduser()
        return str(path.resolve()) if path.exists() else str(self.target)

    @property
    def source(self) -> str | Path:
        return builtin.target_path() if self.name == builtin.NAME else self.name

    @property
    def made_by(self) -> str:
        """What the answers are of: the target, and with an adapter the hash of its weights, wherever they lie."""
        return self.name if self.lora is None else f"{self.name} with adapter {adapter_hash(self.lora)}"

    @property
    def arguments(self) -> list[str]:
        """What a command that takes the target as its argument is given for the same one."""
        return [*([self.target] if self.target else []), *(["--lora", self.lora] if self.lora else [])]

    def check(self) -> None:
        """Raises ConfigError for options that contradict each other."""
        if self.generator not in ("auto", "engine", "rollout"):
            raise ConfigError(f"--generator is auto, engine or rollout, got {self.generator!r}")
        if not self.endpoints and (self.model or self.api_key_env or self.concurrency):
            raise ConfigError("--model, --api-key-env and --concurrency belong to --endpoint, which is not given")
        own = (self.draft, self.device, self.max_num_seqs, self.generator != "auto", self.dtype != "auto")
        if self.endpoints and any(own):
            raise ConfigError(
                "with --endpoint the server runs the target: leave out --draft, --device, --dtype, --max-num-seqs and "
                "--generator"
            )


def run_synthesis(
    where: Where, prompts: Prompts, options: dict[str, Any], directory: Path, mask_token: str | None, hours: float | None
) -> None:
    """The command. `options` are fields of SynthesisConfig, None for the target's own sampling."""
    where.check()
    prompts.check(where.target)
    if where.draft_revision is not None and where.draft is None:
        raise ConfigError("--draft-revision belongs to --draft, which is not given")
    if hours is not None and not 0 < hours < math.inf:
        raise ConfigError(f"--hours must be a time above 0, got {hours:g}")
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"--output {directory} is a file: give a directory, which is made where there is none")
    config = SynthesisConfig(**{**served_sampling(where), **{n: v for n, v in options.items() if v is not None}})
    with ending_on_terminate():
        corpus = read_corpus(prompts, directory)
        refuse_empty(corpus)
        refuse_templateless(where)
        with err.status(escape(f"loading {where.target or 'the built-in target'}")):
            source = open_source(where, config)
        mask_token_id = find_token(source, mask_token) if mask_token is not None else None
        say_plan(source, corpus, config, where)
        seconds = hours * 3600 if hours is not None else None
        status = source.status if isinstance(source, EndpointSource) else None
        with displaying(directory, seconds, status) as display:
            counts = synthesize(
                source,
                corpus,
                directory,
                config,
                target=where.made_by,
                revision=where.revision,
                max_seconds=seconds,
                report=display,
            )
    show_summary(counts, display, directory, where.arguments)
    if mask_token_id is not None:
        print(f"records that hold the mask token {mask_token}: {count_token(directory, mask_token_id):,}")


def served_sampling(where: Where) -> dict[str, Any]:
    """Temperature, top-p and top-k of the target's generation_config.json, which servers take for their defaults."""
    found: dict[str, Any] = {"temperatures": (DEFAULT_TEMPERATURE,)}
    path = _generation_config(where)
    if path is None or not path.is_file():
        return found
    try:
        own = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: repair it, or download it again") from error
    if not isinstance(own, dict) or not own.get("do_sample"):
        return found
    for name, kinds in (("temperature", (int, float)), ("top_p", (int, float)), ("top_k", (int,))):
        if own.get(name) is not None and type(own[name]) not in kinds:
            raise ConfigError(f"{path}: {name} is {own[name]!r} and no number: repair it, or remove it there")
    found |= {name: own[name] for name in ("top_p", "top_k") if own.get(name) is not None}
    return found | ({"temperatures": (own["temperature"],)} if own.get("temperature") is not None else {})


def _generation_config(where: Where) -> Path | None:
    """Where that file would be; None where there is none, or no answer from the hub: loading the target says why."""
    from huggingface_hub import hf_hub_download

    source = Path(where.source)
    if source.is_dir():
        return source / GENERATION_CONFIG
    if source.exists() or str(where.source).count("/") != 1:
        return None
    revision = where.revision or "main"
    try:
        ask_hub({"pretrained_model_name_or_path": str(where.source), "revision": revision}, GENERATION_CONFIG)
        return Path(hf_hub_download(str(where.source), GENERATION_CONFIG, revision=revision, etag_timeout=10))
    except Exception:  # of the hub, the disk and the network, whose errors are those of the HTTP library
        return None


def read_corpus(prompts: Prompts, directory: Path) -> Corpus:
    """All prompts; the files are read once to the end, so that a bad line is found before anything is answered."""
    files = list(prompts.files)
    with err.status("reading prompts") as status:
        if prompts.dataset:
            files += fetch_prompts(
                prompts.dataset,
                prompts.split_names,
                directory,
                limit=prompts.limit,
                revision=prompts.dataset_revision,
                report=lambda split, count: status.update(escape(f"reading prompts: {prompts.dataset} {split}, {count:,}")),
            )
        exclusions = Exclusions(prompt for path in prompts.exclude for prompt in read_prompts(path))
        return Corpus.of_files(
            files, exclusions, limit=prompts.limit, report=lambda count: status.update(f"reading prompts: {count:,}")
        )


def refuse_templateless(where: Where) -> None:
    """Raises what Renderer does, before the target is loaded, which may take minutes."""
    Renderer(load_tokenizer(where.source, revision=where.revision, lora=where.lora))


def open_source(where: Where, config: SynthesisConfig) -> Source:
    if where.endpoints:
        key = os.environ.get(where.api_key_env) if where.api_key_env else None
        if where.api_key_env and not key:
            raise ConfigError(f"--api-key-env names {where.api_key_env}, and no such variable is set in the environment")
        tokenizer = load_tokenizer(where.source, revision=where.revision, lora=where.lora)
        clients = [Client(endpoint, api_key=key) for endpoint in where.endpoints]
        return EndpointSource(clients, tokenizer, model=where.model, concurrency=where.concurrency or 64, say=_say)
    return load_source(
        where.target,
        Lengths(config.max_prompt_tokens, config.max_tokens),
        draft=where.draft,
        generator=cast(Generator, where.generator),
        sampling=[SamplingParams(temperature=t, top_p=config.top_p, top_k=config.top_k) for t in config.temperatures],
        dtype=where.dtype,
        device=where.device,
        revision=where.revision,
        draft_revision=where.draft_revision,
        lora=where.lora,
        max_num_seqs=where.max_num_seqs,
        gpu_memory_utilization=where.gpu_memory_utilization,
    )


def _say(text: str) -> None:
    err.print(text, style="yellow", markup=False)


def say_plan(source: Source, corpus: Corpus, config: SynthesisConfig, where: Where) -> None:
    """What is about to be done, in two or three lines."""
    left_out = [f"{corpus.counts[f'prompts {what}']:,} {what}" for what in ("duplicate", "excluded")]
    temperatures = ", ".join(f"{t:g}" for t in config.temperatures)
    top = [f"top-p {config.top_p:g}"] * (config.top_p < 1) + [f"top-k {config.top_k}"] * (config.top_k > 0)
    greedy = [f"greedy {config.greedy_share:.0%}"] * (config.greedy_share > 0)
    sampling = ", ".join([f"temperature {temperatures}", *top, *greedy])
    samples = "one answer each" if config.samples == 1 else f"{config.samples} answers each"
    err.print(f"{counted(len(corpus), 'prompt')} ({', '.join(left_out)}), {samples}; {sampling}", markup=False)
    name = where.target or "the built-in target"
    err.print(f"{name}, {source.describe()}; answers of up to {config.max_tokens:,} tokens", markup=False)
    renderer = Renderer(source.tokenizer, config.thinking)
    if config.thinking in ("on", "mixed") and not renderer.switches:
        err.print("this target's chat template ignores enable_thinking: --thinking has no effect", style="yellow")


def find_token(source: Source, name: str) -> int:
    """The id of a token given by its text or its id. Raises ConfigError where there is none."""
    token = int(name) if name.isdecimal() else source.tokenizer.convert_tokens_to_ids(name)
    if not isinstance(token, int) or token == source.tokenizer.unk_token_id or token >= len(source.tokenizer):
        raise ConfigError(f"--mask-token {name!r} is no token of this target's tokenizer")
    return token


@contextmanager
def ending_on_terminate() -> Iterator[None]:
    """SIGTERM ends the program as Ctrl-C does: what is complete is written."""

    def end(*_: Any) -> None:
        sys.exit(143)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
