"""CUDA C++ compiled when it is needed and launched through the driver: NVRTC and libcuda by ctypes, no compiler on the machine.

Every CUDA build of PyTorch brings libnvrtc along. Compiled kernels are kept in `cache_dir()`, so a process pays for a kernel
(0.3 to 1 s) only if none before it did.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

import torch

from flashdraft.errors import FlashdraftError

SOURCES = Path(__file__).parent / "cuda"
HEADERLESS: MappingProxyType[str, str] = MappingProxyType({})

# From cuda.h: attributes of devices, functions and launches.
MULTIPROCESSOR_COUNT, MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 16, 81, 97
_MAX_DYNAMIC_SHARED_SIZE_BYTES, _PREFERRED_SHARED_MEMORY_CARVEOUT = 8, 9
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_ELEMENTS = {torch.float16: 6, torch.bfloat16: 9}
_SWIZZLE_128_BYTES = 3
_PROMOTE_TO_256_BYTES = 3


class CudaError(FlashdraftError):
    """A CUDA library that is missing, or one of its calls that failed."""


class _AttributeValue(ctypes.Union):
    _fields_ = (("bytes", ctypes.c_char * 64), ("allowed", ctypes.c_int))


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", _AttributeValue))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


class TensorMap(ctypes.Structure):
    """CUtensorMap: boxes of a tensor for the copy engine (TMA), a kernel's argument."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


def tensor_map(
    dtype: torch.dtype,
    address: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
) -> TensorMap:
    """Boxes whose innermost side is 128 bytes, in shared memory with 16-byte pieces swizzled in 1,024 bytes. Zero outside.

    Innermost first; strides in bytes, of all dimensions but the innermost.
    """
    memory = (ctypes.c_char * (2 * 64 + ctypes.sizeof(TensorMap)))()
    found = TensorMap.from_buffer(memory, -ctypes.addressof(memory) % 64)  # the driver wants it at a multiple of 64
    rank = len(sizes)
    _driver_call(
        "cuTensorMapEncodeTiled",
        *(ctypes.byref(found), _ELEMENTS[dtype], rank, ctypes.c_void_p(address)),
        *((ctypes.c_uint64 * rank)(*sizes), (ctypes.c_uint64 * (rank - 1))(*strides)),
        *((ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank)),
        *(0, _SWIZZLE_128_BYTES, _PROMOTE_TO_256_BYTES, 0),  # not interleaved; zeros outside, not NaN
    )
    return found


class Function:
    """A kernel of a module on the module's device."""

    def __init__(self, handle: ctypes.c_void_p, context: ctypes.c_void_p) -> None:
        self._handle, self._context = handle, context
        self._shared_bytes = 0

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        arguments: Sequence[ctypes.Structure | ctypes._SimpleCData],
        stream: int,
        pdl: bool = False,
    ) -> None:
        """On `stream` (a cudaStream_t, `torch.cuda.Stream.cuda_stream`); can be captured in a graph.

        pdl: the kernel may start before the one in front of it has ended, as far as that one allows it (compute capability
        9.0 on); it has to wait itself (griddepcontrol.wait) before it touches what others write.
        """
        before = _make_current(self._context)
        if shared_bytes > self._shared_bytes:
            _driver_call("cuFuncSetAttribute", self._handle, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
            # As much of a multiprocessor's L1 as can be: blocks of two consecutive kernels then fit beside each other, and the
            # division does not change between kernels, for which a multiprocessor would have to run empty.
            _driver_call("cuFuncSetAttribute", self._handle, _PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
            self._shared_bytes = shared_bytes
        attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION)
        attribute.value.allowed = 1
        config = _LaunchConfig(*grid, *block, shared_bytes, stream, ctypes.pointer(attribute), int(pdl))
        addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        _driver_call("cuLaunchKernelEx", ctypes.byref(config), self._handle, addresses, None)
        if before.value not in (None, self._context.value):
            _driver_call("cuCtxSetCurrent", before)


class Module:
    """Kernels of one source, compiled for `device` and loaded there. `headers`: text by the name in #include. `specific`: with
    the instructions that only this compute capability has (wgmma).

    Raises CudaError with the compiler's log.
    """

    def __init__(
        self,
        source: str,
        name: str,
        device: torch.device,
        headers: MappingProxyType[str, str] | dict[str, str] = HEADERLESS,
        specific: bool = False,
    ) -> None:
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        self._context = _primary_context(index)
        _make_current(self._context)
        self._image = cached_compile(source, name, torch.cuda.get_device_capability(index), headers, specific)
        self._handle = ctypes.c_void_p()
        _driver_call("cuModuleLoadData", ctypes.byref(self._handle), self._image)

    def function(self, name: str) -> Function:
        handle = ctypes.c_void_p()
        _driver_call("cuModuleGetFunction", ctypes.byref(handle), self._handle, name.encode())
        return Function(handle, self._context)


@dataclass(frozen=True)
class Source:
    """A file of kernels/cuda, `name`.cu, and the headers it includes. What varies is defined in front of it. `specific`: as in
    Module."""

    name: str
    headers: tuple[str, ...]
    specific: bool = False

    @cache  # noqa: B019 (one for each kernel, for as long as the process lives)
    def files(self) -> dict[str, str]:
        return {file: (SOURCES / file).read_text() for file in (*self.headers, f"{self.name}.cu")}

    def text(self, defined: str) -> str:
        return defined + self.files()[f"{self.name}.cu"]

    @cache  # noqa: B019
    def module(self, device: torch.device, defined: str) -> Module:
        return Module(self.text(defined), self.name, device, self.files(), self.specific)

    @cache  # noqa: B019
    def function(self, device: torch.device, defined: str, kernel: str | None = None) -> Function:
        """`kernel`, or the one that is named as the file is."""
        return self.module(device, defined).function(kernel or self.name)


def definitions(values: Mapping[str, object]) -> str:
    return "".join(f"#define FD_{name} {value}\n" for name, value in values.items())


def cache_dir() -> Path:
    """FLASHDRAFT_CACHE, else flashdraft/ in the user's cache directory."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("FLASHDRAFT_CACHE") or Path(root) / "flashdraft") / "kernels"


def cached_compile(
    source: str,
    name: str,
    capability: tuple[int, int],
    headers: MappingProxyType[str, str] | dict[str, str] = HEADERLESS,
    specific: bool = False,
) -> bytes:
    """`compile_image`, from `cache_dir()` if it is there. A cache that cannot be written is done without."""
    parts = [
        source,
        name,
        repr(capability),
        repr(nvrtc_version()),
        repr(specific),
        *(f"{k}\0{v}" for k, v in sorted(headers.items())),
    ]
    path = cache_dir() / f"{name}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}.bin"
    try:
        return path.read_bytes()
    except OSError:
        pass
    image = compile_image(source, name, capability, headers, specific)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(image)
        Path(file.name).replace(path)
    except OSError:
        pass
    return image


def compile_image(
    source: str,
    name: str,
    capability: tuple[int, int],
    headers: MappingProxyType[str, str] | dict[str, str] = HEADERLESS,
    specific: bool = False,
) -> bytes:
    """Machine code for a compute capability; PTX for the next lower one where NVRTC is older than the GPU. Needs no GPU.

    `specific` (such as sm_90a) is for that compute capability alone.
    """
    library = _nvrtc()
    wanted, known = 10 * capability[0] + capability[1], supported_architectures()
    exact = wanted in known
    if specific and not exact:
        raise CudaError(f"NVRTC {nvrtc_version()} cannot compile {name} for this GPU: install a PyTorch for a newer CUDA.")
    architecture = wanted if exact else max(a for a in known if a < wanted)
    flags = [f"--gpu-architecture={'sm' if exact else 'compute'}_{architecture}{'a' * specific}", "--std=c++17"]
    program = ctypes.c_void_p()
    texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    names = (ctypes.c_char_p * len(headers))(*(header.encode() for header in headers))
    _nvrtc_call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), f"{name}.cu".encode(), len(headers), texts, names)
    try:
        result = library.nvrtcCompileProgram(
            program, len(flags), (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        )
        if result:
            log = _sized(program, "nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace")
            raise CudaError(f"NVRTC could not compile {name} with {' '.join(flags)}:\n{log}")
        return _sized(program, "nvrtcGetCUBIN" if exact else "nvrtcGetPTX")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _sized(program: ctypes.c_void_p, name: str) -> bytes:
    size = ctypes.c_size_t()
    _nvrtc_call(f"{name}Size", program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    _nvrtc_call(name, program, buffer)
    return buffer.raw


@cache
def supported_architectures() -> tuple[int, ...]:
    count = ctypes.c_int()
    _nvrtc_call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
    architectures = (ctypes.c_int * count.value)()
    _nvrtc_call("nvrtcGetSupportedArchs", architectures)
    return tuple(architectures)


@cache
def nvrtc_version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc_call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def nvrtc_candidates() -> Iterable[str]:
    """Where libnvrtc may be: the wheels PyTorch depends on, PyTorch itself, the system. Of PyTorch's own CUDA version first."""
    own = (torch.version.cuda or "").partition(".")[0]
    versions = sorted(("13", "12"), key=lambda version: version != own)
    site = Path(torch.__file__).parent.parent
    folders = (site / "nvidia/cu13/lib", site / "nvidia/cuda_nvrtc/lib", site / "torch/lib")
    for version in versions:
        for folder in folders:
            # torch/lib holds it under a name with a hash, such as libnvrtc-3bf1c4ff.so.12.
            paths = sorted(folder.glob(f"libnvrtc*.so.{version}*"))
            yield from (str(path) for path in paths if "builtins" not in path.name and ".alt." not in path.name)
    yield from (f"libnvrtc.so.{version}" for version in versions)
    yield "libnvrtc.so"


@cache
def _nvrtc() -> ctypes.CDLL:
    for candidate in nvrtc_candidates():
        try:
            # NVRTC looks for its second library by name only, and the wheel's does not look beside itself.
            for path in Path(candidate).parent.glob("libnvrtc-builtins*.so*") if "/" in candidate else ():
                if ".alt." not in path.name:
                    ctypes.CDLL(str(path))
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise CudaError(
        "libnvrtc, which compiles the CUDA kernels, was not found: install PyTorch for CUDA, or the package nvidia-cuda-nvrtc."
    )


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"The NVIDIA driver's libcuda.so.1 cannot be loaded ({error}): install the driver.") from error


@cache
def _primary_context(device_index: int) -> ctypes.c_void_p:
    """The context PyTorch uses on a device, kept for the life of the process."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _driver_call("cuInit", 0)
    _driver_call("cuDeviceGet", ctypes.byref(device), device_index)
    _driver_call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


def device_attribute(device_index: int, number: int) -> int:
    device, value = ctypes.c_int(), ctypes.c_int()
    _driver_call("cuInit", 0)
    _driver_call("cuDeviceGet", ctypes.byref(device), device_index)
    _driver_call("cuDeviceGetAttribute", ctypes.byref(value), number, device)
    return value.value


def _make_current(context: ctypes.c_void_p) -> ctypes.c_void_p:
    """The context before: a thread that has not used CUDA yet has none, and where there are several GPUs perhaps another's."""
    before = ctypes.c_void_p()
    _driver_call("cuCtxGetCurrent", ctypes.byref(before))
    if before.value != context.value:
        _driver_call("cuCtxSetCurrent", context)
    return before


def _driver_call(name: str, *arguments: object) -> None:
    result = getattr(_driver(), name)(*arguments)
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise CudaError(f"{name} failed with error {result}: {(text.value or b'unknown').decode()}")


def _nvrtc_call(name: str, *arguments: object) -> None:
    result = getattr(_nvrtc(), name)(*arguments)
    if result:
        _nvrtc().nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CudaError(f"{name} failed with error {result}: {_nvrtc().nvrtcGetErrorString(result).decode()}")
