"""Seconds that GPTQ takes for an output head.

    python benchmarks/gptq.py [--rows 262144] [--inputs 2560] [--device cuda]

Random weights; inputs whose sizes differ from column to column, as hidden states' do. Prints the error of the outputs beside
rounding to nearest, so that what was timed is known to work.
"""

from __future__ import annotations

import argparse
import time

import torch

from flashdraft.quant.calibrate import Statistics
from flashdraft.quant.linear import QuantizedLinear
from flashdraft.quant.quantize import Settings, quantize_linears


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=262_144)
    parser.add_argument("--inputs", type=int, default=2560)
    parser.add_argument("--tokens", type=int, default=16_384, help="of the calibration")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    with torch.device(args.device):
        head = torch.nn.Linear(args.inputs, args.rows, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        seen = Statistics(torch.zeros(args.inputs, args.inputs), torch.zeros(()))
        spread = torch.exp(torch.randn(args.inputs))
        mixed = torch.randn(args.inputs, args.inputs) / args.inputs**0.5
        for _ in range(args.tokens // 1024):
            seen.add(torch.randn(1024, args.inputs) @ mixed * spread, None)
    module = torch.nn.ModuleDict({"lm_head": head})
    for method in ("max", "search", "gptq"):
        begun = time.perf_counter()
        made, [report] = quantize_linears(module, {"lm_head": seen}, Settings(method))
        assert isinstance(made["lm_head"], QuantizedLinear)
        if args.device == "cuda":
            torch.cuda.synchronize()
        print(f"{method}: {time.perf_counter() - begun:.1f} s, relative error of the outputs {report.error:.2e} {report.note}")
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    print(f"{args.rows:,} x {args.inputs:,}, {where}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
