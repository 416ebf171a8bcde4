"""The text is the target's own: with any draft, any width, any batch, any pages, preempted or not, or with no draft at all."""

from __future__ import annotations

import pytest
import torch
from pairs import OftenRight, prompts, request, run, small_engine, tiny_draft, tiny_target

pytestmark = pytest.mark.usefixtures("steps")

SAMPLED = dict(temperature=0.9, seed=11)
FILTERED = dict(temperature=1.2, seed=5, top_k=20, top_p=0.9, min_p=0.02)
PENALISED = dict(SAMPLED, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.1, logit_bias={9: 4.0})
KINDS = {"greedy": {}, "sampled": SAMPLED, "filtered": FILTERED, "penalised": PENALISED}


def alone_without_draft(target, prompt, **params):
    engine = small_engine(target)
    [output] = run(engine, [request(prompt, **params)])
    engine.check_idle()
    return output


@pytest.fixture(scope="module", params=[None, 20], ids=["full layers", "sliding layers"])
def target(request):
    return tiny_target(window=request.param)


def right_some_of_the_time(target, prompt, tokens, **options):
    draft = tiny_draft(target, kind=OftenRight, **options)
    draft.truth = {len(prompt) + i: token for i, token in enumerate(tokens)}
    return draft


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_equal_with_a_draft_that_is_right_some_of_the_time_at_every_width(target, kind):
    prompt = prompts(1, seed=3)[0]
    plain = alone_without_draft(target, prompt, **KINDS[kind])
    draft = right_some_of_the_time(target, prompt, plain.tokens)
    for width in range(8):
        engine = small_engine(target, draft, num_speculative_tokens=width)
        [output] = run(engine, [request(prompt, **KINDS[kind])])
        assert output.tokens == plain.tokens
        assert output.finish_reason == plain.finish_reason
        assert sum(output.committed_per_step) + 1 == len(output.tokens)
        if width:
            assert max(output.committed_per_step) > 1, "the draft was never right: the test shows nothing"
            assert min(output.committed_per_step) <= width, "the draft was never wrong: the test shows nothing"
            assert max(output.committed_per_step) <= width + 1
        engine.check_idle()


@pytest.mark.parametrize("kind", KINDS)
def test_text_does_not_depend_on_the_batch(target, kind):
    many = prompts(7, seed=1)
    params = [dict(KINDS[kind], seed=100 + i) if kind != "greedy" else {} for i in range(7)]
    alone = [alone_without_draft(target, p, **q).tokens for p, q in zip(many, params, strict=True)]
    engine = small_engine(target, tiny_draft(target), max_num_seqs=4)
    outputs = run(engine, [request(p, **q) for p, q in zip(many, params, strict=True)])
    assert [o.tokens for o in outputs] == alone
    engine.check_idle()


@pytest.mark.parametrize("page_size", [1, 2, 16, 64, 256])
@pytest.mark.parametrize("chunk", [5, 8, 64])
def test_text_does_not_depend_on_page_size_or_chunks(target, page_size, chunk):
    many = prompts(3, seed=5)
    alone = [alone_without_draft(target, p).tokens for p in many]
    engine = small_engine(target, tiny_draft(target), page_size=page_size, max_num_batched_tokens=chunk)
    assert [o.tokens for o in run(engine, [request(p) for p in many])] == alone
    engine.check_idle()


@pytest.mark.parametrize("kind", ["greedy", "sampled", "penalised"])
def test_preemption_at_every_step_changes_no_token(target, kind):
    prompt = prompts(1, seed=9)[0]
    plain = alone_without_draft(target, prompt, **KINDS[kind])
    draft = right_some_of_the_time(target, prompt, plain.tokens)

    def preempt_every_other_step(engine, step):
        if step % 2 and engine.settle() is not None and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[0])

    # A prompt of several chunks needs several undisturbed steps: one chunk holds it here.
    engine = small_engine(target, draft, max_num_batched_tokens=128, enable_prefix_caching=False)
    [output] = run(engine, [request(prompt, **KINDS[kind])], preempt_every_other_step)
    assert output.tokens == plain.tokens
    assert output.preemptions > 5
    engine.check_idle()


def test_running_out_of_pages_preempts_the_newest_and_changes_no_token(target):
    many = prompts(6, seed=2, longest=90)
    alone = [alone_without_draft(target, p, max_tokens=60).tokens for p in many]
    generous = small_engine(target, tiny_draft(target))
    need = generous.cache.units_for(160, 24)
    engine = small_engine(target, tiny_draft(target), kv_cache_memory_bytes=need * generous.pool.unit_bytes)
    outputs = run(engine, [request(p, max_tokens=60) for p in many])
    assert [o.tokens for o in outputs] == alone
    assert sum(o.preemptions for o in outputs) > 0
    assert outputs[0].preemptions == 0
    engine.check_idle()


@pytest.mark.parametrize("causal", [False, True])
def test_a_prefix_hit_restores_the_drafts_keys_and_changes_no_token(target, causal):
    prompt = prompts(1, seed=21, longest=90)[0] + list(range(3, 80))
    plain = alone_without_draft(target, prompt)
    draft = right_some_of_the_time(target, prompt, plain.tokens, causal=causal)
    engine = small_engine(target, draft)
    first, second = (run(engine, [request(prompt)])[0] for _ in range(2))
    assert first.cached_tokens == 0
    assert second.cached_tokens >= 64
    assert first.tokens == second.tokens == plain.tokens
    assert second.committed_per_step == first.committed_per_step
    longer = prompt + plain.tokens[:20] + [5, 6, 7]
    [third] = run(engine, [request(longer)])
    assert third.cached_tokens > second.cached_tokens
    assert third.tokens == alone_without_draft(target, longer).tokens
    engine.check_idle()
    engine.pool.flush()
    assert len(engine.pool.free_units) == engine.pool.num_units


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_fixed_row_layout_even_the_logprobs_bits_are_equal_with_and_without_the_draft(dtype):
    target = tiny_target(dtype=dtype)
    many = prompts(3, seed=4)
    for prompt in many:
        plain = alone_without_draft(target, prompt, logprobs=3, max_tokens=80)
        draft = right_some_of_the_time(target, prompt, plain.tokens)
        engine = small_engine(target, draft)
        for _ in range(2):  # the second time with a prefix hit
            [output] = run(engine, [request(prompt, logprobs=3, max_tokens=80)])
            assert output.tokens == plain.tokens
            assert output.logprobs == plain.logprobs


def test_in_bfloat16_neither_batch_nor_preemption_changes_a_bit():
    target = tiny_target(dtype=torch.bfloat16)
    many = prompts(9, seed=6)
    alone = [alone_without_draft(target, p, logprobs=1) for p in many]
    engine = small_engine(target, tiny_draft(target), max_num_seqs=9, enable_prefix_caching=False)

    def preempt_sometimes(engine, step):
        if step % 7 == 6 and engine.settle() is not None and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[-1])

    outputs = run(engine, [request(p, logprobs=1) for p in many], preempt_sometimes)
    assert [o.tokens for o in outputs] == [o.tokens for o in alone]
    assert [o.logprobs for o in outputs] == [o.logprobs for o in alone]


def test_a_request_may_choose_its_own_width():
    target = tiny_target()
    prompt = prompts(1, seed=3)[0]
    plain = alone_without_draft(target, prompt)
    draft = right_some_of_the_time(target, prompt, plain.tokens)
    engine = small_engine(target, draft)
    requests = [request(prompt) for _ in range(3)]
    for one, width in zip(requests, (0, 2, 7), strict=True):
        one.max_draft_tokens = width
    outputs = run(engine, requests)
    assert all(o.tokens == plain.tokens for o in outputs)
    assert [max(o.drafted_per_step) for o in outputs] == [0, 2, 7]
    assert max(outputs[1].committed_per_step) <= 3
