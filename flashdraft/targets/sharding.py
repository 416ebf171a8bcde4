"""A target over several processes: each keeps its part of every large matrix, as transformers' tensor parallel plan says.

We take the plan and carry it out ourselves, in plain tensors: transformers' own way wants one mesh over all processes, where a
run has many groups, and its DTensors are not what our head, hooks and hashes read. Whole hidden states are in every process
between layers, so feature hooks see what they see of an unsharded target. Embeddings and head stay whole: training reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from flashdraft.errors import ConfigError, UnsupportedModelError

# Styles of transformers 5.17 to 5.24. What a style cuts: dimension of a weight, and of how many matrices side by side.
CUT = {"colwise": (-2, 1), "packed_colwise": (-2, 2), "rowwise": (-1, 1), "packed_rowwise": (-1, 2)}
SUMMED = {"rowwise", "moe_tp_experts", "all_reduce"}  # of a module: the processes' outputs are parts of a sum
# Weights that stay whole in every process: transformers cuts some of them, but their inputs and outputs are whole there too.
WHOLE = {
    "colwise_gather_output",
    "colwise_rep",
    "rowwise_split_input",
    "rowwise_rep",
    "replicated_with_grad_allreduce",
    "replicate",
    "embedding_rowwise",
    "embedding_colwise",
}
HEADS = ("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads")


@contextmanager
def with_others() -> Iterator[None]:
    """A sum over processes, of which one may have ended: then the others end too, with a sentence."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # of gloo and NCCL, in many kinds
        raise ConfigError(
            "another process of this run has ended or cannot be reached: mend what it says, and the "
            "same command with --resume goes on"
        ) from error


@dataclass(frozen=True)
class Group:
    """The processes that hold one target together, and this one's place among them."""

    rank: int
    size: int
    handle: dist.ProcessGroup

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the group, in place."""
        with with_others():
            dist.all_reduce(tensor, group=self.handle)
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """The rows of all, in order: [B, ...] -> [size * B, ...]."""
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        with with_others():
            dist.all_gather(found, tensor.contiguous(), group=self.handle)
        return torch.cat(found)

    def own(self, tensor: Tensor) -> Tensor:
        """The rows [B, ...] of this process among those of all [size * B, ...]."""
        return tensor.chunk(self.size)[self.rank].clone()  # a view would keep the others'


def check_plan(model: PreTrainedModel, size: int) -> dict[str, str]:
    """Names in the decoder, of modules and parameters, with what is done to each; what stays whole is left out.

    Raises UnsupportedModelError for a family without a plan, or one that we do not carry out, ConfigError where heads or
    matrices cannot be shared evenly.
    """
    name, plan = type(model).__name__, dict(getattr(model, "tp_plan", None) or {})
    config, decoder = model.config.get_text_config(), model.get_decoder()
    inside = next(key for key, module in model.named_modules() if module is decoder)
    todo = {}
    for key in [*dict(model.named_modules()), *dict(model.named_parameters())]:
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", key))
        if style is not None and key.startswith(f"{inside}." if inside else "") and style not in WHOLE:
            todo[key] = style
    if odd := {style for style in todo.values() if style not in CUT and style not in SUMMED}:
        raise UnsupportedModelError(
            f"{name}: its tensor parallel plan has {', '.join(sorted(odd))}, which is not carried out here: give a target "
            "that fits one GPU (--target-parallel 1)"
        )
    if not any(style in CUT for style in todo.values()):
        raise UnsupportedModelError(
            f"{name} has no tensor parallel plan in transformers that shares its weights: it has to fit one GPU "
            "(--target-parallel 1)"
        )
    for head in HEADS:
        if (count := getattr(config, head, None)) and count % size:
            raise ConfigError(
                f"--target-parallel {size}: {name} has {count} heads ({head}), which {size} processes cannot share"
            )
    return todo


@torch.no_grad()
def shard_model(model: PreTrainedModel, group: Group) -> None:
    """Cut every matrix of the plan down to this process's part, in place. Raises what check_plan does."""
    todo = check_plan(model, group.size)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    for key, style in todo.items():
        if key in parameters:
            _cut(*_owner(modules, key), style, group)
            continue
        module = modules[key]
        if style in CUT:
            if type(module) is not nn.Linear:
                raise UnsupportedModelError(
                    f"{type(model).__name__}: {key} is a {type(module).__name__}, which cannot be cut (quantized targets have "
                    "to fit one GPU): leave out --target-parallel, or give the unquantized target"
                )
            _cut(module, "weight", style, group, key)
            if module.bias is not None and style == "rowwise":
                module.bias.mul_(group.rank == 0)  # added once to the sum
            elif module.bias is not None:
                _cut(module, "bias", style, group, key)
        if style in SUMMED:
            module.register_forward_hook(_summed(group))


def _owner(modules: dict[str, nn.Module], key: str) -> tuple[nn.Module, str]:
    path, _, name = key.rpartition(".")
    return modules[path], name


def _cut(module: nn.Module, name: str, style: str, group: Group, key: str = "") -> None:
    whole = getattr(module, name)
    dim, matrices = CUT[style]
    dim = 0 if whole.ndim == 1 else dim
    if whole.shape[dim] % (matrices * group.size):
        raise ConfigError(
            f"--target-parallel {group.size}: {key or name} has {whole.shape[dim] // matrices:,} rows or columns, which "
            f"{group.size} processes cannot share"
        )
    parts = [part.chunk(group.size, dim)[group.rank] for part in whole.chunk(matrices, dim)]
    setattr(module, name, nn.Parameter(torch.cat(parts, dim).clone(), requires_grad=False))


def _summed(group: Group) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return group.sum(output.contiguous())

    return hook


__all__ = ["Group", "check_plan", "shard_model", "with_others"]
