from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Literal

import pytest
import torch

from flashdraft.checkpoint import load_draft
from flashdraft.draft import DFlashDraft, propose_offline
from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.targets.target import Target
from flashdraft.train.data import Batches, Records
from flashdraft.train.loss import LossConfig
from flashdraft.train.trainer import TrainConfig, Trainer, packed_forward
from flashdraft.train.validation import acceptance, summary, walk


def batches_of(records: Records, seed: int = 0) -> Batches:
    return Batches(records, seq_length=32, rows=1, anchors=8, block_size=4, seed=seed)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_ten_and_ten_steps_equal_twenty_bit_for_bit(
    tiny_target: Target, tiny_draft: DFlashDraft, tiny_records: Records, tmp_path: Path, optimizer: Literal["adamw", "muon"]
) -> None:
    config = TrainConfig(steps=20, optimizer=optimizer)
    whole, halves = copy.deepcopy(tiny_draft), copy.deepcopy(tiny_draft)
    Trainer(tiny_target, whole, batches_of(tiny_records), config, tmp_path / "whole").train()

    first = Trainer(tiny_target, halves, batches_of(tiny_records), config, tmp_path / "halves")
    original = first.batches.batch

    class Stop(Exception):
        pass

    def interrupted(step: int) -> object:
        if step == 10:
            raise Stop
        return original(step)

    first.batches.batch = interrupted  # type: ignore[method-assign, assignment]
    with pytest.raises(Stop):
        first.train()
    first.save()
    assert first.step == 10
    resumed = copy.deepcopy(tiny_draft)
    second = Trainer(tiny_target, resumed, batches_of(tiny_records), config, tmp_path / "halves")
    second.train()
    assert second.step == 20
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_a_state_of_another_draft_is_refused(
    tiny_target: Target, tiny_draft: DFlashDraft, tiny_records: Records, tmp_path: Path
) -> None:
    Trainer(tiny_target, tiny_draft, batches_of(tiny_records), TrainConfig(steps=1), tmp_path).train()
    other = DFlashDraft(tiny_draft.config.with_(windows=(5, None)))
    with pytest.raises(CheckpointError, match="another configuration"):
        Trainer(tiny_target, other, batches_of(tiny_records), TrainConfig(steps=1), tmp_path).train()


def test_one_batch_overfits(tiny_target: Target, tiny_draft: DFlashDraft, tiny_records: Records, tmp_path: Path) -> None:
    batches = Batches(tiny_records, seq_length=48, rows=2, anchors=16, block_size=4, seed=0)
    fixed = batches.batch(0)
    batches.batch = lambda step: fixed  # type: ignore[method-assign, assignment]
    config = TrainConfig(steps=250, learning_rate=3e-3, loss=LossConfig(beta=0.0), log_every=50)
    Trainer(tiny_target, tiny_draft, batches, config, tmp_path).train()
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert min(last["accuracy"]) > 0.95


def test_the_saved_draft_is_bf16_and_loads(
    tiny_target: Target, tiny_draft: DFlashDraft, tiny_records: Records, tmp_path: Path
) -> None:
    trainer = Trainer(tiny_target, tiny_draft, batches_of(tiny_records), TrainConfig(max_seconds=0.5, log_every=1), tmp_path)
    trainer.train()
    loaded = load_draft(tmp_path / "draft")
    assert loaded.config == tiny_draft.config
    assert loaded.fc.weight.dtype == torch.bfloat16
    torch.testing.assert_close(loaded.fc.weight.float(), tiny_draft.fc.weight, atol=0, rtol=2**-8)
    assert trainer.step > 1


def test_the_schedule_needs_one_end_and_falls_to_a_tenth() -> None:
    with pytest.raises(ConfigError, match="exactly one"):
        TrainConfig(steps=3, max_seconds=2.0)
    config = TrainConfig(steps=100, learning_rate=1.0)
    assert config.rate(0.02) == pytest.approx(0.5)
    assert config.rate(0.04) == pytest.approx(1.0)
    assert config.rate(1.0) == pytest.approx(0.1)


def test_walk_commits_what_an_engine_would() -> None:
    assert walk([2, 9, 0, 0, 3, 1, 0], last=6) == [2, 0, 1]
    assert walk([], last=0) == []


def test_validation_equals_block_decoding_one_step_at_a_time(
    tiny_target: Target, tiny_draft: DFlashDraft, tiny_records: Records, tmp_path: Path
) -> None:
    config = TrainConfig(steps=60, learning_rate=3e-3, loss=LossConfig(beta=0.0))
    trainer = Trainer(tiny_target, tiny_draft, batches_of(tiny_records), config, tmp_path)
    trainer.train()
    results = acceptance(trainer, tiny_records, seq_length=32, rows=2, anchors=8)
    single = Batches(tiny_records, seq_length=32, rows=1, anchors=1, block_size=4, seed=0)
    for index, accepted in enumerate(results):
        tokens = torch.from_numpy(tiny_records.record(index)).long()
        single.rows = [[index]]
        features = packed_forward(tiny_target, single.batch(0))[0][0]
        anchor, steps = int(tiny_records.prompt_lengths[index]), []
        while anchor < len(tokens) - 1:
            with torch.no_grad():
                logits = propose_offline(
                    tiny_draft, features[:anchor], int(tokens[anchor]), tiny_target.embed_rows, tiny_target.head
                )
            rest = tokens[anchor + 1 : anchor + 4]
            run = int((logits.argmax(-1)[: len(rest)] == rest).long().cumprod(0).sum())
            steps.append(min(run, len(tokens) - 2 - anchor))
            anchor += steps[-1] + 1
        assert accepted == steps
    assert sum(map(sum, results)) > 0
    assert summary(results, tiny_records.categories)["all"]["requests"] == 7
