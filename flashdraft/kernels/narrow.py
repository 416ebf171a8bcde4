"""Products of few rows at the speed at which the weights can be read: Python side of cuda/narrow_linear.cuh.

Shape letters: T rows, K inputs, N outputs. A row's bits depend on neither T nor the other rows: how K is cut (`cut`) depends on
the weight's shape and the device alone. Every combination of shapes and features is compiled once (nvrtc.py); the first call of
each must therefore lie outside a graph capture, and so must the first that needs this much workspace.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from flashdraft.errors import ConfigError
from flashdraft.kernels.narrow_plan import (
    DENSE,
    FASTEST,
    MAX_ROWS,
    NVFP4,
    STEP,
    WARPS,
    Device,
    NarrowOptions,
    Plan,
    Storage,
    cut,
    plan,
)
from flashdraft.kernels.nvrtc import (
    MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
    MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
    MULTIPROCESSOR_COUNT,
    Source,
    definitions,
    device_attribute,
)

TYPES = {torch.bfloat16: "Bf16", torch.float16: "Fp16"}
ACTIVATIONS = {None: 0, "silu": 1, "gelu_tanh": 2}
SOURCE = Source("narrow_linear", ("device.cuh", "narrow_linear.cuh", "nvfp4.cuh"))


class Features(ctypes.Structure):
    """Constants of a compiled kernel: struct Features of narrow_linear.cuh."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("k", "slice_steps")),
        *((name, ctypes.c_bool) for name in ("split", "bias")),
        ("activation", ctypes.c_int),
        *((name, ctypes.c_bool) for name in ("gated", "multiply", "argmax")),
    )

    def text(self) -> str:
        return ", ".join(str(getattr(self, field[0])).lower() for field in self._fields_)


class Arguments(ctypes.Structure):
    """Arguments of a launch: struct Arguments of narrow_linear.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "x", "bias", "multiply")),
        *((name, ctypes.c_void_p) for name in ("z", "partials", "counters", "candidates", "ids")),
        *((name, ctypes.c_longlong) for name in ("weight_stride", "x_stride", "multiply_stride")),
        *((name, ctypes.c_int) for name in ("rows", "outputs", "tiles")),
        ("scales", ctypes.c_void_p),
    )


@dataclass
class Workspace:
    """Partial sums, candidates of the arg max, and counters, which are zero between launches. One for all launches of a
    stream: they run one after another, and a kernel that starts early touches it only when those before it have ended."""

    partials: Tensor
    candidates: Tensor
    counters: Tensor

    @classmethod
    def empty(cls, device: torch.device, partials: int, candidates: int, counters: int) -> Workspace:
        whole = torch.int32
        return cls(
            torch.empty(partials, device=device),
            torch.empty(candidates, dtype=whole, device=device),
            torch.zeros(counters, dtype=whole, device=device),
        )

    def holds(self, partials: int, candidates: int, counters: int) -> bool:
        sizes = (self.partials.numel(), self.candidates.numel(), self.counters.numel())
        return all(size >= least for size, least in zip(sizes, (partials, candidates, counters), strict=True))


FindWorkspace = Callable[[int, int, int], Workspace]


@dataclass(frozen=True)
class Machine:
    """Where products run: a GPU, or in tests its emulation."""

    device: Device
    launch: Callable[..., None]  # plan, features, arguments, dtype, options, storage
    workspace: FindWorkspace


@dataclass(frozen=True)
class Weight:
    """[rows, K] in a storage; `scales` float32 [tiles]: what sums of its tiles are multiplied by (NVFP4)."""

    data: Tensor
    rows: int
    k: int
    storage: Storage
    stride: int = 0
    scales: Tensor | None = None

    @classmethod
    def dense(cls, weight: Tensor) -> Weight:
        rows, k = weight.shape
        return cls(weight, rows, k, DENSE, weight.stride(0))


def narrow_linear(
    weight: Tensor | Weight,
    x: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    multiply: Tensor | None = None,
    gated: bool = False,
    options: NarrowOptions = FASTEST,
    machine: Machine | None = None,
) -> Tensor:
    """z [T, N]: `fused_linear_reference` without what stands before the product, for what `supports` accepts."""
    weight = Weight.dense(weight) if isinstance(weight, Tensor) else weight
    gated, outputs, bias, multiply = prepared(weight.rows, bias, activation, multiply, gated)
    product = _Product(weight, outputs, gated, options, machine or gpu(x.device), bias, activation)
    z, x = x.new_empty(x.shape[0], outputs), aligned(x)
    for rows in product.launches(x.shape[0]):
        product.run(x[rows], z[rows], None if multiply is None else multiply[rows])
    return z


def prepared(
    weight_rows: int, bias: Tensor | None, activation: str | None, multiply: Tensor | None, gated: bool
) -> tuple[bool, int, Tensor | None, Tensor | None]:
    """Whether it is gated, outputs, bias and `multiply` as the kernels take them: only with an activation are there gates."""
    gated = gated and activation is not None
    outputs = weight_rows // 2 if gated else weight_rows
    if multiply is not None:
        multiply = None if activation is None or gated else multiply if multiply.stride(1) == 1 else multiply.contiguous()
    return gated, outputs, None if bias is None else bias.contiguous(), multiply


def narrow_argmax(
    weight: Tensor | Weight, x: Tensor, *, options: NarrowOptions = FASTEST, machine: Machine | None = None
) -> Tensor:
    """int32 [T]: of every row the lowest index of the greatest value of x weight^T, rounded to x's dtype.

    -1 where that value is not finite. For what `supports` accepts if K is one slice: up to 4,096 with 228 KB of shared memory.
    """
    weight = Weight.dense(weight) if isinstance(weight, Tensor) else weight
    product = _Product(weight, weight.rows, False, options, machine or gpu(x.device), None, None)
    ids, x = torch.empty(x.shape[0], dtype=torch.int32, device=x.device), aligned(x)
    for rows in product.launches(x.shape[0]):
        product.run(x[rows], None, None, ids[rows])
    return ids


@dataclass
class _Product:
    weight: Weight
    outputs: int
    gated: bool
    options: NarrowOptions
    machine: Machine
    bias: Tensor | None
    activation: str | None

    def plan(self, rows: int) -> Plan:
        w = self.weight
        return plan(rows, self.outputs, w.k, self.gated, self.machine.device, self.options, w.storage)

    def launches(self, rows: int) -> list[slice]:
        most = 8 * self.plan(MAX_ROWS).tiles_of_rows
        return [slice(start, min(start + most, rows)) for start in range(0, rows, most)]

    def run(self, x: Tensor, z: Tensor | None, multiply: Tensor | None, ids: Tensor | None = None) -> None:
        own = x.dtype if self.weight.storage != DENSE else self.weight.data.dtype
        assert all(t.dtype == own for t in (x, multiply, self.bias) if t is not None)
        chosen = self.plan(x.shape[0])
        parts, results = chosen.cut, chosen.tiles_of_rows * 8
        sums = parts.tiles * parts.slices * results * 16 // parts.fold if parts.slices > 1 else 0
        bests = 0 if ids is None else chosen.grid[0] * results
        workspace = self.machine.workspace(max(sums, bests), bests, parts.tiles if parts.slices > 1 else 1)
        features = Features(
            k=self.weight.k,
            slice_steps=parts.slice_steps,
            split=parts.slices > 1,
            bias=self.bias is not None,
            activation=ACTIVATIONS[self.activation],
            gated=self.gated,
            multiply=multiply is not None,
            argmax=ids is not None,
        )
        arguments = Arguments(
            *(_address(t) for t in (self.weight.data, x, self.bias, multiply)),
            *(_address(t) for t in (z, workspace.partials, workspace.counters, workspace.candidates, ids)),
            *(self.weight.stride, x.stride(0), 0 if multiply is None else multiply.stride(0)),
            *(x.shape[0], self.outputs, parts.tiles, _address(self.weight.scales)),
        )
        self.machine.launch(chosen, features, arguments, x.dtype, self.options, self.weight.storage)


def supports(weight: Tensor) -> bool:
    """bf16 or fp16, on a GPU of compute capability 8.0 or more, K a multiple of 64, rows at multiples of 16 bytes."""
    return (
        weight.is_cuda
        and weight.dtype in TYPES
        and weight.shape[1] % STEP == 0
        and _is_aligned(weight)
        and torch.cuda.get_device_capability(weight.device) >= (8, 0)
    )


def is_one_slice(weight: Tensor) -> bool:
    """Whether `narrow_argmax` takes this weight."""
    return cut(weight.shape[0], weight.shape[1], False, device_of(weight.device)).slices == 1


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _is_aligned(x: Tensor) -> bool:
    row_bytes = x.stride(0) * x.element_size()
    return x.stride(1) == 1 and x.data_ptr() % 16 == 0 and (x.shape[0] == 1 or row_bytes % 16 == 0)


def aligned(x: Tensor) -> Tensor:
    """Pieces of 16 bytes are read: the rows, copied if they do not lie so."""
    return x if _is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


@cache
def device_of(device: torch.device) -> Device:
    index = torch.cuda.current_device() if device.index is None else device.index
    numbers = (MULTIPROCESSOR_COUNT, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)
    return Device(torch.cuda.get_device_capability(index), *(device_attribute(index, number) for number in numbers))


@cache
def gpu(device: torch.device) -> Machine:
    """Launches on a GPU's current stream. Every size of workspace it has had stays, since captured graphs hold its address."""
    description = device_of(device)
    all_workspaces: dict[int, list[Workspace]] = {}  # by stream

    def workspace(partials: int, candidates: int, counters: int) -> Workspace:
        workspaces = all_workspaces.setdefault(torch.cuda.current_stream(device).cuda_stream, [])
        if not workspaces or not workspaces[-1].holds(partials, candidates, counters):
            if torch.cuda.is_current_stream_capturing():
                raise ConfigError(
                    "A product needs more workspace than this stream has: run it once on the stream that captures, before that."
                )
            # 16 MB of sums and 16,384 tiles: down projections of up to 64 rows and 28,672 inputs need no more.
            workspaces.append(Workspace.empty(device, max(partials, 1 << 22), max(candidates, 1 << 14), max(counters, 1 << 14)))
        return workspaces[-1]

    def launch(
        chosen: Plan,
        features: Features,
        arguments: Arguments,
        dtype: torch.dtype,
        options: NarrowOptions,
        storage: Storage,
    ) -> None:
        function = SOURCE.function(device, constants(chosen, features, dtype, storage))
        stream = torch.cuda.current_stream(device).cuda_stream
        pdl = options.pdl and description.capability >= (9, 0)
        function.launch((*chosen.grid, 1), (32 * WARPS, 1, 1), chosen.shared, [arguments], stream, pdl)

    return Machine(description, launch, workspace)


def constants(chosen: Plan, features: Features, dtype: torch.dtype, storage: Storage = DENSE) -> str:
    """What narrow_linear.cu expects to be defined."""
    values = {
        "TYPE": TYPES[dtype],
        "TILES_OF_ROWS": chosen.tiles_of_rows,
        "WEIGHTS": "Nvfp4" if storage == NVFP4 else f"Dense<{chosen.cut.fold}>",
        "DEPTH": chosen.depth,
        "RESIDENT": chosen.resident,
        "FEATURES": features.text(),
    }
    return definitions(values)
