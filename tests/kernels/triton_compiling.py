"""Ahead-of-time compilation of what a wrapper would launch on a given chip; no GPU is needed.

The wrapper runs on CPU tensors under a driver that says it is that chip; launches become compilations. So arguments, their
alignment, tile sizes and stages are those of a real launch.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

# Shared memory a program may have, in KiB, by compute capability (CUDA C++ Programming Guide, technical specifications).
SHARED_KIB = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}


@dataclass(frozen=True)
class Chip:
    """What Triton's launcher and our wrappers ask of a CUDA driver."""

    capability: int

    @property
    def shared_bytes(self) -> int:
        return SHARED_KIB[self.capability] * 1024

    @property
    def utils(self) -> Chip:
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self.shared_bytes}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # kernels are cached by device, so every chip is a device of its own

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_for(capability: int) -> Iterator[list[Any]]:
    """Inside, a launch compiles for this chip instead of running; the list gathers the compiled kernels."""
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return compiled[-1]

    driver = triton.runtime.driver
    with patch.object(driver, "_active", Chip(capability)), patch.object(JITFunction, "run", compile_only):
        yield compiled


def stack_bytes(kernel: Any) -> int:
    """Local memory a thread of a compiled kernel has; registers are spilled there."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(re.findall(r"STACK:(\d+)", usage)[0])
