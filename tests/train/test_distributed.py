from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import tiny
import torch
import torch.multiprocessing as mp
from torch import Tensor

from flashdraft.errors import ConfigError
from flashdraft.train.data import Batches, Records
from flashdraft.train.distributed import World, joined
from flashdraft.train.metrics import read_metrics
from flashdraft.train.trainer import TrainConfig, Trainer
from flashdraft.train.validation import acceptance

STEPS = 4


def records_of(kind: str) -> Records:
    if kind == "even":
        return tiny.make_records()
    # Whole rows of records with one answer token: a rank that gets two of them has not a single anchor.
    return tiny.make_records([(30, 2), (31, 1), (31, 1), (31, 1)])


def train(world: World, kind: str, directory: Path, micro_rows: int) -> Trainer:
    records = records_of(kind)
    batches = Batches(
        records,
        seq_length=32,
        rows=4 if kind == "one anchor" else 2,
        anchors=6,
        block_size=4,
        seed=3,
        micro_rows=micro_rows,
        rank=world.rank,
        ranks=world.size,
    )
    config = TrainConfig(steps=STEPS, learning_rate=1e-3, log_every=2)
    draft = tiny.make_draft()
    if not world.is_main:  # must not matter: every process starts from rank 0's
        torch.nn.init.ones_(draft.fc.weight)
    trainer = Trainer(
        tiny.make_target(), draft, batches, config, directory / str(world.size), world=world, report=lambda row: None
    )
    trainer.train()
    return trainer


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.draft.state_dict().items()}


def run_rank(rank: int, size: int, port: int, directory: Path) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    with joined("cpu") as (world, device):
        assert (world.rank, world.size, device) == (rank, size, "cpu")
        found = {kind: train(world, kind, directory / kind, 1) for kind in ("even", "one anchor")}
        lengths = acceptance(found["even"], records_of("even"), seq_length=32, rows=1, anchors=8)
        torch.save(({kind: weights(t) for kind, t in found.items()}, lengths), directory / f"rank{rank}.pt")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    mp.start_processes(run_rank, (2, free_port(), directory), nprocs=2, start_method="spawn")
    return directory


def crash_rank(rank: int, port: int, directory: Path, how: str) -> None:
    """Rank 1 ends in the middle of a run; what rank 0 hears of it goes to a file."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    try:
        with joined("cpu") as (world, _):
            if how == "refusal":
                world.main_first(lambda: refuse("no room"))
            original = Batches.batch

            def batch(self: Batches, step: int, part: int = 0) -> object:
                if rank == 1 and step == 2:
                    os._exit(7)
                return original(self, step, part)

            Batches.batch = batch  # type: ignore[method-assign, assignment]
            train(world, "even", directory, 1)
    except (ConfigError, SystemExit) as error:
        (directory / f"{how}{rank}").write_text(f"{type(error).__name__}: {error}")


def refuse(sentence: str) -> None:
    raise ConfigError(sentence)


def crash(directory: Path, how: str) -> list[int | None]:
    """Exit codes of both ranks, which end by themselves."""
    context = mp.get_context("spawn")
    port = free_port()
    ranks = [context.Process(target=crash_rank, args=(rank, port, directory, how)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    return [process.exitcode for process in ranks]


def test_a_process_that_crashes_ends_the_others_with_a_sentence(tmp_path: Path) -> None:
    assert crash(tmp_path, "crash") == [0, 7]
    said = (tmp_path / "crash0").read_text()
    assert said == (
        "ConfigError: another process of this run has ended or cannot be reached: mend what it says, and the same command with "
        "--resume goes on"
    )


def test_what_rank_0_refuses_ends_all_and_is_said_once(tmp_path: Path) -> None:
    assert crash(tmp_path, "refusal") == [0, 0]
    assert [(tmp_path / f"refusal{rank}").read_text() for rank in (0, 1)] == ["ConfigError: no room", "SystemExit: 2"]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "two"}, "RANK, WORLD_SIZE, LOCAL_RANK of the environment must be numbers"),
        ({"WORLD_SIZE": "2"}, "the processes of this run cannot be joined .*: start them with torchrun"),
    ],
)
def test_an_environment_that_is_not_torchruns_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message), joined("cpu"):
        pass


@pytest.mark.parametrize("kind", ["even", "one anchor"])
def test_two_processes_train_as_one_with_the_same_global_batch(two_ranks: Path, tmp_path: Path, kind: str) -> None:
    alone = weights(train(World(), kind, tmp_path, 2))
    first, second = (torch.load(two_ranks / f"rank{rank}.pt")[0][kind] for rank in (0, 1))
    for name, value in alone.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], value, atol=2e-6, rtol=1e-5)
    assert not torch.equal(alone["fc.weight"], tiny.make_draft().fc.weight)


def test_metrics_are_of_all_ranks(two_ranks: Path, tmp_path: Path) -> None:
    train(World(), "even", tmp_path, 2)
    ours, theirs = (read_metrics(path / "metrics.jsonl") for path in (tmp_path / "1", two_ranks / "even" / "2"))
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] == [2, 4]
    for one, other in zip(ours, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=2e-5)
        assert one["accuracy"] == other["accuracy"]
        assert one["expected_al"] == other["expected_al"]


def test_ranks_share_an_evaluation_and_agree_on_it(two_ranks: Path, tmp_path: Path) -> None:
    trainer = train(World(), "even", tmp_path, 2)
    first, second = (torch.load(two_ranks / f"rank{rank}.pt")[1] for rank in (0, 1))
    assert first == second == acceptance(trainer, records_of("even"), seq_length=32, rows=1, anchors=8)


def test_rows_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ConfigError, match="give rows as a multiple of 4"):
        Batches(tiny.make_records(), seq_length=32, rows=2, anchors=4, block_size=4, seed=0, micro_rows=2, ranks=2)
