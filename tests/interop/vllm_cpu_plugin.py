"""Loaded by vLLM 0.32 in each of its processes (entry point vllm.general_plugins): what its CPU build lacks for DFlash.

- It normalizes the context keys of all layers in one call of a kernel with a weight per layer, and its CPU kernel takes the
  first row for all of them.
- It has no kernel for NVFP4: a stand-in computes, by vLLM's own reference functions, with what its own loading made of a layer.
- Only proposals are seen from outside: where VLLM_RECORD names a directory, the draft's logits are written there.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import torch
from torch.nn import functional as F


def register() -> None:
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model  # noqa: PLC0415

    def normalize(self, keys):  # type: ignore[no-untyped-def]
        """keys: [layers, tokens, heads, head_dim]"""
        values = keys.float()
        values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self._rms_norm_eps)
        return (values * self._k_norm_weights[:, None, None].float()).to(keys.dtype).contiguous()

    DFlashQwen3Model._normalize_context_k = normalize
    _stand_in_for_nvfp4()
    if folder := os.environ.get("VLLM_RECORD"):
        _record(DFlashQwen3ForCausalLM, Path(folder))


def _stand_in_for_nvfp4() -> None:
    from vllm.model_executor.layers.quantization import modelopt  # noqa: PLC0415
    from vllm.model_executor.layers.quantization.utils import nvfp4_emulation_utils as reference  # noqa: PLC0415

    class Dequantizing:
        """The interface of vLLM's NvFp4LinearKernel."""

        def input_quant_key(self):  # type: ignore[no-untyped-def]
            return None

        def process_weights_after_loading(self, layer) -> None:  # type: ignore[no-untyped-def]
            parts = layer.weight, layer.weight_scale, layer.weight_global_scale
            layer.dequantized = reference.dequantize_to_dtype(*parts, torch.float32, swizzle=False)

        def apply_weights(self, layer, x, bias=None):  # type: ignore[no-untyped-def]
            rounded = x.float()
            if hasattr(layer, "input_global_scale_inv"):  # W4A4
                rounded = reference.ref_nvfp4_quant_dequant(rounded, layer.input_global_scale_inv, 16)
            return F.linear(rounded, layer.dequantized, None if bias is None else bias.float()).to(x.dtype)

    modelopt.init_nvfp4_linear_kernel = lambda use_a16=False: Dequantizing()
    # Its kernels compute in 16 bits, and so it refuses float32, in which two engines can be compared.
    modelopt.ModelOptNvFp4Config.get_supported_act_dtypes = lambda self: [torch.bfloat16, torch.half, torch.float32]


def _record(model, folder: Path) -> None:  # type: ignore[no-untyped-def]
    """Of every call {"anchors" [n], "positions" [n] of the anchors, "logits" [n, B-1, V]}, in files that sort by time."""
    forward, compute, number = model.forward, model.compute_logits, itertools.count()

    def noting(self, input_ids, positions, inputs_embeds=None):  # type: ignore[no-untyped-def]
        self.seen = input_ids.clone(), positions.clone()
        return forward(self, input_ids, positions, inputs_embeds)

    def recording(self, hidden_states):  # type: ignore[no-untyped-def]
        logits = compute(self, hidden_states)
        ids, positions = self.seen
        blocks = len(ids) - len(logits)  # all slots but the anchors propose
        made = {"anchors": ids, "positions": positions}
        made = {name: values.unflatten(0, (blocks, -1))[:, 0] for name, values in made.items()}
        part = folder / f"{next(number):06}.part"
        torch.save({**made, "logits": logits.float().unflatten(0, (blocks, -1))}, part)
        part.rename(part.with_suffix(".pt"))
        return logits

    model.forward, model.compute_logits = noting, recording
