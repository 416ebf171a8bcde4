"""Rows over pages, the references: plain attention in float64 says the same, and a row's bits depend on its prefix only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged_scene import LAYERS, MIXED, NORMS, Layer, Part, Scene, attend, context_scene, plain_norm

from flashdraft.draft import apply_rope, rope_tables
from flashdraft.kernels.fused import Norm
from flashdraft.kernels.paged import Projection, project_rows, store_context, store_rows


@pytest.mark.parametrize("name", LAYERS)
def test_batches_of_mixed_lengths_and_widths_are_plain_attention(name: str) -> None:
    for page_size, tile_rows, span in ((16, 8, 64), (1, 16, 128), (32, 8, 64)):
        scene = Scene(LAYERS[name], MIXED, page_size, tile_rows)
        torch.testing.assert_close(attend(scene, span).double(), scene.expected(), atol=5e-6, rtol=0)


@pytest.mark.parametrize("name", ["an image", "an image, window 20"])
def test_images_that_see_themselves_whole(name: str) -> None:
    for tile_rows in (8, 16):
        scene = Scene(LAYERS[name], [Part(6, 0, 90), Part(7, 130, 45), Part(8, 200, 3)], tile_rows=tile_rows)
        torch.testing.assert_close(attend(scene).double(), scene.expected(), atol=5e-6, rtol=0)


@pytest.mark.parametrize("name", ["full", "window 70", "both ways, window"])
def test_prefill_as_many_tiles_of_one_sequence_is_plain_attention(name: str) -> None:
    scene = Scene(LAYERS[name], [Part(6, 0, 77), Part(7, 40, 30)])
    torch.testing.assert_close(attend(scene).double(), scene.expected(), atol=5e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["full", "one key head", "window 70", "soft cap", "sinks, window"])
def test_a_rows_bits_depend_on_its_prefix_only(name: str, dtype: torch.dtype) -> None:
    layer = replace(LAYERS[name], dtype=dtype)
    for position in (3, 63, 130):
        alone = attend(Scene(layer, [Part(9, position, 1)]))[0]
        eight, others = Part(9, position, 8), [Part(2, 70, 8), Part(4, 30, 2)]
        assert torch.equal(attend(Scene(layer, [eight]))[0], alone)
        assert torch.equal(attend(Scene(layer, [replace(eight, rows=16)], tile_rows=16))[0], alone)
        assert torch.equal(attend(Scene(layer, [*others, eight], page_size=4), splits=1)[10], alone)
        assert torch.equal(attend(Scene(layer, [Part(9, position - 2, 3)]))[2], alone)


def test_keys_of_padding_rows_are_not_stored_and_others_lie_in_their_pages() -> None:
    scene = Scene(Layer(), [Part(1, 14, 4)])
    store_rows(scene.k, scene.v, scene.rows, scene.table, scene.keys, scene.values)
    units = scene.table[1, [0, 0, 1, 1]].long()
    assert torch.equal(scene.keys[units, [14, 15, 0, 1]], scene.k[:4])
    assert torch.equal(scene.values[units, [14, 15, 0, 1]], scene.v[:4])
    assert int(scene.pool.isfinite().any(-1).sum()) == 2


@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("turn", [0, 16, 32])
def test_projected_rows_are_normed_turned_and_stored(norms: str, turn: int) -> None:
    q_norm, k_norm, v_norm = NORMS[norms]
    scene = Scene(Layer(), [Part(1, 30, 5), Part(2, 0, 2)])
    qkv = torch.randn(9, 8 * 32)
    tables = rope_tables(scene.rows.positions, turn, 1e4, torch.float32) if turn else None
    cos, sin = (None, None) if tables is None else (x[:, 0] for x in tables)
    pages = scene.table, scene.keys, scene.values
    q = project_rows(Projection(qkv, 4, 2, 32, q_norm, k_norm, v_norm, cos, sin), scene.rows, *pages)
    parts = [plain_norm(x, n) for x, n in zip(qkv.view(9, 8, 32).split([4, 2, 2], 1), NORMS[norms], strict=True)]
    if tables is not None:
        for x in parts[:2]:
            x[..., :turn] = apply_rope(x[..., :turn], *(t.double() for t in tables))
    torch.testing.assert_close(q.double(), parts[0], atol=1e-5, rtol=0)
    for row, (slot, position) in enumerate(zip(scene.rows.slots[:7].tolist(), scene.rows.positions.tolist(), strict=False)):
        unit, offset = int(scene.table[slot, position // 16]), position % 16
        torch.testing.assert_close(scene.keys[unit, offset].double(), parts[1][row], atol=1e-5, rtol=0)
        torch.testing.assert_close(scene.values[unit, offset].double(), parts[2][row], atol=1e-5, rtol=0)
    shared = project_rows(Projection(qkv[:, :128], 4, 0, 32, q_norm, None, None, cos, sin), scene.rows, *pages)
    assert torch.equal(shared, q)


def test_the_context_of_all_layers_is_stored_as_the_draft_computes_it() -> None:
    rows, pages, _ = context_scene(torch.bfloat16)
    kv, weights = torch.randn(9, 3, 2, 96).bfloat16(), torch.rand(3, 32) + 0.5
    cos, sin = rope_tables(rows.positions, 32, 1e4, torch.bfloat16)
    store_context(kv, weights, 1e-6, True, cos[:, 0], sin[:, 0], rows, pages)
    for layer in range(3):
        k = kv[:, layer, 0].view(9, 3, 32)
        k = apply_rope(plain_norm(k, Norm(weights[layer], 1e-6, True)), cos.double(), sin.double())
        for row, (slot, position) in enumerate(zip(rows.slots[:7].tolist(), rows.positions.tolist(), strict=False)):
            unit = pages.pool[int(pages.tables[pages.slabs[layer], slot, position // 16])]
            keys, values = (unit[s[layer] :][: 16 * 96].view(16, 3, 32)[position % 16] for s in (pages.keys, pages.values))
            torch.testing.assert_close(keys.double(), k[row], atol=0.03, rtol=0.01)
            assert torch.equal(values.flatten(), kv[row, layer, 1])
