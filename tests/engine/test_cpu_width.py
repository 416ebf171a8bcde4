"""On the CPU: rows of all sequences run packed and change no bit, and how many are verified follows from what pays."""

from __future__ import annotations

import pytest
import torch
from pairs import OftenRight, prompts, request, run, small_engine, tiny_draft, tiny_target
from saved import saved_pair

from flashdraft import LLM
from flashdraft.engine.cache import NOTHING
from flashdraft.engine.engine import EngineConfig
from flashdraft.engine.width import StepCost, WidthPolicy
from flashdraft.errors import ConfigError

SAMPLED = dict(temperature=0.9, seed=11)


def adaptive(target, draft, **options):
    return small_engine(target, draft, async_scheduling=False, adaptive_width=True, max_num_seqs=16, **options)


def knowing(target, prompt, tokens, hit_rate=0.75):
    draft = tiny_draft(target, kind=OftenRight)
    draft.truth, draft.hit_rate = {len(prompt) + i: token for i, token in enumerate(tokens)}, hit_rate
    return draft


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 20])
def test_any_mix_of_widths_writes_what_each_request_writes_alone(dtype, window, params):
    target = tiny_target(dtype=dtype, window=window)
    many = prompts(11, seed=12, longest=90)
    alone = [run(small_engine(target), [request(p, logprobs=2, **params)])[0] for p in many]
    draft = knowing(target, many[0], alone[0].tokens)
    for widths in ([0] * 11, [1] * 11, [0, 7] * 5 + [3], [5, 0, 2, 7, 1, 6, 0, 4, 3, 0, 0], [7] * 11):
        requests = [request(p, logprobs=2, **params) for p in many]
        for one, width in zip(requests, widths, strict=True):
            one.max_draft_tokens = width
        engine = small_engine(target, draft, max_num_seqs=11)
        outputs = run(engine, requests)
        assert [o.tokens for o in outputs] == [o.tokens for o in alone]
        assert [max(o.drafted_per_step) for o in outputs] == widths
        if dtype == torch.bfloat16:
            assert [o.logprobs for o in outputs] == [o.logprobs for o in alone]
        engine.check_idle()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("streams", [1, 3, 16])
def test_widths_that_the_policy_chooses_change_no_token(dtype, streams):
    target = tiny_target(dtype=dtype)
    many = prompts(streams, seed=6)
    alone = [run(small_engine(target), [request(p, max_tokens=60, **SAMPLED)])[0].tokens for p in many]
    engine = adaptive(target, knowing(target, many[0], alone[0]))
    outputs = run(engine, [request(p, max_tokens=60, **SAMPLED) for p in many])
    assert [o.tokens for o in outputs] == alone
    engine.check_idle()


def drafted_of(outputs):
    """Rows drafted and steps taken in the second half of every answer."""
    steps = [d for o in outputs for d in o.drafted_per_step[len(o.drafted_per_step) // 2 :]]
    return sum(steps), len(steps)


@pytest.mark.parametrize("streams", [1, 16])
def test_a_draft_that_knows_nothing_is_turned_off(streams):
    target = tiny_target()
    engine = adaptive(target, tiny_draft(target))
    outputs = run(engine, [request(p, max_tokens=180) for p in prompts(streams, seed=4)])
    rows, steps = drafted_of(outputs)
    assert sum(outputs[0].drafted_per_step[:5]) > 0, "it was tried"
    assert rows < 0.5 * steps, "a probe now and then, of up to 7 rows"


def test_a_draft_that_knows_it_all_is_verified_whole_where_rows_are_free():
    target = tiny_target()
    [prompt] = prompts(1, seed=4)
    [plain] = run(small_engine(target), [request(prompt, max_tokens=180)])
    engine = adaptive(target, knowing(target, prompt, plain.tokens, hit_rate=1.1))
    # Of eight rows as on a target that is bound by its weights; the tiny one is bound by what surrounds it.
    engine.scheduler.policy = WidthPolicy(7, StepCost(lambda sequences, rows: 1.0 + 0.01 * (rows > 8), lambda n: 0.3))
    [output] = run(engine, [request(prompt, max_tokens=180)])
    assert output.tokens == plain.tokens
    assert set(output.drafted_per_step[:-1]) == {7}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [1, 2, 16, 40])
def test_measured_costs_grow_and_leave_everything_as_it_was(dtype, slots):
    target = tiny_target(dtype=dtype, window=20)
    engine = small_engine(target, tiny_draft(target), async_scheduling=False, max_num_seqs=slots)
    [prompt] = prompts(1, seed=5)
    [before] = run(engine, [request(prompt)])
    cost = engine.runner.measure(budget=0.05)
    engine.pool.flush()
    engine.check_idle()
    assert not engine.pool.memory[NOTHING].any(), "what is read where there is no page stays zeros"
    for sequences in range(1, slots + 1):
        seconds = [cost.verify(sequences, rows) for rows in range(sequences, 8 * sequences + 1)]
        assert seconds[0] > 0
        assert seconds == sorted(seconds)
        assert 0 < cost.draft(sequences) <= cost.draft(sequences + 1)
    [after] = run(engine, [request(prompt)])
    assert after.tokens == before.tokens
    assert after.committed_per_step == before.committed_per_step


def test_who_adapts(tmp_path):
    target = tiny_target()
    draft = tiny_draft(target)

    def policy(**options):
        return small_engine(target, draft, **{"async_scheduling": False, **options}).scheduler.policy

    assert policy() is None, "an engine by itself verifies all"
    assert policy(adaptive_width=False) is None
    assert isinstance(policy(adaptive_width=True), WidthPolicy)
    assert policy(adaptive_width=True, num_speculative_tokens=0) is None, "there is nothing to choose"
    assert policy(async_scheduling=True) is None
    with pytest.raises(ConfigError, match="adaptive_width needs step times to go by"):
        policy(async_scheduling=True, adaptive_width=True)
    cpu = torch.device("cpu")
    assert EngineConfig().for_serving(cpu).adaptive_width is True
    assert EngineConfig(adaptive_width=False).for_serving(cpu).adaptive_width is False
    assert EngineConfig(async_scheduling=True).for_serving(cpu).adaptive_width is None
    pair = saved_pair(tmp_path)
    options = dict(dtype="float32", device="cpu", max_model_len=64)
    llm = LLM(pair.target, pair.draft, **options)
    assert isinstance(llm.engine.scheduler.policy, WidthPolicy)
    assert llm.without_draft().engine.scheduler.policy is None
    assert LLM(pair.target, pair.draft, **options, adaptive_width=False).engine.scheduler.policy is None
