"""Attention of heads of 512 on Hopper: its CUDA source emulated on the CPU, compiled; on a GPU its results."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from kernels.emulation.attention_emulation import ATTENTION, Emulator
from kernels.emulation.hopper_emulation import Library, Variant
from kernels.emulation.narrow_emulation import COMPILER
from kernels.products import assert_nothing_is_spilled, require_nvrtc
from paged_scene import LONGEST, Layer, Part, Scene, attention_settings
from torch import Tensor

from flashdraft.kernels import hopper_attention, nvrtc, paged
from flashdraft.kernels.hopper_attention import HEAD

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a GPU of compute capability 9.0")
UNWRITTEN = -77.0
E4B = Layer(heads=8, kv_heads=2, key_size=HEAD, value_size=HEAD, dtype=torch.bfloat16)
FOUR = replace(E4B, heads=4, kv_heads=1)
LIMITS = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
# Tiles of 16 rows, two for a program: of one sequence, of two, one that ends early, one that is none.
MIXED = [Part(1, 70, 35), Part(2, 0, 5), Part(3, 121, 16)]
FEW = [Part(1, 70, 7), Part(2, 0, 5)]


@dataclass(frozen=True)
class Kernel:
    layer: Layer
    page: int = 16

    def defined(self) -> str:
        return hopper_attention.constants(self.layer.dtype, self.layer.heads // self.layer.kv_heads, self.page)


KERNELS = {
    "as in Gemma 4 E4B": Kernel(E4B),
    "8 heads of a key head, float16": Kernel(replace(E4B, heads=8, kv_heads=1, dtype=torch.float16)),
    "16 heads of a key head": Kernel(replace(E4B, heads=16, kv_heads=1)),
    "pages of 32": Kernel(FOUR, 32),
    "pages of 128": Kernel(FOUR, 128),
}
# What is left out or changed in hopper_attention.cu, and what is then noticed.
FAULTS: dict[str, tuple[tuple[str, str], str]] = {
    "keys are not released": (("          release(keys);\n", ""), "wait for each other for ever"),
    "stages are overwritten": (("            wait_for(emptied(turn.stage), turn.parity);\n", ""), "not close|more arrivals"),
    "values are released before wgmma has read them": (
        ("if (begin > low) release(values ^ 2);", "release(values);"),
        "not close|more arrivals",
    ),
    "scores are read before the other block's have come": (
        ("    wait_for(came(group), parity);\n", ""),
        "not close|more arrivals",
    ),
    "scores are overwritten": (("    wait_for(taken(group), parity ^ 1);\n", ""), "not close|for ever"),
    "values behind the text are not cleared": (
        ("if (begin + KEYS > high) clear_values", "if (begin < 0) clear_values"),
        "not close",
    ),
    "weights change under a product": (
        (
            "multiply_by_values(o, weights, values, begin - low);",
            "multiply_by_values(o, weights, values, begin - low), weights[3] ^= 1;",
        ),
        "registers of a product under way have changed",
    ),
    "sums are used before wgmma has added": (
        ("        wait_for_products<0>();\n        hold(o);", "        hold(o);"),
        "not close|nobody waited for",
    ),
    "a block leaves while the other writes": (
        (
            "    kernel.consume();\n    arrive_at_cluster<false>();",
            "    kernel.consume();\n    if (false) arrive_at_cluster<false>();",
        ),
        "for ever|a block that has ended",
    ),
    "the span is read early": (
        (
            "  wait_for_earlier_kernels();\n  const Kernel kernel{arguments, memory, cluster_rank()};",
            "  const Kernel kernel{arguments, memory, cluster_rank()};\n  wait_for_earlier_kernels();",
        ),
        "before the wait",
    ),
    "tiles are read early": (
        ("kernel.begin_sights();", "emulation::cluster::self().waited = false, kernel.begin_sights();"),
        "before the wait",
    ),
    "queries are read early": (
        ("    kernel.produce", "    emulation::cluster::self().waited = false, kernel.produce"),
        "before the wait",
    ),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    if COMPILER is None:
        pytest.skip("g++, which compiles the emulation of the CUDA kernels, is not installed")
    variants = [Variant(kernel.defined()) for kernel in KERNELS.values()]
    variants += [Variant(Kernel(FOUR).defined(), *change) for change, _ in FAULTS.values()]
    return Library(tmp_path_factory.mktemp("emulation"), variants, ATTENTION)


def attend(scene: Scene, attend: Callable[..., None], span: int = 128, splits: int = 2) -> Tensor:
    """Attention of the real rows, from partials that are combined here; what is not a row's stays as it was."""
    paged.store_rows_reference(scene.k, scene.v, scene.rows, scene.table, scene.keys, scene.values)
    settings, rows, heads = attention_settings(scene, span, splits), len(scene.q), scene.layer.heads
    spans = -(-LONGEST // span)
    sums = torch.full((rows, heads, spans, HEAD), UNWRITTEN, device=scene.device)
    stats = torch.full((rows, heads, spans, 2), UNWRITTEN, device=scene.device)
    attend(scene.q, scene.keys, scene.values, scene.table, scene.rows, settings, (sums, stats), spans)
    ends = torch.zeros(rows, dtype=torch.int64, device=scene.device)  # of what a row's tile sees
    lines = scene.rows.tile_slot, scene.rows.tile_start, scene.rows.tile_rows, scene.rows.tile_end
    for slot, start, count, end in zip(*(line.tolist() for line in lines), strict=True):
        if slot >= 0:
            ends[start : start + count] = min(end, int(scene.rows.positions[start]) + count)
    seen = torch.arange(spans, device=scene.device) * span < ends[:, None]
    assert sums[~seen[:, None].expand(-1, heads, -1)].eq(UNWRITTEN).all()
    assert stats[~seen[:, None].expand(-1, heads, -1)].eq(UNWRITTEN).all()
    peak = stats[..., 0].masked_fill(~seen[:, None], -torch.inf)
    weight = (peak - peak.amax(-1, keepdim=True)).exp2().nan_to_num(0.0)
    total = (weight * stats[..., 1]).sum(-1, keepdim=True)
    return ((weight[..., None] * sums).sum(2) / total)[: scene.real]


def assert_close(scene: Scene, got: Tensor) -> None:
    torch.testing.assert_close(got.double().cpu(), scene.expected(), atol=LIMITS[scene.layer.dtype], rtol=0)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_tiles_of_one_sequence_and_of_several_are_plain_attention(library: Library, kernel: Kernel) -> None:
    scene = Scene(kernel.layer, MIXED if kernel.layer is E4B else FEW, kernel.page, tile_rows=16)
    assert_close(scene, attend(scene, Emulator(library).attend))


@pytest.mark.parametrize(("span", "splits"), [(64, 1), (64, 3), (192, 2)])
@pytest.mark.parametrize("percent_late", [0, 90])
def test_every_division_of_the_keys_at_every_pace(library: Library, span: int, splits: int, percent_late: int) -> None:
    scene = Scene(FOUR, [Part(1, 127, 20), Part(2, 60, 16)], 16, tile_rows=16)
    assert_close(scene, attend(scene, Emulator(library, percent_late=percent_late, seed=span).attend, span, splits))


def test_a_rows_bits_depend_on_its_prefix_alone(library: Library) -> None:
    def row(parts: list[Part], index: int, **how: int) -> Tensor:
        scene = Scene(FOUR, parts, 16, tile_rows=16)
        return attend(scene, Emulator(library, seed=index).attend, **how)[index]

    alone = row([Part(9, 130, 1)], 0)
    assert torch.equal(row([Part(9, 130, 16)], 0), alone)
    assert torch.equal(row([Part(2, 40, 20), Part(9, 126, 16)], 24, splits=1), alone)


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_noticed(library: Library, name: str) -> None:
    change, found = FAULTS[name]
    scene = Scene(FOUR, [Part(1, 190, 40)], 16, tile_rows=16)

    def at_every_pace() -> None:
        for seed in range(6):
            assert_close(scene, attend(scene, Emulator(library, percent_late=70, seed=seed, change=change).attend, 704, 1))

    with pytest.raises(AssertionError, match=found):
        at_every_pace()


# The source, compiled


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_no_register_is_spilled(tmp_path: Path, kernel: Kernel) -> None:
    assert_nothing_is_spilled(tmp_path, ATTENTION.source.text(kernel.defined()))


def test_nvrtc_compiles_it() -> None:
    require_nvrtc()
    source = ATTENTION.source.text(KERNELS["as in Gemma 4 E4B"].defined())
    image = nvrtc.compile_image(source, "hopper_attention", (9, 0), ATTENTION.source.files(), specific=True)
    assert image.startswith(b"\x7fELF")


# On a GPU


def on_gpu(layer: Layer, parts: list[Part], page: int = 16) -> Scene:
    return Scene(layer, parts, page, tile_rows=16, device="cuda")


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize(("span", "splits"), [(128, 2), (64, 3), (704, 1)])
def test_on_a_gpu_it_is_plain_attention(kernel: Kernel, span: int, splits: int) -> None:
    for parts in (MIXED, FEW, [Part(1, 600, 90)], [Part(1, 0, 16), Part(2, 511, 1), Part(3, 500, 130)]):
        scene = on_gpu(kernel.layer, parts, kernel.page)
        assert_close(scene, attend(scene, hopper_attention.attend, span, splits).cpu())


@pytest.mark.gpu
@needs_hopper
def test_on_a_gpu_it_is_taken_for_what_it_supports_and_gives_what_the_other_kernel_gives() -> None:
    paged_triton = importlib.import_module("flashdraft.kernels.paged_triton")
    scene = on_gpu(E4B, [Part(1, 400, 200)])
    paged_triton.store_rows(scene.k, scene.v, scene.rows, scene.table, scene.keys, scene.values)
    got = []
    for hopper in (False, True):
        settings = replace(attention_settings(scene, 64, 2), query_rows=64, hopper=hopper)
        pages = scene.keys, scene.values, scene.table
        assert hopper_attention.supports(scene.q, scene.keys, scene.values, scene.rows, settings) == hopper
        got.append(paged_triton.paged_attention(scene.q, *pages, scene.rows, settings)[: scene.real])
    torch.testing.assert_close(*got, atol=1e-2, rtol=1e-2)
    assert not torch.equal(*got), "the same kernel twice"


@pytest.mark.gpu
@needs_hopper
def test_on_a_gpu_many_programs_at_once_give_the_same_bits_again() -> None:
    scene = on_gpu(replace(E4B, heads=32, kv_heads=8), [Part(i, 300 + 7 * i, 150 + i) for i in range(1, 9)])
    first = attend(scene, hopper_attention.attend, 192, 2)
    assert_close(scene, first.cpu())
    for _ in range(20):
        assert torch.equal(attend(scene, hopper_attention.attend, 192, 2), first)
