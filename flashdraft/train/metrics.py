"""The rows of metrics.jsonl: summed up while training goes, and read again."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashdraft.train.distributed import World
from flashdraft.train.loss import BlockLoss


class Meter:
    """Sums of measures between two rows of metrics, kept on the device until they are asked for."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.restart()

    def restart(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.steps, self.tokens, self.norms = 0, 0, torch.zeros(())
        self.start, self.paused = time.monotonic(), 0.0

    def pause(self) -> None:
        self.paused = time.monotonic()

    def resume(self) -> None:
        self.start += time.monotonic() - self.paused

    def state(self) -> dict[str, Any]:
        """What a resumed run goes on from, of all ranks; every rank takes part."""
        parts = self.world.gather({"tokens": self.tokens, "sums": {name: value.cpu() for name, value in self.sums.items()}})
        return {"steps": self.steps, "norms": self.norms.cpu(), "seconds": time.monotonic() - self.start, "parts": parts}

    def load(self, state: dict[str, Any], device: torch.device) -> None:
        """Each rank takes its own part, or the parts are shared where there are now more or fewer ranks."""
        self.restart()
        self.steps, self.norms = int(state["steps"]), state["norms"].to(device)
        self.start -= float(state["seconds"])
        for part in state["parts"][self.world.rank :: self.world.size]:
            self.tokens += int(part["tokens"])
            for name, value in part["sums"].items():
                self._add(name, value.to(device))

    def _add(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def add(self, result: BlockLoss, tokens: int) -> None:
        self.tokens += tokens
        for name in ("total", "hits", "counts", "overlap", "run"):
            self._add(name, getattr(result, name).detach().float())

    def norm(self, norm: Tensor) -> None:
        self.norms = self.norms.to(norm.device) + norm.detach()
        self.steps += 1

    def take(self) -> dict[str, Any]:
        """Means over all ranks since the last call."""
        sums = {name: self.world.sum(value.cpu()) for name, value in self.sums.items()}
        tokens = int(self.world.sum(torch.tensor(self.tokens)))
        rows, blocks = sums["counts"].sum().clamp(min=1), sums["counts"][0].clamp(min=1)
        values = {
            "loss": (sums["total"] / rows).item(),
            "overlap": (sums["overlap"] / rows).item(),
            "expected_al": 1.0 + (sums["run"] / blocks).item(),
            "grad_norm": (self.norms / max(self.steps, 1)).item(),
            "accuracy": [round(a, 4) for a in (sums["hits"] / sums["counts"].clamp(min=1)).tolist()],
            "tokens_per_second": round(tokens / max(time.monotonic() - self.start, 1e-9)),
        }
        self.restart()
        return values


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, if there is one; half a line of a killed process, and what else is no row, is left out."""
    rows = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if _is_row(row):
            rows.append(row)
    return rows


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return False
    if "heldout" in row:
        return isinstance(row["heldout"], dict) and _is_number(row["heldout"].get("over_steps", 0))
    accuracy = row.get("accuracy")
    return all(_is_number(row.get(name)) for name in ("loss", "expected_al", "lr")) and (
        isinstance(accuracy, list) and all(map(_is_number, accuracy))
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
