"""LoRA adapters of mixtures of experts and of quantized targets: merged where the module is linear, else refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families import make
from quantized_files import save
from safetensors.torch import save_file
from torch import Tensor

from flashdraft.errors import UnsupportedModelError
from flashdraft.targets import load_target

RANK, SCALE = 4, 1.5


def write(folder: Path, tensors: dict[str, Tensor], **changes: object) -> Path:
    folder.mkdir()
    content = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK * SCALE, "task_type": "CAUSAL_LM", "bias": "none", **changes}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def pair(module: str, outputs: int, inputs: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(len(module))
    shapes = {"A": (RANK, inputs), "B": (outputs, RANK)}
    return {
        f"base_model.model.{module}.lora_{side}.weight": torch.randn(shape, generator=generator) * 0.1
        for side, shape in shapes.items()
    }


def assert_merged(target, base: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Every weight is the base's, plus scale * B A where the adapter has a pair."""
    for name, weight in target.model.state_dict().items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        expected = base[name].float()
        if f"{module}.lora_A.weight" in tensors:
            expected = expected + SCALE * tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("targets", [["q_proj", "o_proj"], ["q_proj", "o_proj", "gate_proj", "up_proj"], r".*\.(q|o)_proj"])
@pytest.mark.parametrize("family", ["qwen3moe", "gpt-oss"])
def test_an_adapter_of_the_attention_of_a_mixture_is_merged(family, targets, tmp_path):
    model = make(family)
    model.save_pretrained(tmp_path / "target")
    tensors: dict[str, Tensor] = {}
    for layer in range(4):
        for name in ("q_proj", "o_proj"):
            module = f"model.layers.{layer}.self_attn.{name}"
            tensors |= pair(module, *model.get_submodule(module).weight.shape)
    target = load_target(tmp_path / "target", lora=write(tmp_path / "adapter", tensors, target_modules=targets))
    assert_merged(target, model.state_dict(), tensors)


@pytest.mark.parametrize(
    ("module", "targets", "changes", "message"),
    [
        ("mlp.experts.1.gate_proj", ["gate_proj"], {}, "adapts experts or the router of a mixture"),
        ("mlp.experts.gate_up_proj", ["gate_up_proj"], {}, "adapts experts or the router of a mixture"),
        ("mlp.gate", ["gate"], {}, "adapts experts or the router of a mixture"),
        ("mlp.experts", [], {"target_parameters": ["mlp.experts.gate_up_proj"]}, "it sets target_parameters"),
    ],
)
def test_an_adapter_of_experts_or_router_is_refused_by_name(module, targets, changes, message, tmp_path):
    make("qwen3moe").save_pretrained(tmp_path / "target")
    tensors = pair(f"model.layers.0.{module}", 32, 64)
    lora = write(tmp_path / "adapter", tensors, target_modules=targets, **changes)
    with pytest.raises(UnsupportedModelError, match=message) as refusal:
        load_target(tmp_path / "target", lora=lora)
    assert "merge it with PEFT" in str(refusal.value)


@pytest.mark.parametrize("form", ["fp8 blocks", "gptq"])
def test_an_adapter_is_merged_into_the_plain_weights_of_a_quantized_target(form, tmp_path):
    plain = save(tmp_path / "target", form)
    tensors: dict[str, Tensor] = {}
    for layer in range(4):
        tensors |= pair(f"model.layers.{layer}.mlp.down_proj", 64, 96)
    target = load_target(tmp_path / "target", lora=write(tmp_path / "adapter", tensors, target_modules=["down_proj"]))
    assert_merged(target, plain, tensors)
