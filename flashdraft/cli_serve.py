"""The options of `flashdraft serve`. Heavy imports live inside the command, as in cli.py."""
# ruff: noqa: PLC0415

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Context, Option
from typer.core import TyperCommand

from flashdraft.cli_options import Lora
from flashdraft.errors import ConfigError

KEYS = ("FLASHDRAFT_API_KEY", "VLLM_API_KEY")
INSTALL = "the server needs the packages of an extra: run `pip install 'flashdraft[serve]'`"
ON_ONE_GPU = "the target runs on one GPU; `--engine vllm` hands the pair over to an engine for several"
ALWAYS = "it is always so: leave it out"
REFUSED = {
    "--quantization": "a checkpoint is served as it is",
    "--kv-cache-dtype": "keys and values have the target's dtype",
    "--enable-prefix-caching": ALWAYS,
    "--enable-chunked-prefill": ALWAYS,
    "--trust-remote-code": "code of checkpoints is never run",
    "--enable-lora": "give one adapter with --lora, it is merged into the target",
    "--lora-modules": "give one adapter with --lora, it is merged into the target",
    "--block-size": "pages hold 16 tokens",
    "--swap-space": "preempted requests are computed again",
    "--cpu-offload-gb": "weights stay on the GPU",
    "--load-format": "safetensors and GGUF are told apart by themselves",
    "--tokenizer": "the target's own is used",
    "--tokenizer-mode": "the target's own is used",
    "--attention-backend": "attention is this engine's own",
    "--structured-outputs-config": "llguidance is used",
    "--guided-decoding-backend": "llguidance is used",
    "--ssl-keyfile": "put a proxy before it (docs/serving.md)",
    "--ssl-certfile": "put a proxy before it (docs/serving.md)",
    "--uvicorn-log-level": "use --log-level",
    "--disable-log-requests": "requests are not logged unless --log-requests is given",
    "--no-enable-log-requests": "requests are not logged unless --log-requests is given",
    "--enable-log-requests": "use --log-requests",
    "--task": "it answers",
    "--runner": "it answers",
    "--max-logprobs": "it is 20",
    "--middleware": "put a proxy before it",
    "--root-path": "put a proxy before it",
    "--enforce-no-think": "use --default-chat-template-kwargs",
}
PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "distributed_executor_backend")
ENGINES = ("flashdraft", "vllm", "sglang")
BEHIND = "flashdraft.behind"  # key of what stands behind `--` on the command line of another engine

Engine = Annotated[str, Option(help="flashdraft, or vllm or sglang to hand the pair over to it, for several GPUs.")]
DryRun = Annotated[bool, Option("--dry-run", help="With another --engine: print its command and end.")]
TensorParallel = Annotated[int | None, Option("--tensor-parallel-size", "-tp", min=1, help="GPUs that share each layer.")]
PipelineParallel = Annotated[int | None, Option("--pipeline-parallel-size", "-pp", min=1, help="Groups of GPUs, by layers.")]
DataParallel = Annotated[int | None, Option("--data-parallel-size", "-dp", min=1, help="Copies of the target.")]
SpeculativeConfig = Annotated[
    str | None, Option(help='As vLLM\'s: \'{"model": DRAFT, "method": "dflash", "num_speculative_tokens": 7}\'.')
]
ApiKey = Annotated[
    list[str] | None, Option("--api-key", help="Key that requests must send; better in FLASHDRAFT_API_KEY or a file.")
]
ServedName = Annotated[list[str] | None, Option(help="Name that requests call the model by; may be repeated.")]
MemoryShare = Annotated[float | None, Option(help="Share of a GPU's memory for everything; without it 0.9.")]
NoAdaptiveWidth = Annotated[bool, Option("--no-adaptive-width", help="Verify all proposals in each step.")]
EngineProcess = Annotated[
    bool | None,
    Option(
        "--engine-process/--no-engine-process",
        " /--disable-frontend-multiprocessing",
        help="The engine in a process of its own. Without it: on a GPU, not on the CPU.",
    ),
]
Template = Annotated[str | None, Option(help="File of a chat template, or the template, instead of the target's.")]
GenerationConfig = Annotated[str, Option(help="auto: sampling defaults by the target's own; vllm: temperature 1.")]
Backend = Annotated[str | None, Option("--distributed-executor-backend", help="mp, or ray over several nodes.")]


class ServeCommand(TyperCommand):
    """`serve` with --config: a YAML file of options, overruled by the command line; and why vLLM's others are refused.

    For another engine what stands behind `--` is that engine's, and not parsed.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        own, behind = _with_config(args[:end]), args[end:]
        handed_over = any(arg == "--engine" or arg.startswith("--engine=") for arg in own)
        for arg in own:
            name = arg.partition("=")[0]
            if name in REFUSED and handed_over:
                raise ConfigError(f"{name} is not translated: give it behind `--`, where everything is the other engine's")
            if name in REFUSED:
                raise ConfigError(f"{name} is an option of vLLM that is not taken here: {REFUSED[name]}")
        if handed_over:
            ctx.meta[BEHIND] = tuple(behind[1:])
        return super().parse_args(ctx, own if handed_over else own + behind)


def _with_config(args: list[str]) -> list[str]:
    places = [i for i, arg in enumerate(args) if arg == "--config" or arg.startswith("--config=")]
    if not places:
        return args
    at = places[-1]
    value = args[at].partition("=")[2] if "=" in args[at] else "".join(args[at + 1 : at + 2])
    rest = args[:at] + args[at + (1 if "=" in args[at] else 2) :]
    import yaml

    try:
        found = yaml.safe_load(Path(value).read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {value}: cannot be read as YAML ({type(error).__name__})") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--config {value} must hold options such as `port: 8000`")
    target = found.pop("model", None)
    options: list[str] = []
    for name, given in found.items():
        for one in given if isinstance(given, list) else [given]:
            text = json.dumps(one) if isinstance(one, dict) else str(one)
            options += [f"--{name}"] if one is True else [] if one is False or one is None else [f"--{name}", text]
    named = [str(target)] if target is not None and not (rest and not rest[0].startswith("-")) else []
    return [*named, *rest[:1], *options, *rest[1:]] if rest and not rest[0].startswith("-") else [*named, *options, *rest]


def serve(
    ctx: Context,
    target: Annotated[str | None, Argument(help="Directory, hub id or .gguf file; without it the built-in pair.")] = None,
    draft: Annotated[str | None, Option("--draft", help="Directory or hub id of the target's draft, or `builtin`.")] = None,
    no_draft: Annotated[bool, Option("--no-draft", help="The target alone.")] = False,
    speculative_config: SpeculativeConfig = None,
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 is all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    api_key: ApiKey = None,
    api_key_file: Annotated[Path | None, Option(help="File of keys, one a line.")] = None,
    served_model_name: ServedName = None,
    max_model_len: Annotated[int | None, Option(help="Longest prompt and answer together, in tokens.")] = None,
    max_num_seqs: Annotated[int | None, Option(min=1, help="Answers at once; without it 16, on a GPU 64.")] = None,
    max_num_batched_tokens: Annotated[int | None, Option(min=1, help="Prompt tokens a step.")] = None,
    gpu_memory_utilization: MemoryShare = None,
    dtype: Annotated[str, Option(help="auto (the checkpoint's own), bfloat16, float16 or float32.")] = "auto",
    device: Annotated[str | None, Option(help="cpu or cuda; without it the GPU if there is one.")] = None,
    revision: Annotated[str | None, Option(help="Revision of the target on the hub.")] = None,
    lora: Lora = None,
    deterministic: Annotated[bool, Option("--deterministic", help="On a GPU too the same bits in any batch; slower.")] = False,
    enforce_eager: Annotated[bool, Option("--enforce-eager", help="On a GPU no CUDA graphs.")] = False,
    async_scheduling: Annotated[bool | None, Option(help="Without it: on a GPU, not on the CPU.")] = None,
    no_adaptive_width: NoAdaptiveWidth = False,
    engine_process: EngineProcess = None,
    chat_template: Template = None,
    default_chat_template_kwargs: Annotated[str | None, Option(help="JSON, such as '{\"enable_thinking\": false}'.")] = None,
    reasoning_parser: Annotated[str | None, Option(help="Without it by the chat template; none: no parser.")] = None,
    tool_call_parser: Annotated[str | None, Option(help="Without it by the chat template.")] = None,
    enable_auto_tool_choice: Annotated[bool, Option("--enable-auto-tool-choice", help="As vLLM's; it is always so.")] = False,
    generation_config: GenerationConfig = "auto",
    limit_mm_per_prompt: Annotated[str | None, Option(help='As vLLM\'s; without it {"image": 16, "audio": 8}.')] = None,
    seed: Annotated[int | None, Option(help="Makes requests without a seed the same after every start.")] = None,
    max_waiting: Annotated[int, Option(min=0, help="Answers that may wait for a place; more are refused with 429.")] = 1024,
    max_body_mib: Annotated[int, Option(min=1, help="Largest request.")] = 16,
    request_timeout: Annotated[float, Option(min=1, help="Longest time for a request, in seconds.")] = 3600.0,
    shutdown_timeout: Annotated[float, Option(min=0, help="Time for running requests after SIGTERM, in seconds.")] = 30.0,
    log_requests: Annotated[bool, Option("--log-requests", help="Log requests with their texts.")] = False,
    log_level: Annotated[str, Option(help="debug, info, warning or error.")] = "info",
    config: Annotated[Path | None, Option("--config", help="YAML file of these options.")] = None,
    engine: Engine = "flashdraft",
    dry_run: DryRun = False,
    tensor_parallel_size: TensorParallel = None,
    pipeline_parallel_size: PipelineParallel = None,
    data_parallel_size: DataParallel = None,
    distributed_executor_backend: Backend = None,
) -> None:
    """Serve the OpenAI API: /v1/chat/completions, /v1/completions and more, and a page to chat at /."""
    _one_of("--engine", engine, ENGINES)
    _one_of("--log-level", log_level, ("debug", "info", "warning", "error"))
    _one_of("--generation-config", generation_config, ("auto", "vllm"))
    speculation = speculative_options(speculative_config, draft, no_draft, engine)
    if engine != "flashdraft":
        return _hand_over(ctx, engine, speculation, _keys(api_key, api_key_file))
    _refuse_parallel(ctx)
    limits: dict[str, Any] = dict(dtype=dtype, device=device, revision=revision, lora=lora, async_scheduling=async_scheduling)
    limits |= dict(max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    limits |= dict(deterministic=deterministic or None, enforce_eager=enforce_eager or None)
    limits |= dict(gpu_memory_utilization=gpu_memory_utilization, adaptive_width=False if no_adaptive_width else None)
    limits |= dict(proposal_noise=0.0 if speculation.get("draft_sample_method") == "greedy" else None)
    options = {
        "names": tuple(served_model_name or [target or "builtin"]),
        "keys": _keys(api_key, api_key_file),
        "reasoning_parser": reasoning_parser,
        "tool_call_parser": tool_call_parser,
        "chat_template": _template(chat_template),
        "chat_template_kwargs": _json("--default-chat-template-kwargs", default_chat_template_kwargs),
        "generation_config": generation_config,
        "max_body_bytes": max_body_mib << 20,
        "max_waiting": max_waiting,
        "request_seconds": request_timeout,
        "shutdown_seconds": shutdown_timeout,
        "log_requests": log_requests,
        "media_limits": _limit_media(limit_mm_per_prompt),
        "engine_process": engine_process,
        "seed": seed,
    }
    _run(target, speculation, limits, options, (host, port, log_level))


def _run(
    target: str | None,
    speculation: dict[str, Any],
    limits: dict[str, Any],
    options: dict[str, Any],
    place: tuple[str, int, str],
) -> None:
    # Before torch is loaded: threads that wait by spinning take the core of the event loop, or of any other program.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from flashdraft.media import MediaLimits
        from flashdraft.server.service import ServerOptions
        from flashdraft.server.serving import on_gpu
        from flashdraft.server.serving import serve as run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "flashdraft":
            raise
        raise ConfigError(INSTALL) from error
    from flashdraft import terminal

    limits |= {
        "draft_revision": speculation.get("revision"),
        "num_speculative_tokens": speculation.get("num_speculative_tokens"),
    }
    given = {name: value for name, value in limits.items() if value is not None}
    host, port, log_level = place
    if options["engine_process"] is None:
        options["engine_process"] = os.name == "posix" and on_gpu(limits["device"])
    run(
        partial(terminal.load, target, speculation["model"], **given),
        ServerOptions(**options | {"media_limits": MediaLimits(**options["media_limits"])}),
        host=host,
        port=port,
        log_level=log_level,
    )


def _hand_over(ctx: Context, engine: str, speculation: dict[str, Any], keys: tuple[str, ...]) -> None:
    from flashdraft.handover.run import Given, hand_over

    options = {"host": ctx.params["host"], "port": ctx.params["port"]}  # always: the engines' own differ
    for name, value in ctx.params.items():
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            options[name] = str(value) if isinstance(value, Path) else value
    hand_over(engine, Given(options, keys, ctx.meta.get(BEHIND, ()), ctx.params["dry_run"]), speculation)


def _refuse_parallel(ctx: Context) -> None:
    if ctx.params["dry_run"]:
        raise ConfigError("--dry-run is an option of --engine: add that, or leave --dry-run out")
    for name in PARALLEL:
        if ctx.params[name] not in (None, 1):
            raise ConfigError(f"--{name.replace('_', '-')} is an option of vLLM that is not taken here: {ON_ONE_GPU}")


def speculative_options(text: str | None, draft: str | None, no_draft: bool, engine: str = "flashdraft") -> dict[str, Any]:
    """vLLM's --speculative-config, with --draft. Raises ConfigError for what is unknown."""
    if draft and no_draft:
        raise ConfigError("--draft and --no-draft contradict each other: give one of them")
    given = _json("--speculative-config", text)
    if given and (draft or no_draft):
        raise ConfigError("--speculative-config names the draft already: leave out --draft and --no-draft")
    known = {"model", "revision", "method", "num_speculative_tokens", "draft_sample_method", "attention_backend"}
    if unknown := sorted(set(given) - known):
        raise ConfigError(f"--speculative-config: there is no key {unknown[0]!r}; the keys are {', '.join(sorted(known))}")
    if given.get("method", "dflash") != "dflash":
        raise ConfigError(f"--speculative-config: method {given['method']!r} is not taken: drafts are of method dflash")
    methods = ("greedy", "probabilistic") if engine == "flashdraft" else ("greedy",)
    if given.get("draft_sample_method", "greedy") not in methods:
        raise ConfigError(f"--speculative-config: draft_sample_method must be {' or '.join(methods)}")
    if "attention_backend" in given and engine == "flashdraft":
        from flashdraft import terminal

        terminal.err.print("flashdraft: attention_backend is not applied: attention is this engine's own", style="dim")
    for name, kind in (("model", str), ("revision", str), ("num_speculative_tokens", int)):
        if name in given and type(given[name]) is not kind:
            raise ConfigError(f"--speculative-config: {name} must be {'a text' if kind is str else 'a whole number'}")
    return {**given, "model": False if no_draft else given.get("model", draft)}


def _json(option: str, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{option} is not valid JSON: {text!r}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{option} must be a JSON object, got {text!r}")
    return value


def _one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{option} must be one of {', '.join(known)}, got {value!r}")


def _limit_media(text: str | None) -> dict[str, int]:
    """MediaLimits' counts of images and clips."""
    names, counts = {"image": "images", "audio": "clips"}, {}
    for kind, value in _json("--limit-mm-per-prompt", text).items():
        count = value.get("count") if isinstance(value, dict) else value
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ConfigError(f"--limit-mm-per-prompt must give {kind} a whole number, got {value!r}")
        if kind in names:
            counts[names[kind]] = count
        elif count:
            raise ConfigError(f"--limit-mm-per-prompt: image and audio are taken here, not {kind}: leave it out, or give 0")
    return counts


def _keys(given: list[str] | None, file: Path | None) -> tuple[str, ...]:
    keys = list(given or [])
    if file is not None:
        try:
            keys += file.read_text(encoding="utf-8").split()
        except (OSError, ValueError) as error:
            raise ConfigError(f"--api-key-file {file} cannot be read") from error
        if not keys:
            raise ConfigError(f"--api-key-file {file} holds no key")
    keys += [os.environ[name] for name in KEYS if os.environ.get(name)]
    if any(not (key.isascii() and key.isprintable() and key.strip()) for key in keys):
        raise ConfigError("an API key is empty or holds characters that no header can carry")
    return tuple(key.strip() for key in keys)


def _template(given: str | None) -> str | None:
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--chat-template {given} cannot be read") from error
