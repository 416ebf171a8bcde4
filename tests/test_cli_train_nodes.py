"""`flashdraft train` on two nodes without a shared file system: two torchruns that share a rendezvous and no files."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from answers import counting, write_answers
from safetensors.torch import load_file
from tiny_config import TINY_RECIPE

from flashdraft.targets.load import load_tokenizer
from flashdraft.train.identity import tokenizer_hash
from flashdraft.train.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_gpu")]

RECIPE = f"{TINY_RECIPE}steps = 12\nsave_seconds = 0.3\nlog_every = 4\n\n[eval]\nshare = 0.2\nrecords = 2\n"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def nodes(pair, tmp_path_factory) -> list[Path]:
    """A directory a node, each with its own copy of the answers and the recipe."""
    made = [tmp_path_factory.mktemp(f"node{number}") for number in (0, 1)]
    for node in made:
        (node / "answers").mkdir()
        write_answers(node / "answers", counting(60), tokenizer_hash(load_tokenizer(pair.target)))
        (node / "recipe.toml").write_text(RECIPE)
    return made


def command(target: Path, node: Path, output: str, *options: object) -> list[str]:
    places = ("--data", node / "answers", "--output", node / output, "--recipe", node / "recipe.toml")
    return [str(word) for word in ("-m", "flashdraft", "train", target, *places, "--dtype", "float32", *options)]


def start(nodes: list[Path], target: Path, output: str, *options: object) -> list[subprocess.Popen[str]]:
    """Both nodes' torchruns, of one process each."""
    where = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *where, "--node-rank", str(number)]
            + command(target, node, output, *options),
            **pipes,  # type: ignore[call-overload]
        )
        for number, node in enumerate(nodes)
    ]


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    said = [process.communicate(timeout=300)[0] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


def test_two_nodes_train_as_one_process_and_only_the_first_writes(nodes, pair):
    found = ended(start(nodes, pair.target, "both"))
    assert [code for code, _ in found] == [0, 0], found
    assert "2 processes" in found[0][1]
    assert "acceptance length" not in found[1][1], "one process speaks"
    subprocess.run([sys.executable, *command(pair.target, nodes[0], "alone")], check=True, capture_output=True)
    ours, theirs = (load_file(nodes[0] / output / "model.safetensors") for output in ("alone", "both"))
    for name, value in ours.items():  # bf16: a sum in another order may round the other way
        torch.testing.assert_close(theirs[name], value, atol=2e-3, rtol=1e-2)
    ours, theirs = (read_metrics(nodes[0] / output / "run" / "metrics.jsonl") for output in ("alone", "both"))
    for one, other in zip(ours, theirs, strict=True):
        assert one["step"] == other["step"]
        assert one.get("loss") == pytest.approx(other.get("loss"), abs=1e-4)
    assert [path for path in (nodes[1] / "both").rglob("*") if path.is_file()] == []


def test_a_lost_node_ends_the_other_and_one_process_goes_on(nodes, pair):
    output = nodes[0] / "lost"
    processes = start(nodes, pair.target, "lost", "--steps", "4000")
    deadline = time.monotonic() + 240
    while not (output / "run" / "state.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    worker = int(subprocess.check_output(["pgrep", "-P", str(processes[1].pid)], text=True).split()[0])
    os.kill(worker, signal.SIGKILL)
    (first, said), (second, _) = ended(processes)
    assert first != 0
    assert second != 0
    assert "the same command with --resume goes on" in " ".join(said.split())
    assert "flashdraft/train/" not in said, "the only traceback is torchrun's own"
    step = torch.load(output / "run" / "state.pt", weights_only=True)["step"]
    one = [sys.executable, *command(pair.target, nodes[0], "lost", "--steps", str(step + 4), "--resume")]
    done = subprocess.run(one, check=True, capture_output=True, text=True)
    assert f"resumed after step {step:,}" in done.stderr
    assert read_metrics(output / "run" / "metrics.jsonl")[-1]["step"] == step + 4


def test_nodes_with_other_answers_are_found_out(nodes, pair, tmp_path):
    other = shutil.copytree(nodes[1], tmp_path / "other")
    write_answers(other / "answers", counting(60, seed=1), tokenizer_hash(load_tokenizer(pair.target)))
    found = ended(start([nodes[0], other], pair.target, "different"))
    assert all(code != 0 for code, _ in found)
    assert "holds other answers on another node: copy the same ones to all of them" in " ".join(found[0][1].split())
