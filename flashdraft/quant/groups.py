"""Fused groups: linears that readers run as one product, and which therefore share weight_scale_2 and input_scale."""

from __future__ import annotations

from collections.abc import Iterable

from flashdraft.kernels.linear import GATE_UP, QKV

FUSED = {"qkv_proj": QKV, "gate_up_proj": GATE_UP}
_FUSED_NAME = {part: fused for fused, parts in FUSED.items() for part in parts}


def runtime_name(name: str) -> str:
    """The name under which readers know a linear: `layers.1.self_attn.qkv_proj` for its q_proj."""
    parent, dot, leaf = name.rpartition(".")
    return parent + dot + _FUSED_NAME.get(leaf, leaf)


def fused_groups(names: Iterable[str]) -> dict[str, list[str]]:
    """Linears by the name readers know them under."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(runtime_name(name), []).append(name)
    return groups
