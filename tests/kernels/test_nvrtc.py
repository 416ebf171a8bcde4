"""Compiling CUDA C++ and launching it through the driver: what needs no GPU."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch
from kernels.products import require_nvrtc

from flashdraft.kernels import nvrtc
from flashdraft.kernels.nvrtc import CudaError, Function

ANSWER = "#include <answer.cuh>\nextern C __global__ void answer(int* p) { *p = ANSWER; }".replace("extern C", 'extern "C"')


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHDRAFT_CACHE", str(tmp_path))
    require_nvrtc()


class Driver:
    """Stands in for libcuda: notes every call, and what a launch points to while it lasts."""

    def __init__(self, context: int = 0) -> None:
        self.calls: list[tuple[str, tuple]] = []
        self.launch: dict[str, object] = {}
        self.context, self.result = context, 0

    def __getattr__(self, name: str):
        def call(*arguments):
            self.calls.append((name, arguments))
            if name == "cuCtxGetCurrent":
                arguments[0]._obj.value = self.context
            elif name == "cuCtxSetCurrent":
                self.context = arguments[0].value
            elif name == "cuGetErrorString":
                arguments[1]._obj.value = b"out of patience"
            elif name == "cuLaunchKernelEx":
                config, addresses = arguments[0]._obj, arguments[2]
                attribute = config.attributes[0] if config.attribute_count else None
                self.launch = {
                    "grid": (config.grid_x, config.grid_y, config.grid_z),
                    "block": (config.block_x, config.block_y, config.block_z),
                    "shared": config.shared_bytes,
                    "stream": config.stream,
                    "attributes": attribute and (attribute.id, attribute.value.allowed),
                    "argument": ctypes.cast(addresses[0], ctypes.POINTER(ctypes.c_int))[0],
                }
                return self.result
            return 0

        return call

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


def launched(monkeypatch, driver: Driver, times: int = 1, **options: bool) -> Driver:
    monkeypatch.setattr(nvrtc, "_driver", lambda: driver)
    function = Function(ctypes.c_void_p(7), ctypes.c_void_p(99))
    for _ in range(times):
        function.launch((3, 2, 1), (256, 1, 1), 115200, [ctypes.c_int(41)], 1234, **options)
    return driver


def test_a_launch_hands_the_driver_grid_stream_and_arguments(monkeypatch):
    launch = launched(monkeypatch, Driver()).launch
    expected = {"grid": (3, 2, 1), "block": (256, 1, 1), "shared": 115200, "stream": 1234, "argument": 41, "attributes": None}
    assert launch == expected


def test_programmatic_dependent_launch_is_attribute_6(monkeypatch):
    assert launched(monkeypatch, Driver(), pdl=True).launch["attributes"] == (6, 1)


def test_shared_memory_is_asked_for_once(monkeypatch):
    driver = launched(monkeypatch, Driver(), times=3)
    asked = [arguments[1:] for name, arguments in driver.calls if name == "cuFuncSetAttribute"]
    assert asked == [(8, 115200), (9, 100)]


def test_the_modules_context_is_made_current_where_it_is_not(monkeypatch):
    assert launched(monkeypatch, Driver(context=0), times=2).names().count("cuCtxSetCurrent") == 1
    assert "cuCtxSetCurrent" not in launched(monkeypatch, Driver(context=99)).names()


def test_another_devices_context_is_current_again_after_a_launch(monkeypatch):
    driver = launched(monkeypatch, Driver(context=98))
    assert driver.names().count("cuCtxSetCurrent") == 2
    assert driver.context == 98


def test_an_error_of_the_driver_is_raised_with_its_text(monkeypatch):
    driver = Driver()
    driver.result = 2
    with pytest.raises(CudaError, match="cuLaunchKernelEx failed with error 2: out of patience"):
        launched(monkeypatch, driver)


def test_structures_have_the_sizes_of_cuda_h():
    assert ctypes.sizeof(nvrtc._LaunchConfig) == 56
    assert ctypes.sizeof(nvrtc._Attribute) == 72
    assert nvrtc._Attribute.value.offset == 8


def test_without_nvrtc_the_error_names_the_package(monkeypatch):
    monkeypatch.setattr(nvrtc, "nvrtc_candidates", lambda: ["/nowhere/libnvrtc.so.13"])
    with pytest.raises(CudaError, match="nvidia-cuda-nvrtc"):
        nvrtc._nvrtc.__wrapped__()


@pytest.mark.parametrize(("version", "first"), [("13.0", "13"), ("12.8", "12"), (None, "13")])
def test_nvrtc_of_pytorchs_own_cuda_version_comes_first(monkeypatch, tmp_path, version, first):
    for path in ("nvidia/cu13/lib/libnvrtc.so.13", "nvidia/cuda_nvrtc/lib/libnvrtc.so.12", "torch/lib/libnvrtc-1a2b.so.12"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
        (tmp_path / path).with_name(f"libnvrtc-builtins.so.{path[-2:]}.0").touch()
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch/__init__.py"))
    monkeypatch.setattr(torch.version, "cuda", version)
    found = [*nvrtc.nvrtc_candidates()]
    assert found[0].endswith(first)
    assert [path for path in found if "builtins" in path] == []
    assert sum(str(tmp_path) in path for path in found) == 3


def test_an_image_is_compiled_once_and_found_again(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHDRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: (13, 0))
    count = itertools.count()
    monkeypatch.setattr(nvrtc, "compile_image", lambda *_: b"image %d" % next(count))
    assert nvrtc.cached_compile("a", "k", (9, 0)) == nvrtc.cached_compile("a", "k", (9, 0)) == b"image 0"
    assert nvrtc.cached_compile("b", "k", (9, 0)) == b"image 1"
    assert nvrtc.cached_compile("a", "k", (8, 0)) == b"image 2"
    assert nvrtc.cached_compile("a", "k", (9, 0), headers={"h": "text"}) == b"image 3"
    assert len([*tmp_path.rglob("k-*.bin")]) == 4


def test_a_source_is_compiled_once_for_each_gpu_and_what_is_defined(monkeypatch):
    class Module:
        def __init__(self, *given):
            compiled.append(given)

        def function(self, name):
            return name, len(compiled)

    compiled = []
    monkeypatch.setattr(nvrtc, "Module", Module)
    source = nvrtc.Source("narrow_linear", ("device.cuh", "narrow_linear.cuh"))
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    defined = nvrtc.definitions({"FOLD": 2})
    assert defined == "#define FD_FOLD 2\n"
    assert source.function(first, defined) == source.function(first, defined) == ("narrow_linear", 1)
    assert source.function(first, defined, "other") == ("other", 1)
    assert source.function(second, defined) == ("narrow_linear", 2)
    assert source.function(first, nvrtc.definitions({"FOLD": 1})) == ("narrow_linear", 3)
    text, name, device, headers, specific = compiled[0]
    assert (name, device, specific) == ("narrow_linear", first, False)
    assert text.startswith(defined)
    assert set(headers) == {"device.cuh", "narrow_linear.cuh", "narrow_linear.cu"}


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHDRAFT_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(nvrtc, "compile_image", lambda *_: b"image")
    assert nvrtc.cached_compile("a", "k", (9, 0)) == b"image"


def test_machine_code_for_a_known_gpu_and_ptx_for_a_later_one(compiler):
    headers = {"answer.cuh": "#define ANSWER 42"}
    assert nvrtc.compile_image(ANSWER, "answer", (9, 0), headers=headers).startswith(b"\x7fELF")
    assert b".entry answer" in nvrtc.compile_image(ANSWER, "answer", (99, 0), headers=headers)


def test_an_error_carries_the_compilers_log(compiler):
    with pytest.raises(CudaError, match=r'wrong.cu\(1\): error: identifier "nonsense" is undefined'):
        nvrtc.compile_image("__global__ void f() { nonsense; }", "wrong", (9, 0))
