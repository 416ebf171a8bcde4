"""vLLM as `flashdraft serve --engine vllm` starts it, on the CPU, with the interpreter that FLASHDRAFT_VLLM_PYTHON names."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

HERE = Path(__file__).parent
SECONDS = 1800  # to be ready; on an idle machine it takes one minute


@contextlib.contextmanager
def serving(
    folder: Path, target: Path, draft: Path, *behind: str, revision: str | None = None, record: Path | None = None
) -> Iterator[str]:
    """The address of the server once it is ready; its log is in folder/vllm.log. It and its processes end with the context.

    behind: options of vLLM's own. revision: of the draft. record: a new directory for its logits (vllm_cpu_plugin.py).
    """
    python = os.environ.get("FLASHDRAFT_VLLM_PYTHON")
    if python is None:
        pytest.skip("FLASHDRAFT_VLLM_PYTHON names no interpreter: run `make test-vllm`")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    speculative = {"model": str(draft), **({} if revision is None else {"revision": revision})}
    pair = [str(target), "--speculative-config", json.dumps(speculative), "--engine", "vllm"]
    options = ["--port", str(port), "--served-model-name", "m", "--max-model-len", "2048", "--max-num-seqs", "8"]
    behind = ("--enforce-eager", "--", "--per-request-spec-decode-metrics", "detailed", *behind)
    command = [sys.executable, "-m", "flashdraft", "serve", *pair, *options, *behind]
    with (folder / "vllm.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=_environment(folder, python, record), start_new_session=True
        )
    try:
        yield _ready(process, f"http://127.0.0.1:{port}", folder / "vllm.log")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _environment(folder: Path, python: str, record: Path | None) -> dict[str, str]:
    plugin = folder / "plugin" / "vllm_cpu_plugin-1.dist-info"
    plugin.mkdir(parents=True, exist_ok=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm_cpu_plugin\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text("[vllm.general_plugins]\ncpu = vllm_cpu_plugin:register\n")
    if record is not None:
        record.mkdir()
    root = HERE.parents[1]
    return {
        **os.environ,
        "PATH": f"{Path(python).absolute().parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, (root, HERE, plugin.parent))),
        "OMP_NUM_THREADS": "2",
        "KMP_BLOCKTIME": "0",  # Intel's OpenMP spins for 0.2 s otherwise
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **({} if record is None else {"VLLM_RECORD": str(record)}),
    }


def _ready(process: subprocess.Popen[bytes], url: str, log: Path) -> str:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, f"it ended: {log.read_text()[-3000:]}"
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == 200:
                return url
        time.sleep(1)
    raise AssertionError(f"it is not ready after {SECONDS} s: {log.read_text()[-3000:]}")


def complete(url: str, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Greedy: {"token_ids", "committed"}; committed: tokens of each verify step, as vLLM counts them."""
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS).raise_for_status().json()
    steps = answer["metrics"]["speculative_decoding"]
    return {"token_ids": answer["choices"][0]["token_ids"], "committed": [1 + n for n in steps["per_step_accepted"]]}
