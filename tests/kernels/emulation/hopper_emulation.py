"""The CUDA source of the Hopper product, compiled by g++ and run on the CPU, in place of what `hopper_linear` asks of a GPU."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernels.emulation.narrow_emulation import COMPILER, HERE, Range
from torch import Tensor

from flashdraft.kernels import hopper, narrow, nvrtc
from flashdraft.kernels.hopper import hopper_linear
from flashdraft.kernels.hopper_plan import HopperOptions
from flashdraft.kernels.narrow_plan import Device

# A GPU with few multiprocessors, so that a block gets several tiles of a small weight.
SMALL_HOPPER = Device((9, 0), 8, 232448, 233472)
GUARD_ROWS = 256  # of z: as many as a kernel has at most, so that a row that it must not store harms no other memory
UNWRITTEN = 0x7FFF  # a NaN in bf16 and fp16, other than those that the kernel gives


class LaunchShape(ctypes.Structure):
    """struct Launch of hopper_linear.cpp."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("variant", "blocks", "threads", "shared_bytes", "percent_late", "seed"))


class TensorMap(ctypes.Structure):
    """struct TensorMap of hopper_emulation.h."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        *((name, ctypes.c_int64 * 4) for name in ("sizes", "strides", "box")),
    )


def tensor_map(dtype: torch.dtype, address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> TensorMap:
    """`nvrtc.tensor_map`, with what the driver asks for. Dimensions that are not there have one element."""
    assert address % 16 == 0
    assert all(stride % 16 == 0 for stride in strides)
    assert 2 * box[0] == 128
    assert max(box) <= 256
    padded = [[*values, *[1] * (4 - len(values))] for values in (sizes, (2, *strides), box)]
    return TensorMap(address, len(sizes), *((ctypes.c_int64 * 4)(*values) for values in padded))


@dataclass(frozen=True)
class Kind:
    """Kernels of one source, run by NAME.cpp. `entry`: the members of its struct Variant."""

    source: nvrtc.Source
    entry: str

    @property
    def name(self) -> str:
        return self.source.name


LINEAR = Kind(hopper.SOURCE, "hopper_linear, FD_PRODUCT, FD_SPLIT")


@dataclass(frozen=True)
class Variant:
    """A kernel to be compiled: what is defined in front of it, and a change of its source that breaks it."""

    defined: str
    before: str = ""
    after: str = ""

    def text(self, kind: Kind) -> str:
        source = kind.source.text("")
        assert not self.before or source.count(self.before) == 1
        return source.replace(self.before, self.after) if self.before else source

    def included(self, kind: Kind, number: int, file: str) -> str:
        """In a namespace of its own; the kernel, which is extern "C", needs another name, too."""
        names = (kind.name, *re.findall(r"#define (\w+)", self.defined))
        return "\n".join(
            (
                f"namespace variant_{number} {{\n#define {kind.name} {kind.name}_{number}\n{self.defined}",
                f'#include "{file}"\nconstexpr Variant variant{{{kind.entry}}};',
                *(f"#undef {name}" for name in names),
                "}\n",
            )
        )


class Library:
    """All variants in one: headers take 1.3 s of a build, a variant 0.07 s."""

    def __init__(self, folder: Path, variants: Iterable[Variant], kind: Kind = LINEAR) -> None:
        assert COMPILER is not None
        self.numbers = {variant: number for number, variant in enumerate(dict.fromkeys(variants))}
        texts = []
        for variant, number in self.numbers.items():
            (folder / f"variant_{number}.cu").write_text(variant.text(kind))
            texts.append(variant.included(kind, number, f"variant_{number}.cu"))
        all_of_them = ", ".join(f"variant_{number}::variant" for number in self.numbers.values())
        (folder / "variants.h").write_text("".join(texts) + f"constexpr Variant variants[] = {{{all_of_them}}};\n")
        library = folder / f"{kind.name}.so"
        flags = ["-std=c++17", "-O1", "-DFLASHDRAFT_EMULATION", "-fPIC", "-shared", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
        includes = [f"-I{folder}", f"-I{HERE}", f"-I{nvrtc.SOURCES}"]
        command = [COMPILER, *flags, *includes, "-o", library, HERE / f"{kind.name}.cpp"]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        assert built.returncode == 0, built.stderr
        self.run = getattr(ctypes.CDLL(str(library)), kind.name)
        self.run.restype = ctypes.c_char_p


class Emulator:
    """Clusters run one by one in a random order. `linear` is `hopper_linear`; what is around its tensors may not be touched."""

    def __init__(self, library: Library, *, percent_late: int = 50, seed: int = 0, change: tuple[str, str] = ("", "")) -> None:
        self.library, self.percent_late, self.seed, self.change = library, percent_late, seed, change
        self.ranges = list[Range]()

    def linear(self, weight: Tensor, x: Tensor, *, options: HopperOptions, **features: Any) -> Tensor:
        """x must lie as TMA wants it. Raises AssertionError with what the emulation found."""
        self.ranges = [extent(tensor) for tensor in (weight, x, features.get("multiply")) if tensor is not None]
        hopper._map.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hopper, "SOURCE", SimpleNamespace(function=lambda _, defined: Kernel(self, defined)))
            patch.setattr(hopper, "tensor_map", tensor_map)
            patch.setattr(narrow, "device_of", lambda _: SMALL_HOPPER)
            patch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
            z = hopper_linear(weight, x, options=options, **features)
        hopper._map.cache_clear()  # the emulation's maps are none for a GPU
        return z

    def run(self, defined: str, blocks: int, threads: int, shared_bytes: int, arguments: list[Any]) -> None:
        *maps, to = arguments
        self.seed += 1
        variant = self.library.numbers[Variant(defined, *self.change)]
        shape = LaunchShape(variant, blocks, threads, shared_bytes, self.percent_late, self.seed)
        # Stores are not checked one by one: z lies between rows that must stay as they are.
        z = torch.full((GUARD_ROWS + to.rows + GUARD_ROWS, to.outputs), UNWRITTEN, dtype=torch.int16)
        real, to.z = to.z, z[GUARD_ROWS:].data_ptr()
        ranges = (Range * len(self.ranges))(*self.ranges)
        fault = self.library.run(*map(ctypes.byref, (shape, *maps, to)), ranges, len(ranges))
        assert fault is None, fault.decode()
        unwritten = (z == UNWRITTEN).split((GUARD_ROWS, to.rows, GUARD_ROWS))
        assert unwritten[0].all(), "a store before z"
        assert unwritten[2].all(), "a store behind z"
        assert not unwritten[1].any(), "a part of z is not stored"
        ctypes.memmove(real, to.z, 2 * to.rows * to.outputs)


@dataclass
class Kernel:
    """`nvrtc.Function`."""

    emulator: Any  # its `run` takes the kernel's place
    defined: str

    def launch(
        self, grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int, arguments: list[Any], stream: int, pdl: bool
    ) -> None:
        assert grid[1:] == block[1:] == (1, 1)
        self.emulator.run(self.defined, grid[0], block[0], shared_bytes, arguments)


def extent(tensor: Tensor) -> Range:
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Range(tensor.data_ptr(), elements * tensor.element_size())
