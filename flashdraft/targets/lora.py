"""LoRA adapters in PEFT's layout, merged into a target at load: W + scale * B A, so that what runs is a plain model.

Format: adapter_config.json and adapter_model.safetensors as written by PEFT 0.4 to 0.21. Shape letters: r rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from flashdraft.errors import CheckpointError, ConfigError, UnsupportedModelError
from flashdraft.targets.discovery import decoder_layers

ROWS = 1024  # of a weight merged at once: 230 MB for 28,672 inputs
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# Settings that merging needs, and settings that say nothing about the merged weights.
_READ = {
    "peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "bias", "init_lora_weights",
}  # fmt: skip
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode", "lora_dropout", "megatron_core",
    "qalora_group_size", "eva_config", "loftq_config", "corda_config", "lora_ga_config", "velora_config", "runtime_config",
    "ensure_weight_tying",
    "fan_in_fan_out",  # how a module keeps its weight is seen from the module, in PEFT too
}  # fmt: skip
# Other ways to begin (PiSSA, OLoRA, CorDA, LoftQ) change the weights of the target as well, which the file does not hold.
_BEGUN_AT_THE_TARGET = (True, False, None, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class LoraConfig:
    """What adapter_config.json says about the merged weights. `where` is for messages, `base` the model it was made for."""

    where: str
    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    targets: str | tuple[str, ...] | None
    excluded: str | tuple[str, ...]
    layers: tuple[int, ...]
    layers_pattern: tuple[str, ...]
    base: str

    @classmethod
    def from_json(cls, where: str, content: Mapping[str, Any]) -> LoraConfig:
        """Raises UnsupportedModelError for what cannot be merged, by the setting's name, CheckpointError for bad values."""
        if (kind := content.get("peft_type")) != "LORA":
            raise UnsupportedModelError(f"{where}: peft_type {kind!r} cannot be merged, only LORA: merge it with PEFT first")
        if content.get("task_type") not in (None, "CAUSAL_LM"):
            raise UnsupportedModelError(f"{where}: an adapter for {content['task_type']}, which a target is not (CAUSAL_LM)")
        unknown = sorted(key for key in set(content) - _READ - _WITHOUT_EFFECT if content[key] not in (None, False, "", [], {}))
        if content.get("bias") not in ("none", None):
            unknown.append("bias")
        if content.get("init_lora_weights") not in _BEGUN_AT_THE_TARGET:
            unknown.append("init_lora_weights")
        if unknown:
            settings = ", ".join(f"{key} {str(content[key])[:60]!r}" for key in unknown[:3])
            raise UnsupportedModelError(f"{where}: it sets {settings}, which is not merged here: merge it with PEFT first")
        try:
            config = cls(
                where=where,
                rank=int(content["r"]),
                alpha=float(content["lora_alpha"]),
                use_rslora=_switch(content.get("use_rslora")),
                rank_pattern={str(key): int(value) for key, value in (content.get("rank_pattern") or {}).items()},
                alpha_pattern={str(key): float(value) for key, value in (content.get("alpha_pattern") or {}).items()},
                targets=_names(content.get("target_modules")),
                excluded=_names(content.get("exclude_modules")) or (),
                layers=tuple(map(int, _listed(content.get("layers_to_transform")))),
                layers_pattern=tuple(map(str, _listed(content.get("layers_pattern")))),
                base=str(content.get("base_model_name_or_path") or "unknown"),
            )
            patterns = [*config.rank_pattern, *config.alpha_pattern, *config.layers_pattern]
            for pattern in [*patterns, *(p for p in (config.targets, config.excluded) if isinstance(p, str))]:
                re.compile(pattern)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, re.error) as error:
            raise CheckpointError(
                f"{where}: {CONFIG} has a missing or bad value ({type(error).__name__}: {error}): save the adapter again"
            ) from error
        numbers = [config.alpha, *config.alpha_pattern.values()]
        if min(config.rank, *config.rank_pattern.values(), 10**9) < 1 or not all(map(math.isfinite, numbers)):
            raise CheckpointError(f"{where}: r must be at least 1 and lora_alpha a finite number: save the adapter again")
        return config

    def rank_of(self, module: str) -> int:
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) for rank-stabilized LoRA (arXiv 2312.03732)."""
        rank, alpha = self.rank_of(module), _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets_module(self, module: str) -> bool:
        """Whether PEFT would give this linear module an adapter: by names, a regular expression, and layer numbers."""
        if _matches(self.excluded, module):
            return False
        if self.targets is None or self.targets == "all-linear":
            return True
        if not _matches(self.targets, module) or isinstance(self.targets, str) or not self.layers:
            return _matches(self.targets, module)
        patterns = [rf"(?:^|.*?\.){p}\.(\d+)\." for p in self.layers_pattern] or [r".*?\.[^.]*\.(\d+)\."]
        found = next(filter(None, (re.match(pattern, module) for pattern in patterns)), None)
        return found is not None and int(found[1]) in self.layers


@torch.no_grad()
def merge_lora(model: PreTrainedModel, config: LoraConfig, file: Path) -> None:
    """Add scale * B A to the weights of the modules that the adapter file names, in float64: rounded to the weights' dtype, the
    sums are the same on every machine, and so is the hash of the target.

    Raises CheckpointError, before any weight is changed, for tensors that have no module here, of other shapes, absent or not
    finite; UnsupportedModelError for modules whose weight cannot take them, and ConfigError for sums too large for float16.
    """
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{config.where}: cannot read {file.name} ({error}): save or download it again") from error
    for name, (a, b) in _pairs(model, config, tensors).items():
        module = model.get_submodule(name)
        assert isinstance(module.weight, Tensor)
        weight = module.weight.T if isinstance(module, Conv1D) else module.weight  # [out, in]
        a, scale = a.double().to(weight.device), config.scale_of(name)
        for part, rows in zip(weight.split(ROWS), b.split(ROWS), strict=True):
            part.copy_(part.double() + scale * (rows.double().to(weight.device) @ a))
        if not weight.isfinite().all():
            remedy = "give --dtype bfloat16" if weight.dtype == torch.float16 else "its values or lora_alpha are too large"
            raise ConfigError(f"with {config.where} merged, {name} is beyond what {weight.dtype} holds: {remedy}")


def _pairs(model: PreTrainedModel, config: LoraConfig, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """A [r, in] and B [out, r] of every adapted module, checked against the model."""
    modules = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    homeless, misfits, sides = [], [], dict[str, dict[str, Tensor]]()
    for key, tensor in tensors.items():
        found = _TENSOR.fullmatch(key)
        name = found["module"] if found else ""
        if found is None or name not in modules or not config.targets_module(name):
            homeless.append(key)
            continue
        _refuse_shared(model, config, name)
        weight, rank = modules[name].weight, config.rank_of(name)
        outputs, inputs = weight.shape if isinstance(modules[name], nn.Linear) else weight.T.shape
        wanted = [rank, inputs] if found["side"] == "A" else [outputs, rank]
        if list(tensor.shape) != wanted:
            misfits.append(f"{key} {list(tensor.shape)} instead of {wanted}")
        elif not (tensor.is_floating_point() and tensor.float().isfinite().all()):
            raise CheckpointError(f"{config.where}: {key} holds values that are no finite numbers: save the adapter again")
        sides.setdefault(name, {})[found["side"]] = tensor
    expected = dict.fromkeys([*sides, *_expected(model, config, modules)])
    missing = [f"{name}.lora_{side}" for name in expected for side in "AB" if side not in sides.get(name, {})]
    _refuse_experts(model, config, homeless)
    groups = {"without a place in this model": homeless, "of another shape": misfits, "missing": missing}
    if other := sorted(key for key in tensors if not key.endswith((".lora_A.weight", ".lora_B.weight"))):
        raise UnsupportedModelError(
            f"{config.where} holds more than LoRA matrices ({', '.join(other[:2])}), which are not merged here: merge it "
            "with PEFT first"
        )
    if not tensors:
        raise CheckpointError(f"{config.where}: its {WEIGHTS} holds no tensors: save the adapter again")
    if wrong := [f"{what}: {', '.join(keys[:2])}{' ...' if len(keys) > 2 else ''}" for what, keys in groups.items() if keys]:
        raise CheckpointError(
            f"{config.where} is no adapter of this target (tensors {'; '.join(wrong)}): give the target that it was made for "
            f"({config.base})"
        )
    return {name: (pair["A"], pair["B"]) for name, pair in sides.items()}


def _refuse_experts(model: PreTrainedModel, config: LoraConfig, homeless: list[str]) -> None:
    """Adapters of a mixture's experts and router, which are no linear layers in transformers 5, by name."""
    others = {name for name, _ in model.named_modules()}
    for key in homeless:
        found = _TENSOR.fullmatch(key)
        if ".experts." in key or (found and found["module"] in others and config.targets_module(found["module"])):
            raise UnsupportedModelError(
                f"{config.where} adapts experts or the router of a mixture ({key}), which are no linear layers here: merge it "
                "with PEFT into the target first"
            )


def _expected(model: PreTrainedModel, config: LoraConfig, modules: Mapping[str, nn.Module]) -> list[str]:
    """The modules of the decoder's layers that the configuration names: encoders of other media may go without."""
    layers = decoder_layers(model)
    prefix = next(name for name, module in model.named_modules() if module is layers) + "."
    return [name for name in modules if name.startswith(prefix) and config.targets is not None and config.targets_module(name)]


def _refuse_shared(model: PreTrainedModel, config: LoraConfig, name: str) -> None:
    """An output embedding tied to the input embedding: merged, it would change what it was not trained to change."""
    table = model.get_input_embeddings().weight
    if model.get_submodule(name).weight is table:
        raise UnsupportedModelError(
            f"{config.where} adapts {name}, whose weight is the input embedding's too: merge it with PEFT into an untied target"
        )


def _names(value: Any) -> str | tuple[str, ...] | None:
    """One regular expression, several names, or None."""
    return value if value is None or isinstance(value, str) else tuple(map(str, _listed(value)))


def _switch(value: Any) -> bool:
    if value not in (None, True, False):
        raise ValueError(f"{str(value)[:60]!r} is neither true nor false")
    return bool(value)


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _matches(names: str | tuple[str, ...], module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that the end of the module's name matches, as in PEFT."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)
