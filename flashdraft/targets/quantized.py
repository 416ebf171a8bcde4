"""Targets with a quantization_config, read as plain weights: by transformers where it can dequantize, GPTQ and AWQ here.

What runs afterwards is a model as any other: layers are fused, adapters merged, and no kernel of a format is needed. Formats:
AutoGPTQ's `qweight`, `qzeros`, `scales`, `g_idx` and AutoAWQ's `gemm`. Shape letters: K inputs, N outputs, G groups of inputs,
P codes in an int32.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel, __version__
from transformers.quantizers import AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer

from flashdraft.errors import CheckpointError, UnsupportedModelError
from flashdraft.targets.recognition import is_plain

# What transformers dequantizes while it loads, with the package that it asks for.
_DEQUANTIZED = {"fp8": "accelerate", "mxfp4": "accelerate", "compressed-tensors": "compressed_tensors"}
_UNPACKED = ("gptq", "awq")
_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
)  # compressed-tensors
_READ = "FP8, compressed-tensors, MXFP4, GPTQ or AWQ"
# Scales of activations and of caches: rounding that a plain model leaves out.
_OF_ACTIVATIONS = (
    "input_scale", "input_zero_point", "input_global_scale", "activation_scale", "output_scale", "q_scale", "k_scale", "v_scale"
)  # fmt: skip
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the eight codes of an int32 belong among its eight outputs
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Quantized:
    """A quantization that can be read: its method, and its section of config.json."""

    method: str
    section: Mapping[str, Any]

    @property
    def unpacked_here(self) -> bool:
        return self.method in _UNPACKED


def quantization_of(name: str | Path, config: Any) -> Quantized | None:
    """The quantization that a transformers configuration names, None if it names none.

    Raises CheckpointError for one that transformers would skip with a warning, UnsupportedModelError for one that cannot be
    read as plain weights, or would be read wrongly.
    """
    section = _section(config)
    if section is None:
        return None
    method = str(section.get("quant_method") or "")
    stated = any(section.get(key) for key in ("quant_method", "load_in_8bit", "load_in_4bit"))
    if not stated or not AutoHfQuantizer.supports_quant_method(section):
        kind = " ".join(str(section[key]) for key in ("quant_method", "quant_algo") if section.get(key)) or "unnamed"
        raise CheckpointError(
            f"{name} is quantized ({kind[:200]}), which transformers {__version__} cannot read: use the unquantized target, "
            f"or one in {_READ}"
        )
    if method not in (*_DEQUANTIZED, *_UNPACKED):
        raise UnsupportedModelError(
            f"{name} is quantized with {method or 'bitsandbytes'}, whose packed weights are not read here: use the unquantized "
            f"target, or one in {_READ}"
        )
    package = _DEQUANTIZED.get(method)
    if package is not None and importlib.util.find_spec(package) is None:
        raise UnsupportedModelError(
            f"{name} is quantized with {method}, which transformers reads with a package that is missing: "
            f"pip install {package.replace('_', '-')}"
        )
    if method == "compressed-tensors" and not hasattr(HfQuantizer, "get_load_operations"):  # 5.17 leaves the linears wrapped
        raise UnsupportedModelError(
            f"{name} is quantized with {method}, which transformers {__version__} does not turn into plain weights: upgrade it "
            "(5.24 does), or use the unquantized target"
        )
    if reason := _REASONS[method](section):
        raise UnsupportedModelError(f"{name} is quantized with {method}, and {reason}: use the unquantized target")
    return Quantized(method, section)


def _section(config: Any) -> dict[str, Any] | None:
    for holder in (config, config.get_text_config()):
        section = getattr(holder, "quantization_config", None)
        if section:
            return dict(section) if isinstance(section, dict) else dict(section.to_dict())
    return None


def dequantizing(config: Any) -> None:
    """Let transformers dequantize what this configuration's quantization_config names while it loads."""
    for holder in (config, config.get_text_config()):
        if getattr(holder, "quantization_config", None):
            holder.quantization_config = {**holder.quantization_config, "dequantize": True}


def without_quantization(config: Any) -> None:
    """Take the quantization_config out of a configuration whose weights are unpacked here."""
    for holder in (config, config.get_text_config()):
        if hasattr(holder, "quantization_config"):
            del holder.quantization_config


def _odd_groups(section: Mapping[str, Any]) -> str:
    """Why a compressed-tensors section is beyond what transformers dequantizes, "" if it is not."""
    groups = [group for group in (section.get("config_groups") or {}).values() if isinstance(group, dict)]
    schemes = {repr((group.get("weights"), group.get("format"))) for group in groups}
    if len(schemes) != 1:  # 5.24 takes one group's scheme for all dense layers
        return f"its {len(schemes)} config_groups store weights in several ways, of which transformers would read one"
    if section.get("transform_config"):
        return "its transform_config rotates activations at run time, which is not computed here"
    if (section.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return f"its weights are sparse ({section['sparsity_config']['format']}), which transformers does not read"
    if (weights := groups[0].get("weights") or {}).get("actorder") == "group":
        return "its weights are grouped in the order of activations (actorder group), which transformers would ignore"
    if not weights:
        return "its config_groups name no weights"
    kind = groups[0].get("format") or section.get("format")
    return "" if kind in _FORMATS else f"its format {kind!r} is not read, only {', '.join(_FORMATS)}"


def _odd_gptq(section: Mapping[str, Any]) -> str:
    if section.get("bits") not in (2, 4, 8):
        return f"its codes have {section.get('bits')!r} bits, and only 2, 4 and 8 are read"
    if (kind := section.get("checkpoint_format") or section.get("format") or "gptq") not in ("gptq", "gptq_v2"):
        return f"its checkpoint_format {kind!r} is not read, only gptq and gptq_v2"
    return ""


def _odd_awq(section: Mapping[str, Any]) -> str:
    if section.get("bits", section.get("w_bit", 4)) != 4:
        return f"its codes have {section.get('bits')!r} bits, and only 4 are read"
    version = str(section.get("version") or section.get("format") or "gemm").lower()
    return "" if version == "gemm" else f"its version {version!r} is not read, only gemm"


_REASONS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "fp8": lambda section: "",
    "mxfp4": lambda section: "",
    "compressed-tensors": _odd_groups,
    "gptq": _odd_gptq,
    "awq": _odd_awq,
}


def refuse_uneven_blocks(name: str | Path, quantized: Quantized, files: list[Path]) -> None:
    """Refuse FP8 weights whose last block is smaller than the others: transformers 5.24 cuts rows into equal blocks."""
    size = quantized.section.get("weight_block_size")
    if quantized.method != "fp8" or not size:
        return
    shapes: dict[str, list[int]] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            shapes |= {key: opened.get_slice(key).get_shape() for key in opened.keys()}  # noqa: SIM118 - not a mapping
    for key, shape in shapes.items():
        scales = shapes.get(f"{key}_scale_inv") or ()
        if len(scales) == 2 and any(n % b and s > 1 for n, b, s in zip(shape, size, scales, strict=True)):
            raise UnsupportedModelError(
                f"{name} is quantized with fp8, and {key} {list(shape)} ends in a part of a block of {list(size)}, which "
                f"transformers {__version__} would dequantize wrongly: use the unquantized target"
            )


def unpacked(name: str | Path, quantized: Quantized, files: list[Path], dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of a GPTQ or AWQ checkpoint, its packed linears as plain `weight` [N, K] of `dtype`.

    Raises CheckpointError for tensors that are missing or do not fit each other.
    """
    if not files:
        raise CheckpointError(f"{name} is quantized with {quantized.method}, and has no safetensors files: convert it to those")
    read = _awq_weight if quantized.method == "awq" else _gptq_weight
    weights: dict[str, Tensor] = {}
    packed: dict[str, dict[str, Tensor]] = {}
    for key, tensor in _tensors(files):
        module, _, part = key.rpartition(".")
        if part in ("qweight", "qzeros", "scales", "g_idx"):
            packed.setdefault(module, {})[part] = tensor
            if len(packed[module]) == (3 if quantized.method == "awq" else 4):  # at once, or all codes are held to the end
                weights[f"{module}.weight"] = _weight(name, module, read, packed.pop(module), quantized.section, dtype)
        else:
            weights[key] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    for module, parts in packed.items():  # without the g_idx that some leave out
        weights[f"{module}.weight"] = _weight(name, module, read, parts, quantized.section, dtype)
    return weights


def _tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - not a mapping
                yield key, opened.get_tensor(key)


def _weight(
    name: str | Path,
    module: str,
    read: Callable[[Mapping[str, Tensor], Mapping[str, Any]], Tensor],
    parts: Mapping[str, Tensor],
    section: Mapping[str, Any],
    dtype: torch.dtype,
) -> Tensor:
    if gone := sorted({"qweight", "qzeros", "scales"} - set(parts)):
        raise CheckpointError(f"{name}: {module} has no {gone[0]}: download it again")
    if any(parts[part].dtype != torch.int32 for part in ("qweight", "qzeros")):
        raise CheckpointError(f"{name}: the codes of {module} are {parts['qweight'].dtype}, and only int32 is read")
    try:
        return read(parts, section).T.to(dtype).contiguous()
    except (RuntimeError, IndexError) as error:
        shapes = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in sorted(parts.items()))
        raise CheckpointError(f"{name}: the parts of {module} do not fit each other ({shapes}): download it again") from error


def _codes(packed: Tensor, bits: int) -> Tensor:
    """Codes [..., P] of int32s, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (packed[..., None] >> shifts) & ((1 << bits) - 1)


def _gptq_weight(parts: Mapping[str, Tensor], section: Mapping[str, Any]) -> Tensor:
    """qweight [K / P, N], qzeros [G, N / P], scales [G, N], g_idx [K] -> weight [K, N] in float32."""
    bits, scales = int(section["bits"]), parts["scales"].float()
    q = _codes(parts["qweight"].T, bits).flatten(1).T
    zeros = _codes(parts["qzeros"], bits).flatten(1)[:, : scales.shape[1]]
    if (section.get("checkpoint_format") or section.get("format") or "gptq") == "gptq":
        zeros = (zeros + 1) & ((1 << bits) - 1)  # stored one less, in the first version of the format
    group = parts["g_idx"].long() if "g_idx" in parts else torch.arange(len(q)) // (len(q) // len(scales))
    return _in_groups(q, zeros, scales, group)


def _awq_weight(parts: Mapping[str, Tensor], section: Mapping[str, Any]) -> Tensor:
    """qweight [K, N / 8], qzeros [G, N / 8], scales [G, N] -> weight [K, N] in float32."""
    scales, order = parts["scales"].float(), torch.tensor(_AWQ_ORDER)
    q, zeros = (_codes(parts[part], 4)[..., order].flatten(1) for part in ("qweight", "qzeros"))
    return _in_groups(q, zeros, scales, torch.arange(len(q)) // (len(q) // len(scales)))


def _in_groups(q: Tensor, zeros: Tensor, scales: Tensor, group: Tensor) -> Tensor:
    if zeros.shape != scales.shape or q.shape != (len(group), scales.shape[1]) or group.min() < 0:
        raise IndexError("codes, zeros, scales and groups of other shapes")
    return scales[group] * (q - zeros[group])


def left_out(keys: list[str]) -> list[str]:
    """Of a checkpoint's unexpected tensors those that are not scales of activations or caches."""
    return [key for key in keys if key.rpartition(".")[2] not in _OF_ACTIVATIONS]


def refuse_packed(name: str | Path, model: PreTrainedModel) -> None:
    """Refuse a model of which anything is not plain weights after loading: it would be run as if it were."""
    for key, parameter in model.named_parameters():
        if parameter.dtype not in _FLOATS:
            raise UnsupportedModelError(
                f"{name}: {key} stays packed ({parameter.dtype}) when loaded: use the unquantized target"
            )
    for key, module in model.named_modules():
        if isinstance(module, nn.Linear) and not is_plain(module):
            raise UnsupportedModelError(f"{name}: {key} stays quantized when loaded: use the unquantized target")
