"""SGLang itself, without a GPU: its options, what it makes of the hand-over's commands, and its own model of a draft.

The interpreter is the one that FLASHDRAFT_SGLANG_PYTHON names: `make test-sglang`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from handing import read
from safetensors.torch import load_file, save_file
from saved import Pair as Saved
from sglang_cases import CASES, FROZEN, commands, draft_for_sglang
from torch import Tensor

from flashdraft.checkpoint import load_draft
from flashdraft.draft import DFlashConfig, DFlashDraft, propose_offline

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

PROBE = Path(__file__).parent / "sglang_probe.py"
CONTEXT = 40  # tokens before the block: more than the windows of 16 reach back
# What differs from a draft of two bidirectional layers with a window of 16.
DRAFTS: dict[str, dict[str, Any]] = {
    "windows": {},
    "no windows": {"windows": (None, None)},
    "causal": {"causal": (True, True)},
    "causal without windows": {"windows": (None, None), "causal": (True, True)},
    "one window": {"windows": (16, None)},
    "one window, causal": {"windows": (None, 16), "causal": (False, True)},
    "other sizes": {"attention_bias": True, "rope_theta": 1e4, "rms_norm_eps": 1e-5, "block_size": 5, "intermediate_size": 80},
    "scaled logits": {"logit_scale": 0.5, "final_logit_softcapping": 15.0},
}


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """What the probe says of these cases."""
    python = os.environ.get("FLASHDRAFT_SGLANG_PYTHON")
    if python is None:
        pytest.skip("FLASHDRAFT_SGLANG_PYTHON names no interpreter: run `make test-sglang`")
    folder = tmp_path_factory.mktemp("probe")

    def run(what: str, cases: list[Any] | None = None) -> Any:
        places = [folder / "out.json"]
        if cases is not None:
            (folder / "in.json").write_text(json.dumps(cases))
            places.insert(0, folder / "in.json")
        # Its own packages, none of this environment's, and no GPU, for which it would want its kernels.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run([python, PROBE, what, *places], capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads((folder / "out.json").read_text())

    return run


def test_its_options_and_targets_are_those_that_are_frozen(ask) -> None:
    found = ask("options")
    assert found["version"] == FROZEN["version"]
    assert {name: found["options"].get(name) for name in FROZEN["options"]} == FROZEN["options"]
    assert found["targets"] == FROZEN["targets"]
    assert found["scaling"] == []  # by another number than the target's own, as for Gemma 4


def test_it_takes_the_commands_and_reads_them_as_they_are_meant(ask, pair: Saved, tmp_path: Path) -> None:
    found = read(pair.target, draft_for_sglang(pair, tmp_path / "draft"))
    wanted = [fields for _, fields in CASES]
    cases = list(zip(commands(found), map(list, wanted), strict=True))
    on_cpu = [*cases[1][0], "--device", "cpu", "--attention-backend", "triton"]
    *answers, elsewhere = ask("commands", [*cases, (on_cpu, [])])
    assert answers == wanted
    assert "DFLASH speculative decoding is not supported" in elsewhere["error"]


def test_its_model_of_a_draft_is_the_definition(ask, pair: Saved, tmp_path: Path) -> None:
    places = [draft_for_sglang(pair, tmp_path / str(i), **changes) for i, changes in enumerate(DRAFTS.values())]
    drafts = [load_draft(place) for place in places]
    blocks = [block_for(draft.config) for draft in drafts]
    cases = []
    for place, block in zip(places, blocks, strict=True):
        save_file(block, f"{place}.in")
        cases.append((commands(read(pair.target, place))[1], f"{place}.in", f"{place}.out"))
    short = draft_for_sglang(pair, tmp_path / "short", max_position_embeddings=256)
    *answers, too_short = ask(
        "drafts", [*cases, ([str(short) if one == str(places[-1]) else one for one in cases[-1][0]], "", "")]
    )
    assert "context_length (512) is greater than the derived context_length (256)" in too_short["error"]
    for name, place, draft, block, found in zip(DRAFTS, places, drafts, blocks, answers, strict=True):
        config = draft.config
        assert (found["architecture"], found["unset"], found["quantization"]) == ("DFlashDraftModel", [], None), name
        assert found["parameters"] == found["in_the_file"] == sum(p.numel() for p in draft.parameters()), name
        assert (found["block_size"], found["mask_token_id"]) == (config.block_size, config.mask_token_id)
        assert found["target_layer_ids"] == list(config.target_layer_ids)
        with torch.no_grad():
            expected = proposals(draft, block)
            got = draft.scaled(load_file(f"{place}.out")["hidden"][1:])
        assert (got - expected).abs().max() < 1e-5 * expected.abs().max(), name


def block_for(config: DFlashConfig) -> dict[str, Tensor]:
    features = torch.randn(CONTEXT, config.num_features * config.hidden_size)
    return {"features": features, "embeddings": torch.randn(config.block_size, config.hidden_size)}


def proposals(draft: DFlashDraft, block: dict[str, Tensor]) -> Tensor:
    """By the definition, under a head that changes nothing."""
    return propose_offline(draft, block["features"], 0, lambda ids: block["embeddings"], head=lambda hidden: hidden)
