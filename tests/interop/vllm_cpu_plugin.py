"""Loaded by vLLM in each of its processes (entry point vllm.general_plugins): what its CPU kernels get wrong for DFlash.

vLLM 0.32 normalizes the context keys of all layers in one call of a kernel with a weight per layer, and its CPU kernel takes
the first row for all of them.
"""

from __future__ import annotations

import torch


def register() -> None:
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model  # noqa: PLC0415

    def normalize(self, keys):  # type: ignore[no-untyped-def]
        """keys: [layers, tokens, heads, head_dim]"""
        values = keys.float()
        values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self._rms_norm_eps)
        return (values * self._k_norm_weights[:, None, None].float()).to(keys.dtype).contiguous()

    DFlashQwen3Model._normalize_context_k = normalize
