"""On a GPU the engine serves the same requests; in float32 with the same tokens as on the CPU."""

from __future__ import annotations

import pytest
import torch
from pairs import OftenRight, prompts, request, run, small_engine, tiny_draft, tiny_target

from flashdraft.engine.engine import Engine, EngineConfig
from flashdraft.errors import ConfigError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

PARAMS = [
    {},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.8, "seed": 2, "top_p": 0.9},
    {"temperature": 0.8, "seed": 3, "top_k": 7, "min_p": 0.01, "logprobs": 1, "presence_penalty": 0.3},
]
STEPS = {
    "host": {},
    "ahead, op by op": {"async_scheduling": True, "enforce_eager": True},
    "ahead, captured": {"async_scheduling": True, "max_num_seqs": 6},
    "ahead, captured, all proposals": {"async_scheduling": True, "max_num_seqs": 6, "adaptive_width": False},
}


def on_gpu(window=None, dtype=torch.float32):
    target = tiny_target(window=window, dtype=dtype)
    target.model.to("cuda")
    return target


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("steps", STEPS)
def test_tokens_on_the_gpu_equal_those_on_the_cpu_with_and_without_the_draft(steps, window, params):
    many = prompts(5, seed=4)
    expected = [o.tokens for o in run(small_engine(tiny_target(window=window)), [request(p, **params) for p in many])]
    target, options = on_gpu(window), STEPS[steps]
    for pair in (None, tiny_draft(target)):
        engine = small_engine(target, pair, **options)
        assert [o.tokens for o in run(engine, [request(p, **params) for p in many])] == expected
        assert [o.tokens for o in run(engine, [request(p, **params) for p in many])] == expected, "the prefix cache"
        engine.check_idle()
    if options.get("async_scheduling") and not options.get("enforce_eager"):
        return  # the draft that knows the truth looks at positions on the host, which a graph cannot
    for prompt, tokens in zip(many, expected, strict=True):
        draft = tiny_draft(target, kind=OftenRight)
        draft.truth = {len(prompt) + i: token for i, token in enumerate(tokens)}
        [output] = run(small_engine(target, draft, **options), [request(prompt, **params)])
        assert output.tokens == tokens
        assert max(output.committed_per_step) > 1


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("steps", STEPS)
def test_prompts_are_scored_as_on_the_cpu(steps, window):
    many = [*prompts(5, seed=4), [(7 * i) % 90 + 3 for i in range(150)]]
    params = [{}, *[{"prompt_logprobs": 2}] * 5]
    asked = list(zip(many, params, strict=True))
    expected = run(small_engine(tiny_target(window=window)), [request(p, **own) for p, own in asked])
    target = on_gpu(window)
    engine = small_engine(target, tiny_draft(target), max_num_batched_tokens=256, **STEPS[steps])
    for _ in range(2):  # the second time with all prompts in the prefix cache
        outputs = run(engine, [request(p, **own) for p, own in asked])
        assert [o.tokens for o in outputs] == [o.tokens for o in expected]
        assert outputs[0].prompt_logprobs is None
        for output, other in zip(outputs[1:], expected[1:], strict=True):
            assert output.prompt_logprobs[0] is None
            for entry, same in zip(output.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
                assert (entry.token, entry.rank) == (same.token, same.rank)
                assert entry.logprob == pytest.approx(same.logprob, abs=1e-3)
    engine.check_idle()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 20])
def test_deterministic_text_is_the_same_bits_alone_in_a_batch_and_with_a_draft(window, dtype):
    many = prompts(6, seed=11)
    target = on_gpu(window, dtype)
    options = dict(async_scheduling=True, deterministic=True, max_num_seqs=6, adaptive_width=False)
    alone = [run(small_engine(target, **options), [request(p, logprobs=1)])[0] for p in many]
    for pair in (None, tiny_draft(target)):
        outputs = run(small_engine(target, pair, **options), [request(p, logprobs=1) for p in many])
        assert [o.tokens for o in outputs] == [o.tokens for o in alone]
        assert [o.logprobs for o in outputs] == [o.logprobs for o in alone]


def test_memory_is_sized_and_reported_and_too_little_is_said_in_one_sentence():
    target = on_gpu()
    engine = Engine(target, None, EngineConfig(async_scheduling=True, gpu_memory_utilization=0.2, max_num_seqs=4))
    assert engine.memory is not None
    assert 0 < engine.memory.pages < 0.2 * engine.memory.total
    assert "KV cache" in str(engine.memory)
    with pytest.raises(ConfigError, match="too little GPU memory"):
        Engine(target, None, EngineConfig(async_scheduling=True, gpu_memory_utilization=0.001, max_num_seqs=4))


def test_two_engines_share_a_gpu_within_what_they_may_take_together():
    target = on_gpu()
    limits = dict(gpu_memory_utilization=0.3, max_num_seqs=1)
    first = Engine(target, tiny_draft(target), EngineConfig(**limits, kv_cache_share=0.4))
    second = Engine(target, None, EngineConfig(**limits))
    assert first.config.async_scheduling, "on a GPU that is the default"
    assert first.memory.pages + second.memory.pages < 0.3 * first.memory.total
    assert second.memory.pages > first.memory.pages
    prompt = prompts(1)[0]
    assert run(first, [request(prompt)])[0].tokens == run(second, [request(prompt)])[0].tokens


def test_out_of_pages_preempts_on_the_gpu_too():
    many = prompts(8, seed=2)
    expected = [o.tokens for o in run(small_engine(tiny_target()), [request(p, max_tokens=60) for p in many])]
    target = on_gpu()
    engine = small_engine(target, tiny_draft(target), async_scheduling=True, max_num_seqs=8, kv_cache_memory_bytes=400_000)
    outputs = run(engine, [request(p, max_tokens=60) for p in many])
    assert [o.tokens for o in outputs] == expected
    assert sum(o.preemptions for o in outputs) > 0, "memory was never short: the test shows nothing"
    engine.check_idle()
