"""Small random drafts in NVFP4."""

from __future__ import annotations

from typing import Any

import torch

from flashdraft.draft import DFlashConfig, DFlashDraft
from flashdraft.quant.calibrate import calibrate
from flashdraft.quant.linear import linears, swap
from flashdraft.quant.quantize import Settings, input_scales, quantize_linears

CONFIG = DFlashConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=40,
    num_target_layers=6,
    target_layer_ids=(1, 4),
    mask_token_id=3,
)


def quantized(w4a4: bool = False, ignore: tuple[str, ...] = (), **changes: Any) -> DFlashDraft:
    """A random draft in NVFP4, the rest of it in bfloat16."""
    draft = DFlashDraft(CONFIG.with_(**changes))

    def run(_: object) -> None:
        for leaf in linears(draft).values():
            leaf(torch.randn(60, leaf.in_features))

    found = calibrate(draft, run)
    scales = input_scales(found) if w4a4 else None
    layers, _ = quantize_linears(draft, found, Settings("max"), ignore=ignore, scales_of_inputs=scales)
    for name, layer in layers.items():
        swap(draft, name, layer)
    return draft.to(torch.bfloat16).requires_grad_(False)
