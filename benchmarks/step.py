"""One decode step on random weights of Gemma 4 E4B's shape with the reference draft: floor, ours, and vLLM's figures.

    python benchmarks/step.py [--batch 1 16] [--context 1024 8192 32768] [--steps 1000] [--variant default] [--nvfp4]
        [--output FILE]

A step is wall clock over consecutive steps of the real engine: capture, append, stop checks and scheduling all run, and only
the outcome of the comparison is overridden, to ACCEPTED proposals in turn. Stages are medians of replays of their graphs.
--nvfp4: also with the draft's weights, its own head among them, in NVFP4. Needs a GPU with 40 GB or more.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

import flashdraft.engine.engine as engine_module
import flashdraft.engine.forward as forward_module
from flashdraft.checkpoint import read_config
from flashdraft.draft import DFlashDraft
from flashdraft.engine.device_runner import DeviceRunner
from flashdraft.engine.engine import Engine, EngineConfig
from flashdraft.engine.request import Request, SamplingParams
from flashdraft.kernels.fused import FusedOptions
from flashdraft.quant.linear import QuantizedLinear, linears, swap
from flashdraft.quant.nvfp4 import Packed
from flashdraft.targets.target import Target

REFERENCE = Path(__file__).parent.parent / "recipes" / "reference" / "config.json"
BANDWIDTH = 4.3e12  # bytes a second that a copy moves on one H200
ACCEPTED = (0, 2, 1, 1)  # proposals in turn: an acceptance length of 2
# vLLM 0.26.0, bf16, CUDA graphs, FlashAttention 4, dummy weights, context 1,024-1,280, on one H200: ms a step.
VLLM = {("plain", 1): 4.53, ("plain", 16): 4.94, ("draft", 1): 5.45, ("draft", 16): 6.58}
# Fields of FusedOptions.
VARIANTS: dict[str, dict[str, bool]] = {
    "default": {},
    "no-pdl": {"pdl": False},
    "no-narrow": {"narrow": False},
    "hopper-attention": {"hopper_attention": True},
}


class FixedAcceptance(DeviceRunner):
    """The engine's runner, but for which proposals count as right."""

    def __init__(self, target: Target, *rest: Any) -> None:
        super().__init__(target, *rest)
        self.forced = torch.tensor(ACCEPTED, dtype=torch.int32, device=target.device)


def full_shape(device: torch.device, layers: int) -> Target:
    """The target of Gemma 4 E4B's text shape, random weights, bfloat16."""
    config = Gemma4TextConfig(
        hidden_size=2560,
        intermediate_size=10240,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        global_head_dim=512,
        num_kv_shared_layers=layers * 18 // 42,
        sliding_window=512,
        hidden_size_per_layer_input=256,
        vocab_size=262144,
        final_logit_softcapping=30.0,
    )
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = Gemma4ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return Target(model, check=False)


def reference_draft(device: torch.device, layers: int) -> DFlashDraft:
    config = read_config(REFERENCE.parent)
    if layers != config.num_target_layers:  # a small target, for a try on a small machine
        config = config.with_(num_target_layers=layers, target_layer_ids=tuple(range(5)))
    with torch.device("meta"):
        draft = DFlashDraft(config).to(torch.bfloat16)
    draft.to_empty(device=device)
    for parameter in draft.parameters():
        nn.init.ones_(parameter) if parameter.dim() == 1 else nn.init.normal_(parameter, std=0.02)
    return draft


def in_nvfp4(draft: DFlashDraft) -> DFlashDraft:
    """The same sizes with random codes and scales, in place."""
    for name, leaf in linears(draft).items():
        rows, k = leaf.out_features, leaf.in_features
        codes = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, device=leaf.weight.device)
        scales = torch.randint(40, 70, (rows, k // 16), dtype=torch.uint8, device=leaf.weight.device)
        scale_2 = torch.tensor(0.01, device=leaf.weight.device)
        swap(draft, name, QuantizedLinear(Packed(codes, scales.view(torch.float8_e4m3fn), scale_2)))
    return draft


def floor(target: Target, draft: DFlashDraft | None) -> dict[str, float]:
    """Milliseconds to read every weight of a pass once; embedding tables are looked up, not read."""
    tables = {id(m.weight) for m in target.model.modules() if isinstance(m, nn.Embedding)}
    head = target.model.get_output_embeddings().weight
    size = sum(p.numel() for p in target.model.parameters() if id(p) not in tables) * 2
    if id(head) in tables:
        size += head.numel() * 2
    floors = {"verify": size / BANDWIDTH * 1e3}
    if draft is not None:
        append = [draft.fc, *(linear for layer in draft.layers for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj))]
        every = sum(map(stored, [*draft.parameters(), *draft.buffers()]))
        context = sum(stored(t) for linear in append for t in [*linear.parameters(), *linear.buffers()])
        fc = sum(map(stored, [*draft.fc.parameters(), *draft.fc.buffers()]))
        floors |= {"draft": (every - fc) / BANDWIDTH * 1e3, "append": context / BANDWIDTH * 1e3}
    return floors


def take_variant(name: str) -> None:
    """Engines made from now on use these kernels."""
    engine_module.FusedOptions = forward_module.FusedOptions = functools.partial(FusedOptions, **VARIANTS[name])


def stored(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def run(engine: Engine, batch: int, context: int, steps: int) -> dict[str, float]:
    """Milliseconds a step (median and p99, of wall clock between returns of step()), and tokens a step of a request."""
    start = max(16, context - steps)
    source = torch.Generator().manual_seed(0)
    params = SamplingParams(temperature=0, max_tokens=2 * steps + 200, ignore_eos=True)
    requests = [Request(torch.randint(0, 1000, (start,), generator=source).tolist(), params) for _ in range(batch)]
    outputs = [engine.add(request) for request in requests]
    while not all(len(output.tokens) > 2 for output in outputs):
        engine.step()
    before = sum(len(output.tokens) for output in outputs)
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
    tokens = sum(len(output.tokens) for output in outputs) - before
    for request in requests:
        engine.abort(request.id)
    engine.settle()
    engine.pool.flush()
    return {
        "mean": statistics.mean(times) * 1e3,
        "median": statistics.median(times) * 1e3,
        "p99": sorted(times)[int(0.99 * len(times))] * 1e3,
        "tokens": tokens / steps / batch,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=42)
    parser.add_argument("--variant", choices=[*VARIANTS], nargs="+", default=["default"])
    parser.add_argument("--nvfp4", action="store_true", help="also a draft in NVFP4")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU, and PyTorch finds none")
    device = torch.device(arguments.device)
    target = full_shape(device, arguments.layers)
    pairs: list[tuple[str, DFlashDraft | None]] = [("draft", reference_draft(device, arguments.layers)), ("plain", None)]
    if arguments.nvfp4:
        pairs.insert(1, ("NVFP4 draft", in_nvfp4(reference_draft(device, arguments.layers))))
    floors = {kind: floor(target, draft) for kind, draft in pairs}
    engine_module.DeviceRunner = FixedAcceptance
    table = Table(arguments.output)
    for variant in arguments.variant:
        take_variant(variant)
        for kind, draft in pairs:
            began = time.perf_counter()
            limits = EngineConfig(
                max_num_seqs=max(arguments.batch),
                max_model_len=max(arguments.context) + 2 * arguments.steps + 1024,
                adaptive_width=False,
                async_scheduling=True,
                deterministic=arguments.deterministic,
            )
            engine = Engine(target, draft, limits)
            print(f"{variant} {kind}: {engine.fusion}; {engine.memory}", flush=True)
            print(f"ready after {time.perf_counter() - began:.0f} s", flush=True)
            for context in arguments.context:
                table.stages(engine, variant, kind, context)
                for batch in arguments.batch:
                    steps = arguments.steps if context <= 2048 else max(10, arguments.steps // 4)
                    table.step(run(engine, batch, context, steps), variant, kind, context, batch)
            del engine
    print("\n".join(table.lines))
    for kind, of_kind in floors.items():
        print(f"floor of {kind}, ms: " + ", ".join(f"{name} {ms:.2f}" for name, ms in of_kind.items()))
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}; torch {torch.__version__}; transformers {transformers.__version__}")


class Table:
    """Lines for the end of the run, and all figures in a file as they come."""

    def __init__(self, output: Path | None) -> None:
        self.output = output
        self.lines: list[str] = []
        self.found: list[dict[str, object]] = []

    def stages(self, engine: Engine, variant: str, kind: str, context: int) -> None:
        stages = {" ".join(map(str, key)): s * 1e3 for key, s in engine.runner.stage_seconds(context).items()}
        shown = [f"{name} {ms:.2f}" for name, ms in stages.items() if name.split()[1] in ("1", "8", "16", "128")]
        self._add(f"{variant} {kind}, context {context}, stages: {', '.join(shown)}", stages=stages)

    def step(self, got: dict[str, float], variant: str, kind: str, context: int, batch: int) -> None:
        peer = VLLM.get((kind, batch)) if context == 1024 else None
        line = f"{variant} {kind}, context {context}, batch {batch}: step {got['median']:.2f} ms (mean {got['mean']:.2f}, "
        line += f"p99 {got['p99']:.2f}), {got['tokens']:.2f} tokens a step"
        self._add(line + (f"; vLLM 0.26.0 {peer:.2f} ms" if peer else ""), **got)

    def _add(self, line: str, **figures: object) -> None:
        print(line, flush=True)
        self.lines.append(line)
        self.found.append({"line": line, **figures})
        if self.output:
            self.output.write_text(json.dumps(self.found, indent=1))


if __name__ == "__main__":
    main()
