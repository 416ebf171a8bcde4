"""The CUDA source of the narrow product, compiled by g++ and run on the CPU: a `narrow.Machine` for tests."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashdraft.kernels import narrow, nvrtc
from flashdraft.kernels.narrow_plan import NVFP4, Device, NarrowOptions, Plan, Storage

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
# A GPU with few multiprocessors, so that a block gets several tiles of a small weight.
SMALL_GPU = Device((9, 0), 4, 232448, 233472)


class LaunchShape(ctypes.Structure):
    """struct Launch of narrow_linear.cpp."""

    _fields_ = tuple(
        (name, ctypes.c_int)
        for name in (
            *("fp16", "tiles_of_rows", "fold", "depth"),
            *("grid_x", "grid_y", "shared_bytes", "late_copies", "seed", "nvfp4"),
        )
    )


class Range(ctypes.Structure):
    """struct Range of emulation.h."""

    _fields_ = (("start", ctypes.c_void_p), ("bytes", ctypes.c_int64))


def build(folder: Path) -> ctypes.CDLL:
    assert COMPILER is not None
    library = folder / "narrow_linear.so"
    includes = [f"-I{HERE}", f"-I{nvrtc.SOURCES}"]
    flags = ["-std=c++17", "-Og", "-DFLASHDRAFT_EMULATION", "-fPIC", "-shared"]
    built = subprocess.run(
        [COMPILER, *flags, *includes, "-o", library, HERE / "narrow_linear.cpp"], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    loaded = ctypes.CDLL(str(library))
    loaded.narrow_linear.restype = ctypes.c_char_p
    return loaded


class Emulator:
    """Blocks run one by one in a random order; `tensors` is all the memory a kernel may touch, besides the workspace."""

    def __init__(self, library: ctypes.CDLL, device: Device = SMALL_GPU, *, late_copies: bool = True) -> None:
        self.library, self.device, self.late_copies = library, device, late_copies
        self.seed, self.plans = 0, list[Plan]()
        self.workspace: narrow.Workspace | None = None

    def machine(self) -> narrow.Machine:
        return narrow.Machine(self.device, self.launch, self.find_workspace)

    def find_workspace(self, *sizes: int) -> narrow.Workspace:
        if self.workspace is None or not self.workspace.holds(*sizes):
            self.workspace = narrow.Workspace.empty(torch.device("cpu"), *sizes)
            self.workspace.partials.fill_(torch.nan)
        return self.workspace

    def launch(
        self,
        plan: Plan,
        features: narrow.Features,
        arguments: narrow.Arguments,
        dtype: torch.dtype,
        _: NarrowOptions,
        storage: Storage,
    ) -> None:
        self.seed += 1
        self.plans.append(plan)
        shape = LaunchShape(
            *(dtype == torch.float16, plan.tiles_of_rows, plan.cut.fold, plan.depth),
            *(*plan.grid, plan.shared, self.late_copies, self.seed, storage == NVFP4),
        )
        ranges = self.ranges(plan, features, arguments, storage)
        fault = self.library.narrow_linear(
            *map(ctypes.byref, (shape, features, arguments)), (Range * len(ranges))(*ranges), len(ranges)
        )
        assert fault is None, fault.decode()
        assert self.workspace is not None
        assert self.workspace.counters.count_nonzero() == 0

    def ranges(self, plan: Plan, features: narrow.Features, arguments: narrow.Arguments, storage: Storage) -> list[Range]:
        """What the arguments say may be read; a pointer that is not needed is null."""
        k, rows = features.k, arguments.rows
        weight_rows = arguments.outputs * (2 if features.gated else 1)
        matrices = [
            (arguments.weight, weight_rows, arguments.weight_stride),
            (arguments.x, rows, arguments.x_stride),
        ]
        found = [(start, 2 * ((count - 1) * stride + k)) for start, count, stride in matrices]
        if storage == NVFP4:
            found[0] = (arguments.weight, arguments.tiles * k // 64 * 576)
            found.append((arguments.scales, 4 * arguments.tiles))
        found.append((arguments.multiply, 2 * ((rows - 1) * arguments.multiply_stride + arguments.outputs)))
        assert self.workspace is not None
        for tensor in (self.workspace.partials, self.workspace.candidates, self.workspace.counters):
            found.append((tensor.data_ptr(), 4 * tensor.numel()))
        return [Range(start, size) for start, size in found if start]


def guarded(shape: tuple[int, int], dtype: torch.dtype, make: Callable[..., Tensor] = torch.randn) -> Tensor:
    """A matrix with NaN behind each of its rows."""
    around = torch.full((shape[0], shape[1] + 64), torch.nan, dtype=dtype)
    around[:, : shape[1]] = make(*shape).to(dtype)
    return around[:, : shape[1]]


def on_gpu(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cuda() if isinstance(value, Tensor) else value for name, value in arguments.items()}


def assert_replays_equal(chain: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """On a GPU: a captured chain of kernels gives, each time it is replayed, the bits of one that was launched."""
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):  # every stream has its own workspace
        wanted = chain(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        found = chain(x)
    for _ in range(50):
        found.zero_()
        graph.replay()
        assert torch.equal(found, wanted)
