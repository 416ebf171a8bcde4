"""Choices of many rows of logits with keyed noise in two to five kernels: Python side of cuda/sample_rows.cu.

The choices are those of `flashdraft.engine.sampling.sample`, bit for bit (that is the reference), at 57 KB of memory a row.
Kernels are compiled when they are needed (nvrtc.py): the first call with a dtype must lie outside a graph capture, and so must
the first with this many rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import ceil

import torch
from torch import Tensor

from flashdraft.errors import ConfigError
from flashdraft.kernels.nvrtc import MULTIPROCESSOR_COUNT, Source, definitions, device_attribute

THREADS, TILE, ROW_BYTES = 256, 2048, 57392  # as in sample_rows.cuh
BLOCKS_PER_MULTIPROCESSOR = 4  # two tiles a thread block for 8 rows of 262,144 tokens on 132 multiprocessors
LEAST_ROWS = 512  # of the workspace: 29 MB
TYPES = {torch.bfloat16: "Half<Bf16>", torch.float16: "Half<Fp16>", torch.float32: "Fp32"}
# Of dynamic shared memory, which nobody uses: for it `Function.launch` asks that all of L1 be shared memory, as for the narrow
# product, and between kernels that want the same division of L1 no multiprocessor has to run empty.
SHARED_BYTES = 16
SOURCE = Source("sample_rows", ("device.cuh", "sample_device.cuh", "sample_rows.cuh"))


class Arguments(ctypes.Structure):
    """Arguments of a launch: struct Arguments of sample_rows.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "temperature", "limit", "top_k", "top_p", "greedy", "noise")),
        *((name, ctypes.c_void_p) for name in ("rows", "ids")),
        ("logits_stride", ctypes.c_longlong),
        *((f"{name}_stride", ctypes.c_int) for name in ("temperature", "limit", "top_k", "top_p", "greedy", "noise")),
        *((name, ctypes.c_int) for name in ("vocab", "segment")),
        *((name, ctypes.c_bool) for name in ("use_top_k", "use_top_p", "use_limit", "aligned")),
    )


@dataclass(frozen=True)
class Launch:
    """One kernel, with a thread block for every (row, segment)."""

    kernel: str
    dtype: torch.dtype
    segments: int
    rows: int


@dataclass(frozen=True)
class Machine:
    """Where rows are sampled: a GPU, or in tests its emulation. workspace: for so many rows uint8 [rows, ROW_BYTES], zero."""

    multiprocessors: int
    launch: Callable[[Launch, Arguments], None]
    workspace: Callable[[int], Tensor]


def sample_rows(
    logits: Tensor,
    temperature: Tensor,
    limit: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    greedy: Tensor,
    noise: Tensor,
    *,
    use_top_k: bool,
    use_top_p: bool,
    use_limit: bool,
    machine: Machine | None = None,
) -> Tensor:
    """Choices int64 [T] from processed logits [T, V] (bf16, fp16 or fp32, taken as float32), -1 where the best is not finite.

    temperature float32, limit float32 (nats below the best that min-p allows), top_k int64, top_p float64 and greedy bool are
    [T] or [T, 1] with any stride, noise is int64 [T, 4] (seed low, seed high, choice, index), all on the device of the logits.
    use_top_k, use_top_p: whether any row uses the filter; use_limit: whether any uses min-p or top-k. The host does not wait.
    """
    rows, vocab = logits.shape
    columns = (temperature, limit, top_k, top_p, greedy)
    dtypes = (torch.float32, torch.float32, torch.int64, torch.float64, torch.bool)
    assert logits.dtype in TYPES and logits.stride(1) == 1
    assert all(column.dtype == dtype and column.numel() == rows for column, dtype in zip(columns, dtypes, strict=True))
    assert noise.dtype == torch.int64 and noise.shape == (rows, 4) and noise.stride(1) == 1
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return ids
    machine = machine or gpu(logits.device)
    segments, segment = cut(rows, vocab, machine.multiprocessors)
    arguments = Arguments(
        *(t.data_ptr() for t in (logits, *columns, noise, machine.workspace(rows), ids)),
        *(t.stride(0) for t in (logits, *columns, noise)),
        vocab=vocab,
        segment=segment,
        use_top_k=use_top_k,
        use_top_p=use_top_p,
        use_limit=use_limit or use_top_k,
        aligned=logits.data_ptr() % 16 == 0 and logits.stride(0) * logits.element_size() % 16 == 0,
    )
    for kernel in kernels(use_top_k, use_top_p):
        machine.launch(Launch(kernel, logits.dtype, segments, rows), arguments)
    return ids


def kernels(use_top_k: bool, use_top_p: bool) -> list[str]:
    """What runs, one after another."""
    limits = [name for name, used in (("settle_top_k", use_top_k), ("settle_top_p", use_top_p)) if used]
    return ["find_best", *(["fill_bins", *limits] if limits else []), "choose"]


def cut(rows: int, vocab: int, multiprocessors: int) -> tuple[int, int]:
    """Segments of a row, and the tokens of one. What is chosen does not depend on it."""
    tiles = ceil(vocab / TILE)
    wanted = min(tiles, ceil(BLOCKS_PER_MULTIPROCESSOR * multiprocessors / rows))
    tiles_of_segment = ceil(tiles / wanted)
    return ceil(tiles / tiles_of_segment), tiles_of_segment * TILE


def supports(logits: Tensor) -> bool:
    """Logits [T, V] on a GPU of compute capability 8.0 or more."""
    return (
        logits.is_cuda
        and logits.dtype in TYPES
        and logits.stride(1) == 1
        and 0 < logits.shape[0] < 1 << 16
        and torch.cuda.get_device_capability(logits.device) >= (8, 0)
    )


@cache
def gpu(device: torch.device) -> Machine:
    """Launches on a GPU's current stream. Calls share one workspace, so they must run one after another. Every size it has had
    stays, since captured graphs hold its address."""
    index = torch.cuda.current_device() if device.index is None else device.index
    pdl = torch.cuda.get_device_capability(index) >= (9, 0)
    workspaces: list[Tensor] = []

    def workspace(rows: int) -> Tensor:
        if not workspaces or workspaces[-1].shape[0] < rows:
            if torch.cuda.is_current_stream_capturing():
                raise ConfigError("Sampling needs more workspace than there is: run it once before it is captured in a graph.")
            workspaces.append(torch.zeros(max(rows, LEAST_ROWS), ROW_BYTES, dtype=torch.uint8, device=device))
        return workspaces[-1]

    def launch(chosen: Launch, arguments: Arguments) -> None:
        function = SOURCE.function(device, definitions({"LOGITS": TYPES[chosen.dtype]}), chosen.kernel)
        stream = torch.cuda.current_stream(device).cuda_stream
        function.launch((chosen.segments, chosen.rows, 1), (THREADS, 1, 1), SHARED_BYTES, [arguments], stream, pdl)

    return Machine(device_attribute(index, MULTIPROCESSOR_COUNT), launch, workspace)
