from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flashdraft.draft import DFlashDraft, propose_offline
from flashdraft.kernels.packed_attention import (
    Spans,
    block_mask,
    dense_mask,
    document_spans,
    make_mask,
    masked_attention,
    wide_head_options,
)
from flashdraft.targets.target import Target
from flashdraft.train.anchors import (
    block_ids,
    block_positions,
    block_spans,
    draft_blocks,
    draft_masks,
    sample_anchors,
    valid_anchors,
)
from flashdraft.train.data import Batch, Batches, Records
from flashdraft.train.features import packed_forward


def a_batch(records: Records, anchors: int = 12) -> Batch:
    return Batches(records, seq_length=48, rows=2, anchors=anchors, block_size=4, seed=0).batch(0)


def run(
    draft: DFlashDraft, target: Target, batch: Batch, features: torch.Tensor, ids: torch.Tensor | None = None
) -> torch.Tensor:
    c = draft.config
    blocks = block_ids(batch.ids, batch.anchors, c.block_size, c.mask_token_id) if ids is None else ids
    slots = block_positions(batch.positions, batch.anchors, c.block_size)
    masks = draft_masks(draft, batch.anchors, batch.documents)
    hidden = draft_blocks(draft, features, batch.positions, target.embed_rows(blocks), slots, masks)
    return hidden.unflatten(1, (-1, c.block_size))


def features_of(draft: DFlashDraft, target: Target, batch: Batch) -> torch.Tensor:
    target.capture(draft.config.target_layer_ids)
    return packed_forward(target, batch)[0]


def test_anchors_are_distinct_sorted_and_followed_by_a_generated_token(tiny_records: Records) -> None:
    batch = a_batch(tiny_records)
    valid = valid_anchors(batch.loss_mask, batch.documents)
    for b in range(2):
        real = batch.anchors[b][batch.supervised[b, :, 0]].tolist()
        assert real == sorted(set(real))
        assert valid[b, real].all()
        assert len(real) == min(12, int(valid[b].sum()))


def test_anchors_are_redrawn_at_every_visit_and_repeat_with_the_seed(tiny_records: Records) -> None:
    mask, documents = torch.ones(1, 40, dtype=torch.bool), torch.zeros(1, 40, dtype=torch.int32)
    uniform = [torch.rand(1, 40, generator=torch.Generator().manual_seed(s)) for s in (0, 1, 0)]
    draws = [sample_anchors(mask, documents, 8, u)[0].tolist() for u in uniform]
    assert draws[0] == draws[2] != draws[1]


def test_anchors_of_a_long_row_come_from_every_depth() -> None:
    mask, documents = torch.ones(1, 8192, dtype=torch.bool), torch.zeros(1, 8192, dtype=torch.int32)
    anchors, _ = sample_anchors(mask, documents, 256, torch.rand(1, 8192))
    depths = torch.histc(anchors.float(), bins=8, min=0, max=8192)
    assert depths.min() >= 16  # 32 expected in each eighth


def test_labels_stop_at_the_end_of_the_answer(tiny_records: Records) -> None:
    batch = a_batch(tiny_records)
    for b, n, k in batch.supervised.nonzero().tolist():
        at = int(batch.anchors[b, n]) + k + 1
        assert batch.labels[b, n, k] == batch.ids[b, at]
        assert batch.loss_mask[b, at]
        assert batch.documents[b, at] == batch.documents[b, batch.anchors[b, n]]
    assert (batch.supervised.long().diff(dim=-1) <= 0).all()


def test_mask_equals_the_rule_written_out(tiny_records: Records) -> None:
    batch, size, window = a_batch(tiny_records, 5), 4, 6
    mask = dense_mask(block_spans(batch.anchors, batch.documents, size, window, True), 68)
    for b in range(2):
        for q in range(20):
            a, o = int(batch.anchors[b, q // size]), q % size
            for kv in range(68):
                if kv < 48:
                    near = int(batch.positions[b, a]) + o - int(batch.positions[b, kv]) < window
                    expected = kv < a and batch.documents[b, kv] == batch.documents[b, a] and near
                else:
                    expected = (kv - 48) // size == q // size and (kv - 48) % size <= o
                assert mask[b, 0, q, kv] == expected


def test_no_row_is_empty_even_in_padding_blocks(tiny_records: Records) -> None:
    batch = a_batch(tiny_records, 40)
    assert not batch.supervised.all(-1).all()
    mask = dense_mask(block_spans(batch.anchors, batch.documents, 4, 6, False), 208)
    assert mask.any(-1).all()


def test_features_at_or_after_the_anchor_never_reach_a_block(
    tiny_draft: DFlashDraft, tiny_target: Target, tiny_records: Records
) -> None:
    batch = a_batch(tiny_records)
    features = features_of(tiny_draft, tiny_target, batch)
    before = run(tiny_draft, tiny_target, batch, features)
    for n in range(0, 12, 3):
        changed = features.clone()
        for b in range(2):
            changed[b, batch.anchors[b, n] :] = torch.randn(features.shape[-1]) * 9
        after = run(tiny_draft, tiny_target, batch, changed)
        assert torch.equal(before[:, n], after[:, n])
        assert not torch.equal(before[:, -1], after[:, -1]) or n == 11


def test_features_of_another_document_never_reach_a_block(
    tiny_draft: DFlashDraft, tiny_target: Target, tiny_records: Records
) -> None:
    batch = a_batch(tiny_records)
    features = features_of(tiny_draft, tiny_target, batch)
    before = run(tiny_draft, tiny_target, batch, features)
    own = batch.documents.gather(1, batch.anchors)
    for b in range(2):
        for document in own[b].unique():
            changed = features.clone()
            changed[b][batch.documents[b] != document] = 7.0
            after = run(tiny_draft, tiny_target, batch, changed)
            assert torch.equal(before[b][own[b] == document], after[b][own[b] == document])


def test_tokens_of_another_block_never_reach_a_block(
    tiny_draft: DFlashDraft, tiny_target: Target, tiny_records: Records
) -> None:
    batch = a_batch(tiny_records)
    features = features_of(tiny_draft, tiny_target, batch)
    ids = block_ids(batch.ids, batch.anchors, 4, 3)
    before = run(tiny_draft, tiny_target, batch, features, ids)
    changed = ids.clone()
    changed[:, 4 * 5 : 4 * 6] = 11
    after = run(tiny_draft, tiny_target, batch, features, changed)
    others = [n for n in range(12) if n != 5]
    assert torch.equal(before[:, others], after[:, others])
    assert not torch.equal(before[:, 5], after[:, 5])


def test_all_blocks_at_once_equal_one_block_at_a_time(
    tiny_draft: DFlashDraft, tiny_target: Target, tiny_records: Records
) -> None:
    batch = a_batch(tiny_records)
    features = features_of(tiny_draft, tiny_target, batch)
    hidden = run(tiny_draft, tiny_target, batch, features)
    for b in range(2):
        for n in batch.supervised[b, :, 0].nonzero()[:, 0].tolist():
            a = int(batch.anchors[b, n])
            own = (batch.documents[b] == batch.documents[b, a]).nonzero()[:, 0]
            past = features[b, own[own < a]]
            alone = propose_offline(tiny_draft, past, int(batch.ids[b, a]), tiny_target.embed_rows, tiny_target.head)
            torch.testing.assert_close(tiny_target.head(hidden[b, n, 1:]), alone, atol=2e-5, rtol=1e-4)


def queries_keys_values(batch: Batch, device: str, heads: int = 4, kv_heads: int = 2, size: int = 16) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    blocks = batch.anchors.shape[1] * 4
    shapes = ((2, heads, blocks, size), *[(2, kv_heads, 48 + blocks, size)] * 2)
    return tuple(torch.randn(shape, generator=generator).to(device) for shape in shapes)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("window", "causal"), [(6, True), (None, False), (6, False)])
def test_flex_attention_equals_the_dense_mask(tiny_records: Records, window: int | None, causal: bool) -> None:
    batch = a_batch(tiny_records)
    spans = block_spans(batch.anchors, batch.documents, 4, window, causal)
    q, k, v = queries_keys_values(batch, "cpu")
    dense = masked_attention(q, k, v, make_mask(spans, k.shape[2]), 0.25)
    flex = flex_attention(q, k, v, block_mask=block_mask(spans, k.shape[2]), scale=0.25, enable_gqa=True)
    torch.testing.assert_close(flex, dense, atol=1e-5, rtol=1e-4)


def long_documents(batch: int, length: int, count: int) -> Tensor:
    """Rows of that many documents and some padding behind them."""
    cuts = torch.rand(batch, count, generator=torch.Generator().manual_seed(2)).sort(1).values * length
    documents = (torch.arange(length)[None, :, None] >= cuts[:, None]).sum(-1)
    return torch.where(documents == count, -1, documents)


def assert_tiles_are_those_of_every_index(spans: Spans, keys: int) -> None:
    queries = spans.low.shape[2]
    mine = block_mask(spans, keys)
    theirs = create_block_mask(spans.mask_mod, len(spans.low), None, queries, keys, device="cpu")
    assert mine.seq_lengths == theirs.seq_lengths
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, others = (getattr(mask, f"{name}_num_blocks") for mask in (mine, theirs))
        assert counts.dtype == others.dtype
        assert counts.equal(others), name
        indices, other_indices = (getattr(mask, f"{name}_indices") for mask in (mine, theirs))
        assert indices.shape == other_indices.shape
        used = torch.arange(indices.shape[-1]) < counts[..., None]
        assert indices[used].equal(other_indices[used]), name
    assert 0 < int(mine.kv_num_blocks.sum()) < mine.kv_indices.numel()


@pytest.mark.parametrize(("window", "causal"), [(200, True), (None, False), (300, False)])
@pytest.mark.parametrize(("length", "anchors", "block_size"), [(640, 96, 8), (600, 50, 7)])
def test_tiles_of_blocks_are_those_of_every_index(
    length: int, anchors: int, block_size: int, window: int | None, causal: bool
) -> None:
    documents = long_documents(2, length, 3)
    valid = torch.ones_like(documents, dtype=torch.bool)
    chosen, _ = sample_anchors(valid, documents, anchors, torch.rand(2, length, generator=torch.Generator().manual_seed(3)))
    spans = block_spans(chosen, documents, block_size, window, causal)
    assert_tiles_are_those_of_every_index(spans, length + anchors * block_size)


@pytest.mark.parametrize("window", [None, 150])
def test_tiles_of_documents_are_those_of_every_index(window: int | None) -> None:
    documents = long_documents(2, 700, 4)
    spans = document_spans(documents, window)
    q, kv = torch.arange(700)[:, None], torch.arange(700)
    expected = (kv <= q) & (documents[:, :, None] == documents[:, None]) & (q - kv < (window or 700))
    assert dense_mask(spans, 700)[:, 0].equal(expected)
    assert_tiles_are_those_of_every_index(spans, 700)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("window", "causal"), [(6, True), (None, False)])
def test_compiled_flex_attention_and_its_gradients_equal_the_dense_mask_on_a_gpu(
    tiny_records: Records, window: int | None, causal: bool
) -> None:
    results = []
    for device in ("cuda", "cpu"):
        batch = a_batch(tiny_records).to(torch.device(device))
        q, k, v = (x.requires_grad_() for x in queries_keys_values(batch, device))
        spans = block_spans(batch.anchors, batch.documents, 4, window, causal)
        out = masked_attention(q, k, v, make_mask(spans, k.shape[2]), 0.25)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("shared_kib", [99, 163, 227])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles_of_wide_heads_fit_the_shared_memory(shared_kib: int, dtype: torch.dtype) -> None:
    options = wide_head_options(512, dtype, shared_kib * 1024)
    held = (options["BLOCK_M"] + 2 * options["num_stages"] * options["BLOCK_N"]) * 512 * dtype.itemsize
    assert held <= shared_kib * 1024
    assert 128 % options["BLOCK_M"] == 128 % options["BLOCK_N"] == 0, "tiles of a block mask hold whole ones"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_heads_of_512_on_a_gpu_are_the_dense_mask_s(tiny_records: Records, dtype: torch.dtype) -> None:
    batch, generator = a_batch(tiny_records), torch.Generator().manual_seed(1)
    rows, length = batch.documents.shape
    q, k, v = (torch.randn((rows, heads, length, 512), generator=generator) for heads in (8, 2, 2))
    spans = document_spans(batch.documents, None)
    wanted = masked_attention(q, k, v, make_mask(spans, length), 0.04)
    on_gpu = Spans(spans.low.cuda(), spans.high.cuda())
    got = masked_attention(*(x.to("cuda", dtype) for x in (q, k, v)), make_mask(on_gpu, length), 0.04)
    limit = 2e-2 if dtype == torch.bfloat16 else 2e-3
    torch.testing.assert_close(got.float().cpu(), wanted, atol=limit, rtol=limit)
