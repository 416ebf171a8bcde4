"""Every kernel of a step on its own, on the shapes of Gemma 4 E4B and the reference draft: floor, ours, and PyTorch's.

    python benchmarks/kernel_times.py [--only products attention ...] [--rows 1 8 16 128] [--output FILE]

Microseconds a call: medians over replays of a CUDA graph of many calls, whose weights, pages and logits rotate through more
memory than the L2 cache holds; what a step keeps small stays in it, as there. `floor` is the bytes that a call must move over
the bandwidth of a device-to-device copy (read and written bytes counted) or its products over the rate of a large one,
whichever is longer. TB/s are those bytes over our time. Attention's peer is scaled_dot_product_attention without a mask, over
contiguous keys, as many as any row sees, with the queries of a key head as its rows: it reads every key once, as ours does.
A line that fails says why, and the exit code is 1. `--device cpu --shrink 16` tries all of it out on small sizes, untimed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kernel_cases import PARTS, Case, Machine
from nvfp4_cases import nvfp4
from prompt_cases import prompts

REPLAYS, WARM_REPLAYS = 25, 5
PARTS = PARTS | {"nvfp4": nvfp4, "prompts": prompts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*PARTS], nargs="+", default=[*PARTS])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 128], help="of products, head and layer")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shrink", type=int, default=1, help="divide sizes by it")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU, and PyTorch finds none")
    torch.manual_seed(0)
    on = Machine(torch.device(arguments.device), arguments.shrink)
    with torch.inference_mode():
        table = Table(on, arguments.output)
        for part in arguments.only:
            table.title(part, PARTS[part].__doc__ or "")
            for line in PARTS[part](on, arguments.rows):
                table.add(part, *line)
    name = torch.cuda.get_device_name() if on.device.type == "cuda" else "CPU"
    print(
        f"\n{name}; torch {torch.__version__}; copy {table.bandwidth / 1e6:.2f} TB/s; products {table.rate / 1e6:.0f} TFLOP/s"
    )
    sys.exit(1 if table.failed else 0)


def microseconds(on: Machine, run: Callable[[Any], object], copies: list[Any]) -> float:
    """Of a call: the median over replays of a graph of all of them. Calls run once before, to compile."""
    if on.device.type != "cuda":
        begin = time.perf_counter()
        for copy in copies:
            run(copy)
        return 1e6 * (time.perf_counter() - begin) / len(copies)
    torch.cuda.synchronize()
    graph, stream, times = torch.cuda.CUDAGraph(), torch.cuda.Stream(), []
    with torch.cuda.stream(stream):  # every stream has its own workspaces
        for copy in copies:
            run(copy)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for copy in copies:
            run(copy)
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times[WARM_REPLAYS:]) / len(copies)


def copy_bandwidth(on: Machine) -> float:
    """Bytes a microsecond, read and written, by a kernel: a graph leaves plain copies to the slower copy engine."""
    source = torch.ones(on(1 << 29), dtype=torch.int32, device=on.device)
    target = torch.empty_like(source)
    return 2 * 4 * source.numel() / microseconds(on, lambda _: torch.neg(source, out=target), [0])


def product_rate(on: Machine) -> float:
    """Operations a microsecond of a product of 8,192 by 8,192 by 8,192."""
    size = on(8192)
    x = on.random(size, size)
    return 2 * size**3 / microseconds(on, lambda _: x @ x, [0])


class Table:
    """Lines as they are measured, and all figures in a file."""

    def __init__(self, on: Machine, output: Path | None) -> None:
        self.on, self.output, self.failed = on, output, False
        self.bandwidth, self.rate = copy_bandwidth(on), product_rate(on)
        self.found: list[dict[str, Any]] = []

    def title(self, part: str, says: str) -> None:
        print(f"\n{part}: {says}\n{'':28}{'rows':>5}{'floor':>10}{'ours':>10}{'peer':>10}{'TB/s':>7}", flush=True)

    def add(self, part: str, name: str, rows: int, make: Callable[[], Case]) -> None:
        figures = self._figures(make)
        if self.on.device.type == "cuda":
            torch.cuda.empty_cache()
        shown = "".join(f"{figures[key]:10.2f}" if key in figures else f"{'-':>10}" for key in ("floor", "ours", "peer"))
        shown += f"{figures['TB/s']:7.2f}" if "TB/s" in figures else f"{'-':>7}"
        errors = [f"{key}: {figures[key]}" for key in ("error", "ours error", "peer error") if key in figures]
        print(f"{name:28}{rows:5}{shown}  {'; '.join(errors)}".rstrip(), flush=True)
        self.failed |= bool(errors)
        self.found.append({"part": part, "name": name, "rows": rows, **figures})
        if self.output:
            self.output.write_text(json.dumps(self.found, indent=1))

    def _figures(self, make: Callable[[], Case]) -> dict[str, Any]:
        try:
            case = make()
        except Exception as error:  # the other lines are still wanted
            return {"error": first_line(error)}
        figures: dict[str, Any] = {"floor": max(case.size / self.bandwidth, case.operations / self.rate)}
        for key, run in (("ours", case.ours), ("peer", case.peer)):
            try:
                figures[key] = microseconds(self.on, run, case.copies)
            except Exception as error:
                figures[f"{key} error"] = first_line(error)
        if "ours" in figures:
            figures["TB/s"] = case.size / figures["ours"] / 1e6
        return figures


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:160]


if __name__ == "__main__":
    main()
