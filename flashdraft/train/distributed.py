"""Several processes, one for each device, started by torchrun: the draft is replicated, its gradients are summed.

Gradients are summed by hand, after the last batch of an update, not by hooks: every rank takes part in every sum whatever its
own batches hold, so a rank without anchors adds zeros (0 * sum(parameters)) and none can hang; and the blocks stay one compiled
graph, flex attention included, which DistributedDataParallel would cut at its buckets.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flashdraft.errors import ConfigError, FlashdraftError, counted
from flashdraft.targets.sharding import Group, with_others

BUCKET = 1 << 26  # float32 values of one sum: 256 MB
TIMEOUT = timedelta(hours=1)  # a rank may wait for another's evaluation or first compilation
_SET_BY_TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


@dataclass(frozen=True)
class World:
    """This process among the processes of a run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    group: Group | None = None  # the processes that hold a target together with this one

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def agree(self, value: float, flag: bool = False) -> tuple[float, bool]:
        """The value of rank 0, and whether any rank raises the flag: the same in every process."""
        if self.size == 1:
            return value, flag
        shared = torch.tensor([value if self.is_main else 0.0, float(flag)], dtype=torch.float64)
        with with_others():
            dist.all_reduce(shared)
        return float(shared[0]), bool(shared[1])

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks of a tensor on the host, in place."""
        if self.size > 1:
            with with_others():
                dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in order, in every process."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with with_others():
            dist.all_gather_object(found, value)
        return found

    def bytes_of_main(self, data: bytes) -> bytes:
        """Rank 0's bytes, in every process: of a file that the other nodes may not see."""
        if self.size == 1:
            return data
        if not (length := int(self.agree(float(len(data)))[0])):
            return b""
        shared = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8) if self.is_main else torch.empty(length, dtype=torch.uint8)
        )
        with with_others():
            for part in shared.split(BUCKET):
                dist.broadcast(part, 0)
        return data if self.is_main else bytes(shared.numpy().data)

    def refuse_different(self, value: str, sentence: str) -> None:
        """Raises ConfigError, in rank 0, where another process has another value; the others end in silence."""
        others = [rank for rank, theirs in enumerate(self.gather(value)) if theirs != value]

        def refuse() -> None:
            if others:
                raise ConfigError(f"{sentence} (process {others[0]} of {self.size} has others)")

        self.main_first(refuse)

    def main_first(self, action: Callable[[], None]) -> None:
        """What rank 0 does for all before they go on. Its FlashdraftError ends it with its sentence, the others in silence."""
        refusal: FlashdraftError | None = None
        if self.is_main:
            try:
                action()
            except FlashdraftError as error:
                refusal = error
        _, refused = self.agree(0.0, refusal is not None)
        if refusal is not None:
            raise refusal
        if refused:
            sys.exit(2)

    def sum_gradients(self, parameters: Iterable[nn.Parameter], count: Tensor) -> Tensor:
        """Add up the gradients and the scalar `count` of all ranks, in place; returns the sum of the counts."""
        if self.size == 1:
            return count
        gradients = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        count = count.float()
        for bucket in _buckets([*gradients, count]):
            flat = torch.cat([tensor.flatten() for tensor in bucket])
            with with_others():
                dist.all_reduce(flat)
            for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))
        return count

    def same_start(self, draft: nn.Module) -> None:
        """Rank 0's parameters, in every process."""
        if self.size > 1:
            with with_others():
                for parameter in draft.parameters():
                    dist.broadcast(parameter.data, 0)


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.numel() for t in bucket) + tensor.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    yield bucket


@contextmanager
def joined(device: str | None, target_parallel: int = 1) -> Iterator[tuple[World, str | None]]:
    """The world of this process and the device that is its own; alone where torchrun did not start it.

    target_parallel: so many processes, of consecutive ranks, hold a target together. Raises ConfigError where there are more
    processes than GPUs, and where they cannot be divided so.
    """
    try:
        rank, size, local_rank = (int(os.environ.get(name, alone)) for name, alone in _SET_BY_TORCHRUN.items())
    except ValueError:
        names = ", ".join(_SET_BY_TORCHRUN)
        raise ConfigError(f"{names} of the environment must be numbers: unset them, or start with torchrun") from None
    world = World(rank, size, local_rank)
    if world.size % target_parallel:
        raise ConfigError(
            f"--target-parallel {target_parallel} and {counted(world.size, 'process')}: start a multiple of {target_parallel}, "
            f"as with torchrun --nproc-per-node {target_parallel}"
        )
    if world.size == 1:
        yield World(), device
        return
    cuda = torch.cuda.is_available() and device != "cpu"
    if cuda:
        if world.local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"{world.size} processes were started and there are {torch.cuda.device_count()} GPUs: give torchrun "
                f"--nproc-per-node {torch.cuda.device_count()}"
            )
        device = f"cuda:{world.local_rank}"
        torch.cuda.set_device(device)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:  # no address named, or nobody there
        raise ConfigError(
            f"the processes of this run cannot be joined ({shorten(str(error), 120)}): start them with torchrun"
        ) from error
    try:
        yield replace(world, group=_own_group(world, target_parallel)), device or "cpu"
    finally:
        dist.destroy_process_group()


def _own_group(world: World, size: int) -> Group | None:
    """The `size` processes of consecutive ranks that this one is among. All of them make all groups."""
    if size == 1:
        return None
    with with_others():
        handles = [dist.new_group(list(range(first, first + size)), timeout=TIMEOUT) for first in range(0, world.size, size)]
    return Group(world.rank % size, size, handles[world.rank // size])
