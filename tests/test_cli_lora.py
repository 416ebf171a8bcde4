"""A target with an adapter from answers to its own draft, on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from saved import ending_pair, saved_pair
from synthesizing import THINKING_TEMPLATE, rows_of
from tiny_fit import RECIPE, write_prompts

from flashdraft import LLM
from flashdraft.targets.load import adapter_hash

CPU = ("--dtype", "float32", "--device", "cpu")


def adapter(folder: Path, size: float) -> Path:
    """One of the first layer's q_proj [64, 48], with a template that knows thinking."""
    folder.mkdir()
    content = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "layers_to_transform": [0]}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(THINKING_TEMPLATE)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    tensors = {f"{name}A.weight": torch.ones(2, 48), f"{name}B.weight": torch.full((64, 2), size)}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_answers_and_draft_of_an_adapter_are_its_own_with_thinking_on_and_off(flashdraft, tmp_path):
    target = ending_pair(tmp_path).target
    lora, other = adapter(tmp_path / "lora", 0.1), adapter(tmp_path / "other", 0.2)
    recipe, answers, draft = tmp_path / "recipe.toml", tmp_path / "answers", tmp_path / "draft-of-lora"
    recipe.write_text(RECIPE)
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    asked = ["synthesize", target, "--prompts", prompts, "--output", answers, "--max-tokens", 12, "--thinking", "mixed", *CPU]
    code, out, _ = flashdraft(*asked, "--lora", lora)
    assert (code, f"flashdraft train {target} --lora {lora} --data" in out) == (0, True)
    assert {row["thinking"] for row in rows_of(answers).values()} == {True, False}
    code, _, err = flashdraft(*asked, "--lora", other)
    assert (code, "holds answers with target" in err) == (2, True)
    trained = ["train", target, "--data", answers, "--output", draft, "--recipe", recipe, "--steps", 4, *CPU]
    code, out, _ = flashdraft(*trained, "--lora", lora)
    assert (code, "thinking on" in out, "thinking off" in out) == (0, True, True)
    figures = json.loads((draft / "training.json").read_text())
    assert figures["lora"] == {"name": str(lora), "hash": adapter_hash(lora)}
    assert set(figures["heldout"]["by_thinking"]) == {"all", "on", "off"}
    assert LLM(target, draft, lora=lora, dtype="float32", device="cpu").warning is None
    assert "was trained for the adapter" in LLM(target, draft, dtype="float32", device="cpu").warning


def test_a_wrong_adapter_is_one_sentence_in_every_command(flashdraft, tmp_path):
    pair, prompts = saved_pair(tmp_path), write_prompts(tmp_path / "prompts.jsonl")
    (tmp_path / "data").mkdir()
    for command in (
        ["synthesize", pair.target, "--prompts", prompts, "--output", tmp_path / "a"],
        ["fit", pair.target, "--prompts", prompts, "--output", tmp_path / "b", "--hours", 1],
        ["train", pair.target, "--data", tmp_path / "data", "--output", tmp_path / "c"],
    ):
        code, _, err = flashdraft(*command, "--lora", pair.draft, *CPU)
        assert (code, err.count("\n")) == (2, 1)
        assert "no adapter_config.json, so it is no LoRA adapter" in err
