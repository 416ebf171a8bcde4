"""A tiny Llama as a GGUF file, tokenizer and chat template included."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from transformers import PreTrainedModel

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    _, _, layer, module = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[module]}.{suffix}"


def rotary_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in llama.cpp's order: the two halves of each head interleaved."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_llama(path: Path, model: PreTrainedModel, kind: gguf.GGMLQuantizationType) -> dict[str, torch.Tensor]:
    """Write a Llama with matrices of `kind`; returns its weights as that kind keeps them, under the model's own names."""
    config, kept = model.config, {}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, config.vocab_size)
    for name, tensor in model.state_dict().items():
        array = tensor.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        own = kind if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        rounded = gguf.dequantize(quantize(array, own), own).reshape(array.shape)
        kept[name] = torch.from_numpy(rounded.copy())
        stored = rotary_order(array, heads) if heads else array
        writer.add_tensor(gguf_name(name), quantize(np.ascontiguousarray(stored), own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def byte_tokens() -> list[str]:
    """The 256 bytes as byte-level BPE writes them: printable ones as they are, the others from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    return [chr(b) for b in sorted(printable)] + [chr(256 + i) for i in range(256 - len(printable))]


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """Byte-level BPE: the 256 bytes, two merges, and special tokens at the end."""
    tokens = [*byte_tokens(), "he", "ll"]
    tokens += [f"<|unused{i}|>" for i in range(vocab_size - len(tokens) - len(SPECIAL))] + SPECIAL
    types = [gguf.TokenType.NORMAL] * 258 + [gguf.TokenType.CONTROL] * (vocab_size - 258)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["h e", "l l"])
    writer.add_eos_token_id(vocab_size - len(SPECIAL))
    writer.add_bos_token_id(vocab_size - len(SPECIAL))
    writer.add_chat_template(TEMPLATE)
