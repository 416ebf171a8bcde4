"""Training that rounds as the draft will be quantized."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from flashdraft.checkpoint import load_draft
from flashdraft.draft import DFlashDraft
from flashdraft.errors import ConfigError
from flashdraft.quant.calibrate import Statistics
from flashdraft.quant.linear import linears
from flashdraft.quant.quantize import Settings, quantize_linears
from flashdraft.quant.training import RoundingLinear, round_while_training
from flashdraft.targets.target import Target
from flashdraft.train.data import Batches, Records
from flashdraft.train.loss import LossConfig
from flashdraft.train.recipe import parse_recipe
from flashdraft.train.trainer import TrainConfig, Trainer


def batches_of(records: Records) -> Batches:
    batches = Batches(records, seq_length=48, rows=2, anchors=16, block_size=4, seed=0)
    fixed = batches.batch(0)
    batches.batch = lambda step, part: fixed  # type: ignore[method-assign, assignment]
    return batches


def loss_in_four_bits(target: Target, draft: DFlashDraft, records: Records, directory: Path) -> float:
    config = TrainConfig(steps=1, quantization="w4a4", loss=LossConfig(beta=0.0))
    trainer = Trainer(target, copy.deepcopy(draft), batches_of(records), config, directory)
    with torch.no_grad():
        result = trainer.loss(trainer.batches.batch(0, 0))
    return float(result.total / result.counts.sum())


def test_a_draft_trained_for_four_bits_loses_less_in_them(
    tiny_target: Target, tiny_draft: DFlashDraft, tiny_records: Records, tmp_path: Path
) -> None:
    losses = {}
    for form in (None, "w4a4"):
        draft, directory = copy.deepcopy(tiny_draft), tmp_path / str(form)
        config = TrainConfig(steps=200, learning_rate=3e-3, quantization=form, loss=LossConfig(beta=0.0), log_every=100)
        Trainer(tiny_target, draft, batches_of(tiny_records), config, directory).train()
        saved = load_draft(directory / "draft", dtype=torch.float32)
        assert not any(isinstance(leaf, RoundingLinear) for leaf in saved.modules())
        losses[form] = loss_in_four_bits(tiny_target, saved, tiny_records, tmp_path / "measured")
    assert losses["w4a4"] < 0.5 * losses[None]


def test_what_training_measures_is_what_quantizing_the_saved_draft_gives(
    tiny_target: Target, tiny_draft: DFlashDraft, tiny_records: Records, tmp_path: Path
) -> None:
    config = TrainConfig(steps=30, learning_rate=3e-3, quantization="w4a16")
    trainer = Trainer(tiny_target, copy.deepcopy(tiny_draft), batches_of(tiny_records), config, tmp_path)
    trainer.train()
    saved = load_draft(tmp_path / "draft")
    seen = {name: Statistics(torch.eye(leaf.in_features), torch.ones(()), 1) for name, leaf in linears(saved).items()}
    made, _ = quantize_linears(saved, seen, Settings("max"))
    for name, rounding in linears(trainer.draft).items():
        assert isinstance(rounding, RoundingLinear)
        weight = rounding(torch.eye(rounding.in_features)).T
        torch.testing.assert_close(weight, made[name].packed.dequantize(), rtol=1e-6, atol=0, msg=name)


def test_a_rounding_run_resumes_bit_for_bit(
    tiny_target: Target, tiny_draft: DFlashDraft, tiny_records: Records, tmp_path: Path
) -> None:
    config = TrainConfig(steps=6, quantization="w4a4")
    whole, halves = copy.deepcopy(tiny_draft), copy.deepcopy(tiny_draft)
    Trainer(tiny_target, whole, batches_of(tiny_records), config, tmp_path / "whole").train()
    first = Trainer(tiny_target, halves, batches_of(tiny_records), config, tmp_path / "halves")
    first.report = lambda row: None
    stream = iter([first.batches.batch(0, 0)] * 3)
    for step in range(3):
        first.update(stream, step / 6)
    first.save()
    resumed = copy.deepcopy(tiny_draft)
    assert Trainer(tiny_target, resumed, batches_of(tiny_records), config, tmp_path / "halves").train()
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_the_recipe_names_the_form() -> None:
    assert parse_recipe({"train": {"quantization": "w4a4"}}).train.quantization == "w4a4"
    assert parse_recipe({}).train.quantization is None
    with pytest.raises(ConfigError, match="quantization must be 'w4a16' or 'w4a4'"):
        parse_recipe({"train": {"quantization": "int8"}})


def test_rounding_is_of_the_draft_at_hand_alone(tiny_draft: DFlashDraft) -> None:
    other = copy.deepcopy(tiny_draft)
    round_while_training(other, "w4a16")
    assert not any(isinstance(leaf, RoundingLinear) for leaf in tiny_draft.modules())
    copied = copy.deepcopy(other)
    for mine, theirs in zip(copied.modules(), other.modules(), strict=True):
        if isinstance(mine, RoundingLinear):
            assert mine.group[0] is not theirs.group[0]
            assert any(mine.weight is weight for weight in mine.group)
