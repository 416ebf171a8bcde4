"""A tiny pair on disk whose draft has learned its target's answers by heart, and what is broken in copies of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from saved import Pair, saved_pair

from flashdraft import builtin
from flashdraft.checkpoint import save_draft
from flashdraft.doctor.arms import asking
from flashdraft.doctor.measuring import answer
from flashdraft.draft import DFlashConfig, DFlashDraft
from flashdraft.engine.engine import Engine, EngineConfig
from flashdraft.llm import LLM
from flashdraft.prompts import read_prompts
from flashdraft.targets import load_target, load_tokenizer
from flashdraft.terminal import round_robin
from flashdraft.train.data import Batches, Records
from flashdraft.train.identity import target_hash, tokenizer_hash
from flashdraft.train.loss import LossConfig
from flashdraft.train.trainer import TrainConfig, Trainer

PROMPTS, TOKENS = 16, 24
OPTIONS = ("--limit", PROMPTS, "--max-tokens", TOKENS, "--dtype", "float32", "--device", "cpu")


def prompts_file(folder: Path) -> Path:
    """Short prompts, so that a tiny target answers them in a tiny context."""
    rows = [{"prompt": " ".join(p.turns[0].split()[:4]), "category": p.category} for p in read_prompts(builtin.PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "prompts.jsonl"


def trained_pair(folder: Path, steps: int = 400, **changes: Any) -> Pair:
    """A draft of one layer, which looks 12 tokens back, without a stamp: as other programs save it."""
    pair = saved_pair(folder)
    target, tokenizer = load_target(pair.target, dtype="float32"), load_tokenizer(pair.target)
    llm = LLM.from_parts(tokenizer, Engine(target, None, EngineConfig(max_num_seqs=PROMPTS)))
    asked = [asking(tokenizer)(p) for p in round_robin(read_prompts(prompts_file(folder)), PROMPTS)]
    answers = answer(llm, asked, TOKENS, lambda seconds: None)
    torch.manual_seed(0)
    values: dict[str, Any] = dict(
        hidden_size=48, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        vocab_size=target.vocab_size, num_target_layers=3, target_layer_ids=(0, 1), mask_token_id=2, block_size=4,
        max_position_embeddings=512, windows=(12,),
    )  # fmt: skip
    draft = DFlashDraft(DFlashConfig(**{**values, **changes}))
    records = Records.from_lists([(a.prompt, a.tokens) for a in answers])
    length = -(-int(records.lengths.max()) // 16) * 16
    batches = Batches(records, seq_length=length, rows=4, anchors=20, block_size=4, seed=0)
    config = TrainConfig(steps=steps, learning_rate=5e-3, loss=LossConfig(beta=0.0), log_every=10**6)
    Trainer(target, draft, batches, config, folder / "run", report=lambda row: None).train()
    shutil.rmtree(pair.draft)
    save_draft(draft, pair.draft)
    unstamp(pair.draft)
    heldout = {"acceptance_length": 3.0, "by_thinking": {"all": {}, "off": {}}}
    facts = {
        "target": str(pair.target),
        "target_hash": target_hash(target),
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "lora": None,
        "heldout": heldout,
    }
    (pair.draft / "training.json").write_text(json.dumps(facts))
    return pair


def unstamp(draft: Path) -> None:
    tensors = load_file(draft / "model.safetensors")
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})


def is_stamped(draft: Path) -> bool:
    with safe_open(draft / "model.safetensors", framework="pt") as opened:
        return "config_sha256" in (opened.metadata() or {})


def copied(pair: Pair, folder: Path) -> Pair:
    shutil.copytree(pair.target, folder / "target")
    shutil.copytree(pair.draft, folder / "draft")
    return Pair(folder / "target", folder / "draft")


def rewrite(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def retensor(file: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
