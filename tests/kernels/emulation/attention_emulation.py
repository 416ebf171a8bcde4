"""The CUDA source of Hopper attention, run on the CPU in place of what `hopper_attention.attend` asks of a GPU."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernels.emulation.hopper_emulation import Kernel, Kind, LaunchShape, Library, Variant, extent, tensor_map
from kernels.emulation.narrow_emulation import Range
from torch import Tensor

from flashdraft.kernels import hopper_attention

ATTENTION = Kind(hopper_attention.SOURCE, 'hopper_attention, "." FD_FORMATS')


class Emulator:
    """`attend` is `hopper_attention.attend`; clusters run one by one in a random order, and read the given tensors alone."""

    def __init__(self, library: Library, *, percent_late: int = 50, seed: int = 0, change: tuple[str, str] = ("", "")) -> None:
        self.library, self.percent_late, self.seed, self.change = library, percent_late, seed, change
        self.ranges = list[Range]()

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> None:
        """Raises AssertionError with what the emulation found."""
        self.ranges = [extent(tensor) for tensor in (q, keys, values)]
        hopper_attention._map.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hopper_attention, "SOURCE", SimpleNamespace(function=lambda _, defined: Kernel(self, defined)))
            patch.setattr(hopper_attention, "tensor_map", tensor_map)
            patch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
            hopper_attention.attend(q, keys, values, *rest)
        hopper_attention._map.cache_clear()  # the emulation's maps are none for a GPU

    def run(self, defined: str, blocks: int, threads: int, shared_bytes: int, arguments: list[Any]) -> None:
        variant = self.library.numbers[Variant(defined, *self.change)]
        shape = LaunchShape(variant, blocks, threads, shared_bytes, self.percent_late, self.seed)
        ranges = (Range * len(self.ranges))(*self.ranges)
        fault = self.library.run(*map(ctypes.byref, (shape, *arguments)), ranges, len(ranges))
        assert fault is None, fault.decode()
