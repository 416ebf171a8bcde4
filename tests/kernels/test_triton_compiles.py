"""Every Triton kernel compiles for GPUs of five generations, as its wrapper would launch it there, and fits their memory."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile", allow_module_level=True)

from triton.runtime.jit import JITFunction
from triton_compiling import SHARED_KIB, Chip, compiling_for

from flashdraft import kernels
from flashdraft.kernels import norm_triton, paged_fused_triton, paged_rows_triton, paged_triton, rollout_triton
from flashdraft.kernels.fused import Norm
from flashdraft.kernels.paged import ContextPages, PagedOptions, Projection, Rows, Settings, Workspace

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
    norm_triton.argmax_rows(torch.empty(8, 262144, dtype=BF16))


def rollout_launches(_pdl: bool) -> None:
    q, cache = torch.empty(4, 8, 128, dtype=BF16), torch.empty(2, 4, 2, 100, 128, dtype=BF16)
    positions, active = torch.zeros(4, dtype=torch.int32), torch.ones(4, dtype=torch.bool)
    rollout_triton.decode_attention(q, q[:, :2], q[:, :2], cache[0], cache[1], positions, active, 0.1)
    rollout_triton.sample(torch.empty(4, 5000), torch.zeros(4), positions[:1], 7)


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
    plain: bool = True  # neither soft cap nor sinks, and a second kernel that combines


GEMMA_SLIDING, GEMMA_GLOBAL = Shape(8, 2, 256, 256, window=512), Shape(8, 2, 512, 512, plain=False)
SHAPES = [
    Shape(32, 8, 128, 128, window=1024),  # the reference draft
    Shape(9, 3, 64, 64),
    Shape(16, 1, 192, 128, torch.float16, plain=False),
    Shape(2, 2, 80, 80),
    Shape(4, 2, 64, 64, torch.float32),
    Shape(8, 2, 512, 512, torch.float32, plain=False),
]


def settings(shape: Shape, pdl: bool) -> Settings:
    return Settings(
        window=shape.window,
        causal=True,
        scale=0.1,
        softcap=None if shape.plain else 30.0,
        sinks=None if shape.plain else torch.zeros(shape.heads),
        span=torch.tensor([64], dtype=torch.int32),
        splits=8,
        workspace=Workspace.allocate(8 * shape.heads * 9 * (shape.value_size + 2), 64, "cpu"),
        options=PagedOptions(fuse_combine=not shape.plain, pdl=pdl),
    )


def attention_launches(shapes: list[Shape], pdl: bool) -> None:
    table, rows = torch.zeros(4, 64, dtype=torch.int32), tiles(1, 8)
    for shape in shapes:
        q = torch.empty(8, shape.heads, shape.key_size, dtype=shape.dtype)
        sizes = (shape.key_size, shape.value_size)
        keys, values = (pages(shape.kv_heads, size, shape.dtype) for size in sizes)
        paged_triton.paged_attention(q, keys, values, table, rows, settings(shape, pdl))


def fused_launches(pdl: bool) -> None:
    """A sliding layer with keys of its own, a global one that shares another's."""
    table, rows, norm = torch.zeros(4, 64, dtype=torch.int32), tiles(1, 8), Norm(torch.ones(512), 1e-6, False)
    for shape, kv_heads in ((GEMMA_SLIDING, 2), (GEMMA_GLOBAL, 0)):
        size = shape.key_size
        qkv, cos = torch.empty(8, (8 + 2 * kv_heads) * size, dtype=BF16), torch.empty(8, size, dtype=BF16)
        keys = pages(2, size)
        whole = Projection(qkv, 8, kv_heads, size, norm, norm, norm, cos, cos)
        paged_fused_triton.fused_paged_attention(whole, rows, table, keys, keys, settings(shape, pdl))


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


LAUNCHES: dict[str, Callable[[bool], None]] = {
    "norm_triton": norm_launches,
    "paged_combine_triton": lambda pdl: attention_launches([GEMMA_SLIDING], pdl),
    "paged_fused_triton": fused_launches,
    "paged_rows_triton": rows_launches,
    "paged_triton": lambda pdl: attention_launches([GEMMA_SLIDING, GEMMA_GLOBAL], pdl),
    "rollout_triton": rollout_launches,
}


def kernels_of(name: str) -> set[str]:
    """Names of the module's kernels: its Triton functions that no other one calls."""
    modules = [importlib.import_module(f"flashdraft.kernels.{other}") for other in MODULES]
    functions = {x for module in modules for x in vars(module).values() if isinstance(x, JITFunction)}
    own = {f for f in functions if f.module == f"flashdraft.kernels.{name}"}
    return {f.__name__ for f in own if not any(f" {f.__name__}(" in g.src for g in functions if g is not f)}


@pytest.mark.parametrize("capability", SHARED_KIB)
@pytest.mark.parametrize("name", MODULES)
def test_every_kernel_compiles_and_fits_the_shared_memory(name: str, capability: int) -> None:
    with compiling_for(capability) as compiled:
        LAUNCHES[name](capability >= 90)
    assert {kernel.name for kernel in compiled} >= kernels_of(name), "a kernel has no launch here"
    for kernel in compiled:
        assert kernel.metadata.shared <= Chip(capability).shared_bytes


@pytest.mark.slow  # a second a kernel
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_attention_of_every_shape_compiles_and_fits_the_shared_memory(shape: Shape, capability: int) -> None:
    with compiling_for(capability) as compiled:
        attention_launches([shape], pdl=False)
    assert all(kernel.metadata.shared <= Chip(capability).shared_bytes for kernel in compiled)
