"""The Hopper product's CUDA source, emulated on the CPU: cluster, copy engine and wgmma as late and as unordered as can be."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from kernels.emulation.hopper_emulation import SMALL_HOPPER, Emulator, Library, Variant
from kernels.emulation.narrow_emulation import COMPILER
from torch import Tensor

from flashdraft.kernels import hopper, narrow
from flashdraft.kernels.fused import fused_linear_reference
from flashdraft.kernels.hopper_plan import HopperOptions, plan


@dataclass(frozen=True)
class Product:
    """`features`: names of hopper_linear's arguments, with True for tensors."""

    k: int
    options: HopperOptions
    features: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16

    def defined(self, rows: int) -> str:
        """What its kernel for so many rows is compiled with, whatever the number of outputs."""
        features = {name: self.features.get(name, False) for name in ("bias", "gated", "multiply")}
        activation = narrow.ACTIVATIONS[self.features.get("activation")]
        chosen = plan(rows, 64, self.k, features["gated"], SMALL_HOPPER, self.options)
        return hopper.constants(chosen, narrow.Features(k=self.k, activation=activation, **features), self.dtype)

    def arguments(self, rows: int, outputs: int) -> dict[str, Any]:
        torch.manual_seed(rows)
        weight_rows = 2 * outputs if self.features.get("gated") else outputs
        arguments = {"weight": (torch.randn(weight_rows, self.k) / self.k**0.5).to(self.dtype)}
        arguments["x"] = surrounded(torch.randn(rows, self.k), self.dtype)
        if "bias" in self.features:
            arguments["bias"] = torch.randn(weight_rows).to(self.dtype)
        if "multiply" in self.features:
            arguments["multiply"] = surrounded(torch.randn(rows, outputs), self.dtype)
        return self.features | arguments


def surrounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix with NaN on all sides."""
    (rows, columns), margin = values.shape, 64
    around = torch.full((rows + 2 * margin, columns + 2 * margin), torch.nan, dtype=dtype)
    inside = around[margin : margin + rows, margin : margin + columns]
    return inside.copy_(values)


EPILOGUES: list[dict[str, Any]] = [
    {"bias": True},
    {"activation": "silu"},
    {"activation": "gelu_tanh", "gated": True},
    {"activation": "silu", "gated": True, "bias": True},
    {"activation": "gelu_tanh", "multiply": True},
]
# Width, split, stages. Of 8 multiprocessors each gets several tiles of WHOLE, and all rings go round more than once.
WHOLE, DIVIDED = Product(320, HopperOptions(24, 1, 3)), Product(640, HopperOptions(24, 2, 2))
OTHERS = {
    "a tile of 8": Product(64, HopperOptions(8, 1, 1)),
    "a tile of 256": Product(192, HopperOptions(256, 1, 2)),
    "K divided by 8": Product(1024, HopperOptions(16, 8, 2)),
    "the fastest": Product(384, HopperOptions()),
}
IN_FLOAT16 = [Product(320, HopperOptions(32, split, 2), EPILOGUES[3], torch.float16) for split in (1, 2)]
OF_OTHER_WIDTH = {
    "K whole": (WHOLE, Product(320, HopperOptions(80, 1, 2))),
    "K divided": (DIVIDED, Product(640, HopperOptions(40, 2, 2))),
}
EPILOGUE_OPTIONS = {"K whole": HopperOptions(80, 1, 2), "K divided": HopperOptions(32, 4, 2)}
MULTIPLIED = Product(640, EPILOGUE_OPTIONS["K whole"], EPILOGUES[4])
CHUNKS = (64, 128, 192, 256)  # rows of the four kernels that a product has
# What is left out or changed in hopper_linear.cu, and what is then noticed.
FAULTS: dict[str, tuple[Product, tuple[str, str], str]] = {
    "stages are not released": (WHOLE, ("if (step > 0) release(previous);", ""), "wait for each other for ever"),
    "stages are overwritten": (WHOLE, ("wait_for(emptied(turn.stage), turn.parity);", ""), "not close|more arrivals"),
    "a stage is released before wgmma has read it": (WHOLE, ("wait_for_products<1>", "wait_for_products<2>"), "not close"),
    "sums are used before wgmma has added": (WHOLE, ("wait_for_products<0>();", ""), "not close|nobody waited for"),
    "rows that are not there are stored": (WHOLE, ("else if (row < p.rows && own < p.outputs)", "else"), "a store behind z"),
    "x is read early": (DIVIDED, ("if (asks) {\n      wait_for_earlier_kernels();", "if (asks) {"), "before the wait"),
    "the ring is overwritten by sums": (DIVIDED, ("meet_consumers<CONSUMERS>();", ""), "not close"),
    "sums of others are read early": (
        DIVIDED,
        ("keep_sums(d, memory);\n      meet<true>();", "meet<true>();\n      keep_sums(d, memory);"),
        "not close",
    ),
    "blocks leave while others read": (DIVIDED, ("if constexpr (SPLIT > 1) meet<false>();", ""), "a block that has ended"),
    "factors are read early": (MULTIPLIED, (">();\n    wait_for_earlier_kernels();", ">();"), "before the wait"),
    "factors of no row are read": (MULTIPLIED, (" || row >= p.rows) return 0.f;", ") return 0.f;"), "outside of every tensor"),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    if COMPILER is None:
        pytest.skip("g++, which compiles the emulation of the CUDA kernels, is not installed")
    variants = [Variant(product.defined(rows)) for product in (WHOLE, DIVIDED) for rows in CHUNKS]
    one_chunk = [*OTHERS.values(), *IN_FLOAT16, *(other for _, other in OF_OTHER_WIDTH.values())]
    one_chunk += [Product(640, options, epilogue) for options in EPILOGUE_OPTIONS.values() for epilogue in EPILOGUES]
    variants += [Variant(product.defined(64)) for product in one_chunk]
    variants += [Variant(product.defined(64), *change) for product, change, _ in FAULTS.values()]
    return Library(tmp_path_factory.mktemp("emulation"), variants)


def assert_close(product: Product, rows: int, outputs: int, emulator: Emulator) -> None:
    arguments = product.arguments(rows, outputs)
    z = emulator.linear(**arguments, options=product.options)
    exact: dict[str, Any] = {name: v.float() if isinstance(v, Tensor) else v for name, v in arguments.items()}
    assert z.dtype == product.dtype
    torch.testing.assert_close(z.float(), fused_linear_reference(**exact)[0], rtol=0.02, atol=0.02)


def cancelling(product: Product, rows: int, outputs: int) -> dict[str, Any]:
    """With exact sums of 0: what float32 makes of them is the rounding on the way, and another order gives other bits."""
    arguments = product.arguments(rows, outputs)
    one, other = torch.randperm(product.k).chunk(2)
    arguments["weight"][:, other] = -arguments["weight"][:, one]
    arguments["x"][:, other] = arguments["x"][:, one]
    return arguments


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
@pytest.mark.parametrize("options", EPILOGUE_OPTIONS.values(), ids=EPILOGUE_OPTIONS)
def test_every_epilogue_and_kind_of_store(library, options, epilogue):
    for outputs in (61, 66, 60, 96):
        assert_close(Product(640, options, epilogue), 40, outputs, Emulator(library))


@pytest.mark.parametrize("rows", [1, 15, 64, 65, 100, 128, 130, 192, 193, 250, 256])
def test_every_number_of_rows(library, rows):
    assert_close(WHOLE, rows, 300, Emulator(library))
    assert_close(DIVIDED, rows, 100, Emulator(library))


def test_more_rows_than_a_launch_takes(library):
    assert_close(WHOLE, 300, 72, Emulator(library))


@pytest.mark.parametrize("product", OTHERS.values(), ids=OTHERS)
def test_other_divisions(library, product):
    assert_close(product, 40, 64, Emulator(library))


@pytest.mark.parametrize("product", IN_FLOAT16, ids=["K whole", "K divided"])
def test_float16(library, product):
    assert_close(product, 64, 96, Emulator(library))


@pytest.mark.parametrize("product", [WHOLE, DIVIDED], ids=["K whole", "K divided"])
def test_bits_do_not_depend_on_when_loads_arrive_nor_on_whose_turn_it_is(library, product):
    arguments = cancelling(product, 100, 110)
    wanted = Emulator(library).linear(**arguments, options=product.options)
    for percent_late, seed in itertools.product((5, 50, 90), range(1, 4)):
        emulator = Emulator(library, percent_late=percent_late, seed=seed)
        assert torch.equal(emulator.linear(**arguments, options=product.options), wanted)


@pytest.mark.parametrize(("product", "wider"), OF_OTHER_WIDTH.values(), ids=OF_OTHER_WIDTH)
def test_a_rows_bits_do_not_depend_on_the_number_of_rows_nor_on_the_width_of_tiles(library, product, wider):
    arguments, emulator = cancelling(product, 256, 70), Emulator(library)
    wanted = emulator.linear(**arguments, options=product.options)
    assert wanted.count_nonzero() > wanted.numel() / 2
    for part in (slice(0, 1), slice(5, 45), slice(3, 131), slice(31, 200)):
        some = arguments | {"x": arguments["x"][part]}
        assert torch.equal(emulator.linear(**some, options=product.options), wanted[part])
    some = arguments | {"x": arguments["x"][7:70]}
    assert torch.equal(emulator.linear(**some, options=wider.options), wanted[7:70])


@pytest.mark.parametrize(("product", "change", "noticed"), FAULTS.values(), ids=FAULTS)
def test_it_is_noticed_that(library, product, change, noticed):
    def run() -> None:
        for seed in range(5):
            assert_close(product, 60, 144, Emulator(library, seed=seed, change=change))

    with pytest.raises(AssertionError, match=noticed):
        run()
