"""The layers of a target by its configuration alone: nothing is loaded, no memory taken."""

from __future__ import annotations

from textwrap import shorten
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from flashdraft.errors import UnsupportedModelError
from flashdraft.targets.discovery import Binding, LayerSpec, decoder_layers, discover, refuse_unsupported
from flashdraft.targets.quiet import quiet


class _Affirming(TorchFunctionMode):
    """Tensors on the meta device have no values, and a model that asks is told yes: what transformers asks for two tokens is
    whether they are one sequence without padding.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__bool__ and args[0].is_meta:
            return True
        return func(*args, **(kwargs or {}))


def layer_specs_of(config: Any) -> list[LayerSpec]:
    """What Target would find of a model with this configuration (of its text model). Raises UnsupportedModelError."""
    refuse_unsupported(config)
    with quiet():
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        except Exception as error:  # whatever a configuration that does not add up makes a model's constructor raise
            reason = shorten(str(error), 120)
            raise UnsupportedModelError(
                f"{config.model_type}: no text model can be made of its configuration: {reason}"
            ) from error
        return discover(model, decoder_layers(model), Binding(), _Affirming())
