"""The Triton kernels of rows over pages against their references: on CUDA, or on the CPU under TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from paged_scene import LAYERS, NORMS, Layer, Part, Scene, attend, attention_settings, context_scene

from flashdraft.draft import rope_tables
from flashdraft.kernels import paged
from flashdraft.kernels.paged import Projection, Settings

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs CUDA, or TRITON_INTERPRET=1", allow_module_level=True)

from triton_interpreting import mended

from flashdraft.kernels import paged_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter takes 5 ms a program, so there are few of them.
MIXED = [Part(1, 0, 1), Part(2, 131, 4), Part(3, 64, 3)]
DTYPES = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    with mended():
        yield


def scene(layer: Layer, parts: list[Part], page_size: int = 16, tile_rows: int = 8) -> Scene:
    return Scene(layer, parts, page_size, tile_rows, DEVICE)


@pytest.mark.parametrize("name", LAYERS)
def test_batches_of_mixed_lengths_and_widths_are_plain_attention(name: str) -> None:
    mixed = scene(LAYERS[name], MIXED, tile_rows=4)
    got = attend(mixed, splits=2, kernels=paged_triton)
    torch.testing.assert_close(got.double().cpu(), mixed.expected(), atol=5e-6, rtol=0)


@pytest.mark.parametrize("page_size", [1, 4, 128])
def test_pages_of_other_sizes(page_size: int) -> None:
    mixed = scene(Layer(heads=2, kv_heads=1, window=70), MIXED, page_size, tile_rows=4)
    got = attend(mixed, splits=2, kernels=paged_triton)
    torch.testing.assert_close(got.double().cpu(), mixed.expected(), atol=5e-6, rtol=0)


@pytest.mark.parametrize("name", ["an image", "an image, window 20"])
def test_images_that_see_themselves_whole(name: str) -> None:
    parts = [Part(6, 40, 50), Part(7, 130, 45), Part(8, 200, 3)]
    images = scene(LAYERS[name], parts, tile_rows=16)
    got = attend(images, splits=2, kernels=paged_triton)
    torch.testing.assert_close(got.double().cpu(), images.expected(), atol=5e-6, rtol=0)


@pytest.mark.parametrize("name", ["full", "both ways, window"])
def test_prefill_as_many_tiles_of_one_sequence_is_plain_attention(name: str) -> None:
    prefill = scene(LAYERS[name], [Part(6, 50, 35)], tile_rows=16)
    got = attend(prefill, splits=2, kernels=paged_triton)
    torch.testing.assert_close(got.double().cpu(), prefill.expected(), atol=5e-6, rtol=0)


@pytest.mark.parametrize(
    ("size", "value_size", "dtype"),
    [
        (16, 16, torch.bfloat16),
        (80, 80, torch.float16),
        (96, 96, torch.bfloat16),
        (192, 128, torch.bfloat16),
        (256, 256, torch.bfloat16),
        (512, 512, torch.bfloat16),
        (512, 512, torch.float32),
    ],
)
def test_heads_of_all_sizes_in_all_precisions(size: int, value_size: int, dtype: torch.dtype) -> None:
    layer = Layer(heads=8, kv_heads=1, key_size=size, value_size=value_size, window=100, dtype=dtype)
    few = scene(layer, [Part(1, 70, 3)], tile_rows=3)
    got = attend(few, splits=2, kernels=paged_triton)
    torch.testing.assert_close(got.double().cpu(), few.expected(), atol=DTYPES[dtype], rtol=0)


@pytest.mark.parametrize(
    ("name", "size", "dtype"),
    [
        ("full", 32, torch.float32),
        ("full", 32, torch.bfloat16),
        ("window 70", 32, torch.float32),
        ("window 70", 32, torch.bfloat16),
        ("window 70", 256, torch.bfloat16),  # programs of 16 query rows: some end between the heads of one row
    ],
)
def test_a_rows_bits_depend_on_its_prefix_only(name: str, size: int, dtype: torch.dtype) -> None:
    layer = replace(LAYERS[name], heads=3, kv_heads=1, key_size=size, value_size=size, dtype=dtype)
    eight, others = Part(9, 130, 8), [Part(2, 60, 3), Part(4, 30, 2)]

    def run(parts: list[Part], page_size: int = 16, tile_rows: int = 8, splits: int = 2) -> torch.Tensor:
        return attend(scene(layer, parts, page_size, tile_rows), splits=splits, kernels=paged_triton)

    alone = run([Part(9, 130, 1)])[0]
    assert torch.equal(run([eight])[0], alone)
    assert torch.equal(run([replace(eight, rows=16)], tile_rows=16)[0], alone)
    assert torch.equal(run([*others, eight], page_size=4, splits=1)[5], alone)
    assert torch.equal(run([Part(9, 125, 8)], splits=3)[5], alone)


@pytest.mark.parametrize("query_rows", [16, 32, 64])
@pytest.mark.parametrize(("name", "size"), [("full", 32), ("window 70", 256)])
def test_more_query_rows_a_program_are_as_right(name: str, size: int, query_rows: int) -> None:
    layer = replace(LAYERS[name], heads=4, kv_heads=1, key_size=size, value_size=size, dtype=torch.bfloat16)
    one, few, whole = [Part(1, 70, 1), Part(2, 130, 1)], [Part(1, 70, 4)], [Part(1, 70, 16), Part(2, 9, 5)]
    for tile_rows, parts in ((16, whole), (4, few), (1, one)):
        some = scene(layer, parts, tile_rows=tile_rows)
        got = attend(some, splits=2, kernels=paged_triton, query_rows=query_rows)
        torch.testing.assert_close(got.double().cpu(), some.expected(), atol=DTYPES[torch.bfloat16], rtol=0)


def test_a_row_that_sees_no_key_is_zero() -> None:
    two = scene(Layer(heads=2, kv_heads=1, window=5), [Part(1, 70, 8)])
    two.rows.tile_end.fill_(71)  # from position 75 on, no key is in the window
    for kernels in (paged, paged_triton):
        got = attend(two, splits=2, kernels=kernels)
        assert got[5:].eq(0).all()
        assert got[:5].ne(0).all()


def test_more_spans_than_the_workspace_holds_give_nan() -> None:
    long = scene(Layer(heads=2, kv_heads=1), [Part(1, 300, 2)], tile_rows=2)
    assert attend(long, splits=5, spans=4, kernels=paged_triton).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("turn", [0, 16, 32])
def test_projected_rows_equal_the_reference(norms: str, turn: int, dtype: torch.dtype) -> None:
    ours, theirs = (scene(Layer(dtype=dtype), [Part(1, 30, 5), Part(2, 0, 2)]) for _ in range(2))
    qkv, three = torch.randn(9, 8 * 32, device=DEVICE).to(dtype), [on_device(n) for n in NORMS[norms]]
    cos, sin = (x[:, 0] for x in rope_tables(ours.rows.positions, turn or 2, 1e4, dtype))
    turns = (cos, sin) if turn else (None, None)
    whole = Projection(qkv, 4, 2, 32, *three, *turns)
    got = paged_triton.project_rows(whole, ours.rows, ours.table, ours.keys, ours.values)
    expected = paged.project_rows_reference(whole, theirs.rows, theirs.table, theirs.keys, theirs.values)
    # bfloat16: where a sum in another order falls to the other side, one rounding of 2^-8
    limits = dict(atol=2e-6, rtol=1e-6) if dtype == torch.float32 else dict(atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(got, expected, **limits)
    torch.testing.assert_close(ours.pool, theirs.pool, equal_nan=True, **limits)
    queries = Projection(qkv[:, :128], 4, 0, 32, three[0], None, None, *turns)
    shared = paged_triton.project_rows(queries, ours.rows, ours.table, ours.keys, ours.values)
    torch.testing.assert_close(shared, got, **limits)


def on_device(norm: paged.Norm | None) -> paged.Norm | None:
    return norm if norm is None or norm.weight is None else replace(norm, weight=norm.weight.to(DEVICE))


@pytest.mark.parametrize("round_first", [False, True])
def test_the_context_of_all_layers_equals_the_reference(round_first: bool) -> None:
    (rows, ours, _), (_, theirs, _) = (context_scene(torch.bfloat16, DEVICE) for _ in range(2))
    kv, weights = torch.randn(9, 3, 2, 96, device=DEVICE).bfloat16(), torch.rand(3, 32, device=DEVICE) + 0.5
    cos, sin = (x[:, 0] for x in rope_tables(rows.positions, 32, 1e4, torch.bfloat16))
    paged_triton.store_context(kv, weights, 1e-6, round_first, cos, sin, rows, ours)
    paged.store_context_reference(kv, weights, 1e-6, round_first, cos, sin, rows, theirs)
    torch.testing.assert_close(ours.pool, theirs.pool, equal_nan=True, atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
def test_a_captured_graph_serves_other_positions_and_pages_with_the_same_bits() -> None:
    layer = Layer(heads=8, kv_heads=2, key_size=256, value_size=256, window=512, dtype=torch.bfloat16)
    captured = scene(layer, [Part(1, 300, 8), Part(2, 40, 8)])
    other, again = (scene(layer, [Part(3, 123, 8), Part(4, 210, 8)]) for _ in range(2))  # as many pages
    qkv, three = torch.randn(18, 12 * 256, device=DEVICE).bfloat16(), [on_device(norm) for norm in wide_norms(256)]
    turns = [x[:, 0] for x in rope_tables(other.rows.positions, 256, 1e4, torch.bfloat16)]
    pdl = torch.cuda.get_device_capability() >= (9, 0)

    def run(on: Scene, settings: Settings) -> torch.Tensor:
        pages = on.table, on.keys, on.values
        whole = Projection(qkv, 8, 2, 256, *three, *turns)
        q = paged_triton.project_rows(whole, on.rows, *pages, pdl=settings.pdl)
        return paged_triton.paged_attention(q, on.keys, on.values, on.table, on.rows, settings)

    expected = run(again, attention_settings(again))
    settings = attention_settings(captured, pdl=pdl)
    run(captured, settings)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(captured, settings)
    for name in ("positions", "slots", "tile_slot", "tile_start", "tile_rows", "tile_end"):
        getattr(captured.rows, name).copy_(getattr(other.rows, name))
    captured.table.copy_(other.table)
    captured.pool.copy_(other.pool)
    for _ in range(3):
        graph.replay()
        assert torch.equal(got[:16], expected[:16])


def wide_norms(size: int) -> tuple[paged.Norm, paged.Norm, paged.Norm]:
    weights = (torch.rand(size) + 0.5 for _ in range(2))
    q_norm, k_norm = (paged.Norm(weight, 1e-6, False) for weight in weights)
    return q_norm, k_norm, paged.Norm(None, 1e-6, False)
