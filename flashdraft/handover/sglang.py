"""Hand-over to SGLang. Its number of draft tokens counts the anchor: the block size, one more than the proposals.

What its DFlash reads of a draft was read off the source of its releases 0.5.17 to 0.5.23: docs/vllm.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashdraft.errors import ConfigError
from flashdraft.handover.command import Command, Program, find, require
from flashdraft.handover.pair import Draft, Pair
from flashdraft.handover.translation import Given, Table, check_json, option
from flashdraft.quantized import section_of
from flashdraft.speculators import is_speculators

LEAST = (0, 5, 18)  # before, sliding layers were causal whatever config.json said
NO_LIMIT = "it has no such limit: put a proxy before it"
TABLE = Table(
    engine="SGLang",
    same=frozenset(
        {
            "host",
            "port",
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
        "enforce_eager": "--disable-cuda-graph",
        "deterministic": "--enable-deterministic-inference",
        "max_waiting": "--max-queued-requests",
        "seed": "--random-seed",
    },
    refused={
        "lora": "the draft would see the hidden states of the base: merge the adapter into the target and save that",
        "limit_mm_per_prompt": "its option is --limit-mm-data-per-request: give that behind `--`",
        "max_body_mib": NO_LIMIT,
        "request_timeout": NO_LIMIT,
        "shutdown_timeout": "it has no such time: stop it by a proxy that drains it first",
    },
    special=frozenset(
        {
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
    arguments = [*start.start, "--model-path", pair.target, *TABLE.arguments(options)]
    if pair.revision is not None:
        arguments += ["--revision", pair.revision]
    arguments += _own_words(options, pair)
    if len(given.keys) > 1:
        raise ConfigError(f"SGLang takes one API key, and {len(given.keys)} are given: give one")
    if given.keys:
        arguments += ["--api-key", given.keys[0]]
    if pair.draft is not None:
        refuse(pair.draft, options)
        arguments += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", pair.draft.place]
        if pair.draft.revision is not None:
            arguments += ["--speculative-draft-model-revision", pair.draft.revision]
        arguments += ["--speculative-num-draft-tokens", str(pair.draft.proposals + 1)]
        # Without it the draft is taken to be quantized as the target is.
        arguments += ["--speculative-draft-model-quantization", "unquant"]
        if "attention_backend" in speculative:
            arguments += ["--speculative-draft-attention-backend", str(speculative["attention_backend"])]
    elif options.get("pipeline_parallel_size", 1) > 1:
        arguments += ["--pipeline-parallel-size", str(options["pipeline_parallel_size"])]
    TABLE.refuse_behind(given.behind, BEHIND)
    return Command((*arguments, *given.behind))


def _own_words(options: Mapping[str, Any], pair: Pair) -> list[str]:
    """Options of which it has other words or fewer values."""
    names = options.get("served_model_name") or []
    if len(names) > 1:
        raise ConfigError(f"SGLang serves a target under one --served-model-name, and {len(names)} are given: give one")
    out = ["--served-model-name", names[0]] if names else []
    # Its auto makes float16 of a float32 checkpoint; ours is the checkpoint's own.
    dtype = options.get("dtype", "auto")
    dtype = "float32" if dtype == "auto" and pair.dtype == "float32" else dtype
    out += [] if dtype == "auto" else ["--dtype", dtype]
    if (device := options.get("device")) is not None:
        out += ["--device", device]
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
        if options.get(name) not in (None, "none"):
            out += [option(name), options[name]]
    if "generation_config" in options:
        out += ["--sampling-defaults", {"auto": "model", "vllm": "openai"}[options["generation_config"]]]
    backend = options.get("distributed_executor_backend")
    if backend not in (None, "ray", "mp"):
        raise ConfigError(f"--distributed-executor-backend {backend} cannot be handed over to SGLang: it has ray and mp")
    return [*out, "--use-ray"] if backend == "ray" else out


def refuse(draft: Draft, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a draft that SGLang refuses, or would run with acceptance lost and no error."""
    place, config = draft.place, draft.config
    if options.get("device") == "cpu":
        raise ConfigError("SGLang runs DFlash drafts on a GPU alone: leave out --device cpu, or give --no-draft")
    if options.get("pipeline_parallel_size", 1) > 1:
        raise ConfigError(
            "--pipeline-parallel-size cannot be handed over to SGLang: it runs DFlash drafts in one stage alone; "
            "give --tensor-parallel-size"
        )
    if is_speculators(draft.raw):
        raise ConfigError(
            f"{place} has the layout of Speculators, which SGLang does not read: rewrite it with "
            "flashdraft.checkpoint.convert(SOURCE, DESTINATION, 'dflash')"
        )
    if config.has_own_lm_head or config.has_own_embeddings or config.draft_vocab_size is not None:
        raise ConfigError(
            f"{place} has a head, embeddings or a vocabulary of its own, for which SGLang takes the target's without a word: "
            "use --engine vllm, or train a draft that shares them"
        )
    if section_of(draft.raw) is not None:
        raise ConfigError(f"{place} is quantized, and SGLang runs these drafts unquantized alone: give the draft in bfloat16")
    if config.input_embedding_scale != 1.0:
        raise ConfigError(
            f"{place} multiplies its embeddings by {config.input_embedding_scale:g}, which SGLang would leave out: "
            "no guess would be right; train one without input_embedding_scale"
        )
    _refuse_visibility(draft)


def _refuse_visibility(draft: Draft) -> None:
    """It reads windows from layer_types and sliding_window, causality from is_causal, neither from dflash_config."""
    types = draft.raw.get("layer_types") or ["full_attention"] * draft.config.num_hidden_layers
    sliding = [kind == "sliding_attention" for kind in types] if isinstance(types, list) else []
    window = draft.raw.get("sliding_window")
    if [window if slides else None for slides in sliding] != list(draft.config.windows):
        raise ConfigError(
            f"{draft.place} has its window in other words than layer_types and sliding_window, which SGLang reads alone: "
            "load and save it with flashdraft"
        )
    stated = draft.raw.get("is_causal")
    read = [bool(slides if stated is None else stated) for slides in sliding]
    if read != list(draft.config.causal):
        if len(set(draft.config.causal)) > 1:
            raise ConfigError(
                f"{draft.place} mixes causal and bidirectional layers, which SGLang cannot be told: use --engine vllm"
            )
        value = str(draft.config.causal[0]).lower()
        raise ConfigError(
            f'{draft.place} does not say `"is_causal": {value}` in its config.json, where SGLang looks for it, and most '
            "guesses would be lost: add that line (flashdraft and vLLM read it too)"
        )
