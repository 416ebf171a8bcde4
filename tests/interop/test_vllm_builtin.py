"""The built-in pair in real vLLM on the CPU: the same text as here, and the same acceptance length.

Everything is asked of one server a pair: it takes a minute or more to start.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluating import options
from vllm_serving import complete, serving

from flashdraft import builtin
from flashdraft.checkpoint import Layout, load_draft, save_draft
from flashdraft.draft import DFlashDraft
from flashdraft.engine.request import SamplingParams
from flashdraft.eval.command import run_eval
from flashdraft.llm import LLM
from flashdraft.prompts import read_prompts
from flashdraft.targets.load import load_target, load_tokenizer
from flashdraft.train.files import read_object

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(7200)]

TIE = 1e-3  # margin of the two likeliest tokens, below which rounding may decide
WITHIN = 0.02  # acceptance lengths
TOKENS = 64


@dataclass(frozen=True)
class Served:
    """A pair in both engines; the target in float32."""

    url: str
    llm: LLM

    def ask(self, prompts: list[list[int]], tokens: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """vLLM's answers and ours: token ids, and the tokens that each verify step committed."""
        with ThreadPoolExecutor(8) as pool:
            theirs = list(pool.map(lambda prompt: complete(self.url, prompt, tokens), prompts))
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        answers = [one.outputs[0] for one in self.llm.generate(prompts, params)]
        return theirs, [{"token_ids": a.token_ids, "committed": list(a.committed_per_step)} for a in answers]

    def margin(self, prompt: list[int], tokens: list[int]) -> float:
        """Of the logits of the two likeliest tokens behind prompt and tokens."""
        ids = torch.tensor([*prompt, *tokens])
        with torch.inference_mode():
            logits = self.llm.target.model(ids[None]).logits[0, -1].float()
        best = logits.topk(2).values
        return float(best[0] - best[1])


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
        yield Served(url, _ours(target, builtin.draft_path()))


def _ours(target: Path, draft: Path) -> LLM:
    return LLM(target, draft, device="cpu", dtype="float32", max_model_len=2048, max_num_seqs=8)


def chat_prompts(llm: LLM, count: int) -> list[list[int]]:
    prompts = read_prompts(builtin.PROMPTS)[:count]
    return [llm.render([*prompt.opening, {"role": "user", "content": prompt.turns[0]}], None) for prompt in prompts]


def compare(served: Served, prompts: list[list[int]], tokens: int = TOKENS) -> None:
    theirs, ours = served.ask(prompts, tokens)
    for prompt, a, b in zip(prompts, theirs, ours, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(a["token_ids"], b["token_ids"], strict=True)) if x != y), tokens)
        assert same == tokens or served.margin(prompt, a["token_ids"][:same]) < TIE, (same, a, b)
    assert acceptance(theirs) == pytest.approx(acceptance(ours), rel=WITHIN)
    assert acceptance(ours) > 1.3, "a draft that is misread guesses nothing"


def acceptance(answers: list[dict[str, Any]]) -> float:
    """Over all steps but the last of each answer, which vLLM counts before it is cut to the longest length."""
    steps = [count for answer in answers for count in answer["committed"][:-1]]
    return sum(steps) / len(steps)


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
        served = Served(url, _ours(target, draft))
        compare(served, chat_prompts(served.llm, 8), 32)
