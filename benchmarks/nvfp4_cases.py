"""The products of the reference draft with NVFP4 weights; the peer is the same kernel's on bf16 weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from kernel_cases import HIDDEN, PRODUCTS, VOCAB, Case, Line, Machine

from flashdraft.kernels.fused import argmax_linear, fused_linear
from flashdraft.kernels.nvfp4 import Nvfp4Weight, repacked, unpacked

DRAFT = {name: PRODUCTS[name] for name in PRODUCTS if name.startswith("draft")} | {"draft fc": (HIDDEN, 5 * HIDDEN, {})}


def nvfp4(on: Machine, rows: list[int]) -> Iterator[Line]:
    """Products with NVFP4 weights, and the likeliest token; the peer is ours with weights in bf16."""
    for name, (outputs, k, given) in DRAFT.items():
        for count in rows:
            yield name, count, partial(product, on, on(outputs), inputs(on, k), given, count)
    for count in rows:
        yield "arg max", count, partial(head, on, count)


def inputs(on: Machine, k: int) -> int:
    return max(64, on(k) // 64 * 64)


def quantized(on: Machine, rows: int, k: int, gated: bool) -> Nvfp4Weight:
    codes = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, device=on.device)
    scales = torch.randint(40, 100, (rows, k // 16), dtype=torch.uint8, device=on.device).view(torch.float8_e4m3fn)
    return repacked(codes, scales, 0.01 / k**0.5, gated=gated)


def product(on: Machine, outputs: int, k: int, given: dict[str, Any], rows: int) -> Case:
    gated = given.get("gated", False)
    height, x = outputs * (2 if gated else 1), on.random(rows, k)
    size = height * k * 9 // 16
    pairs = on.copies(lambda: (w := quantized(on, height, k, gated), unpacked(w)), size)
    moved = size + 2 * rows * (k + outputs)
    return Case(
        moved,
        pairs,
        lambda w: fused_linear(w[0], x, **given),
        lambda w: fused_linear(w[1], x, **given),
        2.0 * rows * height * k,
    )


def head(on: Machine, rows: int) -> Case:
    vocab, k = on(VOCAB), inputs(on, HIDDEN)
    x, size = on.random(rows, k), vocab * k * 9 // 16
    pairs = on.copies(lambda: (w := quantized(on, vocab, k, False), unpacked(w)), size)
    return Case(size, pairs, lambda w: argmax_linear(w[0], x), lambda w: argmax_linear(w[1], x), 2.0 * rows * vocab * k)
