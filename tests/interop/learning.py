"""Small random pairs whose draft has learned its target's answers in part, on disk as any hub directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from answers import write_answers
from saved import Pair, saved_pair
from transformers import PreTrainedModel

from flashdraft.checkpoint import save_draft
from flashdraft.draft import DFlashConfig, DFlashDraft
from flashdraft.engine.request import SamplingParams
from flashdraft.llm import LLM
from flashdraft.targets import load_target, load_tokenizer
from flashdraft.train.data import Batches, load_records
from flashdraft.train.identity import tokenizer_hash
from flashdraft.train.loss import LossConfig
from flashdraft.train.trainer import TrainConfig, Trainer

PROMPTS, TOKENS, VOCAB = 8, 40, 290


def some_prompts() -> list[list[int]]:
    """Each shorter than the one before, most of them longer than the windows of target and draft."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(6, VOCAB, (length,), generator=generator).tolist() for length in range(90, 90 - 10 * PROMPTS, -10)]


def learned_pair(folder: Path, make: Callable[[int], PreTrainedModel]) -> Pair:
    """make(vocabulary): the target. Its answers to some_prompts are left in folder/answers.

    The draft learns until some of its proposals are right, and not all of them.
    """
    pair = saved_pair(folder)
    tokenizer, prompts = load_tokenizer(pair.target), some_prompts()
    make(len(tokenizer)).save_pretrained(pair.target)
    llm = LLM(pair.target, False, device="cpu", dtype="float32", max_model_len=512, max_num_seqs=PROMPTS)
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
    pairs = [(prompt, one.outputs[0].token_ids) for prompt, one in zip(prompts, answers, strict=True)]
    write_answers(folder / "answers", pairs, tokenizer_hash(tokenizer))
    target = load_target(pair.target, dtype="float32")
    torch.manual_seed(0)
    config = DFlashConfig(
        hidden_size=target.hidden_size, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, vocab_size=target.vocab_size, num_target_layers=target.num_layers,
        target_layer_ids=(1, target.num_layers - 1), mask_token_id=2, block_size=6, max_position_embeddings=2048,
        windows=(16, 16), causal=(False, False),
    )  # fmt: skip
    draft = DFlashDraft(config)
    batches = Batches(load_records(folder / "answers"), seq_length=144, rows=4, anchors=16, block_size=6, seed=0)
    settings = TrainConfig(steps=60, learning_rate=3e-3, loss=LossConfig(beta=0.0), log_every=10**6)
    Trainer(target, draft, batches, settings, folder / "run", report=lambda row: None).train()
    save_draft(draft, pair.draft)
    return pair
