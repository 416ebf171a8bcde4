"""What SGLang itself says of options and drafts. Runs in SGLang's interpreter, without a GPU; tests start it as a program.

    python sglang_probe.py options OUT.json             its version, its options, and the targets it has DFlash for
    python sglang_probe.py commands IN.json OUT.json    [[command, fields], ...]: what the fields of each become, or an error
    python sglang_probe.py drafts IN.json OUT.json      [[command, inputs, outputs], ...]: each command's draft, on a block

A draft's model, the loading of its weights and the projection of its context are SGLang's own, in float32. Attention, for which
it has GPU kernels, is a stand-in that takes a layer's type and window as its FlashAttention backend does.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import load_file, save_file

if torch.version.cuda is None:
    # PyPI's torchvision is built for CUDA; beside a CPU build of PyTorch its import ends for want of these two operators.
    operators = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import sglang
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.rotary_embedding import base
from sglang.srt.model_loader.loader import get_model_architecture
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.test.parallel_groups import publish

CAPTURE, SCALE = "set_dflash_layers_to_capture", "get_dflash_noise_embedding_scale"


def options() -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    taken = {
        name: {"values": action.nargs != 0, "choices": sorted(map(str, action.choices)) if action.choices else None}
        for action in parser._actions
        for name in action.option_strings
    }
    return {"version": sglang.__version__, "options": taken, **targets()}


def targets() -> dict[str, list[str]]:
    """Of the models: those that capture features, and those that scale a draft's embeddings. Read from the source, by name."""
    classes: dict[str, tuple[list[str], set[str]]] = {}
    entries: set[str] = set()
    for file in sorted((Path(sglang.__file__).parent / "srt" / "models").glob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8-sig")).body:
            if isinstance(node, ast.ClassDef):
                above = [one.id for one in node.bases if isinstance(one, ast.Name)]
                classes[node.name] = (above, {part.name for part in node.body if isinstance(part, ast.FunctionDef)})
            if isinstance(node, ast.Assign) and any(getattr(name, "id", None) == "EntryClass" for name in node.targets):
                entries |= {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}

    def has(name: str, method: str) -> bool:
        above, own = classes.get(name, ([], set()))
        return method in own or any(has(one, method) for one in above)

    return {
        "targets": sorted(name for name in entries if has(name, CAPTURE)),
        "scaling": sorted(name for name in entries if has(name, SCALE)),
    }


def resolved(command: list[str]) -> ServerArgs:
    """As at the start of a server; the device, which it looks for, is a GPU."""
    given = prepare_server_args(command if "--device" in command else [*command, "--device", "cuda"])
    given.resolve_once()
    return given


def fields(command: list[str], names: list[str]) -> dict[str, Any]:
    try:
        view = resolved_view(resolved(command))
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {name: getattr(view, name) for name in names}


class Attention(torch.nn.Module):
    """A block over the context's keys and values and its own, under one layer's visibility."""

    def __init__(self, layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.layer, self.keys, self.values = layer, keys, values

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, forward_batch: None) -> torch.Tensor:
        layer = self.layer
        q, k, v = (x.view(len(x), -1, layer.head_dim) for x in (q, k, v))
        k, v = (torch.cat(pair).repeat_interleave(q.shape[1] // k.shape[1], 1) for pair in ((self.keys, k), (self.values, v)))
        distance = torch.arange(len(k))[-len(q) :, None] - torch.arange(len(k))[None]
        left = layer.sliding_window_size if layer.sliding_window_size > -1 else len(k)
        right = 0 if layer.attn_type.value == "decoder" else left
        scores = torch.einsum("qhd,khd->hqk", q, k) * layer.scaling
        scores = scores.masked_fill((distance > left) | (distance < -right), float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


@torch.no_grad()
def draft(command: list[str], inputs: str, outputs: str) -> dict[str, Any]:
    """inputs: features [T, n*H] of the positions 0 .. T-1, embeddings [B, H] of the block behind; outputs: hidden [B, H]."""
    given = resolved(command)
    publish(given, role="scheduler")
    place = Path(resolved_view(given).speculative_draft_model_path)
    longest = ModelConfig.from_server_args(given).context_len
    try:
        config = ModelConfig.from_server_args(given, model_path=str(place), is_draft_model=True, context_length=longest)
    except ValueError as error:
        return {"error": str(error)}
    model = get_model_architecture(config)[0](config.hf_config)
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    weights = load_file(place / "model.safetensors")
    model.load_weights(iter(weights.items()))
    unset = [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
    block = load_file(inputs)
    context = model.project_target_hidden(block["features"])
    positions = torch.arange(len(context) + len(block["embeddings"]))
    for layer in model.layers:
        own = layer.self_attn
        k, v = own.kv_proj_only(model.prepare_context_hidden_for_kv(layer, context))
        k = own.apply_k_rope(positions[: len(context)], own.apply_k_norm(k))
        own.attn = Attention(own.attn, *(x.view(len(context), -1, own.head_dim) for x in (k, v)))
    hidden = model(None, positions[len(context) :], None, input_embeds=block["embeddings"]).hidden_states
    save_file({"hidden": hidden}, outputs)
    read = model.draft_config
    return {
        "architecture": type(model).__name__,
        "unset": unset,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "in_the_file": sum(tensor.numel() for tensor in weights.values()),
        "block_size": read.block_size,
        "mask_token_id": read.mask_token_id,
        "target_layer_ids": read.target_layer_ids,
        "quantization": config.quantization,
    }


if __name__ == "__main__":
    base._is_cpu = True  # RoPE in PyTorch; the whole of it set up for the CPU asks for kernels of its own
    what, *places = sys.argv[1:]
    if what == "options":
        found: Any = options()
    else:
        call = {"commands": fields, "drafts": draft}[what]
        found = [call(*case) for case in json.loads(Path(places[0]).read_text())]
    Path(places[-1]).write_text(json.dumps(found))
