"""Hand-over to SGLang. Its number of draft tokens counts the anchor: the block size, one more than the proposals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashdraft.errors import ConfigError
from flashdraft.handover.command import Command, Program, find, require
from flashdraft.handover.pair import Pair
from flashdraft.handover.sglang_pair import refuse
from flashdraft.handover.translation import Given, Table, check_json, option

LEAST = (0, 5, 18)  # before, sliding layers were causal whatever config.json said
NO_LIMIT = "it has no such limit: put a proxy before it"
TABLE = Table(
    engine="SGLang",
    same=frozenset(
        {
            "host",
            "default_chat_template_kwargs",
            "log_requests",
            "log_level",
            "tensor_parallel_size",
            "data_parallel_size",
        }
    ),
    renamed={
        "max_model_len": "--context-length",
        "max_num_seqs": "--max-running-requests",
        "max_num_batched_tokens": "--chunked-prefill-size",
        "gpu_memory_utilization": "--mem-fraction-static",
        "deterministic": "--enable-deterministic-inference",
        "seed": "--random-seed",
    },
    refused={
        "lora": "it would be a model of its own there, by another name: merge the adapter into the target and save that",
        "limit_mm_per_prompt": "its option is --limit-mm-data-per-request: give that behind `--`",
        "max_body_mib": NO_LIMIT,
        "request_timeout": NO_LIMIT,
        "shutdown_timeout": "it has no such time: stop it by a proxy that drains it first",
    },
    special=frozenset(
        {
            "port",
            "max_waiting",
            "enforce_eager",
            "served_model_name",
            "dtype",
            "device",
            "async_scheduling",
            "chat_template",
            "reasoning_parser",
            "tool_call_parser",
            "enable_auto_tool_choice",
            "generation_config",
            "pipeline_parallel_size",
            "distributed_executor_backend",
        }
    ),
)
# Names that vLLM and flashdraft spell otherwise; all others are handed over as they are, and SGLang names those it has.
PARSERS = {
    "reasoning_parser": {"deepseek_r1": "deepseek-r1", "deepseek_v3": "deepseek-v3", "nemotron_v3": "nemotron_3"},
    "tool_call_parser": {"llama3_json": "llama3"},
}
DRAFT_ATTENTION = ("flashinfer", "fa3", "fa4", "triton", "ascend", "trtllm_mha", "intel_xpu")
BEHIND = {
    "--model-path": "the target",
    "--model": "the target",
    "--revision": "--revision",
    "--speculative-algorithm": "--draft",
    "--speculative-draft-model-path": "--draft",
    "--speculative-draft-model": "--draft",
    "--speculative-draft-model-revision": "--speculative-config",
    "--speculative-num-draft-tokens": "--speculative-config",
    "--speculative-dflash-block-size": "--speculative-config",
}


def program(dry_run: bool) -> tuple[Program, str | None]:
    """SGLang as it is installed, and a note. Raises ConfigError where it is missing or too old."""
    module = ("sglang.launch_server",)
    found = find("sglang", ("sglang", "serve"), module, module)
    return found, require(found, "SGLang", LEAST, "pip install 'sglang>=0.5.18'", dry_run)


def command(start: Program, pair: Pair, given: Given, speculative: Mapping[str, Any]) -> Command:
    """The command that serves a pair. Raises ConfigError for an option or a draft that SGLang cannot take."""
    options = dict(given.options)
    check_json(options, "default_chat_template_kwargs")
    TABLE.refuse_behind(given.behind, BEHIND)
    arguments = [*start.start, "--model-path", pair.target, *TABLE.arguments(options)]
    if pair.revision is not None:
        arguments += ["--revision", pair.revision]
    arguments += _own_words(options, pair)
    if len(given.keys) > 1:
        raise ConfigError(f"SGLang takes one API key, and {len(given.keys)} are given: give one")
    if given.keys:
        arguments += ["--api-key", given.keys[0]]
    if pair.draft is not None:
        refuse(pair, options, start.version)
        arguments += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", pair.draft.place]
        if pair.draft.revision is not None:
            arguments += ["--speculative-draft-model-revision", pair.draft.revision]
        arguments += ["--speculative-num-draft-tokens", str(pair.draft.proposals + 1)]
        # Without it the draft is taken to be quantized as the target is.
        arguments += ["--speculative-draft-model-quantization", "unquant"]
        if (backend := speculative.get("attention_backend")) is not None:
            if backend not in DRAFT_ATTENTION:  # it would take its own choice instead
                raise ConfigError(
                    f"--speculative-config: attention_backend {backend!r} is none of SGLang's for drafts: give one of "
                    f"{', '.join(DRAFT_ATTENTION)}, or leave it out"
                )
            arguments += ["--speculative-draft-attention-backend", backend]
    elif options.get("pipeline_parallel_size", 1) > 1:
        arguments += ["--pipeline-parallel-size", str(options["pipeline_parallel_size"])]
    return Command((*arguments, *given.behind))


def _places_and_names(options: Mapping[str, Any]) -> list[str]:
    out = []
    if (port := options.get("port")) is not None:
        if port == 0:
            raise ConfigError("SGLang asks at the --port it was given whether it is up, and ends at 0: give one that is free")
        out += ["--port", str(port)]
    if (waiting := options.get("max_waiting")) is not None:
        if waiting == 0:
            raise ConfigError("every request waits for a moment in SGLang, so that --max-waiting 0 refuses all: give 1 or more")
        out += ["--max-queued-requests", str(waiting)]
    names = options.get("served_model_name") or []
    if len(names) > 1:
        raise ConfigError(f"SGLang serves a target under one --served-model-name, and {len(names)} are given: give one")
    if names and ":" in names[0]:
        raise ConfigError(f"SGLang takes no colon in the name of a target, as in {names[0]}: give another --served-model-name")
    return [*out, "--served-model-name", names[0]] if names else out


def _own_words(options: Mapping[str, Any], pair: Pair) -> list[str]:
    """Options of which it has other words or fewer values."""
    out = _places_and_names(options)
    # Its auto makes float16 of a float32 checkpoint; ours is the checkpoint's own.
    dtype = options.get("dtype", "auto")
    dtype = "float32" if dtype == "auto" and pair.dtype == "float32" else dtype
    out += [] if dtype == "auto" else ["--dtype", dtype]
    if (device := options.get("device")) is not None:
        out += ["--device", device]
    if options.get("enforce_eager"):
        out += ["--disable-decode-cuda-graph", "--disable-prefill-cuda-graph"]
    if options.get("async_scheduling") is False:
        out += ["--disable-overlap-schedule"]
    if (template := options.get("chat_template")) is not None:
        if "{" in template:
            raise ConfigError("--chat-template must be a file for SGLang: write the template into one")
        out += ["--chat-template", template]
    for name, own in (("reasoning_parser", "think"), ("tool_call_parser", "json")):
        if options.get(name) == own:
            raise ConfigError(
                f"{option(name)} {own} is a parser of flashdraft alone: give the one that SGLang has for the target"
            )
        if (given := options.get(name)) not in (None, "none"):
            out += [option(name), PARSERS[name].get(given, given)]
    if "generation_config" in options:
        out += ["--sampling-defaults", {"auto": "model", "vllm": "openai"}[options["generation_config"]]]
    backend = options.get("distributed_executor_backend")
    if backend not in (None, "ray", "mp"):
        raise ConfigError(f"--distributed-executor-backend {backend} cannot be handed over to SGLang: it has ray and mp")
    return [*out, "--use-ray"] if backend == "ray" else out
