from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.targets.target import Target
from flashdraft.train import offline
from flashdraft.train.data import Batches, Records
from flashdraft.train.distributed import World
from flashdraft.train.features import packed_forward
from flashdraft.train.offline import CachedFeatures, CachePlan, build, release_layers
from flashdraft.train.trainer import TrainConfig, Trainer
from flashdraft.train.validation import acceptance

LAYERS = (1, 3)
TOKEN_BYTES = 3 * 32 * 4  # two layers and the last hidden state, hidden 32, float32


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "SHARD_BYTES", 40 * TOKEN_BYTES)


def write(target: Target, records: Records, parent: Path) -> CachePlan:
    target.capture(LAYERS)
    plan = CachePlan.of(target, LAYERS, records, parent)
    plan.check_room()
    build(plan, target, records, seq_length=32, micro_rows=2, world=World(), report=lambda done, count: None)
    return plan


def test_cached_features_are_those_of_the_target(tiny_target: Target, tiny_records: Records, tmp_path: Path) -> None:
    plan = write(tiny_target, tiny_records, tmp_path)
    assert plan.bytes == TOKEN_BYTES * len(tiny_records.tokens)
    assert len(list(plan.directory.glob("*.safetensors"))) == len(plan.ranges) > 1
    kept = tiny_records.select(np.arange(len(tiny_records)) % 3 != 0)  # a part of the records, as training has
    batches = Batches(kept, seq_length=48, rows=2, anchors=8, block_size=4, seed=0, cache=CachedFeatures(plan, tiny_records))
    batch = batches.batch(0)
    assert batch.features is not None
    assert batch.last is not None
    expected = packed_forward(tiny_target, replace(batch, features=None, last=None))
    real = batch.documents >= 0
    torch.testing.assert_close(batch.features[real], expected[0][real], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(batch.last[real], expected[1][real], atol=1e-5, rtol=1e-4)


def test_training_offline_is_training_online_even_without_the_layers(tiny_records: Records, tmp_path: Path) -> None:
    results = []
    for kind in ("online", "offline"):
        target, draft = tiny.make_target(), tiny.make_draft()
        cache = CachedFeatures(write(target, tiny_records, tmp_path), tiny_records) if kind == "offline" else None
        if cache is not None:
            release_layers(target)
            assert {p.device.type for p in target.layers.parameters()} == {"meta"}
        batches = Batches(tiny_records, seq_length=32, rows=2, anchors=8, block_size=4, seed=0, cache=cache)
        trainer = Trainer(target, draft, batches, TrainConfig(steps=12), tmp_path / kind, report=lambda row: None)
        trainer.train()
        results.append((draft, acceptance(trainer, tiny_records, seq_length=32, rows=2, anchors=8)))
    for ours, theirs in zip(results[0][0].parameters(), results[1][0].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
    assert results[0][1] == results[1][1]


def test_finished_shards_are_kept_and_missing_ones_written(tiny_target: Target, tiny_records: Records, tmp_path: Path) -> None:
    plan = write(tiny_target, tiny_records, tmp_path)
    whole = {path.name: path.read_bytes() for path in plan.directory.iterdir()}
    plan.path(1).unlink()
    stamp = plan.path(0).stat().st_mtime_ns
    assert plan.missing == [1]
    write(tiny_target, tiny_records, tmp_path)
    assert plan.path(0).stat().st_mtime_ns == stamp
    assert {path.name: path.read_bytes() for path in plan.directory.iterdir()} == whole


def test_other_data_other_layers_and_another_target_have_another_cache(
    tiny_target: Target, tiny_records: Records, tmp_path: Path
) -> None:
    other = tiny.make_target()
    other.model.model.layers[2].mlp.up_proj.weight.data[0, 0] += 1
    keys = {
        CachePlan.of(tiny_target, LAYERS, tiny_records, tmp_path).key,
        CachePlan.of(tiny_target, (0, 3), tiny_records, tmp_path).key,
        CachePlan.of(other, LAYERS, tiny_records, tmp_path).key,
        CachePlan.of(tiny_target, LAYERS, tiny.make_records([(3, 9)]), tmp_path).key,
    }
    assert len(keys) == 4


def test_corrupt_and_foreign_shards_are_refused(tiny_target: Target, tiny_records: Records, tmp_path: Path) -> None:
    plan = write(tiny_target, tiny_records, tmp_path)
    foreign = write(tiny_target, tiny.make_records([(3, 20), (4, 20)]), tmp_path)
    shutil.copy(foreign.path(0), plan.path(0))
    with pytest.raises(CheckpointError, match="belongs to other data: remove it"):
        CachedFeatures(plan, tiny_records)
    plan.path(0).write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"corrupt .*: remove it to make it again"):
        CachedFeatures(plan, tiny_records)


def test_a_disk_without_room_is_said_before_anything_is_written(
    tiny_target: Target, tiny_records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = CachePlan.of(tiny_target, LAYERS, tiny_records, tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))
    with pytest.raises(ConfigError, match="leave out --features offline, or use fewer answers"):
        plan.check_room()


def test_a_disk_that_fills_up_keeps_finished_shards(
    tiny_target: Target, tiny_records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, written = offline.save_file, []

    def full(tensors: object, path: Path, metadata: object) -> None:
        if written:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        written.append(path)
        original(tensors, path, metadata=metadata)  # type: ignore[arg-type]

    monkeypatch.setattr(offline, "save_file", full)
    with pytest.raises(CheckpointError, match=r"No space left.*make room and start again, finished shards are kept"):
        write(tiny_target, tiny_records, tmp_path)
    (directory,) = tmp_path.glob("features-*")
    assert [path.name for path in directory.iterdir()] == ["features-00000.safetensors"]
