"""Every Triton kernel compiles for GPUs of five generations, as its wrapper would launch it there, and fits their memory."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile", allow_module_level=True)

from step_scene import LIMIT, SceneState, chunk_plan, verify_plan
from triton.runtime.jit import JITFunction
from triton_compiling import SHARED_KIB, Chip, compiling_for, stack_bytes

from flashdraft import kernels
from flashdraft.kernels import norm_triton, paged_rows_triton, paged_triton, rollout_triton, step
from flashdraft.kernels.fused import Norm
from flashdraft.kernels.paged import ContextPages, Projection, Rows, Settings

MODULES = sorted(path.stem for path in Path(kernels.__file__).parent.glob("*_triton.py"))
BF16 = torch.bfloat16


def norm_launches(_pdl: bool) -> None:
    """Gemma's layers (a norm of what is added, a scale) and Llama's; tensors on the CPU are launched without pdl."""
    for size, dtype, gemma in ((2560, BF16, True), (576, torch.float16, False), (8192, BF16, False), (64, torch.float32, True)):
        x, norm = torch.empty(8, size, dtype=dtype), Norm(torch.ones(size), 1e-6, not gemma)
        norm_triton.add_norm(x, x, norm if gemma else None, 0.5 if gemma else 1.0, norm)
    y = torch.empty(8, 4096, dtype=BF16)
    for activation in ("silu", "gelu_tanh"):
        norm_triton.gated_activation(y, activation)
        norm_triton.activation_multiply(y, activation, y)
    logits = torch.empty(8, 262144, dtype=BF16)
    norm_triton.argmax_rows(logits)
    norm_triton.soft_cap(logits, 30.0, logits)


def rollout_launches(_pdl: bool) -> None:
    q, cache = torch.empty(4, 8, 128, dtype=BF16), torch.empty(2, 4, 2, 100, 128, dtype=BF16)
    positions, active = torch.zeros(4, dtype=torch.int32), torch.ones(4, dtype=torch.bool)
    rollout_triton.decode_attention(q, q[:, :2], q[:, :2], cache[0], cache[1], positions, active, 0.1)


def tiles(count: int, rows: int) -> Rows:
    line = torch.zeros(count, dtype=torch.int32)
    return Rows(torch.zeros(count * rows, dtype=torch.int32), line, line, line, line, line, rows)


def pages(kv_heads: int, size: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(3, 16, kv_heads, size, dtype=dtype)


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype = BF16
    window: int | None = None
    plain: bool = True  # neither soft cap nor sinks
    query_rows: int = 0
    reaches: bool = False


GEMMA_SLIDING, GEMMA_GLOBAL = Shape(8, 2, 256, 256, window=512), Shape(8, 2, 512, 512, plain=False)
SHAPES = [
    Shape(32, 8, 128, 128, window=1024),  # the reference draft
    Shape(9, 3, 64, 64),
    Shape(16, 1, 192, 128, torch.float16, plain=False),
    Shape(2, 2, 80, 80),
    Shape(4, 2, 64, 64, torch.float32),
    Shape(8, 2, 512, 512, torch.float32, plain=False),
    *(replace(shape, query_rows=rows) for shape in (GEMMA_SLIDING, GEMMA_GLOBAL) for rows in (32, 64)),
    replace(GEMMA_SLIDING, query_rows=64, reaches=True),
]


def settings(shape: Shape, pdl: bool) -> Settings:
    return Settings(
        window=shape.window,
        causal=True,
        reaches=shape.reaches,
        scale=0.1,
        softcap=None if shape.plain else 30.0,
        sinks=None if shape.plain else torch.zeros(shape.heads),
        span=torch.tensor([64], dtype=torch.int32),
        splits=8,
        workspace=torch.empty(8 * shape.heads * 9 * (shape.value_size + 2)),
        query_rows=shape.query_rows,
        pdl=pdl,
    )


def attention_launches(shapes: list[Shape], pdl: bool) -> None:
    table = torch.zeros(4, 64, dtype=torch.int32)
    for shape in shapes:
        rows = tiles(1, max(8, shape.query_rows // 4))
        rows = replace(rows, reach=rows.positions.clone()) if shape.reaches else rows
        q = torch.empty(len(rows.positions), shape.heads, shape.key_size, dtype=shape.dtype)
        sizes = (shape.key_size, shape.value_size)
        keys, values = (pages(shape.kv_heads, size, shape.dtype) for size in sizes)
        paged_triton.paged_attention(q, keys, values, table, rows, settings(shape, pdl))


def rows_launches(pdl: bool) -> None:
    rows, table, norm = tiles(1, 8), torch.zeros(4, 64, dtype=torch.int32), Norm(torch.ones(256), 1e-6, False)
    cos, qkv, (keys, values) = torch.empty(8, 256, dtype=BF16), torch.empty(8, 12 * 256, dtype=BF16), [pages(2, 256)] * 2
    norms = norm, norm, Norm(None, 1e-6, False)
    whole, queries = Projection(qkv, 8, 2, 256, *norms, cos, cos), Projection(qkv[:, :2048], 8, 0, 256, norm, *[None] * 4)
    paged_rows_triton.project_rows(whole, rows, table, keys, values, pdl=pdl)
    paged_rows_triton.project_rows(queries, rows, table, keys, values)
    heads = qkv.view(8, 12, 256)
    paged_rows_triton.store_rows(heads[:, 8:10], heads[:, 10:], rows, table, keys, values)
    layers, pool, tables = torch.zeros(5, dtype=torch.int64), torch.empty(9, 2**16, dtype=BF16), table.expand(2, 4, 64)
    context = ContextPages(pool, tables, layers, layers, layers.int(), 16, 8)
    kv, turn = torch.empty(8, 5, 2, 1024, dtype=BF16), torch.empty(8, 128, dtype=BF16)
    paged_rows_triton.store_context(kv, torch.ones(5, 128), 1e-6, True, turn, turn, rows, context, pdl=pdl)


def step_launches(_pdl: bool) -> None:
    """With a draft and without; a choice by arg-max and a sampled one, of an engine and of a benchmark."""
    with patch.object(step, "_has_kernels", lambda x: True):
        for size in (8, 1):
            state, (slots, offsets, places) = SceneState(size, "cpu"), verify_plan([(3, 1)], 16, 4, "cpu")
            step.verify_rows(state, slots, offsets, places, LIMIT, size)
            step.sampling_rows(state, slots, offsets)
            outcome, tokens = torch.zeros(4, size + 1, dtype=torch.int32), torch.zeros(16, dtype=torch.int64)
            step.advance(state, tokens.int(), outcome, places[0], places[1:], slots[:4])
            step.advance(state, tokens, outcome, places[0], places[1:])
            step.advance(state, tokens.int()[:1], outcome[:1], slots[:1], None)
        state = SceneState(8, "cpu")
        step.keep_proposals(state, slots[:2], tokens)
        step.block_rows(state, slots[:2], 7, LIMIT)
        step.sampling_blocks(state, slots[:2], 8, 0.7)
        step.chunk_rows(*chunk_plan([], 1, "cpu"), slots)


LAUNCHES: dict[str, Callable[[bool], None]] = {
    "norm_triton": norm_launches,
    "paged_combine_triton": lambda pdl: attention_launches([GEMMA_SLIDING], pdl),
    "paged_rows_triton": rows_launches,
    "paged_triton": lambda pdl: attention_launches([GEMMA_SLIDING, GEMMA_GLOBAL], pdl),
    "rollout_triton": rollout_launches,
    "step_triton": step_launches,
}


def kernels_of(name: str) -> set[str]:
    """Names of the module's kernels: its Triton functions that no other one calls."""
    modules = [importlib.import_module(f"flashdraft.kernels.{other}") for other in MODULES]
    functions = {x for module in modules for x in vars(module).values() if isinstance(x, JITFunction)}
    own = {f for f in functions if f.module == f"flashdraft.kernels.{name}"}
    return {f.__name__ for f in own if not any(f" {f.__name__}(" in g.src for g in functions if g is not f)}


@pytest.mark.parametrize("capability", SHARED_KIB)
@pytest.mark.parametrize("name", MODULES)
def test_every_kernel_compiles_and_fits_registers_and_shared_memory(name: str, capability: int) -> None:
    with compiling_for(capability) as compiled:
        LAUNCHES[name](capability >= 90)
    assert {kernel.name for kernel in compiled} >= kernels_of(name), "a kernel has no launch here"
    for kernel in compiled:
        assert kernel.metadata.shared <= Chip(capability).shared_bytes
        assert stack_bytes(kernel) == 0, "registers are spilled"


@pytest.mark.slow  # a second a kernel
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_attention_of_every_shape_compiles_and_fits_the_shared_memory(shape: Shape, capability: int) -> None:
    with compiling_for(capability) as compiled:
        attention_launches([shape], pdl=False)
    assert all(kernel.metadata.shared <= Chip(capability).shared_bytes for kernel in compiled)
