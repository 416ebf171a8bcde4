from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from flashdraft.draft import DFlashConfig, DFlashDraft
from flashdraft.targets.target import Target
from flashdraft.train.data import Records

VOCAB, MASK = 64, 3


@pytest.fixture(scope="session")
def tiny_target() -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        vocab_size=VOCAB, max_position_embeddings=128, initializer_range=0.3, eos_token_id=1, bos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    return Target(LlamaForCausalLM(config).float().eval())


@pytest.fixture
def tiny_draft() -> DFlashDraft:
    torch.manual_seed(1)
    config = DFlashConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        vocab_size=VOCAB, num_target_layers=5, target_layer_ids=(1, 3), mask_token_id=MASK, block_size=4, windows=(6, None),
        causal=(True, False),
    )  # fmt: skip
    return DFlashDraft(config)


@pytest.fixture
def tiny_records() -> Records:
    generator = torch.Generator().manual_seed(2)

    def tokens(n: int) -> list[int]:
        return torch.randint(4, VOCAB, (n,), generator=generator).tolist()

    sizes = [(3, 9), (5, 14), (2, 7), (4, 11), (6, 8), (3, 2), (1, 12), (4, 1)]
    return Records.from_lists([(tokens(p), tokens(o)) for p, o in sizes], ["a", "b"] * 4)
