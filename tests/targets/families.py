"""Tiny random models of many families, for tests: hidden size 64, vocabulary 320, weights so large that logits are not flat."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB = 320
MAX_POSITIONS = 4096

_SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=MAX_POSITIONS,
    initializer_range=0.2,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
    tie_word_embeddings=False,
)
_S, _F = "sliding_attention", "full_attention"
_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, num_local_experts=4)
_DEEPSEEK = dict(
    num_key_value_heads=4,
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    moe_intermediate_size=32,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
)
_GEMMA3 = dict(head_dim=32, query_pre_attn_scalar=24, sliding_window=24, layer_types=[_S, _S, _F, _S])
_GEMMA3N = dict(
    head_dim=16,
    sliding_window=24,
    layer_types=[_S, _S, _S, _F],
    num_kv_shared_layers=0,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=VOCAB,
    laurel_rank=8,
    activation_sparsity_pattern=[0.0] * 4,
)
_GEMMA4 = dict(
    num_hidden_layers=6,
    layer_types=[_S, _S, _F, _S, _S, _F],
    num_kv_shared_layers=3,
    head_dim=16,
    global_head_dim=32,
    sliding_window=24,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=VOCAB,
    final_logit_softcapping=30.0,
)
_GPT2 = dict(n_embd=64, n_layer=4, n_head=4, n_positions=MAX_POSITIONS)
_LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=1e4,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=256,
)
_YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=256)
_LONGROPE = dict(
    rope_type="longrope",
    rope_theta=1e4,
    short_factor=[1.0] * 8,
    long_factor=[2.0] * 8,
    original_max_position_embeddings=128,
)
_DYNAMIC = dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)
_MINISTRAL = dict(_YARN, original_max_position_embeddings=16, llama_4_scaling_beta=0.5)
_MROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3])
_VISION = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
_QWEN_VISION = dict(
    depth=1, hidden_size=32, num_heads=2, out_hidden_size=64, intermediate_size=32, deepstack_visual_indexes=[0]
)


def _family(prefix: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    return prefix, changes


# name -> (prefix of its classes in transformers, changes to the sizes above)
FAMILIES = {
    "llama": _family("Llama"),
    "llama3 rope": _family("Llama", rope_parameters=_LLAMA3_ROPE),
    "yarn": _family("Qwen3", head_dim=16, rope_parameters=_YARN),
    "qwen2": _family("Qwen2"),
    "qwen3": _family("Qwen3", head_dim=32),
    "qwen3 sliding": _family("Qwen3", head_dim=16, layer_types=[_S, _F] * 2, sliding_window=24, use_sliding_window=True),
    "gemma": _family("Gemma", head_dim=16),
    "gemma2": _family(
        "Gemma2",
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=10.0,
    ),
    "gemma3": _family("Gemma3", **_GEMMA3),
    "gemma3n": _family("Gemma3n", **_GEMMA3N),
    "gemma4": _family("Gemma4", **_GEMMA4),
    "mistral": _family("Mistral", sliding_window=24),
    "ministral3": _family("Ministral3", head_dim=16, rope_parameters=_MINISTRAL),
    "mixtral": _family("Mixtral", **_MOE, sliding_window=24),
    "phi": _family("Phi", num_key_value_heads=4),
    "phi3": _family("Phi3", sliding_window=24),
    "phimoe": _family("Phimoe", **_MOE, sliding_window=24),
    "olmo": _family("Olmo", clip_qkv=3.0),
    "olmo2": _family("Olmo2"),
    "olmo3": _family("Olmo3", layer_types=[_S, _F] * 2, sliding_window=24),
    "olmoe": _family("Olmoe", **_MOE),
    "granite": _family(
        "Granite", logits_scaling=3.0, attention_multiplier=0.1, embedding_multiplier=4.0, residual_multiplier=0.5
    ),
    "granitemoe": _family("GraniteMoe", **_MOE, logits_scaling=3.0, attention_multiplier=0.1),
    "cohere": _family("Cohere", logit_scale=0.5, use_qk_norm=True),
    "cohere2": _family("Cohere2", logit_scale=0.5, sliding_window=24, layer_types=[_S, _S, _S, _F]),
    "smollm3": _family("SmolLM3", no_rope_layers=[1, 0, 1, 0]),
    "stablelm": _family("StableLm", use_qkv_bias=True, qk_layernorm=True),
    "starcoder2": _family("Starcoder2", sliding_window=24),
    "glm": _family("Glm", head_dim=16),
    "glm4": _family("Glm4", head_dim=16),
    "glm4moe": _family("Glm4Moe", **_MOE, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, head_dim=16),
    "qwen2moe": _family(
        "Qwen2Moe",
        **_MOE,
        shared_expert_intermediate_size=32,
        use_sliding_window=True,
        sliding_window=24,
        layer_types=[_S, _F, _F, _F],
    ),
    "qwen3moe": _family("Qwen3Moe", **_MOE, head_dim=16),
    "deepseek v2": _family("DeepseekV2", **_DEEPSEEK, head_dim=8),
    "deepseek v3": _family("DeepseekV3", **_DEEPSEEK),
    "nemotron": _family("Nemotron"),
    "seed-oss": _family("SeedOss", head_dim=16),
    "hunyuan": _family("HunYuanDenseV1", head_dim=16),
    "ernie4.5": _family("Ernie4_5", head_dim=16),
    "exaone4": _family("Exaone4", head_dim=16, sliding_window=24, layer_types=[_S, _S, _S, _F]),
    "apertus": _family("Apertus"),
    "arcee": _family("Arcee"),
    "helium": _family("Helium", head_dim=16),
    "gpt-oss": _family("GptOss", **_MOE, head_dim=16, sliding_window=24),
    "gpt-neox": _family("GPTNeoX"),
    "gpt2": _family("GPT2", **_GPT2),
    "gpt2 scaled by layer": _family("GPT2", **_GPT2, scale_attn_by_inverse_layer_idx=True),
    "gpt-bigcode": _family("GPTBigCode", **_GPT2),
    "opt": _family("OPT", ffn_dim=96, word_embed_proj_dim=64, init_std=0.2),
    "biogpt": _family("BioGpt"),
    "gpt-neo": _family("GPTNeo", num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]], window_size=24),
    "falcon": _family("Falcon", new_decoder_architecture=True, num_kv_heads=2),
    "falcon alibi": _family("Falcon", alibi=True),
    "bloom": _family("Bloom", n_head=4, n_layer=4),
    "mpt": _family("Mpt", d_model=64, n_heads=4, n_layers=4, max_seq_len=MAX_POSITIONS),
    "rwkv": _family("Rwkv", attention_hidden_size=64),
    "mamba": _family("Mamba", state_size=8),
    "jamba": _family("Jamba", attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4),
    "recurrentgemma": _family("RecurrentGemma", lru_width=64, attention_window_size=24),
    "qwen3-next": _family("Qwen3Next", **_MOE, head_dim=16, shared_expert_intermediate_size=32),
    "qwen3.5": _family("Qwen3_5", head_dim=16),
    "lfm2": _family("Lfm2", layer_types=["conv", _F] * 2),
    "falcon-h1": _family("FalconH1", mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1),
    "llama4": _family("Llama4", num_local_experts=2, attention_chunk_size=16, intermediate_size_mlp=96),
    "doge": _family("Doge"),
    "diffllama": _family("DiffLlama"),
    "bert": _family("Bert", is_decoder=True),
    "t5": _family("T5", d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4),
    "longrope": _family("Phi3", original_max_position_embeddings=128, rope_parameters=_LONGROPE),
    "dynamic rope": _family("Llama", rope_parameters=_DYNAMIC),
    "gemma3 bidirectional": _family("Gemma3", head_dim=16, use_bidirectional_attention=True),
}
# Multimodal models, whose text part is served: name -> (prefix, changes to the text part, the rest of the configuration)
MULTIMODAL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3 multimodal": (
        "Gemma3",
        _GEMMA3,
        dict(vision_config=dict(_VISION, image_size=28, patch_size=14), mm_tokens_per_image=4),
    ),
    "gemma4 multimodal": ("Gemma4", dict(_GEMMA4, pad_token_id=0), dict(vision_config=_VISION, audio_config=None)),
    "qwen3-vl": ("Qwen3VL", dict(head_dim=16, rope_parameters=_MROPE), dict(vision_config=_QWEN_VISION)),
}
_CLASSES = {
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "Gemma3n": ("Gemma3nTextConfig", "Gemma3nForCausalLM"),
    "Gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM"),
    "Qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "Llama4": ("Llama4TextConfig", "Llama4ForCausalLM"),
    "GPT2": ("GPT2Config", "GPT2LMHeadModel"),
    "Bert": ("BertConfig", "BertLMHeadModel"),
    "T5": ("T5Config", "T5ForConditionalGeneration"),
}


def make(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A random model of a family, always with the same weights; norms and biases are random too, so that none hides."""
    if name in MULTIMODAL:
        prefix, text, rest = copy.deepcopy(MULTIMODAL[name])
        config_name, model_name = f"{prefix}Config", f"{prefix}ForConditionalGeneration"
        values = dict(rest, text_config={**_SIZES, **text, **changes})
    else:
        prefix, own = copy.deepcopy(FAMILIES[name])
        config_name, model_name = _CLASSES.get(prefix, (f"{prefix}Config", f"{prefix}ForCausalLM"))
        values = {**_SIZES, **own, **changes}
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**values))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype).eval()
