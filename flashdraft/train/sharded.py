"""A target that several processes hold together: loaded one process after another, and compared with the whole one."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from flashdraft.errors import FlashdraftError, UnsupportedModelError
from flashdraft.targets.discovery import switch_attention
from flashdraft.targets.sharding import Group, shard_model
from flashdraft.targets.target import Target
from flashdraft.train.distributed import World
from flashdraft.train.identity import weights_hash

LIMITS = {torch.float32: 1e-4}  # relative, of the worst logit; in 16 bits of the median row, for an expert may change
IN_16_BITS = 0.1


def load_sharded(load: Callable[[], PreTrainedModel], device: torch.device, world: World) -> Target:
    """This process's part of a target, as a Target. `load` gives the whole one in host memory, which one process of a group
    at a time does: a host needs room for one target a group that it runs.

    Raises what loading and sharding raise, UnsupportedModelError where the parts together compute something else.
    """
    group = world.group
    assert group is not None
    made: tuple[PreTrainedModel, str, Tensor] | None = None
    failure: FlashdraftError | None
    for turn in range(group.size):
        failure = None
        if group.rank == turn:
            try:
                made = _load_part(load, group)
            except FlashdraftError as error:
                failure = error
        _end_together(world, failure)
    assert made is not None
    model, weights, expected = made
    model.to(device)  # type: ignore[arg-type]
    failure = None
    if not _close(_logits_of_parts(model), expected, model.dtype):
        failure = UnsupportedModelError(
            f"{type(model).__name__}: its parts in {group.size} processes do not give what the whole target gives: it has to "
            "fit one GPU (--target-parallel 1)"
        )
    _end_together(world, failure)
    target = Target(model)
    # Heads are those of this process; whoever asks for the target's own sizes asks its configuration.
    target.group, target.weights_hash = group, weights
    return target


def _load_part(load: Callable[[], PreTrainedModel], group: Group) -> tuple[PreTrainedModel, str, Tensor]:
    model = load().eval()
    weights = weights_hash(model)
    switch_attention(model, "eager")
    expected = _logits(model)
    shard_model(model, group)
    return model, weights, expected


@torch.no_grad()
def _logits(model: PreTrainedModel) -> Tensor:
    """Of eight tokens [8, V], on the host."""
    ids = torch.arange(8, device=model.device)[None]
    logits: Tensor = model(input_ids=ids, use_cache=False, return_dict=True).logits[0]
    return logits.float().cpu()


def _logits_of_parts(model: PreTrainedModel) -> Tensor | None:
    """The same (its attention is still eager); None where the parts do not fit together."""
    try:
        return _logits(model)
    except RuntimeError:
        return None


def _close(got: Tensor | None, expected: Tensor, dtype: torch.dtype) -> bool:
    if got is None:
        return False
    error = (got - expected).abs().amax(-1) / expected.abs().max().clamp(min=1e-6)
    return bool(error.max() <= LIMITS[dtype]) if dtype in LIMITS else bool(error.median() <= IN_16_BITS)


def _end_together(world: World, failure: FlashdraftError | None) -> None:
    """Where one process fails all end: the first of them with its sentence, the others in silence."""
    failed = [rank for rank, one in enumerate(world.gather(failure is not None)) if one]
    if failure is not None and failed[0] == world.rank:
        raise failure
    if failed:
        sys.exit(2)
