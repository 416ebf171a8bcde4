"""How much memory pages get on a GPU: what is free once the models are loaded and a step has taken what it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashdraft.errors import ConfigError

GIB = 2**30
GRAPHS = 2  # a captured graph keeps the memory of its largest step beside what a step outside of graphs takes


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a GPU when an engine has started. `others`: other processes, and CUDA itself."""

    total: int
    models: int
    step: int
    pages: int
    others: int

    def __str__(self) -> str:
        parts = {"models": self.models, "KV cache": self.pages, "steps": self.step, "other": self.others}
        free = self.total - sum(parts.values())
        return f"{self.total / GIB:.1f} GiB: " + ", ".join(
            f"{name} {size / GIB:.2f}" for name, size in {**parts, "free": free}.items()
        )


def refuse_old(device: torch.device) -> None:
    """Raises ConfigError for a GPU that the kernels do not run on."""
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ConfigError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, and our kernels need 8.0 or newer "
            "(Ampere, Ada, Hopper, Blackwell): leave out async_scheduling, or run with device='cpu'"
        )


def measure(device: torch.device, rehearse: Callable[[], None], utilization: float, least: int) -> MemoryReport:
    """What pages may take: `utilization` of the GPU less what is in use and what `rehearse`, the largest step, takes.

    Raises ConfigError where that is less than `least` bytes, which one request of the longest context needs.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    models = torch.cuda.memory_allocated(device)
    rehearse()
    torch.cuda.synchronize(device)
    step = torch.cuda.max_memory_allocated(device) - models
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    pages = int(utilization * total) - others - models - GRAPHS * step
    if pages < least:
        raise ConfigError(
            f"too little GPU memory: one request of the longest context needs {least / GIB:.2f} GiB of KV cache, and "
            f"{max(pages, 0) / GIB:.2f} GiB are left of {total / GIB:.1f} (models {models / GIB:.2f}, steps "
            f"{GRAPHS * step / GIB:.2f}, others {others / GIB:.2f}): lower max_model_len, max_num_seqs or "
            "max_num_batched_tokens, raise gpu_memory_utilization, or run with device='cpu'"
        )
    return MemoryReport(total, models, GRAPHS * step, pages, others)
