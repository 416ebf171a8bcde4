from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from flashdraft.errors import RequestError
from flashdraft.kernels.rollout import decode_attention_reference, repetition
from flashdraft.targets.target import Target
from flashdraft.train.rollout import Job, Rollout, generate


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48, intermediate_size=48, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, head_dim=8,
        vocab_size=64, max_position_embeddings=128, initializer_range=0.3, eos_token_id=1, bos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    return Target(LlamaForCausalLM(config).float().eval())


def reference(target: Target, prompt: list[int], new: int, stop: int) -> list[int]:
    model = LlamaForCausalLM(copy.deepcopy(target.model.config))
    model.load_state_dict(target.model.state_dict())
    model.set_attn_implementation("eager")
    out = model.eval().generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False, eos_token_id=stop, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def test_greedy_rollout_equals_transformers_generate(target: Target) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, 64, (n,), generator=generator).tolist() for n in (1, 3, 9, 14, 5, 7, 2)]
    stop = reference(target, prompts[2], 12, stop=63)[5]
    rollout = Rollout(target, frozenset({stop}), slots=3, max_len=32, max_new=12, prefill_shape=(2, 16), check_every=2)
    answers = generate(rollout, [Job(p, 0.0, 12) for p in prompts])
    assert [a.tokens for a in answers] == [reference(target, p, 12, stop) for p in prompts]
    assert any(a.finish == "stop" for a in answers)
    assert all((a.finish == "stop") == (a.tokens[-1] == stop) for a in answers)


def test_max_len_cuts_an_answer_short(target: Target) -> None:
    rollout = Rollout(target, frozenset(), slots=2, max_len=20, max_new=12, prefill_shape=(1, 16))
    (answer,) = generate(rollout, [Job(list(range(2, 16)), 0.0, 12)])
    assert (len(answer.tokens), answer.finish) == (6, "length")


def test_a_prompt_that_does_not_fit_is_refused(target: Target) -> None:
    rollout = Rollout(target, frozenset(), slots=2, max_len=16, max_new=4, prefill_shape=(1, 16))
    with pytest.raises(RequestError, match="does not fit"):
        generate(rollout, [Job([2] * 16, 0.0, 4)])


def test_repetition_is_the_share_of_repeated_8_grams() -> None:
    fresh = torch.arange(40)
    looping = torch.arange(4).repeat(10)
    torch.testing.assert_close(repetition(torch.stack((fresh, looping))), torch.tensor([0.0, 1 - 4 / 33]))


def test_decode_attention_ignores_unwritten_memory_and_inactive_slots() -> None:
    n, kv, length, d = 3, 2, 8, 4
    caches = [torch.full((n, kv, length, d), float("nan")) for _ in range(2)]
    positions, active = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([True, True, False])
    for cache in caches:
        cache[1, :, :2] = torch.randn(kv, 2, d)
    q, k, v = torch.randn(n, 4, d), torch.randn(n, kv, d), torch.randn(n, kv, d)
    out = decode_attention_reference(q, k, v, *caches, positions, active, 0.5)
    torch.testing.assert_close(out[0], v[0].repeat_interleave(2, 0))
    assert out[1].isfinite().all()
    assert not out[2].any()
    assert torch.equal(caches[0][1, :, 2], k[1])
