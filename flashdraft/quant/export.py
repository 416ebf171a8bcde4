"""quantization_config of a config.json: the flat form that vLLM reads, and what it says against the tensors of a file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Literal

from flashdraft.errors import CheckpointError
from flashdraft.quant.groups import fused_groups, runtime_name
from flashdraft.quant.nvfp4 import GROUP

Algorithm = Literal["W4A16_NVFP4", "NVFP4"]
ALGORITHMS = ("W4A16_NVFP4", "NVFP4")
PARTS = ("weight_scale", "weight_scale_2", "input_scale")


@dataclass(frozen=True)
class Scheme:
    """What a config.json says: the algorithm, and the modules that are not quantized."""

    algorithm: Algorithm
    ignore: tuple[str, ...]

    @property
    def rounds_inputs(self) -> bool:
        return self.algorithm == "NVFP4"

    def ignores(self, name: str) -> bool:
        """Whether a linear is left unquantized: it, its fused group or a module around it is named, or a pattern fits."""
        for own in (name, runtime_name(name)):
            if any(own == other or own.startswith(other + ".") or fnmatch(own, other) for other in self.ignore):
                return True
        return False


def dump_scheme(algorithm: Algorithm, ignored: Collection[str], version: str) -> dict[str, object]:
    """The section of a draft whose linears are all quantized but the `ignored` ones, given by their own names."""
    number: dict[str, object] = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": GROUP}
    group: dict[str, object] = {"weights": number, "targets": ["Linear"]}
    if algorithm == "NVFP4":
        group = {"input_activations": dict(number), **group}
    names = list(fused_groups(ignored))
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "group_size": GROUP,
        "ignore": names,
        "exclude_modules": list(names),
        "config_groups": {"group_0": group},
        "producer": {"name": "flashdraft", "version": version},
    }


def parse_scheme(section: Mapping[str, object]) -> Scheme:
    """Raises CheckpointError for a section that does not describe NVFP4 in the flat form."""
    algorithm = section.get("quant_algo")
    if algorithm not in ALGORITHMS:
        named = algorithm or section.get("quant_method") or "unnamed"
        raise CheckpointError(
            f"config.json says quantized by {named}, and only quant_algo W4A16_NVFP4 and NVFP4 (flat) can be read: "
            "use the unquantized draft, or quantize it with `flashdraft quantize`"
        )
    size = section.get("group_size", GROUP)
    if size != GROUP:
        raise CheckpointError(f"config.json: quantization_config.group_size is {size!r}, and NVFP4 has groups of {GROUP}")
    ignored: list[str] = []
    for key in ("ignore", "exclude_modules"):
        names = section.get(key) or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"config.json: quantization_config.{key} must be a list of module names, got {names!r}")
        ignored += [name for name in names if name not in ignored]
    return Scheme("NVFP4" if algorithm == "NVFP4" else "W4A16_NVFP4", tuple(ignored))


def disagreements(scheme: Scheme, names: Collection[str], tensors: Collection[str]) -> list[str]:
    """Where the section and the tensors of a file disagree about its linears `names`, one phrase for each kind of fault."""
    quantized = [name for name in names if any(f"{name}.{part}" in tensors for part in PARTS)]
    both = [name for name in quantized if scheme.ignores(name)]
    neither = [name for name in names if name not in quantized and not scheme.ignores(name)]
    partial = [
        fused for fused, members in fused_groups(names).items() if 0 < sum(name in quantized for name in members) < len(members)
    ]
    faults = {
        "ignored by quantization_config but with scales in the file:": both,
        "neither ignored by quantization_config nor with a weight_scale in the file:": neither,
        "quantized only in part, which readers run as one product:": partial,
    }
    return [f"{fault} {', '.join(found)}" for fault, found in faults.items() if found]


def quantized_shapes(
    scheme: Scheme, name: str, outputs: int, inputs: int
) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Shape and safetensors type of each tensor of a quantized linear."""
    shapes: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
        f"{name}.weight": ((outputs, inputs // 2), ("U8",)),
        f"{name}.weight_scale": ((outputs, inputs // GROUP), ("F8_E4M3",)),
        f"{name}.weight_scale_2": ((), ("F32",)),
    }
    if scheme.rounds_inputs:
        shapes[f"{name}.input_scale"] = ((), ("F32",))
    return shapes
