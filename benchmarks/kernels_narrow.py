"""The narrow products of a Gemma 4 E4B layer, a DFlash layer and the head on a GPU: are they right, and as fast as memory?

    python benchmarks/kernels_narrow.py [--rows 1 8 16] [--layers 10] [--only checks products options chain]

Times are microseconds a product in a CUDA graph whose weights rotate through more memory than the L2 cache holds. `floor` is
the weight's bytes over the bandwidth of a device-to-device copy, read and written bytes counted. `chain`: all six products of
a layer, one after another, with their norms, for several layers.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flashdraft.kernels.fused import Norm, fused_linear_reference
from flashdraft.kernels.narrow import device_of, narrow_argmax, narrow_linear
from flashdraft.kernels.narrow_plan import NarrowOptions, plan

HIDDEN, ROTATED_BYTES = 2560, 400 << 20
# Outputs, inputs, and what stands around the product: as in a layer.
PRODUCTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "q, k, v": (3072, HIDDEN, {"add": True, "post_norm": True, "scale": 0.5, "norm": True}),
    "output": (HIDDEN, 2048, {}),
    "output, global": (HIDDEN, 4096, {}),
    "gate, up": (10240, HIDDEN, {"add": True, "post_norm": True, "norm": True, "activation": "gelu_tanh", "gated": True}),
    "down": (HIDDEN, 10240, {}),
    "per-layer gate": (256, HIDDEN, {"add": True, "post_norm": True, "activation": "gelu_tanh", "multiply": True}),
    "per-layer proj.": (HIDDEN, 256, {}),
    "draft q, k, v": (6144, HIDDEN, {"add": True, "norm": True}),
    "draft down": (HIDDEN, 5120, {}),
    "head": (262144, HIDDEN, {"norm": True}),
}
OPTIONS = {
    "default": NarrowOptions(),
    "no pdl": NarrowOptions(pdl=False),
    "no prefetch": NarrowOptions(prefetch=False),
    "2 blocks": NarrowOptions(blocks=2),
    "in parts": NarrowOptions(row_at_once=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--layers", type=int, default=10)
    parts = {"checks": checks, "products": products, "options": options, "chain": chain}
    parser.add_argument("--only", choices=[*parts], nargs="+", default=[*parts])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__, device_of(torch.device("cuda", torch.cuda.current_device())))
    for name in arguments.only:
        print(f"\n{name}", flush=True)
        parts[name](arguments)


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def norm() -> Norm:
    return Norm(torch.rand(HIDDEN, device="cuda") + 0.5, 1e-6, False)


def features(name: str, rows: int) -> dict[str, Any]:
    """Arguments of a product but its weight and x."""
    outputs, k, given = PRODUCTS[name]
    made: dict[str, Any] = dict(given)
    for key in ("norm", "post_norm"):
        if key in made:
            made[key] = norm()
    if "add" in made:
        made["add"] = random(rows, k)
    if "multiply" in made:
        made["multiply"] = random(rows, outputs)
    return made


def weights(name: str, copies: int = 1) -> list[Tensor]:
    outputs, k, given = PRODUCTS[name]
    return [random(outputs * (2 if given.get("gated") else 1), k, scale=k**-0.5) for _ in range(copies)]


def microseconds(run: Callable[[], object], products: int) -> float:
    """Median over replays of a graph of `run`, divided by its products. Runs once before, to compile."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(25):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times[5:]) / products


def over(function: Callable[..., object], copies: list[Tensor], *arguments: Any, **named: Any) -> Callable[[], object]:
    """Calls a function with every one of the weights."""
    return lambda: [function(weight, *arguments, **named) for weight in copies]


def copy_bandwidth() -> float:
    """Bytes a microsecond, read and written."""
    source, target = (
        torch.ones(2 << 30, dtype=torch.uint8, device="cuda"),
        torch.empty(2 << 30, dtype=torch.uint8, device="cuda"),
    )
    return 2 * source.numel() / microseconds(lambda: target.copy_(source), 1)


def checks(arguments: argparse.Namespace) -> None:
    """Against float32 products of the same rounded inputs; a row's bits alone, and among 8, 16 and 64."""
    for name in PRODUCTS:
        (weight,), given = weights(name), features(name, 64)
        x = random(64, weight.shape[1])
        z, r = narrow_linear(weight, x, **given)
        torch.cuda.synchronize()
        wanted, wanted_r = fused_linear_reference(weight, x, **given)
        error = float((z.float() - wanted.float()).norm() / wanted.float().norm())
        error_r = float((r.float() - wanted_r.float()).norm() / wanted_r.float().norm())
        same = True
        for rows in (slice(0, 1), slice(5, 6), slice(8, 16), slice(3, 19), slice(0, 33)):
            part: dict[str, Any] = {k: v[rows] if isinstance(v, Tensor) else v for k, v in given.items()}
            for _ in range(3):
                z_part, r_part = narrow_linear(weight, x[rows], **part)
                same &= torch.equal(z_part, z[rows]) and torch.equal(r_part, r[rows])
        verdict = "right" if error < 1e-2 and error_r < 2e-3 and same else "WRONG"
        print(f"{name:16} {verdict}: error {error:.1e}, of r {error_r:.1e}, rows alone {'the same' if same else 'DIFFER'}")
    (weight,), x = weights("head"), random(8, HIDDEN)
    logits = fused_linear_reference(weight, x)[0].float()
    chosen = logits.gather(1, narrow_argmax(weight, x).long()[:, None])[:, 0]
    print("argmax: below the greatest by at most", float((logits.amax(1) - chosen).max()), "(a bf16 step is 0.03 at 4)")


def products(arguments: argparse.Namespace) -> None:
    bandwidth, device = copy_bandwidth(), device_of(torch.device("cuda", torch.cuda.current_device()))
    print(f"copy: {bandwidth / 1e6:.2f} TB/s")
    print(f"{'':16}{'rows':>5}{'floor':>8}{'ours':>8}{'no norms':>9}{'F.linear':>9}{'TB/s':>6}  plan")
    for name, (outputs, k, given) in PRODUCTS.items():
        size = 2 * outputs * k * (2 if given.get("gated") else 1)
        copies = weights(name, max(2, ROTATED_BYTES // size))
        for rows in arguments.rows:
            x, around = random(rows, k), features(name, rows)
            bare = {key: value for key, value in around.items() if key in ("activation", "gated", "multiply")}
            ours = microseconds(over(narrow_linear, copies, x, **around), len(copies))
            plain = microseconds(over(narrow_linear, copies, x, **bare), len(copies))
            theirs = microseconds(over(lambda w, x: F.linear(x, w), copies, x), len(copies))
            p = plan(rows, outputs, k, bool(given.get("gated")), device)
            cut = f"{p.grid[0]} x {p.grid[1]} blocks, fold {p.cut.fold}, depth {p.depth}, {p.shared >> 10} KB x {p.resident}"
            times = f"{size / bandwidth:8.2f}{ours:8.2f}{plain:9.2f}{theirs:9.2f}{size / ours / 1e6:6.2f}"
            print(f"{name:16}{rows:5}{times}  {cut}", flush=True)
        if name == "head":
            x = random(8, k)
            print(f"{'argmax':16}{8:5}{size / bandwidth:8.2f}", end="")
            print(f"{microseconds(over(narrow_argmax, copies, x), len(copies)):8.2f}", flush=True)


def options(arguments: argparse.Namespace) -> None:
    """8 rows; queues of so many KB beside what fits."""
    device = device_of(torch.device("cuda", torch.cuda.current_device()))
    queues = (32, 48, 96)
    print(f"{'':16}" + "".join(f"{name:>13}" for name in (*OPTIONS, *(f"{size} KB" for size in queues))))
    for name, (outputs, k, given) in PRODUCTS.items():
        copies = weights(name, max(2, ROTATED_BYTES // (2 * outputs * k * (2 if given.get("gated") else 1))))
        x, around = random(8, k), features(name, 8)
        line = f"{name:16}"
        fold = plan(8, outputs, k, bool(given.get("gated")), device).cut.fold
        for chosen in (*OPTIONS.values(), *(NarrowOptions(depth=fold * size // 16) for size in queues)):
            line += f"{microseconds(over(narrow_linear, copies, x, **around, options=chosen), len(copies)):13.2f}"
        print(line, flush=True)


CHAIN = ("q, k, v", "output", "gate, up", "down", "per-layer gate", "per-layer proj.")


def chain(arguments: argparse.Namespace) -> None:
    """Microseconds a layer; attention is left out: the output product reads the first values of q, k, v."""
    layers = [{name: weights(name)[0] for name in CHAIN} for _ in range(arguments.layers)]
    norms = [[norm() for _ in range(5)] for _ in layers]
    bandwidth = copy_bandwidth()
    print(f"floor {sum(2 * w.numel() for w in layers[0].values()) / bandwidth:.1f}")
    for rows in arguments.rows:
        inputs = random(rows, HIDDEN), random(rows, HIDDEN), random(rows, 256)
        line = f"{rows:3} rows:"
        for name, chosen in OPTIONS.items():
            run = partial(forward, partial(narrow_linear, options=chosen), layers, norms, *inputs)
            line += f"  {name} {microseconds(run, len(layers)):.1f}"
        run = partial(forward, fused_linear_reference, layers, norms, *inputs)
        line += f"  reference {microseconds(run, len(layers)):.1f}"
        by_size = {w.shape[1]: random(rows, w.shape[1]) for w in layers[0].values()}
        flat = [w for layer in layers for w in layer.values()]
        bare = over(lambda w, by_size: F.linear(by_size[w.shape[1]], w), flat, by_size)
        print(line + f"  F.linear alone {microseconds(bare, len(layers)):.1f}", flush=True)


def forward(
    linear: Callable[..., tuple[Tensor, Tensor]],
    layers: list[dict[str, Tensor]],
    norms: list[list[Norm]],
    x: Tensor,
    added: Tensor,
    multiply: Tensor,
) -> Tensor:
    gelu = {"activation": "gelu_tanh"}
    for layer, n in zip(layers, norms, strict=True):
        qkv, x = linear(layer["q, k, v"], x, add=added, post_norm=n[0], scale=0.5, norm=n[1])
        out, _ = linear(layer["output"], qkv[:, :2048])
        z, x = linear(layer["gate, up"], x, add=out, post_norm=n[2], norm=n[3], gated=True, **gelu)
        down, _ = linear(layer["down"], z)
        z, x = linear(layer["per-layer gate"], x, add=down, post_norm=n[4], multiply=multiply, **gelu)
        added, _ = linear(layer["per-layer proj."], z)
    return x


if __name__ == "__main__":
    main()
