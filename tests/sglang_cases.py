"""Commands for SGLang that together hold every option that is translated, and what SGLang makes of each.

The options that it takes are frozen in fixtures/sglang.json; interop/test_sglang_itself.py holds both against SGLang itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from handing import SGLANG
from saved import Pair as Saved

from flashdraft.checkpoint import load_draft, save_draft
from flashdraft.draft import DFlashConfig, DFlashDraft
from flashdraft.handover import sglang
from flashdraft.handover.pair import Pair
from flashdraft.handover.translation import Given

FROZEN = json.loads((Path(__file__).parent / "fixtures" / "sglang.json").read_text())
# Options of flashdraft, and the fields of SGLang's configuration that they become.
CASES: tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...] = (
    (
        {
            "host": "0.0.0.0", "port": 8123, "tensor_parallel_size": 2, "data_parallel_size": 3, "max_model_len": 256,
            "max_num_seqs": 4, "max_num_batched_tokens": 128, "gpu_memory_utilization": 0.85, "dtype": "bfloat16",
            "device": "cuda", "served_model_name": ["m"], "default_chat_template_kwargs": '{"enable_thinking": false}',
            "log_requests": True, "log_level": "debug", "seed": 3, "max_waiting": 7, "deterministic": True,
        },
        {
            "host": "0.0.0.0", "port": 8123, "tp_size": 2, "dp_size": 3, "context_length": 256, "max_running_requests": 4,
            "chunked_prefill_size": 128, "mem_fraction_static": 0.85, "dtype": "bfloat16", "served_model_name": "m",
            "default_chat_template_kwargs": {"enable_thinking": False}, "log_requests": True, "log_level": "debug",
            "random_seed": 3, "max_queued_requests": 7, "enable_deterministic_inference": True, "attention_backend": "fa3",
            "speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 8, "speculative_draft_model_quantization": None,
        },
    ),
    (
        {
            "enforce_eager": True, "async_scheduling": False, "generation_config": "vllm", "reasoning_parser": "deepseek_r1",
            "tool_call_parser": "llama3_json", "enable_auto_tool_choice": True, "distributed_executor_backend": "ray",
            "pipeline_parallel_size": 1, "chat_template": __file__,
        },
        {
            "disable_decode_cuda_graph": True, "disable_prefill_cuda_graph": True, "disable_overlap_schedule": True,
            "sampling_defaults": "openai", "reasoning_parser": "deepseek-r1", "tool_call_parser": "llama3", "use_ray": True,
            "dtype": "float32", "api_key": "sesame", "chat_template": __file__, "speculative_draft_attention_backend": "fa3",
        },
    ),
)  # fmt: skip


def draft_for_sglang(pair: Saved, folder: Path, **changes: Any) -> Path:
    """The pair's draft, with features of the first two of the target's three layers: of a Llama SGLang has no more."""
    config = load_draft(pair.draft).config.with_(target_layer_ids=(0, 1), **changes)
    return save_draft(randomized(config), folder)


def randomized(config: DFlashConfig) -> DFlashDraft:
    draft = DFlashDraft(config)
    for parameter in draft.parameters():
        parameter.data.normal_(std=0.2 if parameter.dim() > 1 else 1.0)
    return draft


def commands(pair: Pair) -> list[list[str]]:
    """The arguments of each case."""
    start = len(SGLANG.start)
    ways: Sequence[tuple[tuple[str, ...], Mapping[str, Any]]] = (((), {}), (("sesame",), {"attention_backend": "fa3"}))
    return [
        list(sglang.command(SGLANG, pair, Given(options, keys), speculative).arguments[start:])
        for (options, _), (keys, speculative) in zip(CASES, ways, strict=True)
    ]
