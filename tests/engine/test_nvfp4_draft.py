"""A draft whose weights stay in NVFP4 proposes in fused products what it proposes expanded; text is the target's either way."""

from __future__ import annotations

import copy

import pytest
import torch
from pairs import prompts, request, run, small_engine, tiny_draft, tiny_target

from flashdraft.draft import DFlashDraft
from flashdraft.kernels.nvfp4 import Nvfp4Weight
from flashdraft.quant.groups import fused_groups
from flashdraft.quant.linear import QuantizedLinear, expand, linears, swap
from flashdraft.quant.nvfp4 import amax, quantize, tensor_scale


def quantized(draft: DFlashDraft, input_scale: float | None = None, without: tuple[str, ...] = ()) -> DFlashDraft:
    made, leaves = copy.deepcopy(draft), linears(draft)
    for names in fused_groups(name for name in leaves if name not in without).values():
        scale_2 = tensor_scale(amax([leaves[name].weight for name in names]))
        for name in names:
            packed = quantize(leaves[name].weight, scale_2)
            if input_scale is not None:
                packed = packed.with_input_scale(torch.tensor(input_scale))
            swap(made, name, QuantizedLinear(packed, leaves[name].bias))
    return made.requires_grad_(False)


@pytest.fixture
def pair():
    target = tiny_target()
    config = tiny_draft(target).config.with_(has_own_lm_head=True, intermediate_size=128)
    torch.manual_seed(5)
    draft = DFlashDraft(config)
    for parameter in draft.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    return target, draft.requires_grad_(False)


def steps(target, draft, **options):
    engine = small_engine(target, draft, **options)
    outputs = run(engine, [request(prompt, max_tokens=40) for prompt in prompts(3, seed=5)])
    return engine, [(output.tokens, output.committed_per_step) for output in outputs]


@pytest.mark.parametrize("without", [(), ("fc", "layers.1.mlp.down_proj", "lm_head")], ids=["all", "but some"])
def test_it_proposes_what_it_does_expanded(pair, without):
    target, draft = pair
    packed = quantized(draft, without=without)
    engine, found = steps(target, packed, async_scheduling=True)
    fused = engine.runner.models._draft_pass
    assert isinstance(fused.context_weight, Nvfp4Weight)
    assert all(isinstance(w, Nvfp4Weight) for layer in fused.layers for w in (layer.qkv, layer.out, layer.gate_up))
    assert isinstance(fused.head, torch.Tensor if without else Nvfp4Weight)
    expanded = expand(copy.deepcopy(packed), torch.float32)
    assert steps(target, expanded, async_scheduling=True)[1] == found
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in steps(target, None)[1]]


def test_the_callers_draft_keeps_its_weights(pair):
    target, draft = pair
    packed = quantized(draft)
    before = {name: value.clone() for name, value in packed.state_dict().items()}
    steps(target, packed, async_scheduling=True)
    assert packed.state_dict().keys() == before.keys()
    for name, value in packed.state_dict().items():
        assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (value, before[name])))


def test_the_draft_of_an_engine_makes_another_engine(pair):
    target, draft = pair
    engine, found = steps(target, quantized(draft), async_scheduling=True)
    assert steps(target, engine.draft, async_scheduling=True)[1] == found


def test_where_there_is_no_fused_pass_for_it_the_draft_is_expanded(pair):
    target, draft = pair
    packed = quantized(draft)
    engine, found = steps(target, packed, async_scheduling=False)
    assert not any(isinstance(m, QuantizedLinear) for m in engine.draft.modules())
    assert found == steps(target, expand(copy.deepcopy(packed), torch.float32), async_scheduling=False)[1]
    rounding = quantized(draft, input_scale=0.01)
    engine, found = steps(target, rounding, async_scheduling=True)
    assert engine.runner.models._draft_pass is None
    assert found == steps(target, expand(copy.deepcopy(rounding), torch.float32), async_scheduling=True)[1]
