"""A pair in vLLM and here: the same questions to both, and what must be the same in the answers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from vllm_serving import complete

from flashdraft.draft import DFlashDraft, propose_offline
from flashdraft.engine.request import SamplingParams
from flashdraft.llm import LLM

TIE = 1e-3  # margin of the two likeliest tokens, below which rounding may decide
WITHIN = 0.02  # acceptance lengths
TOKENS = 64


@dataclass(frozen=True)
class Served:
    """A pair in both engines; the target in float32."""

    url: str
    target: Path
    llm: LLM
    at_once: int = 8

    def ask(self, prompts: list[list[int]], tokens: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """vLLM's answers and ours: token ids, and the tokens that each verify step committed."""
        with ThreadPoolExecutor(self.at_once) as pool:
            theirs = list(pool.map(lambda prompt: complete(self.url, prompt, tokens), prompts))
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        answers = [one.outputs[0] for one in self.llm.generate(prompts, params)]
        return theirs, [{"token_ids": a.token_ids, "committed": list(a.committed_per_step)} for a in answers]

    @torch.inference_mode()
    def margin(self, prompt: list[int], tokens: list[int]) -> float:
        """Of the logits of the two likeliest tokens behind prompt and tokens, by the target in transformers."""
        model = AutoModelForCausalLM.from_pretrained(self.target, dtype=torch.float32)
        best = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].topk(2).values
        return float(best[0] - best[1])


def both(url: str, target: Path, draft: Path, *, revision: str | None = None, at_once: int = 8) -> Served:
    """The pair that a vLLM serves, here too."""
    limits = dict(max_model_len=2048, max_num_seqs=8, adaptive_width=False)
    return Served(url, target, LLM(target, draft, draft_revision=revision, device="cpu", dtype="float32", **limits), at_once)


def compare(served: Served, prompts: list[list[int]], tokens: int = TOKENS, same_steps: bool = False) -> list[list[int]]:
    """Ask both; the prompts with vLLM's answers. same_steps: where the text is the same, so is what each step commits."""
    theirs, ours = served.ask(prompts, tokens)
    for prompt, a, b in zip(prompts, theirs, ours, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(a["token_ids"], b["token_ids"], strict=True)) if x != y), tokens)
        assert same == tokens or served.margin(prompt, a["token_ids"][:same]) < TIE, (same, a, b)
        # vLLM counts the last step before it is cut to the longest length.
        assert not same_steps or same < tokens or a["committed"][:-1] == b["committed"][:-1], (a, b)
    assert acceptance(theirs) == pytest.approx(acceptance(ours), rel=WITHIN)
    assert acceptance(ours) > 1.3, "a draft that is misread guesses nothing"
    return [prompt + answer["token_ids"] for prompt, answer in zip(prompts, theirs, strict=True)]


def acceptance(answers: list[dict[str, Any]]) -> float:
    """Over all steps but the last of each answer, which vLLM counts before it is cut to the longest length."""
    steps = [count for answer in answers for count in answer["committed"][:-1]]
    return sum(steps) / len(steps)


def recorded(folder: Path) -> list[list[dict[str, Tensor]]]:
    """What vllm_cpu_plugin wrote, by prompt: they were asked one after the other, each shorter than the one before."""
    found: list[list[dict[str, Tensor]]] = []
    last = 0
    for file in sorted(folder.glob("*.pt")):
        made = torch.load(file)
        position = int(made["positions"])
        if not found or position < last:
            found.append([])
        found[-1].append(made)
        last = position
    return found


@torch.inference_mode()
def by_definition(target: Path, draft: DFlashDraft, ids: list[int], positions: list[int]) -> list[Tensor]:
    """The draft's logits [B-1, V], in float32 and without an engine, of the blocks with anchors at these positions of ids."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    outputs: list[Tensor] = []
    for layer in model.get_decoder().layers:
        layer.register_forward_hook(lambda _m, _a, out: outputs.append((out if isinstance(out, Tensor) else out[0])[0]))
    model(torch.tensor([ids]))
    features = torch.cat([outputs[i] for i in draft.config.target_layer_ids], -1)
    # Raw rows and a head without a cap, also where the target scales and caps its own.
    embed = partial(F.embedding, weight=model.get_input_embeddings().weight)
    head = partial(F.linear, weight=model.get_output_embeddings().weight)
    return [propose_offline(draft, features[:p], ids[p], embed, head) for p in positions]


def differences(folder: Path, target: Path, draft: DFlashDraft, sequences: list[list[int]]) -> Tensor:
    """Of every block of the sequences (prompts, each shorter than the one before, with vLLM's answers) that vLLM drafted: the
    largest difference of its logits from the definition's, relative to the largest of those.
    """
    found = recorded(folder)
    assert len(found) == len(sequences)
    differences = []
    for ids, blocks in zip(sequences, found, strict=True):
        # What is drafted behind the end of an answer is thrown away.
        kept = [block for block in blocks if int(block["positions"]) < len(ids)]
        positions = [int(block["positions"]) for block in kept]
        assert [ids[p] for p in positions] == [int(block["anchors"]) for block in kept]
        for block, expected in zip(kept, by_definition(target, draft, ids, positions), strict=True):
            differences.append((block["logits"][0] - expected).abs().max() / expected.abs().max())
    return torch.stack(differences)
