"""Ends of requests, limits, aborts, refusals, and what the steps report."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pairs import VOCAB, OftenRight, prompts, request, run, small_engine, tiny_draft, tiny_target

from flashdraft.engine.engine import Engine, EngineConfig
from flashdraft.engine.request import Request, SamplingParams
from flashdraft.errors import ConfigError, FlashdraftError, RequestError
from flashdraft.targets.target import packed_attend

pytestmark = pytest.mark.usefixtures("steps")

PROMPT = prompts(1, seed=3)[0]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def plain(target):
    return run(small_engine(target), [request(PROMPT, max_tokens=60)])[0].tokens


def all_right(target, tokens, prompt=PROMPT):
    draft = tiny_draft(target, kind=OftenRight)
    draft.truth, draft.hit_rate = {len(prompt) + i: t for i, t in enumerate(tokens)}, 1.1
    return draft


def first_of_its_kind(tokens, start):
    """An index from `start` on whose token does not occur before it."""
    return next(i for i in range(start, len(tokens)) if tokens[i] not in tokens[:i])


def test_a_draft_that_is_always_right_commits_whole_blocks(target, plain):
    [output] = run(small_engine(target, all_right(target, plain)), [request(PROMPT, max_tokens=57)])
    assert output.tokens == plain[:57]
    assert output.committed_per_step == [8] * 7
    assert output.acceptance_length == 8.0


def test_a_stop_id_inside_a_block_ends_it_and_drops_the_rest(target, plain):
    stop = first_of_its_kind(plain, 3)
    assert (stop - 1) % 8 != 7, "the stop must not be the last of its block"
    for draft in (None, all_right(target, plain)):
        engine = small_engine(target, draft)
        [output] = run(engine, [request(PROMPT, stop_ids=frozenset({plain[stop]}), logprobs=0)])
        assert output.tokens == plain[: stop + 1]
        assert (output.finish_reason, output.stop_token) == ("stop", plain[stop])
        assert len(output.logprobs) == len(output.tokens)
        assert sum(output.committed_per_step) + 1 == len(output.tokens)
        engine.check_idle()


def test_a_stop_at_the_token_limit_is_a_stop_and_one_behind_it_is_not_seen(target, plain):
    stop = first_of_its_kind(plain, 3)
    for limit, reason in ((stop + 1, "stop"), (stop, "length")):
        for draft in (None, all_right(target, plain)):
            [output] = run(small_engine(target, draft), [request(PROMPT, stop_ids=frozenset({plain[stop]}), max_tokens=limit)])
            assert (output.finish_reason, len(output.tokens)) == (reason, limit)


@pytest.mark.parametrize("limit", range(1, 19))
def test_max_tokens_is_exact_inside_blocks(target, plain, limit):
    [output] = run(small_engine(target, all_right(target, plain)), [request(PROMPT, max_tokens=limit)])
    assert output.tokens == plain[:limit]
    assert output.finish_reason == "length"


def test_min_tokens_forbids_a_stop_at_each_rows_own_index(target, plain):
    stop = first_of_its_kind(plain, 2)
    ids = frozenset({plain[stop]})
    for minimum in (stop, stop + 1, stop + 4):
        outputs = []
        for draft in (None, all_right(target, plain)):
            outputs += run(small_engine(target, draft), [request(PROMPT, stop_ids=ids, min_tokens=minimum, max_tokens=40)])
        assert outputs[0].tokens == outputs[1].tokens
        assert outputs[0].finish_reason == outputs[1].finish_reason
        assert plain[stop] not in outputs[1].tokens[:minimum]
        assert (outputs[1].tokens == plain[: stop + 1]) == (minimum == stop)


def test_on_token_sees_every_committed_token_once_and_can_end_the_request(target, plain):
    for draft in (None, all_right(target, plain)):
        seen = []

        def hook(token, seen=seen):
            seen.append(token)
            return "stop" if len(seen) == 12 else None

        one = request(PROMPT)
        one.on_token = hook
        [output] = run(small_engine(target, draft), [one])
        assert seen == output.tokens == plain[:12]
        assert output.finish_reason == "stop"


@pytest.mark.parametrize("spare", [1, 2, 7, 8, 9])
def test_the_end_of_the_context_ends_the_answer(target, plain, spare):
    for draft in (None, all_right(target, plain)):
        engine = small_engine(target, draft, max_model_len=len(PROMPT) + spare)
        [output] = run(engine, [request(PROMPT, max_tokens=None)])
        assert output.tokens == plain[:spare]
        assert output.finish_reason == "length"
        engine.check_idle()


def test_a_constraint_masks_every_position_of_a_block(target, plain):
    class OnlyEven:
        def __init__(self):
            self.consumed = []

        def masks(self, proposals):
            return (torch.arange(VOCAB) % 2 == 0).expand(len(proposals) + 1, -1)

        def advance(self, token):
            self.consumed.append(token)

    texts = []
    for draft in (None, tiny_draft(target), all_right(target, plain)):
        one = request(PROMPT)
        one.constraint = OnlyEven()
        [output] = run(small_engine(target, draft), [one])
        assert all(token % 2 == 0 for token in output.tokens)
        assert one.constraint.consumed == output.tokens
        texts.append(output.tokens)
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding"])
def test_abort_frees_everything(target, when):
    engine = small_engine(target, tiny_draft(target), max_num_batched_tokens=8, max_num_seqs=1)
    outputs = [engine.add(request(p)) for p in (list(range(3, 40)), PROMPT)]
    for _ in range({"waiting": 1, "prefilling": 2, "decoding": 9}[when]):
        engine.step()
    victim = outputs[1] if when == "waiting" else outputs[0]
    assert bool(victim.tokens) == (when == "decoding")
    assert engine.abort(victim.request.id)
    assert victim.finish_reason == "abort"
    assert not engine.abort(victim.request.id)
    while engine.has_work:
        engine.step()
    engine.check_idle()


@pytest.mark.slow
def test_sampled_tokens_of_the_engine_follow_the_targets_distribution(target, steps):
    """Chi-square over the pairs (second, third token): three positions of a block, a draft that is right some of the time."""
    prompt, count, temperature = PROMPT[:6], 600 if steps else 1500, 0.6
    draft = tiny_draft(target, kind=OftenRight)
    draft.truth, draft.hit_rate = {len(prompt) + i: 5 + i for i in range(4)}, 0.5
    engine = small_engine(target, draft, max_num_seqs=64, kv_cache_memory_bytes=64 << 20)
    outputs = run(engine, [request(prompt, max_tokens=3, temperature=temperature, seed=s, top_k=3) for s in range(count)])
    seen = Counter(tuple(o.tokens) for o in outputs)
    expected = {}
    for first, p1 in next_tokens(target, prompt, temperature):
        for second, p2 in next_tokens(target, [*prompt, first], temperature):
            for third, p3 in next_tokens(target, [*prompt, first, second], temperature):
                expected[first, second, third] = p1 * p2 * p3 * count
    assert set(seen) <= set(expected)
    bins = [(seen[key], mean) for key, mean in expected.items() if mean >= 5]
    rest = (count - sum(s for s, _ in bins), count - sum(m for _, m in bins))
    chi2 = sum((s - m) ** 2 / m for s, m in [*bins, rest] if m > 0)
    freedom = len(bins)
    assert freedom >= 5
    # Wilson and Hilferty: the cube root of chi2 / k is nearly normal; 4 sigma.
    assert (chi2 / freedom) ** (1 / 3) < 1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))


def next_tokens(target, tokens, temperature):
    n = len(tokens)
    attend = packed_attend(torch.zeros(n), torch.arange(n))
    logits = target.forward(torch.tensor(tokens), torch.arange(n), attend, torch.tensor([n - 1]))[0][0]
    top = logits.topk(3)
    return list(zip(top.indices.tolist(), (top.values / temperature).softmax(-1).tolist(), strict=True))


def test_answers_of_one_seed_differ_by_choice_and_repeat_by_seed(target):
    engine = small_engine(target, tiny_draft(target))

    def answers(seed):
        batch = [request(PROMPT, temperature=1.0, seed=seed) for _ in range(4)]
        for choice, one in enumerate(batch):
            one.choice = choice
        return [o.tokens for o in run(engine, batch)]

    assert len({tuple(a) for a in answers(1)}) == 4
    assert answers(1) == answers(1)
    assert answers(1) != answers(2)


def test_unseeded_requests_differ(target):
    outputs = run(small_engine(target), [request(PROMPT, temperature=1.0) for _ in range(4)])
    assert len({tuple(o.tokens) for o in outputs}) == 4


REFUSED = {
    "an empty prompt": ([], {}, "empty"),
    "a prompt as long as the context": ([5] * 256, {}, "context holds 256"),
    "a token outside the vocabulary": ([5, VOCAB], {}, "not an id of the target's vocabulary"),
    "a negative token": ([5, -1], {}, "not an id of the target's vocabulary"),
    "a number that is no id": ([5, 3.5], {}, "not an id of the target's vocabulary"),
    "a bias for no token": ([5], {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_requests_are_refused_and_nothing_is_queued(target, name):
    prompt, params, words = REFUSED[name]
    engine = small_engine(target)
    with pytest.raises(RequestError, match=words):
        engine.add(request(prompt, **params))
    engine.check_idle()


def test_an_id_in_use_is_refused(target):
    engine = small_engine(target)
    first, second = request(PROMPT), request(PROMPT)
    second.id = first.id
    engine.add(first)
    with pytest.raises(RequestError, match="in use"):
        engine.add(second)
    assert engine.abort(first.id)
    engine.check_idle()


def test_a_request_that_can_never_fit_is_refused_at_once(target):
    engine = small_engine(target, kv_cache_memory_bytes=4 * small_engine(target).pool.unit_bytes)
    with pytest.raises(RequestError, match="lower max_tokens or raise kv_cache_memory_bytes"):
        engine.add(request([5] * 20, max_tokens=200))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"page_size": 24}, "page_size must divide 256"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_model_len": 4096}, "more than the 2048 positions"),
        ({"num_speculative_tokens": 9}, "more than this draft's 7 proposals"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"row_multiple": 1.5}, "row_multiple"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be a number above 0"),
        ({"kv_cache_share": 0}, "kv_cache_share must be a number above 0"),
    ],
)
def test_bad_limits_are_refused(target, options, words):
    with pytest.raises(ConfigError, match=words):
        Engine(target, tiny_draft(target), EngineConfig(**options))


def test_broken_logits_end_their_request_with_an_error_and_no_token(target):
    broken = tiny_target(seed=5)
    broken.model.lm_head.weight.fill_(float("nan"))
    engine = small_engine(broken)
    [output] = run(engine, [request(PROMPT)])
    assert (output.tokens, output.finish_reason) == ([], "error")
    assert isinstance(output.error, FlashdraftError)
    assert "logits" in str(output.error)
    engine.check_idle()


class Impossible:
    """A constraint that allows nothing from the third token of the output on."""

    def __init__(self):
        self.seen = 0

    def masks(self, proposals):
        allowed = [self.seen + i < 2 for i in range(len(proposals) + 1)]
        return torch.tensor(allowed)[:, None].expand(-1, VOCAB)

    def advance(self, token):
        self.seen += 1


def test_one_request_without_a_choice_does_not_disturb_the_others(target, plain):
    stuck = request(prompts(1, seed=8)[0])
    stuck.constraint = Impossible()
    engine = small_engine(target, all_right(target, plain))
    healthy, ended = run(engine, [request(PROMPT), stuck])
    assert healthy.tokens == plain[:40]
    assert (len(ended.tokens), ended.finish_reason) == (2, "error")
    assert "grammar" in str(ended.error)
    engine.check_idle()


@pytest.mark.parametrize("at", range(1, 14))
def test_a_hook_that_raises_ends_its_request_and_no_other(target, at):
    def hook(token, count=[0]):  # noqa: B006
        count[0] += 1
        if count[0] == at:
            raise ValueError("mine")

    first, second = request(list(range(3, 13)), max_tokens=60), request(list(range(3, 60)), max_tokens=10)
    alone = run(small_engine(target), [request(list(range(3, 60)), max_tokens=10)])[0]
    first.on_token = lambda token, count=[0]: hook(token, count)
    engine = small_engine(target, tiny_draft(target))
    broken, healthy = run(engine, [first, second])
    assert (len(broken.tokens), broken.finish_reason) == (at, "error")
    assert isinstance(broken.error, ValueError)
    assert healthy.tokens == alone.tokens
    engine.check_idle()


@pytest.mark.parametrize("at", [1, 5, 8])
@pytest.mark.parametrize("other_length", [5, 50])
@pytest.mark.parametrize("own", [True, False], ids=["its own request", "another request"])
def test_a_hook_may_abort(target, at, other_length, own):
    engine = small_engine(target, tiny_draft(target))
    first, second = request(list(range(3, 13))), request(list(range(5, 5 + other_length)))
    victim, seen = (first if own else second), []

    def hook(token):
        seen.append(token)
        if len(seen) == at:
            engine.abort(victim.id)

    first.on_token = hook
    outputs = run(engine, [first, second])
    ended, other = outputs if own else outputs[::-1]
    assert ended.finish_reason == "abort"
    assert len(ended.tokens) == at or not own
    assert (other.finish_reason, len(other.tokens)) == ("length", 40)
    engine.check_idle()


@pytest.mark.parametrize(("page_size", "chunk"), [(1, 1), (1, 4), (16, 1)])
def test_what_add_accepts_runs_in_exactly_the_memory_it_asks_for(page_size, chunk):
    windowed = tiny_target(window=8)
    draft = tiny_draft(windowed, window=8, block_size=16)
    options = {"page_size": page_size, "max_num_batched_tokens": chunk}
    roomy = small_engine(windowed, draft, **options)
    # With every layer windowed the need does not grow with the length, so nothing is to spare.
    units = roomy.cache.units_for(len(PROMPT) + 40 + 16, max(chunk, 16))
    tight = small_engine(windowed, draft, **options, kv_cache_memory_bytes=units * roomy.pool.unit_bytes)
    [output] = run(tight, [request(PROMPT)])
    assert output.tokens == run(small_engine(windowed), [request(PROMPT)])[0].tokens
    assert output.preemptions == 0
    with pytest.raises(RequestError, match="raise kv_cache_memory_bytes"):
        tight.add(request(PROMPT, max_tokens=200))


def test_the_callers_draft_is_left_as_it_was(target):
    draft = tiny_draft(target)
    before = {k: v.clone() for k, v in draft.state_dict().items()}
    Engine(tiny_target(dtype=torch.bfloat16), draft, EngineConfig(max_model_len=64))
    after = draft.state_dict()
    assert all(torch.equal(after[k], v) and after[k].dtype == v.dtype for k, v in before.items())


@pytest.mark.slow
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 6), st.integers(0, 7), st.booleans())
def test_any_mix_of_lengths_slots_and_widths_ends_with_all_pages_free(lengths, slots, width, sampled):
    target = SHARED
    engine = small_engine(target, SHARED_DRAFT, max_num_seqs=slots, num_speculative_tokens=width, kv_cache_memory_bytes=1 << 20)
    params = {"temperature": 0.8, "seed": 4} if sampled else {}
    outputs = run(engine, [request([3 + n] * n, max_tokens=n, **params) for n in lengths])
    assert [len(o.tokens) for o in outputs] == lengths
    engine.check_idle()


SHARED = tiny_target(layers=2)
SHARED_DRAFT = tiny_draft(SHARED)


def test_a_default_request_has_a_fresh_seed_each_time():
    assert SamplingParams().resolved_seed() != SamplingParams().resolved_seed()
    assert Request([1], SamplingParams()).seed is None


@pytest.mark.parametrize("options", [{"enforce_eager": True}, {"deterministic": True}, {"gpu_memory_utilization": 0.5}])
def test_options_of_async_scheduling_are_refused_without_it(options):
    words = r"is an option of async_scheduling, which is off \(by default on the CPU\): set async_scheduling=True as well"
    with pytest.raises(ConfigError, match=words):
        EngineConfig(async_scheduling=False, **options)
    with pytest.raises(ConfigError, match=words):
        Engine(tiny_target(), None, EngineConfig(**options))
    EngineConfig(async_scheduling=True, **options)


def test_on_the_cpu_steps_run_to_their_end_unless_asked_otherwise(target):
    default = Engine(target, None, EngineConfig(max_model_len=64))
    ahead = Engine(target, None, EngineConfig(max_model_len=64, async_scheduling=True))
    assert (default.config.async_scheduling, default.runner.asynchronous) == (False, False)
    assert (ahead.config.async_scheduling, ahead.runner.asynchronous) == (True, True)
    assert (default.fusion, default.memory) == (None, None)
