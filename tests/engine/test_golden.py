"""Run inside our engine, the draft's logits agree with those that vLLM computed for the same pairs (tests/fixtures/dflash)."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
import torch
from pairs import run, small_engine
from safetensors.torch import load_file

from flashdraft.checkpoint import load_draft
from flashdraft.engine.request import Request, SamplingParams
from flashdraft.targets import load_target

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "dflash" / "golden.tar.xz"
CASES = (
    "full",
    "window4_bidirectional",
    "window16_causal_by_default",
    "unsorted_layer_ids",
    "own_head",
    "for_gemma4",
)


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    root = tmp_path_factory.mktemp("golden")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(root, filter="data")
    [cases] = root.rglob("cases.json")
    return cases.parent


def test_every_golden_case_is_tested(golden):
    assert set(json.loads((golden / "cases.json").read_text())) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_engine_reproduces_tokens_and_draft_logits(golden, name):
    case = json.loads((golden / "cases.json").read_text())[name]
    expected = load_file(golden / case["expect"])
    ids, prompt_len = expected["token_ids"].tolist(), case["prompt_len"]
    target = load_target(golden / case["target"], dtype="float32")
    engine = small_engine(target, load_draft(golden / case["draft"], dtype=torch.float32), kv_cache_memory_bytes=32 << 20)
    drafted = []
    plain_logits = engine.draft.logits

    def spy(hidden, head=None):
        drafted.append(plain_logits(hidden, head))
        return drafted[-1]

    engine.draft.logits = spy
    # One token more than recorded, so that the last recorded block is drafted too.
    [output] = run(engine, [Request(ids[:prompt_len], SamplingParams(temperature=0, max_tokens=len(ids) - prompt_len + 1))])
    assert output.tokens[: len(ids) - prompt_len] == ids[prompt_len:]
    prefixes = [prompt_len + sum(output.committed_per_step[:i]) for i in range(len(drafted))]
    compared = 0
    for step in case["steps"]:
        if step["prefix_len"] in prefixes:
            got = drafted[prefixes.index(step["prefix_len"])]
            torch.testing.assert_close(got, expected[f"step{step['step']}.draft_logits"], atol=2e-5, rtol=0)
            compared += 1
    assert compared == len(case["steps"])
    engine.check_idle()
