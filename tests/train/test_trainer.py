from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import BinaryIO, Literal

import pytest
import tiny
import torch

from flashdraft.checkpoint import load_draft
from flashdraft.draft import DFlashDraft
from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.targets.target import Target
from flashdraft.train.data import Batches, Records
from flashdraft.train.loss import LossConfig
from flashdraft.train.metrics import read_metrics
from flashdraft.train.trainer import TrainConfig, Trainer


def batches_of(records: Records, seed: int = 0) -> Batches:
    return Batches(records, seq_length=32, rows=1, anchors=8, block_size=4, seed=seed)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_ten_and_ten_steps_equal_twenty_bit_for_bit(
    tiny_target: Target, tiny_draft: DFlashDraft, tiny_records: Records, tmp_path: Path, optimizer: Literal["adamw", "muon"]
) -> None:
    config = TrainConfig(steps=20, optimizer=optimizer, log_every=6)  # between two rows where it is interrupted
    whole, halves = copy.deepcopy(tiny_draft), copy.deepcopy(tiny_draft)
    Trainer(tiny_target, whole, batches_of(tiny_records), config, tmp_path / "whole").train()

    first = Trainer(tiny_target, halves, batches_of(tiny_records), config, tmp_path / "halves")
    original = first.batches.batch

    class Stop(Exception):
        pass

    def interrupted(step: int, part: int) -> object:
        if step == 10:
            raise Stop
        return original(step, part)

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
    rows = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "halves")]
    assert [row.pop("tokens_per_second") > 0 for row in (*rows[0], *rows[1])] == [True] * 8
    assert rows[0] == rows[1]


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
    batches.batch = lambda step, part: fixed  # type: ignore[method-assign, assignment]
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


def test_one_pass_and_several_small_ones_make_the_same_update(
    tiny_target: Target, tiny_records: Records, tmp_path: Path
) -> None:
    drafts = []
    for micro_rows in (2, 1):
        batches = Batches(tiny_records, seq_length=32, rows=2, anchors=8, block_size=4, seed=0, micro_rows=micro_rows)
        drafts.append(tiny.make_draft())
        Trainer(tiny_target, drafts[-1], batches, TrainConfig(steps=3), tmp_path / str(micro_rows)).train()
    for ours, theirs in zip(drafts[0].parameters(), drafts[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


def test_a_run_is_evaluated_as_it_goes_and_at_its_end_which_changes_nothing(
    tiny_target: Target, tiny_records: Records, tmp_path: Path
) -> None:
    calls: list[tuple[int, bool]] = []

    def evaluate(trainer: Trainer, final: bool) -> dict[str, int]:
        calls.append((trainer.step, final))
        torch.rand(3)
        return {"requests": len(calls)}

    config = TrainConfig(steps=8, log_every=4, evaluations=4)
    plain, measured = tiny.make_draft(), tiny.make_draft()
    Trainer(tiny_target, plain, batches_of(tiny_records), config, tmp_path / "plain").train()
    Trainer(tiny_target, measured, batches_of(tiny_records), config, tmp_path / "measured", evaluate=evaluate).train()
    assert calls == [(2, False), (4, False), (6, False), (8, True)]
    rows = read_metrics(tmp_path / "measured" / "metrics.jsonl")
    assert [(row["step"], "heldout" in row) for row in rows] == [
        (2, True),
        (4, False),
        (4, True),
        (6, True),
        (8, False),
        (8, True),
    ]
    for ours, theirs in zip(plain.parameters(), measured.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_stop_ends_after_the_step_at_hand_with_a_saved_state(
    tiny_target: Target, tiny_draft: DFlashDraft, tiny_records: Records, tmp_path: Path
) -> None:
    config = TrainConfig(steps=6, log_every=1)
    trainer = Trainer(tiny_target, tiny_draft, batches_of(tiny_records), config, tmp_path)

    def stop(row: dict[str, object]) -> None:
        trainer.stop = row["step"] == 3

    trainer.report = stop
    assert trainer.train() is False
    resumed = Trainer(tiny_target, tiny.make_draft(), batches_of(tiny_records), config, tmp_path)
    resumed.resume()
    assert resumed.step == 3
    assert resumed.train() is True
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_rows_of_metrics_behind_the_saved_state_are_dropped_and_half_a_line_too(
    tiny_target: Target, tiny_draft: DFlashDraft, tiny_records: Records, tmp_path: Path
) -> None:
    Trainer(tiny_target, tiny_draft, batches_of(tiny_records), TrainConfig(steps=2, log_every=1), tmp_path).train()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 1.0, "lr": 1.0, "expected_al": 1.0, "accuracy": []}\n{"step": 4, "lo')
    config = TrainConfig(steps=4, log_every=1)
    Trainer(tiny_target, tiny_draft, batches_of(tiny_records), config, tmp_path).train()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_full_disk_keeps_the_last_state(
    tiny_target: Target, tiny_draft: DFlashDraft, tiny_records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(tiny_target, tiny_draft, batches_of(tiny_records), TrainConfig(steps=2), tmp_path)
    trainer.train()
    before = (tmp_path / "state.pt").read_bytes()

    def full(state: object, file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    trainer.step = 3
    with pytest.raises(CheckpointError, match=r"No space left on device.*make room and resume, the last state is kept"):
        trainer.save()
    assert (tmp_path / "state.pt").read_bytes() == before
    assert not list(tmp_path.glob("*.partial"))


def test_weights_that_are_not_finite_are_never_saved(
    tiny_target: Target, tiny_draft: DFlashDraft, tiny_records: Records, tmp_path: Path
) -> None:
    trainer = Trainer(tiny_target, tiny_draft, batches_of(tiny_records), TrainConfig(steps=1), tmp_path)
    tiny_draft.norm.weight.data[0] = float("nan")
    with pytest.raises(ConfigError, match="not finite at step 0: lower learning_rate"):
        trainer.save()
    with pytest.raises(ConfigError, match="loss is not finite at step 1: lower learning_rate"):
        Trainer(tiny_target, tiny_draft, batches_of(tiny_records), TrainConfig(steps=2, log_every=1), tmp_path).train()
    assert not (tmp_path / "state.pt").exists()


@pytest.mark.parametrize("damage", ["cut short", "other text", "another file of torch", "other keys", "other values"])
def test_a_state_that_is_none_is_refused_and_without_it_the_same_call_starts_anew(
    tiny_target: Target, tiny_records: Records, tmp_path: Path, damage: str
) -> None:
    config = TrainConfig(steps=2, log_every=1)

    def train() -> bool:
        return Trainer(tiny_target, tiny.make_draft(), batches_of(tiny_records), config, tmp_path).train()

    train()
    path = tmp_path / "state.pt"
    state = torch.load(path)
    if damage == "cut short":
        path.write_bytes(path.read_bytes()[:-500])
    elif damage == "other text":
        path.write_bytes(b"nonsense")
    else:
        torch.save(
            {"another file of torch": [1], "other keys": {"step": 1}, "other values": state | {"step": "x"}}[damage], path
        )
    with pytest.raises(
        CheckpointError, match=r"state\.pt is cut short, or no state of a run: remove that file and give the same"
    ):
        train()
    path.unlink()
    assert train()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_rows_of_a_run_that_was_killed_before_its_first_state_go(
    tiny_target: Target, tiny_draft: DFlashDraft, tiny_records: Records, tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "lr": 1.0, "expected_al": 1.0, "accuracy": [0.5]}\n')
    Trainer(tiny_target, tiny_draft, batches_of(tiny_records), TrainConfig(steps=4, log_every=2), tmp_path).train()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [2, 4]


def test_what_is_no_row_of_metrics_is_left_out(tmp_path: Path) -> None:
    path, row = tmp_path / "metrics.jsonl", {"step": 1, "loss": 2, "lr": 1e-3, "expected_al": 1.5, "accuracy": [0.5]}
    held = {"step": 2, "heldout": {"over_steps": 1.5}}
    others: list[object] = [3, None, [row], {}, row | {"step": "1"}, row | {"loss": None}, row | {"accuracy": 1}]
    others += [row | {"accuracy": ["x"]}, {"step": 2, "heldout": 3}, {"step": 2, "heldout": {"over_steps": "x"}}]
    lines = [json.dumps(line).encode() for line in (row, *others, held)]
    path.write_bytes(b"\n".join([b"\xff\xfe\x00", b"[" * 100_000, *lines, b'{"step": 4, "lo']))
    assert read_metrics(path) == [row, held]
    assert read_metrics(tmp_path / "absent.jsonl") == []
