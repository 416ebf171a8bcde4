"""The CUDA source of the wide product, compiled by g++ and run on the CPU: a `wide.Machine` for tests."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import torch
from kernels.emulation.narrow_emulation import COMPILER, HERE, SMALL_GPU, Range

from flashdraft.kernels import narrow, nvrtc
from flashdraft.kernels.narrow_plan import Device
from flashdraft.kernels.wide_plan import WideOptions, WidePlan


class LaunchShape(ctypes.Structure):
    """struct Launch of wide_linear.cpp."""

    _fields_ = tuple(
        (name, ctypes.c_int)
        for name in (
            *("fp16", "high", "deep", "wide", "groups", "fold", "stages", "parallel"),
            *("blocks", "shared_bytes", "late_copies", "seed"),
        )
    )


def build(folder: Path) -> ctypes.CDLL:
    assert COMPILER is not None
    library = folder / "wide_linear.so"
    flags = ["-std=c++17", "-Og", "-DFLASHDRAFT_EMULATION", "-fPIC", "-shared", f"-I{HERE}", f"-I{nvrtc.SOURCES}"]
    built = subprocess.run(
        [COMPILER, *flags, "-o", library, HERE / "wide_linear.cpp"], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    loaded = ctypes.CDLL(str(library))
    loaded.wide_linear.restype = ctypes.c_char_p
    return loaded


class Emulator:
    """Blocks run one by one in a random order; `ranges` is all the memory that copies and fresh loads may touch."""

    def __init__(
        self, library: ctypes.CDLL, device: Device = SMALL_GPU, *, late_copies: bool = True, most_blocks: int = 1 << 30
    ) -> None:
        self.library, self.device, self.late_copies, self.most_blocks = library, device, late_copies, most_blocks
        self.seed, self.plans = 0, list[WidePlan]()
        self.workspace: narrow.Workspace | None = None

    def machine(self) -> narrow.Machine:
        return narrow.Machine(self.device, self.launch, self.find_workspace)

    def find_workspace(self, *sizes: int) -> narrow.Workspace:
        self.workspace = narrow.Workspace.empty(torch.device("cpu"), *sizes)
        self.workspace.partials.fill_(torch.nan)
        return self.workspace

    def launch(
        self, plan: WidePlan, features: narrow.Features, arguments: narrow.Arguments, dtype: torch.dtype, _: WideOptions
    ) -> None:
        self.seed += 1
        self.plans.append(plan)
        shape = LaunchShape(
            *(dtype == torch.float16, *plan.tile, plan.cut.fold, plan.stages, plan.parallel),
            *(min(plan.blocks, self.most_blocks), plan.shared, self.late_copies, self.seed),
        )
        ranges = self.ranges(features, arguments)
        fault = self.library.wide_linear(
            *map(ctypes.byref, (shape, features, arguments)), (Range * len(ranges))(*ranges), len(ranges)
        )
        assert fault is None, fault.decode()
        assert self.workspace is None or self.workspace.counters.count_nonzero() == 0

    def ranges(self, features: narrow.Features, arguments: narrow.Arguments) -> list[Range]:
        """What the arguments say may be read; a pointer that is not needed is null."""
        k, rows = features.k, arguments.rows
        matrices = (
            (arguments.weight, arguments.outputs * (2 if features.gated else 1), arguments.weight_stride, k),
            (arguments.x, rows, arguments.x_stride, k),
            (arguments.multiply, rows, arguments.multiply_stride, arguments.outputs),
        )
        found = [(start, 2 * ((count - 1) * stride + width)) for start, count, stride, width in matrices]
        if self.workspace is not None:
            tensors = (self.workspace.partials, self.workspace.counters)
            found += [(tensor.data_ptr(), 4 * tensor.numel()) for tensor in tensors]
        return [Range(start, size) for start, size in found if start]
