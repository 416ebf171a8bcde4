from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

from flashdraft import LLM, SamplingParams, builtin
from flashdraft.checkpoint import load_draft
from flashdraft.draft import DFlashDraft, propose_offline
from flashdraft.targets.load import load_target
from flashdraft.targets.target import Target
from flashdraft.train.data import Batches, Records
from flashdraft.train.features import packed_forward
from flashdraft.train.loss import LossConfig
from flashdraft.train.trainer import TrainConfig, Trainer
from flashdraft.train.validation import acceptance, by_depth, by_position, heldout_report, summary, walk


def batches_of(records: Records) -> Batches:
    return Batches(records, seq_length=32, rows=1, anchors=8, block_size=4, seed=0)


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


def test_steps_are_counted_by_position_and_by_the_depth_of_their_anchor() -> None:
    accepted = [[2, 0, 3], [1], []]
    assert by_position(accepted, 3) == [0.75, 0.5, 0.25]
    # Anchors of the first record: 250, 253, 254; of the second: 600.
    depths = by_depth([[5, 0, 3], [1], []], [250, 600, 10])
    assert depths["0-255"] == {"acceptance_length": 6.0, "steps": 1}
    assert depths["256-511"] == {"acceptance_length": 2.5, "steps": 2}
    assert depths["512-1023"] == {"acceptance_length": 2.0, "steps": 1}
    assert list(depths) == ["0-255", "256-511", "512-1023"]
    assert by_depth([], []) == {}


def test_the_last_report_measures_depth_with_and_without_the_window(tiny_target: Target, tmp_path: Path) -> None:
    records = tiny.make_records([(4, 60), (5, 50), (3, 55)])
    batches = Batches(records, seq_length=64, rows=1, anchors=16, block_size=4, seed=0)
    draft = tiny.make_draft()
    config = TrainConfig(steps=150, learning_rate=3e-3, loss=LossConfig(beta=0.0))
    trainer = Trainer(tiny_target, draft, batches, config, tmp_path, report=lambda row: None)
    trainer.train()
    often, final = (heldout_report(trainer, records, final=final) for final in (False, True))
    assert "by_depth_without_window" not in often
    with_window, without = final["by_depth"]["0-255"], final["by_depth_without_window"]["0-255"]
    unwindowed = DFlashDraft(draft.config.with_(windows=(None, None)))
    unwindowed.load_state_dict(draft.state_dict())
    other = Trainer(tiny_target, unwindowed, batches, TrainConfig(steps=1), tmp_path / "other", report=lambda row: None)
    assert heldout_report(other, records, final=False)["by_depth"]["0-255"] == without != with_window
    assert set(final["by_language"]) == {"all", "en"}
    assert set(final["by_thinking"]) == {"all", "off"}
    assert len(final["by_position"]) == 3


@pytest.mark.slow
def test_the_engine_commits_what_training_expects_on_the_same_text(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    llm = LLM(device="cpu", num_speculative_tokens=7, max_num_seqs=1, max_model_len=512, adaptive_width=False)
    questions = [
        "Write a Python function that reverses a string.",
        "What is 17 times 3? Explain each step.",
        "Name three planets and say one thing about each.",
    ]
    answers = [llm.chat([{"role": "user", "content": q}], SamplingParams(temperature=0.0, max_tokens=64))[0] for q in questions]
    records = Records.from_lists([(a.prompt_token_ids, a.outputs[0].token_ids) for a in answers])
    committed = [step for a in answers for step in a.outputs[0].committed_per_step]
    batches = Batches(records, seq_length=256, rows=1, anchors=64, block_size=8, seed=0)
    draft = load_draft(builtin.draft_path())
    target = load_target(builtin.target_path())  # the engine's own has other linears
    trainer = Trainer(target, draft, batches, TrainConfig(steps=1), tmp_path)
    expected = acceptance(trainer, records, seq_length=256, rows=1, anchors=64)
    over_steps = 1 + sum(map(sum, expected)) / sum(map(len, expected))
    assert over_steps > 2
    assert sum(committed) / len(committed) == pytest.approx(over_steps, rel=0.05)
