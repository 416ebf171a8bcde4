"""A small Gemma 4 in real vLLM: layers of two kinds and sizes, shared keys and values, per-layer embeddings, a soft cap."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from both_engines import Served, compare, differences, ours
from families import make
from learning import TOKENS, learned_pair, some_prompts
from transformers import PreTrainedModel
from vllm_serving import serving

from flashdraft.checkpoint import load_draft

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(7200)]


def gemma4(vocabulary: int) -> PreTrainedModel:
    """The last two layers share keys and values. Of the others, four are sliding and two full: vLLM makes groups of two, so
    that the draft's two layers, whose window is another one, are one group, which it needs on the CPU.
    """
    sizes = dict(vocab_size=vocabulary, vocab_size_per_layer_input=vocabulary, head_dim=32, global_head_dim=64)
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention", "full_attention"]
    return make("gemma4", **sizes, num_hidden_layers=8, layer_types=kinds, num_kv_shared_layers=2, sliding_window=24)


def test_a_gemma_4_pair_gives_the_same_text_in_the_same_steps(tmp_path: Path) -> None:
    pair = learned_pair(tmp_path, gemma4)
    with serving(tmp_path, pair.target, pair.draft, record=tmp_path / "blocks") as url:
        served = Served(url, ours(pair.target, pair.draft), at_once=1)
        sequences = compare(served, some_prompts(), TOKENS, same_steps=True)
    found = differences(tmp_path / "blocks", pair.target, load_draft(pair.draft, dtype=torch.float32), sequences)
    assert found.max() < 1e-4
