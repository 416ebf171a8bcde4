"""The built-in draft in four bits still guesses: a wrong scale, layout or fused group shows in acceptance and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashdraft import builtin
from flashdraft.checkpoint import load_draft, save_draft
from flashdraft.engine.request import SamplingParams
from flashdraft.errors import ConfigError
from flashdraft.llm import LLM
from flashdraft.prompts import read_prompts
from flashdraft.quant.groups import fused_groups
from flashdraft.quant.linear import QuantizedLinear, linears, swap
from flashdraft.quant.nvfp4 import amax, quantize, tensor_scale


def committed_a_step(draft: Path) -> tuple[float, list[list[int]]]:
    """Tokens committed per verify step over a few answers, and the answers."""
    llm = LLM(None, draft, device="cpu", max_model_len=512, max_num_seqs=3, adaptive_width=False)
    texts = [p.turns[0] for p in read_prompts(builtin.PROMPTS) if p.category in ("coding", "math")][:3]
    asked = [[{"role": "user", "content": text}] for text in texts]
    answers = [one.outputs[0] for one in llm.chat(asked, SamplingParams(temperature=0, max_tokens=24))]
    steps = [count for answer in answers for count in answer.committed_per_step]
    return sum(steps) / len(steps), [answer.token_ids for answer in answers]


@pytest.fixture(scope="module")
def unquantized() -> tuple[float, list[list[int]]]:
    try:
        builtin.target_path()
    except ConfigError as error:
        pytest.skip(str(error))
    return committed_a_step(builtin.draft_path())


@pytest.mark.slow
def test_rounding_alone_keeps_most_of_the_acceptance_length(unquantized: tuple[float, list[list[int]]], tmp_path: Path) -> None:
    draft = load_draft(builtin.draft_path()).requires_grad_(False)
    leaves = linears(draft)
    for members in fused_groups(leaves).values():
        scale_2 = tensor_scale(amax([leaves[name].weight for name in members]))
        for name in members:
            swap(draft, name, QuantizedLinear(quantize(leaves[name].weight, scale_2)))
    folder = save_draft(draft, tmp_path / "draft")
    assert (folder / "model.safetensors").stat().st_size < 15e6
    length, answers = committed_a_step(folder)
    assert answers == unquantized[1], "the text is the target's own with any draft"
    assert length > 0.85 * unquantized[0] > 0.85 * 2
