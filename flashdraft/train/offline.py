"""Features cached on disk: safetensors shards of the captured layers and the last hidden states of every token.

A token takes (n + 1) * H values of the target's dtype: 5.8 kB for a 135M target with four layers captured, 49 kB for an 8B one
with five. The directory is named by what the features are of (data, target, layers): runs share it, and none misreads it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from textwrap import shorten

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.targets.target import Target
from flashdraft.train.data import Records, lay_out, make_batch, pack_rows
from flashdraft.train.distributed import World
from flashdraft.train.features import packed_forward
from flashdraft.train.files import replacing
from flashdraft.train.identity import target_hash

SHARD_BYTES = 1 << 30
SHARED_SECONDS = 60.0  # until a network file system shows all nodes a new file


@dataclass(frozen=True)
class CachePlan:
    """Where the features of records go, and how much they take. Record i's tokens begin at records.origins[i]."""

    directory: Path
    token_bytes: int
    tokens: int
    ranges: list[tuple[int, int]]  # records [first, last) of each shard
    key: str

    @classmethod
    def of(cls, target: Target, layer_ids: Sequence[int], records: Records, parent: Path) -> CachePlan:
        """`records` are all that will be read, with origins of their own (Records.origins == starts[:-1])."""
        assert np.array_equal(records.origins, records.starts[:-1])
        token_bytes = (len(layer_ids) + 1) * target.hidden_size * target.dtype.itemsize
        content = json.dumps([records.digest(), target_hash(target), list(layer_ids), str(target.dtype)])
        key = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
        shard = np.maximum.accumulate(records.starts[:-1] // max(SHARD_BYTES // token_bytes, 1))
        cuts = [0, *(np.flatnonzero(np.diff(shard)) + 1).tolist(), len(records)]
        ranges = list(pairwise(cuts))
        return cls(parent / f"features-{key}", token_bytes, len(records.tokens), ranges, key)

    @property
    def bytes(self) -> int:
        return self.tokens * self.token_bytes

    def path(self, shard: int) -> Path:
        return self.directory / f"features-{shard:05d}.safetensors"

    @property
    def missing(self) -> list[int]:
        return [shard for shard in range(len(self.ranges)) if not self.path(shard).exists()]

    def check_room(self) -> None:
        """Raises ConfigError where the disk has no room for the shards that are missing."""
        self.directory.mkdir(parents=True, exist_ok=True)
        share = len(self.missing) / max(len(self.ranges), 1)
        free = shutil.disk_usage(self.directory).free
        if self.bytes * share > free:
            raise ConfigError(
                f"the features take {self.bytes * share / 1e9:,.1f} GB and {free / 1e9:,.1f} GB are free in {self.directory}: "
                "leave out --features offline, or use fewer answers"
            )


def build(
    plan: CachePlan,
    target: Target,
    records: Records,
    *,
    seq_length: int,
    micro_rows: int,
    world: World,
    report: Callable[[int, int], None],
) -> None:
    """Write the shards that are missing, each whole or not at all; ranks take them in turn, or the groups of ranks that hold a
    target together, of which the first rank writes. `report(done, all)` shards.
    """
    _refuse_unshared(plan, world)
    missing = world.gather(plan.missing)[0]  # rank 0's: a shard that is written meanwhile would shift the turns of the others
    together = 1 if target.group is None else target.group.size
    for shard in missing[world.rank // together :: world.size // together]:
        first, last = plan.ranges[shard]
        features, hidden = _features_of(target, records, range(first, last), seq_length, micro_rows)
        if world.rank % together:
            continue
        path = plan.path(shard)
        try:
            with replacing(path) as partial:
                save_file({"features": features, "last": hidden}, partial, metadata={"key": plan.key})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path} cannot be written ({shorten(str(error), 120)}): make room and start again, finished shards are kept"
            ) from error
        report(len(plan.ranges) - len(plan.missing), len(plan.ranges))
    while world.size > 1 and not all(world.gather(not plan.missing)):  # a rank may see a shared disk later than others
        time.sleep(1.0)


def _refuse_unshared(plan: CachePlan, world: World) -> None:
    """Raises ConfigError, in rank 0, where another process does not see what it writes: of a few features each would wait."""
    if world.size == 1:
        return
    mark = plan.directory / ".shared"
    world.main_first(lambda: mark.touch())
    last = time.monotonic() + SHARED_SECONDS
    while not all(seen := world.gather(mark.exists())) and world.agree(time.monotonic())[0] < world.agree(last)[0]:
        time.sleep(0.5)

    def refuse() -> None:
        mark.unlink(missing_ok=True)
        if not all(seen):
            raise ConfigError(
                f"{plan.directory} is not the same directory on all nodes, which --features offline needs: put --data on a "
                "shared file system, or leave out --features offline"
            )

    world.main_first(refuse)


@torch.no_grad()
def _features_of(target: Target, records: Records, chosen: range, seq_length: int, micro_rows: int) -> tuple[Tensor, Tensor]:
    """Features [T, n*H] and last hidden states [T, H] of consecutive records, on the host."""
    base = int(records.starts[chosen.start])
    tokens = int(records.starts[chosen.stop]) - base
    packed = [[chosen.start + i for i in row] for row in pack_rows(records.lengths[chosen.start : chosen.stop], seq_length)]
    found: list[Tensor] = []
    for begin in range(0, len(packed), micro_rows):
        rows = packed[begin : begin + micro_rows]
        layout = lay_out(records, rows + [[]] * (micro_rows - len(rows)), seq_length)
        nowhere = torch.zeros((micro_rows, 1), dtype=torch.long)
        batch = make_batch(layout, nowhere, nowhere.bool(), 2).to(target.device)
        parts = packed_forward(target, batch, same_rows=True)
        if not found:
            found = [torch.empty((tokens, part.shape[-1]), dtype=part.dtype) for part in parts]
        for part, whole in zip(parts, found, strict=True):
            for b, members in enumerate(rows):
                start = 0
                for index in members:
                    length, at = int(records.lengths[index]), int(records.starts[index]) - base
                    whole[at : at + length] = part[b, start : start + length].to("cpu")
                    start += length
    return found[0], found[1]


class CachedFeatures:
    """Reads what build() wrote: features of packed rows, by the records' origins."""

    def __init__(self, plan: CachePlan, records: Records) -> None:
        self.firsts = [int(records.starts[first]) for first, _ in plan.ranges]
        self.files = []
        for shard in range(len(plan.ranges)):
            try:
                opened = safe_open(plan.path(shard), framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{plan.path(shard)} is corrupt ({error}): remove it to make it again") from error
            if (opened.metadata() or {}).get("key") != plan.key:
                raise CheckpointError(f"{plan.path(shard)} belongs to other data: remove it to make it again")
            self.files.append(opened)

    def rows(self, records: Records, rows: Sequence[Sequence[int]], row_length: int) -> tuple[Tensor, Tensor]:
        """Features [B, S, n*H] and last hidden states [B, S, H] of packed rows; zeros where they are padding."""
        made = []
        for name in ("features", "last"):
            slices = [file.get_slice(name) for file in self.files]
            width = slices[0].get_shape()[1]
            out = torch.zeros((len(rows), row_length, width), dtype=slices[0][:0].dtype)
            for b, members in enumerate(rows):
                start = 0
                for index in members:
                    length, origin = int(records.lengths[index]), int(records.origins[index])
                    shard = int(np.searchsorted(self.firsts, origin, side="right")) - 1
                    at = origin - self.firsts[shard]
                    out[b, start : start + length] = slices[shard][at : at + length]
                    start += length
            made.append(out)
        return made[0], made[1]


def release_layers(target: Target) -> None:
    """Give back the memory of the target's layers, which cached features make needless; embeddings and head stay."""
    assert target.logit_scale  # measured by a forward pass, hence before the layers go
    target.layers.to("meta")
    if target.device.type == "cuda":
        torch.cuda.empty_cache()
