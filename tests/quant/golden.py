"""Golden data of NVFP4: the sample that is a fixture, or all of it where FLASHDRAFT_GOLDEN says where it is."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

SAMPLE = Path(__file__).parent.parent / "fixtures" / "nvfp4" / "sample.safetensors"
WHOLE = Path(os.environ["FLASHDRAFT_GOLDEN"]) / "nvfp4" if "FLASHDRAFT_GOLDEN" in os.environ else None
_FILES = {"tensor": "golden_a_qtensor", "gptq": "golden_c_gptq", "input": "golden_d_activation"}
_QKV = ("q_proj", "k_proj", "v_proj")

Case = dict[str, Tensor]


def _grouped(tensors: Case) -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name, tensor in tensors.items():
        case, _, part = name.partition(".")
        cases.setdefault(case, {})[part] = tensor
    return cases


def cases(kind: str) -> dict[str, Case]:
    """The cases of "tensor", "gptq", "input" or "search", each with its tensors by name."""
    if WHOLE is not None and kind != "search":
        return _grouped(load_file(WHOLE / f"{_FILES[kind]}.safetensors"))
    prefix = f"{kind}/"
    return _grouped({k.removeprefix(prefix): t for k, t in load_file(SAMPLE).items() if k.startswith(prefix)})


def exports(kind: str) -> list[dict[str, Case]]:
    """Fused groups of a whole exported model: for each linear its `input` and what was exported; [] without the whole set."""
    if WHOLE is None:
        return []
    source = load_file(WHOLE / "b_tiny_qwen3" / "source_bf16.safetensors")
    made = load_file(WHOLE / "b_tiny_qwen3" / kind / "model.safetensors")
    groups: dict[str, dict[str, Case]] = {}
    for name in (n.removesuffix(".weight_scale") for n in made if n.endswith(".weight_scale")):
        parent, _, leaf = name.rpartition(".")
        group = "qkv" if leaf in _QKV else "gate_up" if leaf in ("gate_proj", "up_proj") else leaf
        parts = {part: made[f"{name}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2")}
        groups.setdefault(f"{parent}.{group}", {})[name] = {"input": source[f"{name}.weight"], **parts}
    return list(groups.values())


def bits(scale: Tensor) -> list[list[int]]:
    """E4M3 values as their codes, which compare exactly."""
    return scale.view(torch.uint8).tolist()
