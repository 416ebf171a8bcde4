"""Log-probabilities of prompts are those of one plain forward of transformers, whatever else runs."""

from __future__ import annotations

import contextlib
import copy
import functools
import random

import pytest
import torch
from pairs import OftenRight, prompts, request, run, small_engine, tiny_draft, tiny_target

from flashdraft.engine import scheduler
from flashdraft.engine.prompt_scores import score
from flashdraft.engine.request import Output, Request, SamplingParams
from flashdraft.engine.scheduler import PrefillChunk
from flashdraft.engine.sequence import Sequence

pytestmark = pytest.mark.usefixtures("steps")
LONG = [(7 * i * i + i * i * i + 3) % 90 + 3 for i in range(161)]


@functools.cache
def plain_logs(prompt, window=None):
    """log_softmax [T, V] of transformers' own attention."""
    ours = tiny_target(window=window).model
    config = copy.deepcopy(ours.config)
    config._attn_implementation = "eager"
    model = type(ours)(config).eval()
    model.load_state_dict(ours.state_dict())
    with torch.no_grad():
        return model(torch.tensor([list(prompt)]), use_cache=False).logits[0].float().log_softmax(-1)


def check(output, wanted, window=None):
    prompt, scores = output.request.prompt, output.prompt_logprobs
    assert len(scores) == len(prompt)
    assert scores[0] is None
    for token, logs, entry in zip(prompt[1:], plain_logs(tuple(prompt), window), scores[1:], strict=False):
        assert entry.token == token
        assert entry.logprob == pytest.approx(float(logs[token]), abs=1e-4)
        assert entry.rank == 1 + int((logs > logs[token]).sum())
        best = logs.topk(wanted)
        assert [t for t, _ in entry.top] == best.indices.tolist()
        assert [log for _, log in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def short(prompt, **params):
    return request(prompt, **{"max_tokens": 12, **params})


def engine_of(target, drafted, **options):
    draft = None
    if drafted:
        draft = tiny_draft(target, kind=OftenRight)
        draft.truth = {}
    return small_engine(target, draft, max_num_batched_tokens=options.pop("chunk", 24), **options)


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("chunk", [24, 200])
def test_they_are_those_of_a_plain_forward_and_the_answer_stays(drafted, window, chunk):
    target = tiny_target(window=window)
    for prompt in ([5], [5, 9], LONG, LONG[:129]):
        [plain] = run(engine_of(target, drafted, chunk=chunk), [short(prompt)])
        [output] = run(engine_of(target, drafted, chunk=chunk), [short(prompt, prompt_logprobs=3, logprobs=1)])
        check(output, 3, window)
        assert output.tokens == plain.tokens
        assert plain.prompt_logprobs is None
        assert output.logprobs[0].rank is None


def test_without_likeliest_tokens_there_are_still_the_prompts_own():
    [output] = run(engine_of(tiny_target(), False), [short(LONG[:40], prompt_logprobs=0)])
    check(output, 0)
    [alone] = run(engine_of(tiny_target(), False), [short([7], prompt_logprobs=5)])
    assert alone.prompt_logprobs == [None]


def test_beside_others_each_gets_its_own():
    target = tiny_target()
    many = [*prompts(8, seed=21), LONG, LONG[:150]]
    params = [dict(prompt_logprobs=i % 4) if i % 3 else {} for i in range(len(many))]
    params[1] |= dict(temperature=0.8, seed=4)
    alone = [run(engine_of(target, False), [short(p, **own)])[0] for p, own in zip(many, params, strict=True)]
    for chunk in (24, 200):
        engine = engine_of(target, True, chunk=chunk)
        outputs = run(engine, [short(p, **own) for p, own in zip(many, params, strict=True)])
        assert [o.tokens for o in outputs] == [o.tokens for o in alone]
        for output, own in zip(outputs, params, strict=True):
            if own.get("prompt_logprobs") is None:
                assert output.prompt_logprobs is None
            else:
                check(output, own["prompt_logprobs"])
        engine.check_idle()


def test_no_step_scores_more_positions_than_it_may(monkeypatch):
    monkeypatch.setattr(scheduler, "MOST_SCORED", 20)
    engine = engine_of(tiny_target(), False, chunk=64)
    seen, launch = [], engine.runner.launch
    engine.runner.launch = lambda batch: seen.append([c.scored for c in batch.prefill]) or launch(batch)
    outputs = run(engine, [short(p, prompt_logprobs=1) for p in (LONG[:70], LONG[1:51], LONG[2:12])] + [short(LONG[3:90])])
    assert max(map(sum, seen)) == 20
    assert sum(map(sum, seen)) == 69 + 49 + 9
    for output in outputs[:3]:
        check(output, 1)


def test_other_prompts_do_not_wait_for_those_to_be_scored(steps, monkeypatch):
    monkeypatch.setattr(scheduler, "MOST_SCORED", 4)
    engine = engine_of(tiny_target(), False, chunk=64)
    scored = [engine.add(short(LONG[i : i + 90], prompt_logprobs=1)) for i in range(2)]
    other = engine.add(short(LONG[7:40]))
    count = 0
    while engine.has_work:
        engine.step()
        count += not other.tokens
        engine.settle()
    assert count < 4 or not steps  # a CPU takes one prompt a step
    for output in scored:
        check(output, 1)
    engine.check_idle()


def test_a_cached_prompt_is_scored_all_the_same_and_found_again():
    target = tiny_target()
    engine = engine_of(target, True)
    [first] = run(engine, [short(LONG)])
    [scored] = run(engine, [short(LONG, prompt_logprobs=2)])
    check(scored, 2)
    assert scored.cached_tokens == 0
    [again] = run(engine, [short(LONG)])
    assert again.cached_tokens > 100
    assert first.tokens == scored.tokens == again.tokens
    both = run(engine, [short(LONG, prompt_logprobs=1), short(LONG), short(LONG, prompt_logprobs=1)])
    check(both[0], 1)
    check(both[2], 1)
    assert [o.tokens for o in both] == [first.tokens] * 3
    engine.check_idle()


def test_preempted_prompts_lose_and_double_nothing():
    target = tiny_target()
    many = [LONG, LONG[:90], *prompts(3, seed=5)]
    alone = [run(engine_of(target, False), [short(p)])[0] for p in many]
    for caching in (False, True):
        chance = random.Random(3)
        engine = engine_of(target, True, enable_prefix_caching=caching)

        def preempt_sometimes(engine, step, chance=chance):
            if chance.random() < 0.4 and engine.scheduler.running:
                engine.settle()
                if engine.scheduler.running:
                    engine.scheduler.preempt(chance.choice(engine.scheduler.running))

        outputs = run(engine, [short(p, prompt_logprobs=2) for p in many], preempt_sometimes)
        assert sum(o.preemptions for o in outputs) > 5
        assert [o.tokens for o in outputs] == [o.tokens for o in alone]
        for output in outputs:
            check(output, 2)
        engine.check_idle()


def test_a_step_that_failed_or_an_abort_leaves_the_others_whole():
    target = tiny_target()
    engine = engine_of(target, True)
    outputs = [engine.add(short(p, prompt_logprobs=1)) for p in (LONG, LONG[:80])]
    aborted = engine.add(short(LONG[:100], prompt_logprobs=1))
    prefill, failures = engine.runner._prefill, iter([False, False, True, False, True])

    def sometimes(*given, **named):
        prefill(*given, **named)
        if next(failures, False):
            raise RuntimeError("failed")

    engine.runner._prefill = sometimes
    steps = 0
    while engine.has_work:
        with contextlib.suppress(RuntimeError):
            engine.step()
        steps += 1
        if steps == 12:
            engine.abort(aborted.request.id)
    for output in outputs:
        check(output, 1)
    engine.check_idle()


def test_equal_logits_rank_by_token_id():
    asked = Request([0, 5, 6, 7], SamplingParams(prompt_logprobs=2))
    sequence = Sequence(asked, Output(asked), 0, list(asked.prompt), [])
    logits = torch.zeros(3, 9)
    logits[1, 3] = logits[1, 8] = 1.0
    logits[2, 7] = 2.0
    [(_, entries)] = score([PrefillChunk(sequence, 0, 4, True, 3)], logits)
    assert [entry.rank for entry in entries] == [6, 8, 1]
    assert [[t for t, _ in entry.top] for entry in entries] == [[0, 1], [3, 8], [7, 0]]
