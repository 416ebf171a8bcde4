"""Attention over pages: plain softmax attention in float64 says the same, and a row's bits depend on its own prefix only."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from paged_scene import Layer, plain
from torch import Tensor

from flashdraft.engine.cache import CacheManager, KVShape, PagePool
from flashdraft.engine.pages import PackedRows, PageTables
from flashdraft.engine.request import Output, Request, SamplingParams
from flashdraft.engine.scheduler import Sequence
from flashdraft.kernels.attention import KEY_PAD, KEY_SPLIT, attention, gather_pages, score_mask, write_pages

# 1 to 3 tokens, around a page, around the range boundary, and well past it.
LENGTHS = [1, 3, 16, 17, 255, KEY_SPLIT - 1, KEY_SPLIT, KEY_SPLIT + 1, KEY_SPLIT + 300]


@dataclass
class Line:
    """One sequence: its place in the engine, and all its queries, keys and values [n, heads, D]."""

    sequence: Sequence
    q: Tensor
    k: Tensor
    v: Tensor

    def expected(self, layer: Layer, start: int, stop: int) -> Tensor:
        return plain(layer, self.q, self.k, self.v, start, stop)


class PagedLayer:
    """One attention layer over pages. Memory of nobody is NaN; unwritten slots of a page hold what the pool left there."""

    def __init__(self, layer: Layer, page_size: int = 16, slots: int = 4, tokens: int = 1024) -> None:
        self.layer = layer
        self.shape = KVShape(layer.kv_heads, layer.key_size, layer.value_size, layer.window)
        num_bytes = slots * tokens * self.shape.elements(1) * layer.dtype.itemsize
        self.pool = PagePool([self.shape], page_size=page_size, num_bytes=num_bytes, dtype=layer.dtype, device="cpu")
        self.pool.poison()
        self.cache = CacheManager(self.pool, enable_prefix_caching=False)
        self.tables = PageTables(self.pool, slots, tokens)
        self.slots = list(range(slots))
        self.sinks = None if layer.sinks is None else torch.tensor(layer.sinks)
        self.generator = torch.Generator().manual_seed(0)

    def line(self, length: int) -> Line:
        request, layer = Request([1], SamplingParams()), self.layer
        sequence = Sequence(request, Output(request), 0, [], self.cache.new_sequence(), slot=self.slots.pop())
        sizes = (layer.heads, layer.key_size), (layer.kv_heads, layer.key_size), (layer.kv_heads, layer.value_size)
        q, k, v = (torch.randn((length, *size), generator=self.generator).to(layer.dtype) for size in sizes)
        return Line(sequence, q * 2, k * 2, v)

    def run(self, batch: list[tuple[Line, int, int]], multiple: int = 8) -> list[Tensor]:
        """Store and attend with rows [start, stop) of every line, together, padded as the engine pads."""
        positions = [list(range(start, stop)) for _, start, stop in batch]
        for line, _, stop in batch:
            assert self.cache.grow(line.sequence.held, stop), "the test's pool is too small"
            self.tables.sync(line.sequence)
        rows = PackedRows(self.tables, [line.sequence.slot for line, _, _ in batch], positions, multiple)
        q, k, v = (torch.cat([getattr(line, name)[start:stop] for line, start, stop in batch]) for name in "qkv")
        q, k, v = (torch.cat([x, x[:1].expand(rows.padding, -1, -1)]) for x in (q, k, v))
        rows.write(self.pool.layers[0], k, v)
        out = rows.attend(
            self.pool.layers[0], self.shape, q, self.layer.causal, self.layer.scale, self.layer.softcap, self.sinks
        )
        return list(out.split([*map(len, positions), rows.padding])[:-1])

    def prefill(self, line: Line, stop: int, chunk: int = 256) -> None:
        for start in range(0, stop, chunk):
            self.run([(line, start, min(start + chunk, stop))])
            self.cache.drop_behind(line.sequence.held, min(start + chunk, stop))


SMALL = Layer(key_size=16, value_size=16)
LAYERS = {
    "full": SMALL,
    "one key head": replace(SMALL, heads=6, kv_heads=1),
    "as many key heads": replace(SMALL, heads=3, kv_heads=3, key_size=40, value_size=40),
    "unequal sizes": replace(SMALL, key_size=24, value_size=16),
    "window 1": replace(SMALL, window=1),
    "window 5": replace(SMALL, window=5),
    "window 24": replace(SMALL, window=24, heads=8),
    "window over a range": replace(SMALL, window=KEY_SPLIT + 40),
    "both ways": replace(SMALL, causal=False),
    "both ways, window": replace(SMALL, causal=False, window=20),
    "soft cap": replace(SMALL, softcap=3.0),
    "soft cap, window": replace(SMALL, softcap=3.0, window=30),
    "sinks": replace(SMALL, sinks=(-1.0, 0.5, 2.0, 8.0)),
    "sinks, window": replace(SMALL, sinks=(-1.0, 0.5, 2.0, 8.0), window=30),
}


@pytest.mark.parametrize("name", LAYERS)
def test_whole_sequences_are_plain_attention(name):
    layer = LAYERS[name]
    for length in LENGTHS:
        paged = PagedLayer(layer, slots=1)
        line = paged.line(length)
        [got] = paged.run([(line, 0, length)])
        torch.testing.assert_close(got.double(), line.expected(layer, 0, length), atol=5e-6, rtol=0)


@pytest.mark.parametrize("page_size", [1, 2, 4, 16, 64, KEY_PAD])
@pytest.mark.parametrize("name", ["full", "window 24", "both ways, window", "soft cap, window"])
def test_blocks_behind_a_prefix_are_plain_attention_at_any_page_size(name, page_size):
    layer = LAYERS[name]
    paged = PagedLayer(layer, page_size, slots=2, tokens=1280)
    for start in (KEY_SPLIT - 5, 77):
        line = paged.line(start + 8)
        paged.prefill(line, start, 200)
        [got] = paged.run([(line, start, start + 8)])
        torch.testing.assert_close(got.double(), line.expected(layer, start, start + 8), atol=5e-6, rtol=0)


@pytest.mark.parametrize("name", LAYERS)
def test_batches_of_mixed_lengths_and_widths_are_plain_attention(name):
    layer = LAYERS[name]
    paged = PagedLayer(layer)
    batch = [(paged.line(start + 8), start, start + rows) for start, rows in ((KEY_SPLIT + 3, 8), (0, 1), (40, 5), (250, 8))]
    for line, start, _ in batch:
        paged.prefill(line, start)
    for (line, start, stop), got in zip(batch, paged.run(batch), strict=True):
        torch.testing.assert_close(got.double(), line.expected(layer, start, stop), atol=5e-6, rtol=0)


def test_keys_of_rejected_rows_are_overwritten_and_never_seen():
    layer = LAYERS["full"]
    paged = PagedLayer(layer, slots=1)
    line = paged.line(100)
    paged.prefill(line, 50)
    kept = line.k.clone(), line.v.clone()
    line.k[52:], line.v[52:] = 9.0, 1e6  # rows 52.. of this block will be rejected
    paged.run([(line, 50, 58)])
    line.k, line.v = kept
    for start, stop in ((52, 60), (60, 61)):
        [got] = paged.run([(line, start, stop)])
        torch.testing.assert_close(got.double(), line.expected(layer, start, stop), atol=5e-6, rtol=0)


def test_16_bits_are_as_close_as_they_can_be():
    for dtype, limit in ((torch.bfloat16, 2e-2), (torch.float16, 3e-3)):
        layer = replace(SMALL, dtype=dtype)
        paged = PagedLayer(layer, slots=1)
        line = paged.line(300)
        [got] = paged.run([(line, 0, 300)])
        torch.testing.assert_close(got.double(), line.expected(layer, 0, 300), atol=limit, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["full", "one key head", "unequal sizes", "window 24", "window over a range", "soft cap", "sinks"]
)
def test_a_rows_bits_depend_on_its_prefix_only(name, dtype):
    layer = replace(LAYERS[name], dtype=dtype)
    for position in (3, 100, KEY_SPLIT - 2, KEY_SPLIT + 130):
        paged = PagedLayer(layer)
        line = paged.line(position + 40)
        others = [paged.line(n) for n in (KEY_SPLIT + 280, 9, 300)]
        paged.prefill(line, position)
        for other in others:
            paged.prefill(other, len(other.q) - 8)
        [alone] = paged.run([(line, position, position + 1)])
        companions = [(other, len(other.q) - 8, len(other.q)) for other in others]
        for got in (
            paged.run([(line, position, position + 8)])[0][:1],
            paged.run([(line, position, position + 33)])[0][:1],
            paged.run([(line, position, position + 1)], multiple=24)[0],
            paged.run([(line, position, position + 3), *companions])[0][:1],
            paged.run([*companions[:2], (line, position, position + 1)])[-1],
            paged.run([(line, max(0, position - 7), position + 1)])[0][-1:],
        ):
            assert torch.equal(got, alone)


def test_prefill_in_any_chunks_gives_the_same_bits():
    for dtype in (torch.float32, torch.bfloat16):
        layer, length = replace(SMALL, dtype=dtype, window=100), KEY_SPLIT + 200
        whole = PagedLayer(layer, slots=1)
        line = whole.line(length)
        [expected] = whole.run([(line, 0, length)])
        for chunk in (17, 64, 256):
            paged = PagedLayer(layer, slots=1)
            again = paged.line(length)
            starts = range(0, length, chunk)
            parts = [paged.run([(again, start, min(start + chunk, length))])[0] for start in starts]
            assert torch.equal(torch.cat(parts), expected)


def test_rows_are_written_to_their_slots_and_gathered_in_order():
    pages = torch.full((5, 4, 2, 3), float("nan"))
    rows = torch.randn(6, 2, 3)
    write_pages(pages, torch.tensor([3, 3, 1, 1, 1, 1]), torch.tensor([2, 3, 0, 1, 2, 3]), rows)
    assert torch.equal(gather_pages(pages, torch.tensor([[3, 1]]))[0, :, 2:], rows.transpose(0, 1))


def test_the_mask_shows_what_each_row_may_see():
    positions, ends = torch.tensor([[5, 6]]), torch.tensor([7])
    causal = score_mask(positions, 2, 6, ends, None, True, 2, torch.float32)
    assert (causal == 0).int().tolist() == [[[[1, 1, 1, 1, 0, 0]] * 2 + [[1, 1, 1, 1, 1, 0]] * 2]][0:1]
    both = score_mask(positions, 2, 6, ends, 2, False, 1, torch.float32)
    assert (both[0, 0] == 0).int().tolist() == [[0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 0]]


def test_a_row_that_sees_only_its_own_key_returns_that_value():
    q, k, v = torch.randn(1, 8, 4, 16), torch.randn(1, 2, KEY_PAD, 16), torch.randn(1, 2, KEY_PAD, 16)
    mask = score_mask(torch.arange(8)[None], 0, KEY_PAD, torch.tensor([8]), 1, True, 2, torch.float32)
    out = attention(q, k, v, mask, 0.25)
    torch.testing.assert_close(out[0], v[0, :, :8].transpose(0, 1).repeat_interleave(2, 1))
