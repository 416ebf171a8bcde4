"""The built-in pair in real vLLM on the CPU: the same text as here, and the same acceptance length.

Everything is asked of one server a pair: it takes a minute or more to start.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from both_engines import WITHIN, Served, both, compare
from evaluating import options
from vllm_serving import serving

from flashdraft import builtin
from flashdraft.checkpoint import Layout, load_draft, save_draft
from flashdraft.draft import DFlashDraft
from flashdraft.eval.command import run_eval
from flashdraft.llm import LLM
from flashdraft.prompts import read_prompts
from flashdraft.targets.load import load_target, load_tokenizer
from flashdraft.train.files import read_object

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in target in transformers' layout: vLLM reads no GGUF file."""
    folder = tmp_path_factory.mktemp("target")
    load_target(builtin.target_path(), dtype="float32").model.save_pretrained(folder)
    load_tokenizer(builtin.target_path()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("plain"), target, builtin.draft_path()) as url:
        yield both(url, target, builtin.draft_path())


def chat_prompts(llm: LLM, count: int) -> list[list[int]]:
    prompts = read_prompts(builtin.PROMPTS)[:count]
    return [llm.render([*prompt.opening, {"role": "user", "content": prompt.turns[0]}], None) for prompt in prompts]


def test_the_built_in_pair_gives_the_same_text_and_acceptance(plain: Served) -> None:
    compare(plain, chat_prompts(plain.llm, 40))


def test_prompts_beyond_the_window_of_the_draft_too(plain: Served) -> None:
    ids = [token for prompt in chat_prompts(plain.llm, 40) for token in prompt]
    assert set(load_draft(builtin.draft_path()).config.windows) == {1024}
    compare(plain, [ids[start : start + 1024 + beyond] for start, beyond in ((0, 80), (300, 320), (600, 560))])


def test_eval_measures_both_engines_alike(plain: Served, target: Path, tmp_path: Path) -> None:
    found = {}
    for name, url in (("vllm", plain.url), ("flashdraft", None)):
        given: dict[str, Any] = {"limit": 6, "compare": False}
        given |= {} if url else {"target": str(target), "drafts": (str(builtin.draft_path()),), "serve": ("--dtype", "float32")}
        assert run_eval(options(Path("mini"), tmp_path / name, url, concurrency=4, **given)) == 0
        results = read_object(tmp_path / name / "results.json")
        assert results is not None
        found[name] = results["drafts"][0]["acceptance"]["all"]["step_pooled"]["value"]
    assert found["vllm"] == pytest.approx(found["flashdraft"], rel=WITHIN)


@pytest.mark.parametrize("layout", ["dflash", "speculators"])
def test_a_head_of_its_own_in_either_layout(layout: Layout, target: Path, tmp_path: Path) -> None:
    """The target's head as the draft's own: the same guesses as without, if it is read."""
    shared = load_draft(builtin.draft_path())
    own = DFlashDraft(shared.config.with_(has_own_lm_head=True))
    head = load_target(target, dtype="float32").model.get_output_embeddings().weight.detach()
    own.load_state_dict({**shared.state_dict(), "lm_head.weight": head})
    draft = save_draft(own.to(torch.bfloat16), tmp_path / "draft", layout=layout)
    with serving(tmp_path, target, draft) as url:
        served = both(url, target, draft)
        compare(served, chat_prompts(served.llm, 8), 32)
