"""Several measurements in one call, one on each GPU at a time: what the figures of docs/ were made by.

    python benchmarks/on_gpus.py --output DIR --target SMOLLM [--jobs NAME ...] [--seconds 560]
    python benchmarks/on_gpus.py --list

SMOLLM: the built-in target's weights as a transformers directory (`--make-target` writes them there first). Every job writes
DIR/NAME.log and whatever it measures beside it. Jobs are started in the order given as GPUs become free and are ended when the
time is up, so that what was measured until then is kept; then the last lines of each are printed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from versus_transformers import gguf_arguments

from flashdraft import builtin
from flashdraft.targets import load_tokenizer

ROOT = Path(__file__).parent.parent
# {target}: SMOLLM; {out}: where a job may write; {python}: this interpreter; {prompts}, {others}: files. Commands that need all
# GPUs begin with "ALL ".
PREFILL = "{python} benchmarks/prefill.py --arrivals 1 --prompt"
FLASHDRAFT = "{python} -m flashdraft"
QUANTIZE = f"{FLASHDRAFT} quantize %s --target {{target}} --own-head --w4a4 --heldout 1600 "
QUANTIZE += "--calibration {out}/others --output {out}/"
SYNTHESIZE = f"{FLASHDRAFT} synthesize {{target}} --max-tokens 640 --greedy-share 0.5 --max-num-seqs 1024 --prompts "
LONG = "131008 --running 15 --steps 40 --chunk 2048 --repeats 1 --alone 16384 131008"
JOBS = {
    "tests": "{python} -m pytest -q -m gpu tests",
    "attention-tests": "{python} -m pytest -q -m gpu tests/kernels/test_hopper_attention.py",
    "media-and-mask-tests": "{python} -m pytest -q -m gpu tests/train/test_anchors.py tests/engine/test_cuda_media.py",
    "prompts": "{python} benchmarks/kernel_times.py --only prompts --output {out}/prompts.json",
    "prefill": f"{PREFILL} {LONG} --output {{out}}/prefill.json",
    "prefill-hopper": f"{PREFILL} {LONG} --variant hopper-attention --output {{out}}/prefill-hopper.json",
    "short-beside-long": f"{PREFILL} 32768 --running 4 --steps 60 --chunk 512 2048 --repeats 2 --alone 1024 8192",
    "step": "{python} benchmarks/step.py --batch 1 --context 1024 32768 129024 --steps 400 --nvfp4 --output {out}/step.json",
    "train": "{python} benchmarks/train.py --target {target} --steps 20 --profile",
    "train-e4b": "{python} benchmarks/train.py --e4b --steps 3",
    "train-two": "ALL {python} benchmarks/train.py --target {target} --steps 20 --gpus 2",
    "decode": "{python} benchmarks/decode.py --target {target} --draft builtin --rounds 2 --max-tokens 200",
    "serve": "{python} benchmarks/serve.py overhead --engine-process both --target {target} --draft builtin --dtype bfloat16 "
    "--concurrency 1 4 16 64 --max-tokens 128 --seconds 2.5",
    "fit": f"{FLASHDRAFT} fit {{target}} --prompts {{prompts}} --hours 0.08 --output {{out}}/fit",
    "doctor": f"{FLASHDRAFT} doctor {{target}} builtin",
    "bench": f"{FLASHDRAFT} bench --target {{target}} --draft builtin --output {{out}}/bench",
    "answers": SYNTHESIZE + "{prompts} --output {out}/answers",  # to train on
    "others": SYNTHESIZE + "{others} --output {out}/others",  # to calibrate with and to measure on
    # Behind "others".
    "four-bits": QUANTIZE % "builtin" + "nvfp4",
    "four-bits-max": QUANTIZE % "builtin" + "nvfp4-max --method max",
    # Behind "answers".
    "rounding": f"{FLASHDRAFT} train {{target}} --init builtin --data {{out}}/answers --output {{out}}/rounded --steps 300 "
    "--recipe recipes/builtin_rounding.toml",
    "four-bits-rounded": QUANTIZE % "{out}/rounded" + "nvfp4-rounded",  # behind "rounding" and "others"
}


@dataclass
class Running:
    name: str
    gpus: list[str]
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)

    def end(self) -> None:
        """With all that it started; the log says where it was (PYTHONFAULTHANDLER)."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGABRT)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)


def make_target(directory: Path) -> None:
    """The built-in target in bfloat16, from its GGUF file."""
    arguments: dict[str, Any] = gguf_arguments()
    AutoModelForCausalLM.from_pretrained(**arguments, dtype=torch.bfloat16).save_pretrained(directory)
    load_tokenizer(builtin.target_path()).save_pretrained(directory)


def start(name: str, gpus: list[str], arguments: argparse.Namespace) -> Running:
    values = dict(python=sys.executable, target=arguments.target, out=arguments.output, prompts=shlex.join(arguments.prompts))
    values["others"] = shlex.join(arguments.others)
    command = JOBS[name].removeprefix("ALL ")
    words = shlex.split(command.format(**values))
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    environment |= {"PYTHONFAULTHANDLER": "1"}
    with (arguments.output / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            words, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
        )
    return Running(name, gpus, process)


def play(arguments: argparse.Namespace) -> dict[str, str]:
    """How each job ended."""
    free, waiting, running = [str(i) for i in range(torch.cuda.device_count())], list(arguments.jobs), list[Running]()
    ended, everything, deadline = {}, len(free), time.monotonic() + arguments.seconds
    while (waiting or running) and time.monotonic() < deadline:
        for job in [job for job in running if job.process.poll() is not None]:
            ended[job.name] = f"exit code {job.process.returncode} after {time.monotonic() - job.began:.0f} s"
            running.remove(job)
            free += job.gpus
        while waiting and len(free) >= (needed := everything if JOBS[waiting[0]].startswith("ALL ") else 1):
            running.append(start(waiting.pop(0), [free.pop() for _ in range(needed)], arguments))
        time.sleep(0.2)
    for job in running:
        job.end()
        ended[job.name] = f"cut after {time.monotonic() - job.began:.0f} s"
    return ended | dict.fromkeys(waiting, "not begun")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="the jobs and their commands")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--make-target", action="store_true")
    parser.add_argument("--prompts", nargs="+", default=[], help="files, for what needs some")
    parser.add_argument("--others", nargs="+", default=[], help="files of other prompts, for what quantizes")
    parser.add_argument("--jobs", nargs="+", choices=[*JOBS], default=[*JOBS])
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--lines", type=int, default=14, help="of each job's output that are printed")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{name}: {command}" for name, command in JOBS.items()))
        return
    if not arguments.output or not arguments.target:
        parser.error("--output and --target are needed")
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA GPU, and PyTorch finds none")
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.make_target:
        make_target(arguments.target)
    for name, how in play(arguments).items():
        log = arguments.output / f"{name}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        print(f"\n== {name}: {how}", *lines[-arguments.lines :], sep="\n")


if __name__ == "__main__":
    main()
