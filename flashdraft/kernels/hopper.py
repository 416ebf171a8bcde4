"""Products of any number of rows on a Hopper GPU's own tensor-core instruction: Python side of cuda/hopper_linear.cuh.

Shape letters: T rows, K inputs, N outputs. A row's bits do not depend on T. They are those of no other kernel of ours, as wgmma
adds up 16 products otherwise than mma.sync. Every combination of shapes and features is compiled once (nvrtc.py): the first
call of each must lie outside a graph capture.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from flashdraft.kernels import narrow
from flashdraft.kernels.hopper_plan import FASTEST, LINE, MAX_ROWS, HopperOptions, HopperPlan, plan
from flashdraft.kernels.narrow import ACTIVATIONS, TYPES, Arguments, Features
from flashdraft.kernels.narrow_plan import STEP
from flashdraft.kernels.nvrtc import Source, TensorMap, definitions, tensor_map

SOURCE = Source("hopper_linear", ("device.cuh", "narrow_linear.cuh", "hopper.cuh", "hopper_linear.cuh"), specific=True)
FORMATS = {torch.bfloat16: "bf16", torch.float16: "f16"}


def hopper_linear(
    weight: Tensor,
    x: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    multiply: Tensor | None = None,
    gated: bool = False,
    options: HopperOptions = FASTEST,
) -> Tensor:
    """z [T, N]: `fused_linear_reference` without what stands before the product, for what `supports` accepts.

    PyTorch's roundings. More than 256 rows take several launches.
    """
    gated, outputs, bias, multiply = narrow.prepared(weight.shape[0], bias, activation, multiply, gated)
    assert all(t.dtype == weight.dtype for t in (x, multiply, bias) if t is not None)
    z, x = x.new_empty(x.shape[0], outputs), _described(x)
    for start in range(0, x.shape[0], MAX_ROWS):
        some = slice(start, start + MAX_ROWS)
        _launch(weight, x[some], z[some], bias, activation, None if multiply is None else multiply[some], gated, options)
    return z


def supports(weight: Tensor) -> bool:
    """bf16 or fp16, on a GPU of compute capability 9.0, K a multiple of 64, rows at multiples of 16 bytes."""
    return narrow.supports(weight) and torch.cuda.get_device_capability(weight.device) == (9, 0) and _has_map(weight)


def _has_map(x: Tensor) -> bool:
    """TMA wants rows that do not overlap."""
    return x.shape[0] == 1 or x.stride(0) >= x.shape[1]


def _described(x: Tensor) -> Tensor:
    x = narrow.aligned(x)
    return x if _has_map(x) else x.clone(memory_format=torch.contiguous_format)


def _launch(
    weight: Tensor,
    x: Tensor,
    z: Tensor,
    bias: Tensor | None,
    activation: str | None,
    multiply: Tensor | None,
    gated: bool,
    options: HopperOptions,
) -> None:
    outputs, k, device = z.shape[1], weight.shape[1], weight.device
    description = narrow.device_of(device)
    chosen = plan(x.shape[0], outputs, k, gated, description, options)
    features = Features(
        k=k, bias=bias is not None, activation=ACTIVATIONS[activation], gated=gated, multiply=multiply is not None
    )
    function = SOURCE.function(device, constants(chosen, features, weight.dtype))
    maps = weight_map(weight, chosen, gated), rows_map(x, chosen)
    arguments = Arguments(
        bias=None if bias is None else bias.data_ptr(),
        multiply=None if multiply is None else multiply.data_ptr(),
        z=z.data_ptr(),
        multiply_stride=0 if multiply is None else multiply.stride(0),
        rows=x.shape[0],
        outputs=outputs,
        tiles=chosen.tiles,
    )
    stream = torch.cuda.current_stream(device).cuda_stream
    function.launch((chosen.blocks, 1, 1), (chosen.threads, 1, 1), chosen.shared, [*maps, arguments], stream, options.pdl)


def weight_map(weight: Tensor, chosen: HopperPlan, gated: bool) -> TensorMap:
    """Tiles [width, 64] of the weight, of a gated one [gate and up, width / 2, 64]. Innermost first."""
    halves = 2 if gated else 1
    height, pitch = weight.shape[0] // halves, _pitch(weight)
    return _map(
        *(weight.dtype, weight.data_ptr(), (weight.shape[1], height, halves), (pitch, height * pitch)),
        (STEP, chosen.width // halves, halves),
    )


def rows_map(x: Tensor, chosen: HopperPlan) -> TensorMap:
    """64 inputs of all rows."""
    return _map(x.dtype, x.data_ptr(), (x.shape[1], x.shape[0]), (_pitch(x),), (STEP, chosen.capacity))


def _pitch(x: Tensor) -> int:
    return 2 * (x.shape[1] if x.shape[0] == 1 else x.stride(0))


# Of weights and buffers the addresses recur; a map says nothing that is not in the arguments.
@lru_cache(maxsize=4096)
def _map(dtype: torch.dtype, address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> TensorMap:
    assert 2 * box[0] == LINE and max(box) <= 256
    return tensor_map(dtype, address, sizes, strides, box)


def constants(chosen: HopperPlan, features: Features, dtype: torch.dtype) -> str:
    """What hopper_linear.cuh expects to be defined. The operands of wgmma, which differ in number, are text."""
    sums = chosen.width // 2
    values = {
        "TYPE": TYPES[dtype],
        "GROUPS": chosen.groups,
        "DEEP": chosen.deep,
        "WIDTH": chosen.width,
        "STAGES": chosen.stages,
        "SPLIT": chosen.split,
        "CLUSTER": f"__cluster_dims__({chosen.split}, 1, 1)" if chosen.split > 1 else "",
        "CONSUMER_REGISTERS": chosen.consumer_registers,
        "FEATURES": features.text(),
        "PRODUCT": f'"m64n{chosen.width}k16.f32.{FORMATS[dtype]}.{FORMATS[dtype]}"',
        "SUMS": '"' + ", ".join(f"%{i}" for i in range(sums)) + '"',
        "OPERANDS(d)": ", ".join(f'"+f"(d[{i}])' for i in range(sums)),
        **{name: f'"%{sums + i}"' for i, name in enumerate(("A", "B", "ADD"))},
    }
    return definitions(values)
