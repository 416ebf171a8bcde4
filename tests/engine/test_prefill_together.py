"""Prompts that arrive together are computed together, as far as a step's tokens go, and none of them can tell."""

from __future__ import annotations

import pytest
import torch
from pairs import prompts, request, run, small_engine, tiny_draft, tiny_target

LIMITS = dict(async_scheduling=True, max_num_seqs=8)


def noting_chunks(engine):
    """[(start, count) of every chunk] of every step with any."""
    steps, launch = [], engine.runner.launch

    def noted(batch):
        if batch.prefill:
            steps.append([(chunk.start, chunk.count) for chunk in batch.prefill])
        return launch(batch)

    engine.runner.launch = noted
    return steps


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("tokens", [24, 64, 200])
def test_prompts_together_give_the_texts_of_each_alone(tokens, window):
    many = prompts(7, seed=21)
    expected = [run(small_engine(tiny_target(window=window)), [request(p)])[0].tokens for p in many]
    target = tiny_target(window=window)
    for draft in (None, tiny_draft(target)):
        engine = small_engine(target, draft, max_num_batched_tokens=tokens, **LIMITS)
        steps = noting_chunks(engine)
        assert [o.tokens for o in run(engine, [request(p) for p in many])] == expected
        engine.check_idle()
        assert sum(count for step in steps for _, count in step) == sum(map(len, many))
        assert all(sum(-(-count // 16) * 16 for _, count in step) <= -(-tokens // 16) * 16 for step in steps)
        assert max(map(len, steps)) > 1, "never two prompts in a step: the test shows nothing"


def test_prompts_that_fit_a_step_all_start_in_the_first():
    target = tiny_target()
    engine = small_engine(target, tiny_draft(target), max_num_batched_tokens=200, **LIMITS)
    steps = noting_chunks(engine)
    outputs = [engine.add(request(p, seed=i, temperature=0.8)) for i, p in enumerate(prompts(5, seed=3, longest=30))]
    engine.step()
    engine.settle()
    assert len(steps) == 1
    assert all(len(output.tokens) == 1 for output in outputs)


def test_first_tokens_that_the_host_chooses_beside_others():
    many = prompts(5, seed=9, longest=30)
    params = [{}, {"logprobs": 2}, {"temperature": 0.7, "seed": 4}, {"presence_penalty": 0.5}, {"logit_bias": {5: 3.0}}]
    expected = [run(small_engine(tiny_target()), [request(p, **own)])[0] for p, own in zip(many, params, strict=True)]
    target = tiny_target()
    engine = small_engine(target, tiny_draft(target), max_num_batched_tokens=200, **LIMITS)
    outputs = run(engine, [request(p, **own) for p, own in zip(many, params, strict=True)])
    assert [o.tokens for o in outputs] == [o.tokens for o in expected]
    assert len(outputs[1].logprobs) == len(outputs[1].tokens)


def test_a_prompt_waits_for_one_under_way_that_begins_like_it_and_takes_its_pages():
    target, common = tiny_target(), prompts(1, seed=2, longest=200)[0]
    common = (common * 40)[:70]
    many = [[*common, *p] for p in prompts(4, seed=8, longest=20)]
    expected = [run(small_engine(target), [request(p)])[0].tokens for p in many]
    engine = small_engine(target, tiny_draft(target), max_num_batched_tokens=200, **LIMITS)
    steps = noting_chunks(engine)
    outputs = run(engine, [request(p) for p in many])
    assert [o.tokens for o in outputs] == expected
    assert outputs[0].cached_tokens == 0
    assert all(output.cached_tokens == 64 for output in outputs[1:])
    assert [len(step) for step in steps] == [1, 3]
    engine.check_idle()


def test_without_a_prefix_cache_nothing_is_worth_waiting_for():
    target, common = tiny_target(), [7] * 40
    engine = small_engine(target, max_num_batched_tokens=200, enable_prefix_caching=False, **LIMITS)
    steps = noting_chunks(engine)
    run(engine, [request([*common, i]) for i in range(3, 6)])
    assert [len(step) for step in steps] == [3]


def test_more_prompts_than_a_step_may_begin():
    target = tiny_target()
    many = [p[:4] for p in prompts(20, seed=5)]
    expected = [run(small_engine(target), [request(p, max_tokens=5)])[0].tokens for p in many]
    engine = small_engine(target, max_num_batched_tokens=512, async_scheduling=True, max_num_seqs=32)
    steps = noting_chunks(engine)
    assert [o.tokens for o in run(engine, [request(p, max_tokens=5) for p in many])] == expected
    assert [len(step) for step in steps] == [16, 4]


def test_a_prompt_aborted_beside_others_leaves_nothing():
    target = tiny_target()
    engine = small_engine(target, tiny_draft(target), max_num_batched_tokens=64, **LIMITS)
    requests = [request(p) for p in prompts(6, seed=13)]

    def abort(engine, step):
        if step == 1:
            engine.abort(requests[1].id)
        if step == 2:
            engine.abort(requests[4].id)

    outputs = run(engine, requests, abort)
    assert [o.finish_reason for o in outputs] == ["length", "abort", "length", "length", "abort", "length"]
    engine.check_idle()


def scene(engine, length=400, short=20, count=3):
    """A long prompt under way, and then short ones: the step after which each has its first token."""
    generator = torch.Generator().manual_seed(5)
    many = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in (length, *[short] * count)]
    outputs = [engine.add(request(many[0], max_tokens=3))]
    engine.step()
    outputs += [engine.add(request(p, max_tokens=3)) for p in many[1:]]
    first: dict[int, int] = {}
    for step in range(200):
        engine.step()
        first |= {i: step for i, output in enumerate(outputs) if output.tokens and i not in first}
        if len(first) == len(outputs):
            return many, outputs, first
    raise AssertionError("a prompt is never computed")


def test_short_prompts_need_not_wait_for_all_of_a_long_one_which_takes_twice_as_long_at_most():
    target = tiny_target()
    engine = small_engine(target, tiny_draft(target), max_model_len=512, max_num_batched_tokens=64, **LIMITS)
    steps = noting_chunks(engine)
    many, outputs, first = scene(engine)
    assert [first[i] for i in (1, 2, 3)] == [1, 2, 3]  # one fits, rounded to 32 rows, into half of a step; a step is under way
    assert steps[:5] == [[(0, 64)], [(0, 20), (64, 32)], [(0, 20), (96, 32)], [(0, 20), (128, 32)], [(160, 64)]]
    while engine.has_work:
        engine.step()
    expected = [run(small_engine(tiny_target(), max_model_len=512), [request(p, max_tokens=3)])[0].tokens for p in many]
    assert [output.tokens for output in outputs] == expected
    assert len(steps) <= 2 * -(-400 // 64)
    engine.check_idle()


def test_long_prompts_are_computed_in_the_order_of_their_arrival():
    target = tiny_target()
    engine = small_engine(target, None, max_model_len=512, max_num_batched_tokens=64, **LIMITS)
    steps = noting_chunks(engine)
    _, _, first = scene(engine, short=100, count=2)
    assert first[0] < first[1] <= first[2]
    assert [len(step) for step in steps[:6]] == [1] * 6
