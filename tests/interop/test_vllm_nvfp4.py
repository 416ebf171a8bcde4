"""Drafts in NVFP4 with a quantized head of their own in real vLLM: read as they were written, and computed to the same logits.

On a CPU it has no kernel for them, so a stand-in (vllm_cpu_plugin.py) computes what vLLM has read.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from both_engines import Served, compare, differences, ours
from families import make
from learning import TOKENS, learned_pair, some_prompts
from saved import Pair
from typer.testing import CliRunner
from vllm_serving import serving

from flashdraft.checkpoint import load_draft
from flashdraft.cli import app

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(7200)]

IGNORED = ("layers.1.mlp.gate_up_proj", "layers.0.self_attn.o_proj")  # one that is fused there, one that is not


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """W4A16, and W4A4 in a sub-directory, by `flashdraft quantize`."""
    folder = tmp_path_factory.mktemp("pair")
    pair = learned_pair(folder, lambda vocabulary: make("qwen3", torch.bfloat16, vocab_size=vocabulary))
    options = ["--target", pair.target, "--calibration", folder / "answers", "--output", folder / "quantized"]
    options += [
        "--own-head",
        "--w4a4",
        "--heldout",
        0,
        "--device",
        "cpu",
        *(part for name in IGNORED for part in ("--ignore", name)),
    ]
    result = CliRunner().invoke(app, ["quantize", str(pair.draft), *map(str, options)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return Pair(pair.target, folder / "quantized")


@pytest.mark.parametrize(("revision", "other"), [(None, "w4a4"), ("w4a4", None)])
def test_its_logits_are_ours(quantized: Pair, revision: str | None, other: str | None, tmp_path: Path) -> None:
    # In float32, in which two engines can be compared; behind `--`, as it is refused for such drafts otherwise.
    behind = ("--dtype", "float32")
    with serving(tmp_path, quantized.target, quantized.draft, *behind, revision=revision, record=tmp_path / "blocks") as url:
        served = Served(url, ours(quantized.target, quantized.draft, revision), at_once=1)
        sequences = compare(served, some_prompts(), TOKENS, same_steps=revision is None)

    def found(revision: str | None) -> torch.Tensor:
        draft = load_draft(quantized.draft, revision=revision, dtype=torch.float32)
        return differences(tmp_path / "blocks", quantized.target, draft, sequences)

    # Not the largest of all: what lies between two codes of W4A4 may be rounded to either.
    assert found(revision).quantile(0.95) < 1e-4
    assert found(other).quantile(0.05) > 0.01
