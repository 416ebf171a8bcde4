"""Steps from state on the device: what the draft proposes there, what ends in the middle of one, and what is left behind."""

from __future__ import annotations

import pytest
import torch
from pairs import VOCAB, OftenRight, prompts, request, run, small_engine, tiny_draft, tiny_target

from flashdraft.draft import propose_offline
from flashdraft.engine.graphs import bucket_of, chunk_buckets, row_buckets, sequence_buckets
from flashdraft.kernels.paged import workspace_size
from flashdraft.targets.fused import fuse
from flashdraft.targets.target import packed_attend


def features_of(target, draft, tokens):
    ids = torch.tensor(tokens)
    positions = torch.arange(len(ids))
    target.capture(draft.config.target_layer_ids)
    return target.forward(ids, positions, packed_attend(torch.zeros_like(ids), positions))[1]


@pytest.mark.parametrize("own_head", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 20])
def test_the_fused_draft_proposes_what_the_drafts_equations_say(window, causal, own_head):
    target = tiny_target(window=window)
    draft = tiny_draft(target, causal=causal)
    if own_head:
        config = draft.config.with_(has_own_lm_head=True)
        own = type(draft)(config)
        own.load_state_dict(draft.state_dict() | {"lm_head.weight": torch.randn(target.vocab_size, target.hidden_size)})
        draft = own.requires_grad_(False)
    engine = small_engine(target, draft, async_scheduling=True)
    assert engine.runner.models._draft_pass is not None
    outputs = [engine.add(request(p)) for p in prompts(3, seed=5)]
    compared = 0
    while engine.has_work:
        engine.settle()
        before = {s.slot: list(s.tokens) for s in engine.scheduler.running if s.output.tokens}
        engine.step()
        for slot, tokens in before.items():
            features = features_of(target, draft, tokens[:-1])
            logits = propose_offline(draft, features, tokens[-1], target.embed_rows, target.head)
            assert engine.runner.state.proposals[slot].tolist() == logits.argmax(-1).tolist()
            compared += 1
    assert compared > 30
    assert all(output.finish_reason == "length" for output in outputs)


def test_a_draft_of_a_class_of_its_own_is_run_as_it_is():
    target = tiny_target()
    engine = small_engine(target, tiny_draft(target, kind=OftenRight), async_scheduling=True)
    assert engine.runner.models._draft_pass is None


def test_a_request_that_ended_wastes_at_most_one_step_and_leaves_nothing():
    target = tiny_target()
    tokens = run(small_engine(target), [request(prompts(1)[0], max_tokens=30)])[0].tokens
    stop = next(i for i in range(5, 30) if tokens[i] not in tokens[:i])
    engine = small_engine(target, tiny_draft(target), async_scheduling=True)
    launches = []
    launch = engine.runner.launch
    engine.runner.launch = lambda batch: launches.append([row.sequence for row in batch.verify]) or launch(batch)
    _, other = prompts(2, seed=9)
    first = engine.add(request(prompts(1)[0], stop_ids=frozenset({tokens[stop]}), max_tokens=30))
    engine.add(request(other, max_tokens=40))
    steps_with_it = 0
    while engine.has_work:
        engine.step()
        steps_with_it += first.finished and any(s.request is first.request for s in launches[-1])
    assert first.tokens == tokens[: stop + 1]
    assert steps_with_it <= 1
    engine.check_idle()


def test_an_abort_while_a_step_is_under_way_leaves_nothing():
    target = tiny_target()
    engine = small_engine(target, tiny_draft(target), async_scheduling=True)
    aborted, kept = request(prompts(1)[0]), request(prompts(2)[1])
    outputs = [engine.add(aborted), engine.add(kept)]
    for _ in range(6):
        engine.step()
    engine.abort(aborted.id)
    late = engine.add(request(prompts(1)[0]))
    while engine.has_work:
        engine.step()
    assert outputs[0].finish_reason == "abort"
    assert outputs[1].tokens == run(small_engine(target), [request(prompts(2)[1])])[0].tokens
    assert late.tokens == run(small_engine(target), [request(prompts(1)[0])])[0].tokens
    engine.check_idle()


class NothingAllowed:
    """A grammar that leaves no token to choose, or one whose masks fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def masks(self, proposals):
        if self.error is not None:
            raise self.error
        return torch.zeros((len(proposals) + 1, VOCAB), dtype=torch.bool)

    def advance(self, token):
        raise AssertionError("no token was allowed")


def test_a_request_without_a_choice_ends_alone():
    target = tiny_target()
    kept = request(prompts(2)[1])
    [alone] = run(small_engine(target), [request(prompts(2)[1])])
    engine = small_engine(target, tiny_draft(target), async_scheduling=True)
    hopeless = request(prompts(1)[0])
    hopeless.constraint = NothingAllowed()
    outputs = run(engine, [hopeless, kept])
    assert outputs[0].finish_reason == "error"
    assert outputs[1].tokens == alone.tokens
    engine.check_idle()


@pytest.fixture(scope="module")
def three_alone():
    target, many = tiny_target(), prompts(3, seed=12)
    return target, many, [run(small_engine(target), [request(p, max_tokens=24)])[0].tokens for p in many]


@pytest.mark.parametrize(("failures", "error"), [(1, RuntimeError), (7, KeyboardInterrupt)])
@pytest.mark.parametrize(
    ("owner", "part"),
    [*(("", f"_{stage}") for stage in ("draft", "verify", "prefill", "choose", "first"))]
    + [("state", "place"), ("state", "advance"), ("tables", "sync"), ("plan", "upload")],
)
def test_a_step_that_fails_anywhere_loses_no_token(owner, part, failures, error, three_alone, monkeypatch):
    target, many, alone = three_alone
    engine = small_engine(target, tiny_draft(target), async_scheduling=True)
    outputs = [engine.add(request(p, max_tokens=24)) for p in many[:2]]
    for _ in range(8):
        engine.step()
    outputs.append(engine.add(request(many[2], max_tokens=24)))
    owner = getattr(engine.runner, owner) if owner else engine.runner
    whole, left = getattr(owner, part), [failures]

    def fails(*args):
        done = whole(*args)
        if left[0]:
            left[0] -= 1
            raise error("planted")
        return done

    monkeypatch.setattr(owner, part, fails)
    failed = 0
    while engine.has_work:
        try:
            engine.step()
        except error:
            failed += 1
    assert failed == failures
    assert [o.tokens for o in outputs] == alone
    engine.check_idle()


def test_a_wait_for_a_step_that_is_interrupted_loses_no_token(three_alone, monkeypatch):
    target, many, alone = three_alone
    engine = small_engine(target, tiny_draft(target), async_scheduling=True)
    outputs = [engine.add(request(p, max_tokens=24)) for p in many]
    collect, calls = engine.runner.collect, []

    def interrupted(flight):
        calls.append(1)
        if len(calls) in (4, 5, 9):
            raise KeyboardInterrupt
        return collect(flight)

    monkeypatch.setattr(engine.runner, "collect", interrupted)
    stopped = 0
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            stopped += 1
    assert stopped == 3
    assert [output.tokens for output in outputs] == alone
    engine.check_idle()


def test_masks_that_fail_lose_no_token_of_another_request():
    target = tiny_target()
    alone = run(small_engine(target), [request(prompts(2)[1])])[0].tokens
    engine = small_engine(target, tiny_draft(target), async_scheduling=True)
    bad = request(prompts(1)[0])
    bad.constraint = NothingAllowed(RuntimeError("planted"))
    engine.add(bad)
    good = engine.add(request(prompts(2)[1]))
    failed = 0
    while engine.has_work:
        try:
            engine.step()
        except RuntimeError:
            failed += 1
            engine.abort(bad.id)
    assert failed == 1
    assert good.tokens == alone
    engine.check_idle()


@pytest.mark.parametrize("ahead", [False, True])
def test_an_interrupt_in_a_hook_ends_that_request_and_no_other(ahead):
    target = tiny_target()
    many = prompts(3, seed=12)
    alone = [run(small_engine(target), [request(p)])[0].tokens for p in many]
    engine = small_engine(target, tiny_draft(target), async_scheduling=ahead)
    seen = []

    def interrupt(token):
        seen.append(token)
        if len(seen) == 9:
            raise KeyboardInterrupt

    stopped = request(many[1])
    stopped.on_token = interrupt
    outputs = [engine.add(r) for r in (request(many[0]), stopped, request(many[2]))]
    interrupts = 0
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 1
    assert outputs[1].finish_reason == "abort"
    assert outputs[1].tokens == alone[1][:9]
    assert [outputs[0].tokens, outputs[2].tokens] == [alone[0], alone[2]]
    engine.check_idle()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_hook_may_not_step_the_engine(ahead):
    engine = small_engine(tiny_target(), async_scheduling=ahead)
    asking = request(prompts(1)[0])
    asking.on_token = lambda token: engine.step() and None
    [output] = run(engine, [asking])
    assert output.finish_reason == "error"
    assert "from a hook" in str(output.error)


def test_a_chunk_that_ends_behind_the_longest_text_is_padded_within_it():
    target = tiny_target()
    first = torch.randint(3, VOCAB, (96,), generator=torch.Generator().manual_seed(1)).tolist()
    long = first + torch.randint(3, VOCAB, (154,), generator=torch.Generator().manual_seed(2)).tolist()
    for draft in (None, tiny_draft(target)):
        options = dict(max_model_len=256, max_num_batched_tokens=192, enable_prefix_caching=True)
        expected = run(small_engine(target, **options), [request(long)])[0].tokens
        engine = small_engine(target, draft, async_scheduling=True, **options)
        run(engine, [request(first, max_tokens=2)])
        [output] = run(engine, [request(long)])
        assert output.cached_tokens == 96
        assert output.tokens == expected


def test_every_forward_has_the_workspace_that_its_tiles_need():
    target = tiny_target(window=20)
    for slots, tokens in ((1, 2048), (16, 256), (64, 256), (8, 64)):
        engine = small_engine(
            target,
            tiny_draft(target),
            async_scheduling=True,
            max_num_seqs=slots,
            max_num_batched_tokens=tokens,
            max_model_len=1500,
        )
        models, size = engine.runner.models, engine.runner.models._workspace.numel()
        for rows, tiles in engine.runner._shapes():
            for shape in models.shapes:
                assert workspace_size(rows, models._heads, shape.value_size, models._most_spans(shape, tiles)) <= size


@pytest.mark.parametrize("block_size", [2, 13, 21])
def test_blocks_of_other_sizes_are_drafted_whole_and_verified_up_to_16_rows(block_size):
    target = tiny_target()
    prompt = prompts(1, seed=3)[0]
    [plain] = run(small_engine(target), [request(prompt)])
    draft = tiny_draft(target, kind=OftenRight, block_size=block_size, window=None)
    draft.truth, draft.hit_rate = {len(prompt) + i: token for i, token in enumerate(plain.tokens)}, 1.1
    [output] = run(small_engine(target, draft, async_scheduling=True), [request(prompt)])
    assert output.tokens == plain.tokens
    assert max(output.committed_per_step) == min(block_size, 16)


@pytest.mark.parametrize("limit", [1, 7, 8, 16, 23, 24, 130, 256, 257, 512, 2048])
def test_buckets_ascend_and_hold_every_size(limit):
    for buckets in (row_buckets(limit, True), row_buckets(limit, False), sequence_buckets(limit), chunk_buckets(limit)):
        assert buckets == sorted(set(buckets))
        assert all(bucket_of(size, buckets) >= size for size in range(1, limit + 1))
        assert buckets[-1] < limit + 32
    rows = row_buckets(limit, False)
    assert all(bucket_of(size, rows) - size <= max(7, size // 8) for size in range(1, limit + 1))


@pytest.mark.parametrize("window", [None, 20])
def test_a_target_with_fused_layers_writes_the_same_text(window):
    many = prompts(4, seed=8)
    expected = [o.tokens for o in run(small_engine(tiny_target(window=window)), [request(p) for p in many])]
    target = tiny_target(window=window)
    assert not fuse(target).kept
    for draft in (None, tiny_draft(target)):
        engine = small_engine(target, draft, async_scheduling=True)
        assert [o.tokens for o in run(engine, [request(p) for p in many])] == expected
        engine.check_idle()
