"""On a GPU the engine serves the same requests; in float32 with the same tokens as on the CPU."""

from __future__ import annotations

import pytest
import torch
from pairs import OftenRight, prompts, request, run, small_engine, tiny_draft, tiny_target

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 5}, {"temperature": 0.8, "seed": 2, "top_p": 0.9}])
@pytest.mark.parametrize("window", [None, 20])
def test_tokens_on_the_gpu_equal_those_on_the_cpu_with_and_without_the_draft(window, params):
    many = prompts(5, seed=4)
    expected = [o.tokens for o in run(small_engine(tiny_target(window=window)), [request(p, **params) for p in many])]
    target = tiny_target(window=window)
    target.model.to("cuda")
    for prompt, tokens in zip(many, expected, strict=True):
        draft = tiny_draft(target, kind=OftenRight)
        draft.truth = {len(prompt) + i: token for i, token in enumerate(tokens)}
        for pair in (None, draft):
            engine = small_engine(target, pair)
            [output] = run(engine, [request(prompt, **params)])
            assert output.tokens == tokens
            engine.check_idle()
    outputs = run(small_engine(target, tiny_draft(target)), [request(p, **params) for p in many])
    assert [o.tokens for o in outputs] == expected
