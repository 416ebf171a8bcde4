"""Attention of prompts: a part of kernel_times.py."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kernel_cases import CHUNK, LAYERS, TILE_ROWS, Line, Machine, attend


def prompts(on: Machine, rows: list[int]) -> Iterator[Line]:
    """Chunks of a prompt in layers whose heads have 512 values, by the kernel for Hopper; the peer is the one in Triton."""
    for name, kind in LAYERS.items():
        for each in (CHUNK, 4 * CHUNK) if kind.size == 512 else ():
            for context in (1024, 8192, 32768, 131072 - 4 * CHUNK):
                n = max(TILE_ROWS, on(each))
                yield f"{name}, a chunk behind {context:,}", n, partial(attend, on, kind, 1, on(context), n, hopper=True)
