"""Hand-over to vLLM: `vllm serve` with the same pair. What it takes and what not, by version: docs/vllm.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flashdraft.errors import ConfigError
from flashdraft.handover.command import Command, Program, find, require
from flashdraft.handover.pair import Draft, Pair, refuse_split
from flashdraft.handover.translation import Given, Table, check_json, option
from flashdraft.quantized import section_of

LEAST = (0, 31)
NO_LIMIT = "it has no such limit: put a proxy before it"
TABLE = Table(
    engine="vLLM",
    same=frozenset(
        {
            "host",
            "port",
            "served_model_name",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "gpu_memory_utilization",
            "enforce_eager",
            "async_scheduling",
            "chat_template",
            "default_chat_template_kwargs",
            "generation_config",
            "limit_mm_per_prompt",
            "seed",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
            "distributed_executor_backend",
        }
    ),
    renamed={"log_requests": "--enable-log-requests"},
    refused={
        "device": "it runs on the hardware that it was built for: leave it out",
        "lora": "it would be a model of its own there, without the draft: merge the adapter into the target and save that",
        "deterministic": "set VLLM_BATCH_INVARIANT=1 in the environment instead",
        "max_waiting": NO_LIMIT,
        "max_body_mib": NO_LIMIT,
        "request_timeout": NO_LIMIT,
    },
    special=frozenset(
        {"dtype", "reasoning_parser", "tool_call_parser", "enable_auto_tool_choice", "log_level", "shutdown_timeout"}
    ),
)
PARSERS = {"qwen": "hermes"}  # another name of it here
BEHIND = {
    "--model": "the target",
    "--revision": "--revision",
    "--speculative-config": "--speculative-config or --draft",
    "-sc": "--speculative-config or --draft",
}


def program(dry_run: bool) -> tuple[Program, str | None]:
    """vLLM as it is installed, and a note. Raises ConfigError where it is missing or too old."""
    module, of_others = ("vllm.entrypoints.cli.main", "serve"), ("vllm.entrypoints.openai.api_server", "--model")
    found = find("vllm", ("vllm", "serve"), module, of_others)
    return found, require(found, "vLLM", LEAST, "pip install 'vllm>=0.31'", dry_run)


def command(start: Program, pair: Pair, given: Given, speculative: Mapping[str, Any]) -> Command:
    """The command that serves a pair. Raises ConfigError for an option or a draft that vLLM cannot take."""
    options = dict(given.options)
    check_json(options, "default_chat_template_kwargs", "limit_mm_per_prompt")
    arguments = [*start.start, pair.target, *TABLE.arguments(options)]
    if pair.revision is not None:
        arguments += ["--revision", pair.revision]
    dtype = _dtype(options.get("dtype", "auto"), pair)
    arguments += dtype
    arguments += _parsers(options)
    environment = {}
    if "log_level" in options:
        environment["VLLM_LOGGING_LEVEL"] = options["log_level"].upper()
        arguments += ["--uvicorn-log-level", options["log_level"]]
    if "shutdown_timeout" in options:
        arguments += ["--shutdown-timeout", str(round(options["shutdown_timeout"]))]
    if len(given.keys) > 1:
        raise ConfigError(f"vLLM takes one API key from its environment, and {len(given.keys)} are given: give one")
    if given.keys:
        environment["VLLM_API_KEY"] = given.keys[0]
    if pair.draft is not None:
        refuse(pair.draft, options.get("tensor_parallel_size", 1), in_float32="float32" in dtype)
        arguments += ["--speculative-config", _speculative(pair.draft, speculative)]
        if len(set(pair.draft.config.windows)) > 1 or len(set(pair.draft.config.causal)) > 1:
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # its first takes no draft whose layers see differently
    TABLE.refuse_behind(given.behind, BEHIND)
    return Command((*arguments, *given.behind), environment)


def _dtype(dtype: str, pair: Pair) -> list[str]:
    # vLLM's auto makes bfloat16 or float16 of a float32 checkpoint; ours is the checkpoint's own.
    wanted = "float32" if dtype == "auto" and pair.dtype == "float32" else dtype
    return [] if wanted == "auto" else ["--dtype", wanted]


def _parsers(options: Mapping[str, Any]) -> list[str]:
    reasoning, tools = options.get("reasoning_parser"), options.get("tool_call_parser")
    for name, value, own in (("reasoning_parser", reasoning, "think"), ("tool_call_parser", tools, "json")):
        if value == own:
            raise ConfigError(
                f"{option(name)} {own} is a parser of flashdraft alone: give the one that vLLM has for the target"
            )
    out = [] if reasoning in (None, "none") else ["--reasoning-parser", str(reasoning)]
    if tools is not None:
        return [*out, "--tool-call-parser", PARSERS.get(tools, tools), "--enable-auto-tool-choice"]
    if "enable_auto_tool_choice" in options:
        raise ConfigError("--enable-auto-tool-choice needs a parser there: give --tool-call-parser too")
    return out


def _speculative(draft: Draft, given: Mapping[str, Any]) -> str:
    # A revision of a local draft is resolved: vLLM ignores revisions of local paths, and would serve the draft beside it.
    config: dict[str, Any] = {"model": draft.place, "method": "dflash", "num_speculative_tokens": draft.proposals}
    if draft.revision is not None:
        config["revision"] = draft.revision
    if "attention_backend" in given:
        config["attention_backend"] = given["attention_backend"]
    return json.dumps(config)


def refuse(draft: Draft, tensor_parallel: int, in_float32: bool) -> None:
    """Raise ConfigError for a draft that vLLM refuses late, or would run with all acceptance lost and no error."""
    config = draft.config
    if draft.other_weights:
        raise ConfigError(
            f"{draft.place}: vLLM loads every .safetensors file as weights of the draft: move "
            f"{', '.join(draft.other_weights)} away"
        )
    if config.input_embedding_scale != 1.0:
        raise ConfigError(
            f"{draft.place} multiplies its embeddings by {config.input_embedding_scale:g}, which vLLM would leave out: "
            "no guess would be right; train one without input_embedding_scale"
        )
    _refuse_quantization(draft, in_float32)
    refuse_split(draft, tensor_parallel)


def _refuse_quantization(draft: Draft, in_float32: bool) -> None:
    section = section_of(draft.raw)
    own = any(name.startswith("lm_head.") for name in draft.tensors)
    layer = draft.raw.get("transformer_layer_config")
    flags = [part.get("has_own_lm_head") for part in (draft.raw, layer) if isinstance(part, dict)]
    if True in flags and not own:
        raise ConfigError(
            f"{draft.place} says has_own_lm_head and has no lm_head: vLLM would leave it unset; copy the draft again"
        )
    if section is None:
        return
    if isinstance(section.get("quantization"), dict):
        raise ConfigError(
            f"{draft.place}: quantization_config has the nested form of hf_quant_config.json, which vLLM does not read for "
            "W4A16: quantize the draft again with `flashdraft quantize`, which writes the flat one"
        )
    if in_float32:
        raise ConfigError(
            f"{draft.place} is quantized, and vLLM runs such drafts in 16 bits alone, with a target in the same: give --dtype "
            "bfloat16, or the draft that it was made from"
        )
    if own and True not in flags and "lm_head.weight_scale" in draft.tensors:
        raise ConfigError(
            f"{draft.place} has a quantized head of its own and does not say has_own_lm_head, without which vLLM reads it as "
            'unquantized: add `"has_own_lm_head": true` to its config.json'
        )
