"""A tiny target, a draft for it, and records of answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from flashdraft.draft import DFlashConfig, DFlashDraft
from flashdraft.targets.target import Target
from flashdraft.train.data import Records

VOCAB, MASK = 64, 3
SIZES = ((3, 9), (5, 14), (2, 7), (4, 11), (6, 8), (3, 2), (1, 12), (4, 1))  # prompt and answer tokens


def make_target() -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        vocab_size=VOCAB, max_position_embeddings=128, initializer_range=0.3, eos_token_id=1, bos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    return Target(LlamaForCausalLM(config).float().eval())


def make_draft() -> DFlashDraft:
    torch.manual_seed(1)
    config = DFlashConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        vocab_size=VOCAB, num_target_layers=5, target_layer_ids=(1, 3), mask_token_id=MASK, block_size=4, windows=(6, None),
        causal=(True, False),
    )  # fmt: skip
    return DFlashDraft(config)


def make_records(sizes: Sequence[tuple[int, int]] = SIZES, vocab: int = VOCAB) -> Records:
    generator = torch.Generator().manual_seed(2)

    def tokens(n: int) -> list[int]:
        return torch.randint(4, vocab, (n,), generator=generator).tolist()

    return Records.from_lists([(tokens(p), tokens(o)) for p, o in sizes], ["ab"[i % 2] for i in range(len(sizes))])
