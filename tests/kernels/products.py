"""GPUs and products that the plans of the kernels are tested on."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from flashdraft.kernels import nvrtc
from flashdraft.kernels.narrow_plan import Device


def require_nvrtc() -> None:
    """Skips the test where NVIDIA's compiler is missing."""
    try:
        nvrtc.nvrtc_version()
    except nvrtc.CudaError:
        pytest.skip("libnvrtc, which a CUDA build of PyTorch brings along, is not installed")


# Compute capability, multiprocessors, shared memory of a block and of a multiprocessor.
A100, L40S = Device((8, 0), 108, 166912, 167936), Device((8, 9), 142, 101376, 102400)
H200, B200 = Device((9, 0), 132, 232448, 233472), Device((10, 0), 148, 232448, 233472)
RTX_5090 = Device((12, 0), 170, 101376, 102400)
DEVICES = {"A100": A100, "L40S": L40S, "H200": H200, "B200": B200, "RTX 5090": RTX_5090}
# Outputs, inputs, gated.
GEMMA4_E4B = {
    "gate and up": (10240, 2560, True),
    "down": (2560, 10240, False),
    "q, k and v": (3072, 2560, False),
    "output, sliding": (2560, 2048, False),
    "output, global": (2560, 4096, False),
    "per-layer gate": (256, 2560, False),
    "per-layer projection": (2560, 256, False),
    "head": (262144, 2560, False),
}


def assert_nothing_is_spilled(folder: Path, source: str) -> None:
    """By nvcc's report of a kernel for compute capability 9.0."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("nvcc, which reports registers, is not installed")
    (folder / "k.cu").write_text(source)
    flags = ["-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", f"-I{nvrtc.SOURCES}", "-Xptxas", "-v", "-cubin"]
    built = subprocess.run([compiler, *flags, "k.cu"], cwd=folder, capture_output=True, text=True, check=False)
    report = built.stdout + built.stderr
    assert built.returncode == 0, report
    assert "0 bytes stack frame, 0 bytes spill stores" in report, report
    assert "warning" not in report.lower(), report
