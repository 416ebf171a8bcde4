"""The CUDA source of sampling, compiled by g++ and run on the CPU: a `sample.Machine` for tests."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import torch
from kernels.emulation.narrow_emulation import COMPILER, HERE, Range
from torch import Tensor

from flashdraft.kernels import nvrtc, sample

KERNELS = sample.kernels(True, True)
TYPES = [torch.bfloat16, torch.float16, torch.float32]


class LaunchShape(ctypes.Structure):
    """struct Launch of sample_rows.cpp."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("kernel", "type", "segments", "rows", "seed"))


def build(folder: Path) -> ctypes.CDLL:
    assert COMPILER is not None
    library = folder / "sample_rows.so"
    flags = ["-std=c++17", "-O1", "-DFLASHDRAFT_EMULATION", "-fPIC", "-shared", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
    command = [COMPILER, *flags, f"-I{HERE}", f"-I{nvrtc.SOURCES}", "-o", str(library), str(HERE / "sample_rows.cpp")]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    loaded = ctypes.CDLL(str(library))
    loaded.sample_rows.restype = ctypes.c_char_p
    return loaded


class Emulator:
    """Thread blocks run one by one in a random order; what lies outside of the arguments' tensors may not be touched."""

    def __init__(self, library: ctypes.CDLL, multiprocessors: int = 4) -> None:
        self.library, self.multiprocessors, self.seed = library, multiprocessors, 0
        self.launches: list[sample.Launch] = []
        self.memory = torch.zeros(0, sample.ROW_BYTES, dtype=torch.uint8)

    def machine(self) -> sample.Machine:
        return sample.Machine(self.multiprocessors, self.launch, self.workspace)

    def workspace(self, rows: int) -> Tensor:
        self.memory = torch.zeros(rows, sample.ROW_BYTES, dtype=torch.uint8)
        return self.memory

    def launch(self, chosen: sample.Launch, arguments: sample.Arguments) -> None:
        self.seed += 1
        self.launches.append(chosen)
        shape = LaunchShape(*(KERNELS.index(chosen.kernel), TYPES.index(chosen.dtype), chosen.segments, chosen.rows, self.seed))
        ranges = self.ranges(chosen, arguments)
        fault = self.library.sample_rows(
            ctypes.byref(shape), ctypes.byref(arguments), (Range * len(ranges))(*ranges), len(ranges)
        )
        assert fault is None, fault.decode()

    def ranges(self, chosen: sample.Launch, arguments: sample.Arguments) -> list[Range]:
        """What the arguments say may be touched: of a row of logits no more than its tokens."""
        sizes = {"temperature": 4, "limit": 4, "top_k": 8, "top_p": 8, "greedy": 1, "noise": 32}
        found = [(self.memory.data_ptr(), self.memory.numel()), (arguments.ids, 8 * chosen.rows)]
        for row in range(chosen.rows):
            found += [
                (getattr(arguments, name) + row * getattr(arguments, f"{name}_stride") * (8 if name == "noise" else size), size)
                for name, size in sizes.items()
            ]
            item = chosen.dtype.itemsize
            found.append((arguments.logits + row * arguments.logits_stride * item, arguments.vocab * item))
        return [Range(*pair) for pair in found]
