"""Drafts in NVFP4 with a quantized head of their own in real vLLM: read as they were written, and computed to the same logits.

On a CPU it has no kernel for them, so a stand-in (vllm_cpu_plugin.py) computes what vLLM has read.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from both_engines import both, compare, differences
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
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The target in bfloat16; beside its draft, the same as `flashdraft quantize` makes it."""
    folder = tmp_path_factory.mktemp("pair")
    pair = learned_pair(folder, lambda vocabulary: make("qwen3", torch.bfloat16, vocab_size=vocabulary))
    options = ["--target", pair.target, "--calibration", folder / "answers", "--heldout", 0, "--device", "cpu"]
    ignore = [part for name in IGNORED for part in ("--ignore", name)]
    for name, more in (("own", ["--own-head", "--w4a4", *ignore]), ("shared", [])):
        given = [pair.draft, *options, "--output", folder / name, *more]
        result = CliRunner().invoke(app, ["quantize", *map(str, given)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    return pair


# wrong: what another revision computes, or the draft unquantized. It must not pass.
@pytest.mark.parametrize(
    ("head", "revision", "wrong"),
    [("own", None, ("own", "w4a4")), ("own", "w4a4", ("own", None)), ("shared", None, ("draft", None))],
    ids=["own head, W4A16", "own head, W4A4", "shared head, W4A16"],
)
def test_its_logits_are_ours(
    pair: Pair, head: str, revision: str | None, wrong: tuple[str, str | None], tmp_path: Path
) -> None:
    draft = pair.draft.parent / head
    # In float32, in which two engines can be compared; behind `--`, as it is refused for such drafts otherwise.
    behind = ("--dtype", "float32")
    with serving(tmp_path, pair.target, draft, *behind, revision=revision, record=tmp_path / "blocks") as url:
        served = both(url, pair.target, draft, revision=revision, at_once=1)
        sequences = compare(served, some_prompts(), TOKENS, same_steps=revision is None)

    def found(name: str, revision: str | None) -> torch.Tensor:
        expected = load_draft(pair.draft.parent / name, revision=revision, dtype=torch.float32)
        return differences(tmp_path / "blocks", pair.target, expected, sequences)

    # Not the largest of all: what lies between two codes of W4A4 may be rounded to either.
    assert found(head, revision).quantile(0.95) < 1e-4
    assert found(*wrong).quantile(0.05) > 0.01
