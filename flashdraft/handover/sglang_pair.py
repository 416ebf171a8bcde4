"""What SGLang makes of a pair, and what it would refuse late or read otherwise than the draft was trained, without an error.

Read off the source of its releases 0.5.18 to 0.5.23; tests/interop/test_sglang_itself.py asks 0.5.23 itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig

from flashdraft.errors import ConfigError
from flashdraft.handover.command import numbers
from flashdraft.handover.pair import Draft, Pair, refuse_split
from flashdraft.quantized import section_of
from flashdraft.speculators import is_speculators

KNOWN = (0, 5, 23)  # newer releases may have more targets
# Targets of which every layer can be a feature; of SCALED, a draft's embeddings are multiplied as the target's own are.
SCALED = frozenset({"Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"})
EVERY_LAYER = SCALED | frozenset({
    "GptOssForCausalLM", "LagunaForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Lfm2VlForConditionalGeneration",
    "MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM", "MiniMaxM3SparseForConditionalGeneration", "NemotronHForCausalLM",
    "NemotronHPuzzleForCausalLM", "NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2", "NemotronH_Omni_Reasoning_V3",
})  # fmt: skip
# Targets of which is captured what goes into a layer, and so nothing of the last.
ALL_BUT_THE_LAST = frozenset({
    "Cosmos3ForConditionalGeneration", "DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM",
    "Glm4MoeLiteForCausalLM", "Glm5NextForConditionalGeneration", "GlmMoeDsaForCausalLM", "IQuestCoderForCausalLM",
    "InternLM3ForCausalLM", "InternS1ProForConditionalGeneration", "InternS2MobiusForConditionalGeneration",
    "InternS2PreviewForConditionalGeneration", "KimiK25ForConditionalGeneration", "Llama4ForCausalLM", "LlamaForCausalLM",
    "MellumForCausalLM", "Ministral3ForCausalLM", "MistralForCausalLM", "MistralLarge3ForCausalLM", "NanbeigeForCausalLM",
    "Phi3ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration", "Qwen4ExpForConditionalGeneration", "TeleFLMForCausalLM",
})  # fmt: skip


def refuse(pair: Pair, options: Mapping[str, Any], version: str | None) -> None:
    """Raise ConfigError for a pair that SGLang refuses, or would run with acceptance lost and no error."""
    assert pair.draft is not None
    draft = pair.draft
    if options.get("device") == "cpu":
        raise ConfigError("SGLang runs DFlash drafts on a GPU alone: leave out --device cpu, or give --no-draft")
    if options.get("pipeline_parallel_size", 1) > 1:
        raise ConfigError(
            "--pipeline-parallel-size cannot be handed over to SGLang: it runs DFlash drafts in one stage alone; "
            "give --tensor-parallel-size"
        )
    refuse_split(draft, options.get("tensor_parallel_size", 1))
    _refuse_parts(draft)
    _refuse_reading(draft)
    _refuse_target(pair, draft, newer=version is not None and numbers(version, len(KNOWN)) > KNOWN)
    _refuse_positions(pair, draft, options.get("max_model_len"))


def _refuse_parts(draft: Draft) -> None:
    place, config = draft.place, draft.config
    if is_speculators(draft.raw):
        raise ConfigError(
            f"{place} has the layout of Speculators, which SGLang does not read: rewrite it with "
            "flashdraft.checkpoint.convert(SOURCE, DESTINATION, 'dflash')"
        )
    if draft.raw.get("architectures") != ["DFlashDraftModel"]:
        raise ConfigError(
            f"{place} does not say that its architecture is DFlashDraftModel, by which SGLang finds it: load and save it with "
            "flashdraft"
        )
    if config.has_own_lm_head or config.has_own_embeddings or config.draft_vocab_size is not None:
        raise ConfigError(
            f"{place} has a head, embeddings or a vocabulary of its own, for which SGLang takes the target's without a word: "
            "use --engine vllm, or train a draft that shares them"
        )
    if section_of(draft.raw) is not None:
        raise ConfigError(f"{place} is quantized, and SGLang runs these drafts unquantized alone: give the draft in bfloat16")


def _refuse_reading(draft: Draft) -> None:
    """It takes config.json as transformers reads it, causality from is_causal, and of dflash_config none of the visibility."""
    place, config = draft.place, draft.config
    raw = {key: value for key, value in draft.raw.items() if key != "model_type"}
    try:
        read = AutoConfig.for_model(str(draft.raw.get("model_type")), **raw).get_text_config()
    # All of them, as in inspection.py: what a configuration cannot hold surfaces as almost any exception.
    except Exception as error:
        raise ConfigError(
            f"{place}: transformers, with which SGLang reads config.json, does not take it "
            f"({(str(error).strip() or type(error).__name__).splitlines()[0]}): load and save the draft with flashdraft"
        ) from error
    types = getattr(read, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    sliding = [kind == "sliding_attention" for kind in types]
    window = getattr(read, "sliding_window", None)
    if tuple(window if slides else None for slides in sliding) != config.windows:
        raise ConfigError(
            f"{place} has its window in other words than layer_types, use_sliding_window and sliding_window, which SGLang "
            "reads alone: load and save it with flashdraft"
        )
    _refuse_causality(draft, sliding)
    inner = draft.raw.get("dflash_config")
    stated = {**draft.raw, **(inner if isinstance(inner, dict) else {})}
    ids = stated.get("target_layer_ids")
    found = {
        "rope_theta": (getattr(read, "rope_parameters", None) or {}).get("rope_theta"),
        "head_dim": getattr(read, "head_dim", None),
        "rms_norm_eps": getattr(read, "rms_norm_eps", None),
        "max_position_embeddings": getattr(read, "max_position_embeddings", None),
        "mask_token_id": stated.get("mask_token_id"),
        "target_layer_ids": tuple(sorted(ids)) if isinstance(ids, list) else None,
    }
    for name, value in found.items():
        if value != (meant := getattr(config, name)):
            raise ConfigError(
                f"{place}: SGLang would read {name} as {value}, and {meant} is meant: load and save it with flashdraft"
            )


def _refuse_causality(draft: Draft, sliding: list[bool]) -> None:
    stated = draft.raw.get("is_causal")
    if tuple(bool(slides if stated is None else stated) for slides in sliding) == draft.config.causal:
        return
    if len(set(draft.config.causal)) > 1:
        raise ConfigError(
            f"{draft.place} mixes causal and bidirectional layers, which SGLang cannot be told: use --engine vllm"
        )
    value = str(draft.config.causal[0]).lower()
    raise ConfigError(
        f'{draft.place} does not say `"is_causal": {value}` in its config.json, where SGLang looks for it, and most '
        "guesses would be lost: add that line (flashdraft and vLLM read it too)"
    )


def _refuse_target(pair: Pair, draft: Draft, newer: bool) -> None:
    kind, config = pair.architecture, draft.config
    if not newer and kind not in EVERY_LAYER | ALL_BUT_THE_LAST:
        raise ConfigError(
            f"SGLang has no DFlash for {pair.target}, a {kind}, up to its release {'.'.join(map(str, KNOWN))}: use --engine "
            "vllm, or give --no-draft"
        )
    if kind in ALL_BUT_THE_LAST and max(config.target_layer_ids) == pair.layers - 1:
        raise ConfigError(
            f"{draft.place} reads features of the target's last layer, which SGLang does not hand over of a {kind}: use "
            "--engine vllm, or train a draft with target_layer_ids below it"
        )
    scale = math.sqrt(config.hidden_size) if kind in SCALED else 1.0
    # Relative: in 16 bits the target's own scale is rounded by as much.
    if math.isclose(config.input_embedding_scale, scale, rel_tol=0.004):
        return
    if kind in SCALED:
        raise ConfigError(
            f"SGLang multiplies the embeddings by {scale:.4g} for the draft of a {kind} too, and {draft.place} is not said to "
            f'be trained with that: use --engine vllm, or, if it was, add `"input_embedding_scale": {scale:.6g}` to its '
            "config.json (`flashdraft doctor` finds out)"
        )
    raise ConfigError(
        f"{draft.place} multiplies its embeddings by {config.input_embedding_scale:g}, which SGLang would leave out: "
        "no guess would be right; train one without input_embedding_scale"
    )


def _refuse_positions(pair: Pair, draft: Draft, longest: int | None) -> None:
    """It starts the draft with the target's context length, and ends if that is longer than the draft's own."""
    most = draft.config.max_position_embeddings
    wanted = longest if longest is not None else pair.positions
    if wanted is not None and wanted > most:
        raise ConfigError(
            f"{draft.place} has {most} positions, and SGLang starts no draft with fewer than the {wanted} of its target: give "
            f"--max-model-len {most}"
        )
