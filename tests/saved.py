"""A tiny pair on disk, in the layout of any hub directory: weights, tokenizer and chat template, and its draft."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from flashdraft.checkpoint import save_draft
from flashdraft.draft import DFlashConfig, DFlashDraft

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Pair:
    target: Path
    draft: Path


def saved_pair(
    folder: Path,
    *,
    hidden_size: int = 48,
    chat_template: str | None = TEMPLATE,
    seed: int = 0,
    positions: int = 512,
    added: tuple[str, ...] = (),  # tokens, not special ones, beside the vocabulary
) -> Pair:
    torch.manual_seed(seed)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<mask>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 3, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", chat_template=chat_template)
    fast.add_tokens(list(added))
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=positions,
        initializer_range=0.2,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "target")
    fast.save_pretrained(folder / "target")
    draft_config = DFlashConfig(
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=len(fast),
        num_target_layers=3,
        target_layer_ids=(0, 2),
        mask_token_id=2,
        max_position_embeddings=positions,
        windows=(16, 16),
        causal=(False, False),
    )
    draft = DFlashDraft(draft_config)
    for parameter in draft.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1)
    save_draft(draft, folder / "draft")
    return Pair(folder / "target", folder / "draft")


def ending_pair(folder: Path) -> Pair:
    """A saved pair whose answers end at any of 30 tokens: a random target hardly ever chooses one of them."""
    pair = saved_pair(folder)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((pair.target / name).read_text())
        (pair.target / name).write_text(json.dumps({**content, "eos_token_id": [1, *range(200, 229)]}))
    return pair
