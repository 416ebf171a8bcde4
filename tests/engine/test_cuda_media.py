"""Images and audio on a GPU: in float32 the same tokens as on the CPU, whatever runs the steps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "targets"))

from media_prompts import MediaPrompt, text
from multimodal import media_target, picture, sound
from pairs import run, small_engine, tiny_draft

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

LIMITS = dict(max_model_len=512, kv_cache_memory_bytes=32 << 20, max_num_batched_tokens=96)
STEPS = {
    "host": dict(async_scheduling=False),
    "ahead, op by op": dict(async_scheduling=True, enforce_eager=True),
    "ahead, captured": dict(async_scheduling=True, max_num_seqs=4),
}


def asked(target):
    many = [text(1, 9), picture(1), text(2, 20)], [text(1, 30), sound(1, 0.7), text(2, 11), picture(2), picture(3), text(3, 5)]
    return [MediaPrompt.of(target, *pieces).request(max_tokens=24) for pieces in many]


def on_gpu(bidirectional, dtype=torch.float32):
    target = media_target(bidirectional, dtype)
    target.model.to("cuda")
    return target


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("steps", STEPS)
def test_tokens_behind_media_equal_those_on_the_cpu(steps, bidirectional):
    cpu = media_target(bidirectional)
    expected = [output.tokens for output in run(small_engine(cpu, **LIMITS), asked(cpu))]
    target = on_gpu(bidirectional)
    for pair in (None, tiny_draft(target)):
        engine = small_engine(target, pair, **LIMITS, **STEPS[steps])
        assert [output.tokens for output in run(engine, asked(target))] == expected
        again = run(engine, asked(target))
        assert [output.tokens for output in again] == expected, "the prefix cache"
        assert all(output.cached_tokens for output in again)
        engine.check_idle()


def test_deterministic_text_behind_media_is_the_same_bits_in_a_batch_and_in_other_chunks():
    target = on_gpu(True, torch.bfloat16)
    options = dict(async_scheduling=True, deterministic=True, max_num_seqs=4)
    together = [output.tokens for output in run(small_engine(target, **LIMITS, **options), asked(target))]
    alone = small_engine(target, **{**LIMITS, "max_num_batched_tokens": 256}, **options)
    assert [run(alone, [one])[0].tokens for one in asked(target)] == together
