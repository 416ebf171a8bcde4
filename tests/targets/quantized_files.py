"""Checkpoints in the layouts of quantization formats, written from their descriptions, and the plain weights they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from families import make
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
E4M3 = torch.float8_e4m3fn
GROUP = 32


def _bits(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., n] packed into int32s [..., n * bits / 32], the first in the lowest bits."""
    words = codes.long().view(*codes.shape[:-1], -1, 32 // bits)
    total = sum(words[..., i] << (bits * i) for i in range(32 // bits))
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def _grouped(weight: Tensor, group: int, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [N, K], scales and zeros [N, G] of groups of inputs, and the weight that they mean; scales are those of float16."""
    n, k = weight.shape
    parts = weight.view(n, k // group, group)
    top = 2**bits - 1
    if symmetric:
        scale, zero = parts.abs().amax(-1) * 2 / top, torch.full((n, k // group), 2 ** (bits - 1))
    else:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scale = (high - low) / top
        zero = (-low / scale).round().clamp(0, top)
    scale = scale.half().float()
    codes = ((parts / scale[..., None]).round() + zero[..., None]).clamp(0, top)
    return codes.view(n, k).int(), scale, zero.int(), ((codes - zero[..., None]) * scale[..., None]).view(n, k)


def fp8_block(weight: Tensor) -> tuple[Tensors, Tensor]:
    n, k = weight.shape
    blocks = weight.view(n // GROUP, GROUP, k // GROUP, GROUP)
    scale = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).to(E4M3)
    plain = codes.float() * scale[:, None, :, None]
    return {"weight": codes.view(n, k), "weight_scale_inv": scale}, plain.view(n, k)


def fp8_tensor(weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(E4M3)
    return {"weight": codes, "weight_scale_inv": scale, "activation_scale": torch.tensor(0.5)}, codes.float() * scale


def ct_fp8(weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(E4M3)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor([0.5])}, codes.float() * scale


def ct_int8(weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def ct_int4(weight: Tensor, symmetric: bool = True) -> tuple[Tensors, Tensor]:
    codes, scale, zero, plain = _grouped(weight, GROUP, 4, symmetric)
    parts = {"weight_packed": _bits(codes, 4), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    if not symmetric:
        parts["weight_zero_point"] = _bits(zero.T, 4).T
    return parts, plain


def ct_int4_asymmetric(weight: Tensor) -> tuple[Tensors, Tensor]:
    return ct_int4(weight, symmetric=False)


def _gptq(weight: Tensor, bits: int, symmetric: bool, first: bool, order: Tensor | None) -> tuple[Tensors, Tensor]:
    inputs = torch.arange(weight.shape[1]) if order is None else order
    codes, scale, zero, plain = _grouped(weight[:, inputs], GROUP, bits, symmetric)
    back = inputs.argsort()
    parts = {
        "qweight": _bits(codes[:, back], bits).T,
        "qzeros": _bits((zero - int(first)).T % 2**bits, bits),
        "scales": scale.T.half(),
        "g_idx": (torch.arange(len(inputs)) // GROUP)[back].int(),
    }
    return parts, plain[:, back]


def gptq(weight: Tensor) -> tuple[Tensors, Tensor]:
    return _gptq(weight, 4, symmetric=True, first=True, order=None)


def gptq_without_order(weight: Tensor) -> tuple[Tensors, Tensor]:
    parts, plain = _gptq(weight, 8, symmetric=False, first=False, order=None)
    del parts["g_idx"]
    return parts, plain


def gptq_by_activation(weight: Tensor) -> tuple[Tensors, Tensor]:
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
    return _gptq(weight, 4, symmetric=True, first=True, order=order)


def awq(weight: Tensor) -> tuple[Tensors, Tensor]:
    codes, scale, zero, plain = _grouped(weight, GROUP, 4, symmetric=False)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # AutoAWQ: which output stands in the first, second, ... four bits

    def packed(x: Tensor) -> Tensor:
        return _bits(x.view(len(x), -1, 8)[..., order].flatten(1), 4)

    return {"qweight": packed(codes.T), "qzeros": packed(zero.T), "scales": scale.T.half()}, plain


_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _fp4(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of four bits, and the values they have."""
    code = (scaled.abs()[..., None] - _FP4).abs().argmin(-1)
    return code + 8 * (scaled < 0), _FP4[code] * scaled.sign()


def ct_nvfp4(weight: Tensor) -> tuple[Tensors, Tensor]:
    blocks = weight.unflatten(1, (-1, 16))
    overall = 448 * 6 / weight.abs().max()
    scale = (blocks.abs().amax(-1) / 6 * overall).to(E4M3)
    code, value = _fp4(blocks / (scale.float() / overall)[..., None])
    code = code.flatten(1)
    parts = {
        "weight_packed": (code[:, ::2] + 16 * code[:, 1::2]).byte(),
        "weight_scale": scale,
        "weight_global_scale": overall[None],
        "input_global_scale": torch.tensor([0.5]),
    }
    return parts, (value * (scale.float() / overall)[..., None]).flatten(1)


def mxfp4(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Experts [E, K, N] as published for gpt-oss: blocks [E, N, K / 32, 16] of two codes a byte, scales [E, N, K / 32]."""
    blocks = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponent = (blocks.abs().amax(-1) / 6).clamp(min=2.0**-20).log2().ceil()
    code, value = _fp4(blocks / exponent.exp2()[..., None])
    plain = (value * exponent.exp2()[..., None]).flatten(2).transpose(1, 2)
    return {"blocks": (code[..., ::2] + 16 * code[..., 1::2]).byte(), "scales": (exponent + 127).byte()}, plain


def _ct(kind: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None, "format": kind}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _weights(bits: int, kind: str, strategy: str, symmetric: bool = True) -> dict[str, Any]:
    group = {"group": {"group_size": GROUP}, "tensor_group": {"group_size": 16}}.get(strategy, {})
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric, "dynamic": False, **group}


_FP8_INPUTS = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
_INT8_INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
# name -> (what becomes of a linear's weight, quantization_config)
FORMATS: dict[str, tuple[Callable[[Tensor], tuple[Tensors, Tensor]], dict[str, Any]]] = {
    "fp8 blocks": (
        fp8_block,
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP]},
    ),
    "fp8 tensors": (fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}),
    "compressed fp8": (ct_fp8, _ct("float-quantized", _weights(8, "float", "channel"), _FP8_INPUTS)),
    "compressed int8": (ct_int8, _ct("int-quantized", _weights(8, "int", "channel"), _INT8_INPUTS)),
    "compressed int4": (ct_int4, _ct("pack-quantized", _weights(4, "int", "group"))),
    "compressed nvfp4": (ct_nvfp4, _ct("nvfp4-pack-quantized", _weights(4, "float", "tensor_group"))),
    "compressed int4 with zeros": (ct_int4_asymmetric, _ct("pack-quantized", _weights(4, "int", "group", symmetric=False))),
    "gptq": (gptq, _GPTQ),
    "gptq in the order of activations": (gptq_by_activation, {**_GPTQ, "desc_act": True}),
    "gptq v2, 8 bits": (gptq_without_order, {**_GPTQ, "bits": 8, "sym": False, "checkpoint_format": "gptq_v2"}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
}


def save_gpt_oss(folder: Path) -> Tensors:
    """A tiny gpt-oss whose experts are in MXFP4; returns the weights they mean, in the file's names."""
    make("gpt-oss").save_pretrained(folder)
    file = folder / "model.safetensors"
    plain, stored = load_file(file), {}
    for name, tensor in list(plain.items()):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parts, plain[name] = mxfp4(tensor)
            stored |= {f"{name}_{part}": value.contiguous() for part, value in parts.items()}
        else:
            stored[name] = tensor
    save_file(stored, file, metadata={"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    edit(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": kept})
    return plain


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def save(folder: Path, form: str, family: str = "llama", **changes: Any) -> Tensors:
    """Write a tiny model of `family`, its layers' linears in a format; returns the weights they mean, in the file's names."""
    make(family, **changes).save_pretrained(folder)
    quantize, section = FORMATS[form]
    file = folder / "model.safetensors"
    plain, stored = load_file(file), {}
    for name, tensor in list(plain.items()):
        if ".layers." in name and name.endswith("_proj.weight"):
            parts, plain[name] = quantize(tensor)
            stored |= {f"{name.removesuffix('.weight')}.{part}": value.contiguous() for part, value in parts.items()}
        else:
            stored[name] = tensor
    save_file(stored, file, metadata={"format": "pt"})
    edit(folder, quantization_config=section)
    return plain
