"""CUDA graphs of the stages of a step, one for each bucketed size. Without a GPU, or by choice, stages simply run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence

import torch

from flashdraft.errors import ConfigError


def row_buckets(limit: int, few: bool) -> list[int]:
    """Numbers of rows with a graph of their own, up to one that holds `limit`: never more than 7 rows of padding to 128 rows,
    15 to 256, 31 beyond, where a row costs the less the more there are. few: also 1, 2 and 4 rows.
    """
    buckets = [*((1, 2, 4) if few else ()), *range(8, 129, 8), *range(144, 257, 16), *range(288, max(limit, 288) + 32, 32)]
    return buckets[: bisect_left(buckets, limit) + 1]


def sequence_buckets(limit: int) -> list[int]:
    """Numbers of sequences that draft together with a graph of their own; the last is `limit`."""
    return [n for n in (*range(1, 9), *range(10, 33, 2), *range(36, limit, 4)) if n < limit] + [limit]


def chunk_buckets(limit: int) -> list[int]:
    """Lengths of prefill chunks with a graph of their own, a third apart at most; the last holds `limit`."""
    steps, size = [16, 32, 48], 64
    while size < limit:
        steps += [size, size // 2 * 3]
        size *= 2
    return [n for n in steps if n < limit] + [-(-limit // 16) * 16]


def bucket_of(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `size`."""
    return buckets[bisect_left(buckets, size)]


class Graphs:
    """Stages by key. The first call of a key captures it, for which the step's plan must be one that changes nothing."""

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self.enabled = enabled
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if enabled else None
        self._stream = torch.cuda.Stream(device) if enabled else None

    def __contains__(self, key: Hashable) -> bool:
        return not self.enabled or key in self._graphs

    def capture(self, key: Hashable, stage: Callable[[], None]) -> None:
        """Record a stage. Raises ConfigError for one that cannot be recorded, such as a model that looks at its values."""
        if key in self:
            return
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            stage()  # kernels compile and workspaces grow in it
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Not torch.cuda.graph, which collects garbage and empties the allocator's cache each time.
            torch.cuda.synchronize()
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    stage()
                finally:
                    graph.capture_end()
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                "the GPU's memory does not hold the CUDA graphs: lower gpu_memory_utilization, max_num_seqs or "
                "max_num_batched_tokens, or set enforce_eager=True, which runs op by op, slower"
            ) from error
        except RuntimeError as error:
            raise ConfigError(
                f"the stage {key} cannot be captured as a CUDA graph ({str(error).splitlines()[0]}): "
                "set enforce_eager=True, which runs op by op, slower"
            ) from error
        self._graphs[key] = graph

    def run(self, key: Hashable, stage: Callable[[], None]) -> None:
        """Replay a captured stage, or run it where nothing is captured."""
        if self.enabled:
            self._graphs[key].replay()
        else:
            stage()
