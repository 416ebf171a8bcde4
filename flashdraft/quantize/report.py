"""What `flashdraft quantize` says: a table of acceptance lengths, one of layers, and quantization.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from rich import box
from rich.markup import escape
from rich.table import Table

from flashdraft import __version__
from flashdraft.quant.quantize import LinearReport
from flashdraft.quantize.measure import Arm
from flashdraft.train.display import err, out

REPORT = "quantization.json"


class Findings(Protocol):
    """See run.Result."""

    @property
    def arms(self) -> list[Arm]: ...
    @property
    def layers(self) -> dict[str, list[LinearReport]]: ...
    @property
    def bytes(self) -> dict[str, int]: ...
    @property
    def facts(self) -> dict[str, Any]: ...


def as_json(result: Findings) -> dict[str, Any]:
    return {
        "flashdraft": __version__,
        **result.facts,
        "bytes": result.bytes,
        "acceptance": [arm.to_json() for arm in result.arms],
        "layers": {revision: [asdict(layer) for layer in layers] for revision, layers in result.layers.items()},
    }


def write_report(result: Findings, directory: Path) -> None:
    """quantization.json beside the draft."""
    (directory / REPORT).write_text(json.dumps(as_json(result), indent=1) + "\n", encoding="utf-8")


def show_report(result: Findings, directory: Path) -> None:
    for revision, layers in result.layers.items():
        out.print(_layer_table(revision, layers))
        for layer in layers:
            if layer.note:
                err.print(f"flashdraft: {layer.name}: {layer.note}", style="yellow", markup=False, soft_wrap=True)
    if result.arms:
        out.print(_arm_table(result.arms))
        out.print("loss: of the mean AL; at most: its bound, paired by answer, one-sided at 95 %", style="dim")
    before = result.bytes["before"]
    for revision, size in result.bytes.items():
        if revision != "before":
            out.print(f"{revision}: {size:,} bytes of weights, {size / before:.2f} of the {before:,} before", markup=False)
    for note in result.facts["notes"]:
        out.print(f"note: {note}", markup=False)
    out.print(f"the draft is in {directory}, the report in {directory / REPORT}", markup=False)


def _layer_table(revision: str, layers: Iterable[LinearReport]) -> Table:
    table = Table(title=f"{revision}: error of outputs on the calibration set", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("linear", "shape", "error", "< 2^-6", "largest"):
        table.add_column(name, justify="left" if name == "linear" else "right", no_wrap=True)
    for layer in layers:
        shape = f"{layer.shape[0]:,} x {layer.shape[1]:,}"
        cells = (f"{layer.error:.3%}", f"{layer.flushed_share:.2%}", f"{layer.largest_scale:g}")
        table.add_row(escape(layer.name), shape, *cells)
    return table


def _arm_table(arms: Iterable[Arm]) -> Table:
    table = Table(title="acceptance length on held-out prompts", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("", "answers", "AL", "over steps", "loss", "at most"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for arm in arms:
        loss = ("-", "-") if arm.loss is None or arm.loss_at_most is None else (f"{arm.loss:.2%}", f"{arm.loss_at_most:.2%}")
        table.add_row(escape(arm.name), f"{arm.answers:,}", f"{arm.acceptance_length:.3f}", f"{arm.over_steps:.3f}", *loss)
    return table
