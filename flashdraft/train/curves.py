"""The curves of a run: a PNG at its end (matplotlib), TensorBoard while it goes (tensorboard); both are optional packages."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from flashdraft.errors import ConfigError
from flashdraft.train.files import replacing

EXTRA = "pip install 'flashdraft[train]'"


def draw_curves(rows: list[dict[str, Any]], path: Path) -> bool:
    """Loss, expected and held-out AL, accuracy by position and learning rate over steps; False without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return False
    steps = [row for row in rows if "loss" in row]
    held = [row for row in rows if "over_steps" in row.get("heldout", {})]
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    loss, length, accuracy, rate = figure.subplots(2, 2).flatten()
    at = [row["step"] for row in steps]
    marker = "." if len(at) < 20 else ""  # a line through one point is not to be seen
    loss.plot(at, [row["loss"] for row in steps], marker=marker)
    loss.set_title("loss")
    length.plot(at, [row["expected_al"] for row in steps], marker=marker, label="expected, on training blocks")
    length.plot([r["step"] for r in held], [r["heldout"]["over_steps"] for r in held], "o-", label="held out, over steps")
    length.set_title("acceptance length")
    length.legend()
    for position, values in enumerate(zip(*(row["accuracy"] for row in steps), strict=True), 1):
        accuracy.plot(at, values, marker=marker, label=str(position))
    accuracy.set_title("accuracy by position, on training blocks")
    if steps:
        accuracy.legend(ncols=2, fontsize="small")
    rate.plot(at, [row["lr"] for row in steps], marker=marker)
    rate.set_title("learning rate")
    for axes in (loss, length, accuracy, rate):
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    with replacing(path) as partial:
        figure.savefig(partial, format="png", dpi=120)
    return True


def require_tensorboard() -> Any:
    """torch's SummaryWriter, whose module imports tensorboard at its top. Raises ConfigError without that package."""
    try:
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError as error:
        raise ConfigError(f"--tensorboard needs the package tensorboard: {EXTRA}, or leave it out") from error


class TensorBoard:
    """Writes every row of metrics as scalars; what an earlier process wrote behind `step` is dropped."""

    def __init__(self, directory: Path, step: int) -> None:
        self.writer = require_tensorboard()(str(directory), purge_step=step + 1)

    def add(self, row: dict[str, Any]) -> None:
        step = row["step"]
        for name in ("loss", "overlap", "expected_al", "grad_norm", "lr", "tokens_per_second"):
            if name in row:
                self.writer.add_scalar(f"train/{name}", row[name], step)
        for position, value in enumerate(row.get("accuracy", []), 1):
            self.writer.add_scalar(f"accuracy/{position}", value, step)
        if held := row.get("heldout"):
            self.writer.add_scalar("heldout/acceptance_length", held["acceptance_length"], step)
            self.writer.add_scalar("heldout/over_steps", held["over_steps"], step)
            for kind in ("by_category", "by_language", "by_thinking", "by_depth"):
                for name, values in held[kind].items():
                    self.writer.add_scalar(f"heldout_{kind}/{name or 'none'}", values["acceptance_length"], step)

    def close(self) -> None:
        self.writer.close()
