"""Whether a GPU can serve a pair, and how much of its memory pages get: what is free once the models are loaded and a step has
taken what it needs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from textwrap import shorten

import torch

from flashdraft.engine.cache import CacheManager, KVShape, PagePool
from flashdraft.errors import ConfigError, UnsupportedModelError

GIB = 2**30
PAGE_SIZE = 16
CHUNK = 2048  # prompt tokens a step on a GPU, unless told otherwise
ELSEWHERE = "set async_scheduling=False, which needs none of our kernels, or run with device='cpu'"
GRAPHS = 2  # a captured graph keeps the memory of its largest step beside what a step outside of graphs takes


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a GPU when an engine has started. `models`: all that this process holds before, an earlier engine included;
    `others`: other processes, and CUDA itself.
    """

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


def request_bytes(shapes: Sequence[KVShape], dtype: torch.dtype, tokens: int, lookahead: int = 2 * CHUNK) -> int:
    """Bytes of KV cache that one request of so many tokens takes at most: full layers hold all of them, windowed ones their
    window and `lookahead` tokens. That is a chunk of its prompt, twice on a GPU, where the next step has its pages before this
    one has ended.
    """
    pool = PagePool(shapes, page_size=PAGE_SIZE, num_bytes=1, dtype=dtype, device="meta")
    return CacheManager(pool).bytes_for(tokens, lookahead)


def refuse_old(device: torch.device) -> None:
    """Raises ConfigError for a GPU that the kernels do not run on, and where what compiles them is missing."""
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        raise ConfigError(f"{name} is no NVIDIA GPU, and our kernels are for those alone: {ELSEWHERE}")
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ConfigError(
            f"{name} has compute capability {major}.{minor}, and our kernels need 8.0 or newer (Ampere, Ada, Hopper, "
            f"Blackwell): {ELSEWHERE}"
        )
    if find_spec("triton") is None:
        raise ConfigError(f"our kernels for {name} need the package triton, which is not installed: install it, {ELSEWHERE}")


def refuse_heads(shapes: Iterable[KVShape]) -> None:
    """Raises UnsupportedModelError for head sizes that the attention kernel has no tile for (kernels/paged_triton.py).

    Sizes are padded to powers of two. A tile is 32,768 elements of keys and values together, at most 64 keys, and its number
    of keys must be a power of two of at least 16, as products of tiles take no other.
    """
    for shape in shapes:
        padded = [1 << (size - 1).bit_length() for size in (shape.key_size, shape.value_size)]
        keys = min(64, 32768 // sum(padded))
        if min(padded) < 16 or keys < 16 or keys & (keys - 1):
            raise UnsupportedModelError(
                f"the {'draft' if shape.draft else 'target'}'s attention heads have {shape.key_size} numbers for keys and "
                f"{shape.value_size} for values, and our GPU kernel takes 9 to 1024 for both, or different ones of at most 512 "
                f"together: {ELSEWHERE}"
            )


@contextmanager
def saying_what_is_full() -> Iterator[None]:
    """Turns PyTorch's errors of a full memory, and Triton's of a kernel too large for it, into one sentence."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        raise ConfigError(
            f"too little GPU memory: {free / GIB:.2f} GiB of {total / GIB:.1f} are free, and loading or starting needs more: "
            "end other programs that use the GPU, lower max_num_seqs or max_model_len, set enforce_eager=True, or run with "
            "device='cpu'"
        ) from error
    except Exception as error:
        if "can't allocate memory" in str(error):  # a RuntimeError of the allocator on the CPU
            raise ConfigError("too little memory to load or start: lower max_num_seqs or max_model_len") from error
        if type(error).__name__ != "OutOfResources":  # Triton's, which may not be installed
            raise
        raise UnsupportedModelError(
            f"a kernel for heads of these sizes needs more than this GPU has ({shorten(str(error), 120)}): {ELSEWHERE}"
        ) from error


def release_unused() -> None:
    """Give back what engines that are no more held, before anything new is put in the middle of it: 2 GiB of weights once kept
    108 GiB of pages from being given back."""
    gc.collect()
    torch.cuda.empty_cache()


def measure(
    device: torch.device, rehearse: Callable[[], None], utilization: float, least: int, share: float = 1.0
) -> MemoryReport:
    """What pages may take: `share` of what is left of `utilization` of the GPU behind what is in use and what `rehearse`, the
    largest step, takes.

    Raises ConfigError where that is less than `least` bytes, which one request of the longest context needs.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    models, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)  # graphs reserve alone
    rehearse()
    torch.cuda.synchronize(device)
    step = torch.cuda.max_memory_allocated(device) - allocated
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    pages = int(share * (int(utilization * total) - others - models - GRAPHS * step))
    if pages < least:
        raise ConfigError(
            f"too little GPU memory: one request of the longest context needs {least / GIB:.2f} GiB of KV cache, and "
            f"{max(pages, 0) / GIB:.2f} GiB are left of {total / GIB:.1f} (models {models / GIB:.2f}, steps "
            f"{GRAPHS * step / GIB:.2f}, others {others / GIB:.2f}): lower max_model_len or max_num_seqs, raise "
            "gpu_memory_utilization, or run with device='cpu'"
        )
    return MemoryReport(total, models, GRAPHS * step, pages, others)
