"""NVFP4 drafts on disk: which tensors their linears have, that config.json and the scales agree, and both ways between them.

Here quant and draft meet: quant knows linears by name, checkpoint.py the rest of a draft's files. Format: docs/quantization.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flashdraft.draft import DFlashDraft
from flashdraft.errors import CheckpointError
from flashdraft.quant.export import Algorithm, Scheme, disagreements, dump_scheme, parse_scheme, quantized_shapes
from flashdraft.quant.groups import fused_groups
from flashdraft.quant.linear import QuantizedLinear, RoundedInputLinear, linears, swap
from flashdraft.quant.nvfp4 import GROUP, Packed

Expected = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]  # tensor -> shape, and the types of safetensors it may have
FLOATS = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True)
class Quantization:
    """The quantized linears of a file, and where its config.json says otherwise."""

    scheme: Scheme
    names: tuple[str, ...]  # with any tensor of scales
    rest: tuple[str, ...]
    faults: tuple[str, ...]


def section_of(raw: Mapping[str, object]) -> Mapping[str, object] | None:
    """The quantization_config of a config.json of either layout."""
    layer = raw.get("transformer_layer_config")
    section = raw.get("quantization_config") or (layer.get("quantization_config") if isinstance(layer, dict) else None)
    return section if isinstance(section, dict) else None


def quantization_of(raw: Mapping[str, object], draft: DFlashDraft, tensors: Mapping[str, object]) -> Quantization | None:
    """What is quantized of a draft with these tensors, by its config.json and by their names; None without such a section.

    Raises CheckpointError for a quantization other than NVFP4.
    """
    section = section_of(raw)
    if section is None:
        return None
    scheme = parse_scheme(section)
    # A head that is not in the file is the target's, or the draft's own embeddings.
    names = [name for name in linears(draft) if name != "lm_head" or any(t.startswith("lm_head.") for t in tensors)]
    quantized = tuple(name for name in names if any(f"{name}.{part}" in tensors for part in ("weight_scale", "weight_scale_2")))
    rest = tuple(name for name in names if name not in quantized)
    return Quantization(scheme, quantized, rest, tuple(disagreements(scheme, names, tensors.keys())))


def expected_tensors(draft: DFlashDraft, quantization: Quantization | None) -> Expected:
    """The tensors that a draft's file must hold."""
    expected: Expected = {
        name: (tuple(t.shape), ("I64", "I32") if name == "d2t" else FLOATS) for name, t in draft.state_dict().items()
    }
    if quantization is not None:
        leaves = linears(draft)
        for name in quantization.names:
            del expected[f"{name}.weight"]
            expected |= quantized_shapes(quantization.scheme, name, leaves[name].out_features, leaves[name].in_features)
    return expected


def place_quantized(draft: DFlashDraft, quantization: Quantization) -> None:
    """Put empty QuantizedLinears (on the meta device) where the file has quantized linears."""
    meta = torch.device("meta")
    for name, leaf in linears(draft).items():
        if name not in quantization.names:
            continue
        rows, columns = leaf.out_features, leaf.in_features
        scalar = torch.empty((), device=meta)
        packed = Packed(
            torch.empty(rows, columns // 2, dtype=torch.uint8, device=meta),
            torch.empty(rows, columns // GROUP, dtype=torch.float8_e4m3fn, device=meta),
            scalar,
            scalar.clone() if quantization.scheme.rounds_inputs else None,
        )
        swap(draft, name, QuantizedLinear(packed, leaf.bias))


def scale_faults(tensors: Mapping[str, Tensor]) -> list[str]:
    """What is wrong with the scales of quantized linears, one phrase for each kind of fault."""
    names = [name.removesuffix(".weight_scale_2") for name in tensors if name.endswith(".weight_scale_2")]
    bad_blocks, bad_scalars, unequal = [], [], []
    for name in names:
        codes = tensors[f"{name}.weight_scale"].view(torch.uint8)  # positive and finite E4M3 are 1..126
        if not bool(((codes >= 1) & (codes <= 126)).all()):
            bad_blocks.append(f"{name}.weight_scale")
    for part in ("weight_scale_2", "input_scale"):
        values = {name: float(tensors[f"{name}.{part}"]) for name in names if f"{name}.{part}" in tensors}
        bad_scalars += [f"{name}.{part} {value:g}" for name, value in values.items() if not 0 < value < float("inf")]
        for fused, members in fused_groups(values).items():
            if len({values[name] for name in members}) > 1:
                unequal.append(f"{fused} ({part})")
    faults = {
        "hold scales that are NaN, zero or negative": [*bad_blocks, *bad_scalars],
        "has other scales in one linear than in another, and readers take one for all": unequal,
    }
    return [f"{', '.join(found)} {fault}" for fault, found in faults.items() if found]


def dump_section(draft: DFlashDraft, version: str) -> dict[str, object] | None:
    """The quantization_config of a draft with QuantizedLinears; None for one without.

    Raises CheckpointError for a draft whose linears were expanded, which no longer are what a file would say, and for scales
    that readers would take otherwise.
    """
    quantized = {name: child for name, child in draft.named_modules() if isinstance(child, QuantizedLinear)}
    if any(isinstance(child, RoundedInputLinear) for child in draft.modules()):
        raise CheckpointError("this W4A4 draft is expanded for running: load it with load_draft(..., packed=True) to save it")
    if not quantized:
        return None
    rounds = {leaf.input_scale is not None for leaf in quantized.values()}
    if len(rounds) > 1:
        raise CheckpointError(
            "some linears of this draft have an input_scale and some have none: quantize all for W4A4, or none"
        )
    algorithm: Algorithm = "NVFP4" if rounds.pop() else "W4A16_NVFP4"
    rest = [name for name, child in draft.named_modules() if isinstance(child, nn.Linear)]
    rest += ["lm_head"] if draft.lm_head is None else []
    rest += ["embed_tokens"] if draft.embed_tokens is not None else []
    section = dump_scheme(algorithm, rest, version)
    faults = [*scale_faults(draft.state_dict()), *disagreements(parse_scheme(section), [*quantized, *rest], draft.state_dict())]
    if faults:
        raise CheckpointError(f"this draft cannot be saved: {'; '.join(faults)}. Quantize it again")
    return section
