"""Products of many rows with the bits of the narrow kernel: Python side of cuda/wide_linear.cuh.

Shape letters: T rows, K inputs, N outputs. A row of z is bit for bit what `narrow_linear` makes of it, whatever T is. As there,
the first call of each combination of shapes and features must lie outside a graph capture.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from flashdraft.kernels import narrow
from flashdraft.kernels.narrow import ACTIVATIONS, TYPES, Arguments, Features, Machine
from flashdraft.kernels.narrow_plan import WARPS
from flashdraft.kernels.nvrtc import Source, definitions
from flashdraft.kernels.wide_plan import FASTEST, WideOptions, WidePlan, plan

SOURCE = Source("wide_linear", ("device.cuh", "narrow_linear.cuh", "wide_linear.cuh"))

supports = narrow.supports


def wide_linear(
    weight: Tensor,
    x: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    multiply: Tensor | None = None,
    gated: bool = False,
    options: WideOptions = FASTEST,
    machine: Machine | None = None,
) -> Tensor:
    """z [T, N]: `narrow_linear` of the same arguments, faster from some 32 rows on."""
    machine = machine or gpu(weight.device)
    gated, outputs, bias, multiply = narrow.prepared(weight.shape[0], bias, activation, multiply, gated)
    assert all(t.dtype == weight.dtype for t in (x, multiply, bias) if t is not None)
    z, x = x.new_empty(x.shape[0], outputs), narrow.aligned(x)
    if not x.shape[0]:
        return z
    chosen = plan(x.shape[0], outputs, weight.shape[1], gated, machine.device, options)
    parts = chosen.cut
    workspace = machine.workspace(*chosen.workspace) if chosen.parallel else None
    features = Features(
        k=weight.shape[1],
        slice_steps=parts.slice_steps,
        split=parts.slices > 1,
        bias=bias is not None,
        activation=ACTIVATIONS[activation],
        gated=gated,
        multiply=multiply is not None,
    )
    used = () if workspace is None else (workspace.partials, workspace.counters)
    named = {"weight": weight, "x": x, "bias": bias, "multiply": multiply, "z": z}
    arguments = Arguments(
        **{name: tensor.data_ptr() for name, tensor in named.items() if tensor is not None},
        **{name: tensor.data_ptr() for name, tensor in zip(("partials", "counters"), used, strict=False)},
        **{
            f"{name}_stride": t.stride(0) for name, t in (("weight", weight), ("x", x), ("multiply", multiply)) if t is not None
        },
        **{"rows": x.shape[0], "outputs": outputs, "tiles": parts.tiles},
    )
    machine.launch(chosen, features, arguments, x.dtype, options)
    return z


@cache
def gpu(device: torch.device) -> Machine:
    """Launches on a GPU's current stream; the workspace is the narrow kernel's."""
    description = narrow.device_of(device)

    def launch(chosen: WidePlan, features: Features, arguments: Arguments, dtype: torch.dtype, options: WideOptions) -> None:
        function = SOURCE.function(device, constants(chosen, features, dtype))
        stream = torch.cuda.current_stream(device).cuda_stream
        pdl = options.pdl and description.capability >= (9, 0)
        function.launch((chosen.blocks, 1, 1), (32 * WARPS, 1, 1), chosen.shared, [arguments], stream, pdl)

    return Machine(description, launch, narrow.gpu(device).workspace)


def constants(chosen: WidePlan, features: Features, dtype: torch.dtype) -> str:
    """What wide_linear.cu expects to be defined."""
    values = {
        "TYPE": TYPES[dtype],
        "TILE": ", ".join(map(str, chosen.tile)),
        "FOLD": chosen.cut.fold,
        "STAGES": chosen.stages,
        "RESIDENT": chosen.resident,
        "PARALLEL": str(chosen.parallel).lower(),
        "FEATURES": features.text(),
    }
    return definitions(values)
