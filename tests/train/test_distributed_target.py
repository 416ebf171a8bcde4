"""A target that two processes hold together: the features, training and held-out acceptance of a whole one."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import tiny
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from flashdraft.errors import ConfigError, FlashdraftError, UnsupportedModelError
from flashdraft.targets.sharding import Group, check_plan, shard_model
from flashdraft.targets.target import Target
from flashdraft.train.data import Batch, Batches
from flashdraft.train.distributed import World, joined
from flashdraft.train.features import packed_forward
from flashdraft.train.identity import target_hash
from flashdraft.train.metrics import read_metrics
from flashdraft.train.offline import CachePlan, build
from flashdraft.train.sharded import load_sharded
from flashdraft.train.trainer import TrainConfig, Trainer
from flashdraft.train.validation import acceptance

SIZES: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    vocab_size=tiny.VOCAB, max_position_embeddings=128, initializer_range=0.3, eos_token_id=1, bos_token_id=0, pad_token_id=1,
)  # fmt: skip
CONFIGS: dict[str, Any] = {
    "llama with biases": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen3, tied": lambda: Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen3 moe": lambda: Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "gemma 3, windows": lambda: Gemma3TextConfig(**SIZES, sliding_window=6, query_pre_attn_scalar=8),
}
LAYERS = (1, 3)


def make_model(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config).float().eval())
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def batches_of(world: World, rows: int = 4, **options: Any) -> Batches:
    return Batches(
        tiny.make_records([(3, 9), (5, 14), (30, 2), (2, 7), (4, 11), (6, 8), (31, 1), (1, 12)]),
        seq_length=32, rows=rows, anchors=6, block_size=4, seed=3, micro_rows=1 if world.size == 2 else 2, rank=world.rank,
        ranks=world.size, **options,
    )  # fmt: skip


def features_of(target: Target, batch: Batch) -> tuple[Tensor, Tensor]:
    target.capture(LAYERS)
    return packed_forward(target, batch)


def train(target: Target, world: World, directory: Path) -> Trainer:
    config = TrainConfig(steps=4, learning_rate=1e-3, log_every=2)
    trainer = Trainer(target, tiny.make_draft(), batches_of(world), config, directory, world=world, report=lambda row: None)
    trainer.train()
    return trainer


def measured(trainer: Trainer) -> list[list[int]]:
    # Three records: one rank has rows to measure where the other has none.
    records = tiny.make_records([(3, 29), (5, 27), (2, 30)])
    return acceptance(trainer, records, seq_length=32, rows=1, anchors=8)


def run_rank(rank: int, port: int, directory: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with joined("cpu", 2) as (world, _):
        group = world.group
        assert group is not None
        for name, config in CONFIGS.items():
            target = load_sharded(lambda config=config: make_model(config()), torch.device("cpu"), world)
            found[name] = features_of(target, batches_of(world).batch(0)), target_hash(target)
            sizes = {spec.heads for spec in target.layer_specs}, sum(p.numel() for p in target.layers.parameters())
            found[name] += (sizes,)
        sharded = load_sharded(lambda: tiny.make_target().model, torch.device("cpu"), world)
        trainer = train(sharded, world, directory / "two")
        found["trained"] = {name: value.clone() for name, value in trainer.draft.state_dict().items()}, measured(trainer)
        records = batches_of(world).records
        records = replace(records, origins=records.starts[:-1])
        plan = CachePlan.of(sharded, LAYERS, records, directory / "cache")
        plan.directory.mkdir(parents=True, exist_ok=True)
        build(plan, sharded, records, seq_length=32, micro_rows=2, world=world, report=lambda done, all: None)
        found["key"], found["said"] = plan.key, refusals(world)
    torch.save(found, directory / f"rank{rank}.pt")


def refusals(world: World) -> list[str]:
    """What is said where the parts are not the whole, and where one process cannot load it."""

    def other() -> PreTrainedModel:
        model = make_model(CONFIGS["llama with biases"]())
        model.config.base_model_tp_plan = None
        plan = {k: v for k, v in model.tp_plan.items() if not k.endswith("o_proj")}
        model.tp_plan = plan | {"model.layers.*.self_attn.o_proj": "rowwise_split_input"}
        return model

    def missing() -> PreTrainedModel:
        if world.rank == 1:
            raise ConfigError("no such directory here")
        return make_model(CONFIGS["llama with biases"]())

    said = []
    for load in (missing, other):
        try:
            load_sharded(load, torch.device("cpu"), world)
        except (FlashdraftError, SystemExit) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("together")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    mp.start_processes(run_rank, (port, directory), nprocs=2, start_method="spawn")
    return directory


def assert_close(found: Tensor, expected: Tensor) -> None:
    """To 1e-5 of the largest value: parts of a sum are rounded before they are added."""
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def results(directory: Path, key: str) -> tuple[Any, Any]:
    first, second = (torch.load(directory / f"rank{rank}.pt", weights_only=False)[key] for rank in (0, 1))
    return first, second


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_each_process_gets_the_features_of_its_own_rows(two_ranks: Path, name: str) -> None:
    whole = Target(make_model(CONFIGS[name]()))
    size = sum(p.numel() for p in whole.layers.parameters())
    for rank, (found, hash_, (heads, parameters)) in enumerate(results(two_ranks, name)):
        expected = features_of(whole, batches_of(World(rank, 2)).batch(0))
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
        assert hash_ == target_hash(whole)
        assert heads == {2}
        assert parameters < 0.6 * size


@pytest.mark.slow
def test_training_and_held_out_acceptance_are_those_of_one_process(two_ranks: Path, tmp_path: Path) -> None:
    trainer = train(tiny.make_target(), World(), tmp_path)
    for weights, accepted in results(two_ranks, "trained"):
        for name, value in trainer.draft.state_dict().items():
            torch.testing.assert_close(weights[name], value, atol=2e-5, rtol=1e-4)
        assert accepted == measured(trainer)
    ours, theirs = (read_metrics(path / "metrics.jsonl") for path in (tmp_path, two_ranks / "two"))
    assert [row["loss"] for row in theirs] == pytest.approx([row["loss"] for row in ours], abs=2e-5)


@pytest.mark.slow
def test_cached_features_have_the_name_and_the_values_of_a_whole_target_s(two_ranks: Path, tmp_path: Path) -> None:
    records = batches_of(World()).records
    records = replace(records, origins=records.starts[:-1])
    whole = tiny.make_target()
    plan = CachePlan.of(whole, LAYERS, records, tmp_path)
    assert results(two_ranks, "key") == (plan.key, plan.key)
    whole.capture(LAYERS)
    plan.directory.mkdir()
    build(plan, whole, records, seq_length=32, micro_rows=2, world=World(), report=lambda done, all: None)
    ours, theirs = (load_file(path / plan.directory.name / plan.path(0).name) for path in (tmp_path, two_ranks / "cache"))
    for name in ("features", "last"):
        assert_close(theirs[name], ours[name])


@pytest.mark.slow
def test_what_one_process_cannot_load_ends_all_and_is_said_once(two_ranks: Path) -> None:
    first, second = results(two_ranks, "said")
    assert first[0] == second[1] == "SystemExit: 2"
    assert second[0] == "ConfigError: no such directory here"
    assert "its parts in 2 processes do not give what the whole target gives" in first[1]


class Part(Group):
    """One of several parts, without processes."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size, cast(dist.ProcessGroup, None))


@pytest.mark.parametrize(
    ("config", "size", "error", "message"),
    [
        (lambda: LlamaConfig(**SIZES), 4, ConfigError, r"has 2 heads \(num_key_value_heads\), which 4 processes cannot share"),
        (lambda: LlamaConfig(**{**SIZES, "intermediate_size": 47}), 2, ConfigError, "mlp.gate_proj has 47 rows or columns"),
        (
            lambda: GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64),
            2,
            UnsupportedModelError,
            "no tensor parallel plan",
        ),
        (
            lambda: Phi3Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
            2,
            UnsupportedModelError,
            "no tensor paral",
        ),
    ],
)
def test_a_target_that_cannot_be_shared_is_one_sentence(
    config: Callable[[], Any], size: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        shard_model(make_model(config()), Part(0, size))


def test_a_quantized_layer_and_an_unknown_style_are_named() -> None:
    class Packed(torch.nn.Linear):
        """Stands for a layer of a quantized target."""

    model = make_model(LlamaConfig(**SIZES))
    first = model.get_decoder().layers[0].self_attn
    first.o_proj = Packed(32, 32, bias=False)
    with pytest.raises(UnsupportedModelError, match=r"layers.0.self_attn.o_proj is a Packed, which cannot be cut"):
        shard_model(model, Part(0, 2))
    model._tp_plan = {**model.tp_plan, "model.layers.*.self_attn.o_proj": "mla_kv_a_proj"}
    with pytest.raises(UnsupportedModelError, match="its tensor parallel plan has mla_kv_a_proj"):
        check_plan(model, 2)


def test_processes_must_be_a_multiple_of_those_that_hold_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, said in (("1", "1 process"), ("3", "3 processes")):
        monkeypatch.setenv("WORLD_SIZE", size)
        with pytest.raises(ConfigError, match=f"--target-parallel 2 and {said}: start a multiple of 2"), joined("cpu", 2):
            pass
