"""A fused target computes what the model computes: logits, features, with any rows, hooks and attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from families import VOCAB, make
from paged import PagedRun, Rows, assert_close, own_forward
from pairs import request, run, small_engine
from torch import Tensor

from flashdraft.errors import ConfigError
from flashdraft.kernels import fused as kernels
from flashdraft.kernels.fused import FusedOptions, Norm
from flashdraft.kernels.paged import Projection
from flashdraft.targets import fused_layer
from flashdraft.targets.discovery import LayerSpec
from flashdraft.targets.fused import FusedLayer, FusionReport, fuse
from flashdraft.targets.fused_layer import CachedRotary, ChangedStateError, FusedNorm, FusedProduct, separate
from flashdraft.targets.recognition import norm_of
from flashdraft.targets.target import Target, packed_attend

FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "gemma4"]


def fused(name: str, dtype: torch.dtype = torch.float32, **changes: object) -> Target:
    target = Target(make(name, dtype, **changes))
    report = fuse(target)
    assert report.kept == {}
    assert all(isinstance(layer.forward, FusedLayer) for layer in target.layers)
    return target


def forward(target: Target, rows: int, attend=None) -> tuple[Tensor, Tensor | None]:
    """Two packed sequences, the first three times as long, at positions apart, so that windows of 24 end within them."""
    ids = torch.randint(0, VOCAB, (rows,), generator=torch.Generator().manual_seed(rows))
    documents = (torch.arange(rows) >= rows - rows // 4).long()
    ids, documents, positions = (x.to(target.device) for x in (ids, documents, 5 * torch.arange(rows) % 400))
    return target.forward(ids, positions, attend or packed_attend(documents, positions))


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected.float()).square().mean().sqrt() / expected.float().square().mean().sqrt())


@pytest.mark.parametrize("name", [*FAMILIES, "gemma4 multimodal", "smollm3", "mistral"])
def test_logits_and_features_are_those_of_the_model_for_any_number_of_rows(name) -> None:
    own, ours = Target(make(name)), fused(name)
    for target in (own, ours):
        target.capture(range(target.num_layers))
    for rows in (1, 7, 8, 17, 60):
        for got, expected in zip(forward(ours, rows), forward(own, rows), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", FAMILIES)
def test_in_bfloat16_the_error_is_that_of_the_models_own_rounding(name) -> None:
    own, ours = Target(make(name, torch.bfloat16)), fused(name, torch.bfloat16)
    exact = Target(make(name, torch.bfloat16).float())
    for rows in (1, 8, 17):
        expected = forward(exact, rows)[0]
        assert relative(forward(ours, rows)[0], expected) <= 1.2 * relative(forward(own, rows)[0], expected) < 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(
    "options",
    [FusedOptions(), FusedOptions(pdl=False), FusedOptions(narrow=False), FusedOptions(deterministic=True)],
    ids=["narrow", "without pdl", "three kernels", "deterministic"],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_on_cuda_the_error_is_that_of_the_models_own_rounding(name, options) -> None:
    changes = dict(intermediate_size=128) | (dict(hidden_size_per_layer_input=64) if name == "gemma4" else {})
    own, ours = (Target(make(name, torch.bfloat16, **changes).cuda()) for _ in range(2))
    exact = Target(make(name, torch.bfloat16, **changes).float().cuda())
    assert fuse(ours, options).kept == {}
    for rows in (1, 8, 17, 60):
        expected = forward(exact, rows)[0]
        assert relative(forward(ours, rows)[0], expected) <= 1.3 * relative(forward(own, rows)[0], expected) < 0.1


def test_the_models_are_what_they_are_here_for() -> None:
    gemma4 = [layer.forward.parts for layer in fused("gemma4").layers]
    assert all(p.per_layer_input is not None and p.activation == "gelu_tanh" and p.mlp_post_norm for p in gemma4)
    assert [p.v_norm is None for p in gemma4] == [False] * 3 + [True] * 3  # the last three read others' keys and values
    assert [p.qkv.weight.shape[0] for p in gemma4] == [(4 + 2 * 2) * 16] * 2 + [(4 + 2 * 2) * 32] + [4 * 16] * 2 + [4 * 32]
    qwen2, qwen3 = (fused(name).layers[0].forward.parts for name in ("qwen2", "qwen3"))
    assert qwen2.qkv.bias is not None
    assert qwen3.q_norm is not None
    assert [layer.forward.parts.rotary for layer in fused("smollm3").layers] == [True, False, True, False]


def test_head_and_norms_beside_the_layers_are_fused_too() -> None:
    target = fused("gemma4")
    forwards = {name: type(module.__dict__.get("forward")) for name, module in target.decoder.named_children()}
    assert {name for name, kind in forwards.items() if kind is FusedNorm} == {"norm", "per_layer_projection_norm"}
    assert {name for name, kind in forwards.items() if kind is FusedProduct} == {"per_layer_model_projection"}
    assert isinstance(target.model.lm_head.forward, FusedProduct)
    hidden = torch.randn(2, 3, 64)
    assert torch.equal(target.head(hidden), hidden @ target.model.lm_head.weight.T)
    assert target.logit_scale == 1.0


def test_a_layers_scale_is_honoured() -> None:
    own, ours = (Target(make("gemma4"), check=False) for _ in range(2))
    for target in (own, ours):
        for index, layer in enumerate(target.layers):
            layer.layer_scalar.fill_(0.5 + 0.25 * index)
    assert fuse(ours).kept == {}
    torch.testing.assert_close(forward(ours, 9)[0], forward(own, 9)[0], rtol=0, atol=1e-4)


def test_values_made_of_keys() -> None:
    changes = dict(attention_k_eq_v=True, num_global_key_value_heads=2)
    own, ours = Target(make("gemma4", **changes)), fused("gemma4", **changes)
    assert own.layers[2].self_attn.v_proj is None
    torch.testing.assert_close(forward(ours, 17)[0], forward(own, 17)[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma4"])
def test_feature_layers_may_be_chosen_before_or_after(name) -> None:
    own, ours = Target(make(name)), Target(make(name))
    for target in (own, ours):
        target.capture([0, 2])
    assert fuse(ours).kept == {}
    for layers in ([0, 2], [], [1, 3], [3]):
        for target in (own, ours):
            target.capture(layers)
        (logits, features), (own_logits, own_features) = forward(ours, 9), forward(own, 9)
        torch.testing.assert_close(logits, own_logits, rtol=0, atol=1e-4)
        if layers:
            torch.testing.assert_close(features, own_features, rtol=0, atol=1e-4)


def test_only_layers_that_somebody_looks_at_add_up_their_output_themselves(monkeypatch) -> None:
    target, calls = Target(make("gemma4")), []
    monkeypatch.setattr(
        fused_layer, "add_norm", lambda *a, add_norm=fused_layer.add_norm, **k: calls.append(1) or add_norm(*a, **k)
    )
    fuse(target)
    for layers, count in (([], 1), ([1, 3], 3), ([5], 1)):
        target.capture(layers)
        calls.clear()
        forward(target, 8)
        assert len(calls) == count + 2  # and the norms beside the layers


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gemma2"])  # whose own sdpa may lack its soft cap
def test_over_pages(name) -> None:
    ids = torch.randint(0, VOCAB, (90,)).tolist()
    expected = own_forward(make(name), ids)
    paged = PagedRun(fused(name))
    sequence, other = paged.sequence(), paged.sequence()
    for start, end in ((0, 40), (40, 48), (48, 49), (49, 90)):
        got = paged.advance(Rows(sequence, start, ids[start:end]), Rows(other, start, ids[: end - start]))[0]
        assert_close(got, expected, slice(start, end))


@pytest.mark.parametrize("name", ["llama", "gemma4"])
def test_the_engine_says_the_same(name) -> None:
    prompts = [torch.randint(0, VOCAB, (n,)).tolist() for n in (1, 30)]
    own, ours = (
        [out.tokens for out in run(small_engine(target), [request(p, max_tokens=12) for p in prompts])]
        for target in (Target(make(name)), fused(name))
    )
    assert ours == own


@pytest.mark.parametrize("name", ["qwen3", "gemma4", "smollm3"])
def test_an_attention_may_take_the_whole_projection(name) -> None:
    own, ours = Target(make(name)), fused(name)
    rows, stored, seen = 17, {}, []
    positions = 5 * torch.arange(rows)
    plain = packed_attend(torch.zeros_like(positions), positions)

    def attend(layer: int, spec: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise AssertionError("the projection was to be taken")

    def projected(layer: int, spec: LayerSpec, projection: Projection) -> Tensor:
        seen.append(projection)
        q, k, v = separate(projection)
        if spec.source == layer:
            stored[layer] = k, v
        assert k.shape[1] == v.shape[1] == projection.kv_heads == (spec.kv_heads if spec.source == layer else 0)
        return plain(layer, spec, q, *stored[spec.source])

    attend.projected = projected
    torch.testing.assert_close(forward(ours, rows, attend)[0], forward(own, rows, plain)[0], rtol=0, atol=1e-4)
    assert [p.cos is None for p in seen] == [not layer.forward.parts.rotary for layer in ours.layers]


def test_a_projection_turns_the_first_part_of_a_head_where_tables_are_narrower() -> None:
    cos, sin, qkv = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, (2 + 2) * 8)
    projection = Projection(qkv, 2, 1, 8, None, Norm(None, 1e-6, False), None, cos, sin)
    q, k, v = separate(projection)
    heads = qkv.view(3, 4, 8)
    x = heads[:, :2]
    expected = torch.cat(
        (
            x[..., :2] * cos[:, None, :2] - x[..., 2:4] * sin[:, None, :2],
            x[..., 2:4] * cos[:, None, 2:] + x[..., :2] * sin[:, None, 2:],
            x[..., 4:],
        ),
        -1,
    )
    torch.testing.assert_close(q, expected)
    torch.testing.assert_close(k[..., 4:], Norm(None, 1e-6, False)(heads[:, 2:3])[..., 4:])
    assert torch.equal(v, heads[:, 3:])


def storages(target: Target) -> dict[int, int]:
    tensors = [
        *target.model.parameters(),
        *(
            p
            for layer in target.layers
            if isinstance(layer.forward, FusedLayer)
            for p in (layer.forward.parts.qkv.weight, layer.forward.parts.gate_up.weight)
        ),
    ]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@pytest.mark.parametrize("name", FAMILIES)
def test_joined_weights_are_the_models_own_not_copies(name) -> None:
    target = Target(make(name))
    state, size = {key: x.clone() for key, x in target.model.state_dict().items()}, sum(storages(target).values())
    fuse(target)
    assert sum(storages(target).values()) == size
    attention, mlp, parts = target.layers[0].self_attn, target.layers[0].mlp, target.layers[0].forward.parts
    for linear, product in ((attention.k_proj, parts.qkv), (mlp.up_proj, parts.gate_up)):
        assert linear.weight.untyped_storage().data_ptr() == product.weight.untyped_storage().data_ptr()
    assert parts.down.weight is mlp.down_proj.weight
    assert all(torch.equal(x, state[key]) for key, x in target.model.state_dict().items())


# What is not recognised stays.


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mixtral", "it has mlp.experts, which is no known part of a layer"),
        ("nemotron", "it has no mlp.gate_proj"),
        ("olmo", "input_layernorm is not an RMSNorm over 64 values"),
        ("granite", "it computes something else than such parts usually do"),
        ("gemma3n", "it has altup, which is no known part of a layer"),
        ("helium", "it computes something else"),  # RoPE over neighbouring pairs
        ("ernie4.5", "it computes something else"),  # RoPE in float32
    ],
)
def test_a_family_with_other_layers_stays_whole(name, reason) -> None:
    target = Target(make(name))
    expected = forward(target, 9)[0]
    report = fuse(target)
    assert report.fused == ()
    assert str(report).startswith(f"0 of 4 layers fused; layers 0-3 as in the model, because {reason}")
    assert torch.equal(forward(target, 9)[0], expected)


def test_a_model_may_be_fused_in_part() -> None:
    target = Target(make("glm4moe"))
    expected = forward(target, 9)[0]
    assert str(fuse(target)).startswith("1 of 4 layers fused; layers 1-3 as in the model, because it has mlp.experts")
    torch.testing.assert_close(forward(target, 9)[0], expected, rtol=0, atol=1e-4)


def test_a_layer_stays_with_those_it_shares_keys_and_values_with() -> None:
    target = Target(make("gemma4"))
    target.layers[4].mlp.act_fn = torch.nn.ReLU()
    expected = forward(target, 30)[0]
    report = fuse(target)
    assert report.fused == (0, 2, 5)
    assert report.kept[4] == "its activation is none of silu, gelu_tanh"
    assert {report.kept[1], report.kept[3]} == {"it shares keys and values with a layer that stays"}
    torch.testing.assert_close(forward(target, 30)[0], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("change", [lambda x: 2 * x, lambda x: x.mul_(2)])
def test_a_model_that_works_between_its_layers_stays_whole(change) -> None:
    target = Target(make("llama"))
    target.layers[2].register_forward_pre_hook(lambda module, args: (change(args[0]), *args[1:]))
    expected = forward(target, 9)[0]
    report = fuse(target)
    assert set(report.kept.values()) == {"the model does something between its layers"}
    assert torch.equal(forward(target, 9)[0], expected)


def test_one_that_begins_to_do_so_later_is_stopped() -> None:
    target = fused("llama")
    target.layers[2].register_forward_pre_hook(lambda module, args: (2 * args[0], *args[1:]))
    with pytest.raises(ChangedStateError, match="between layers 1 and 2"):
        forward(target, 9)


def test_linear_leaves_of_other_kinds_are_not_joined() -> None:
    target = Target(make("llama"))

    class Quantized(torch.nn.Linear):
        pass

    layer = target.layers[1]
    layer.self_attn.k_proj.__class__ = Quantized
    report = fuse(target)
    assert report.kept == {1: "k_proj is a Quantized, not a plain linear layer"}


def test_fusing_again_takes_other_options() -> None:
    target = fused("qwen2")
    expected = forward(target, 9)[0]
    assert fuse(target, FusedOptions(narrow=False)).fused == (0, 1, 2, 3)
    assert target.layers[0].forward.linear.keywords["options"].narrow is False
    assert torch.equal(forward(target, 9)[0], expected)


def test_where_the_head_cannot_be_deterministic_the_model_stays_as_it_was(monkeypatch) -> None:
    target = Target(make("llama"))

    def product(*args, options, **parts):
        return kernels.fused_linear_reference(*args, **parts)[0]

    narrow = SimpleNamespace(
        supports=lambda weight: weight.shape[0] != VOCAB, narrow_linear=product, NarrowOptions=SimpleNamespace
    )
    triton = SimpleNamespace(add_norm=lambda *args, pdl: kernels.add_norm_reference(*args))
    monkeypatch.setattr(kernels, "_has_kernels", lambda x: True)
    monkeypatch.setattr(kernels, "narrow", narrow)
    monkeypatch.setattr(kernels, "wide", SimpleNamespace(wide_linear=product, WideOptions=SimpleNamespace))
    monkeypatch.setattr(kernels, "_triton", lambda: triton)
    with pytest.raises(ConfigError, match="turn `deterministic` off"):
        fuse(target, FusedOptions(deterministic=True))
    assert not any("forward" in module.__dict__ for module in target.model.modules())
    monkeypatch.undo()
    assert len(fuse(target).fused) == 4


def test_the_report_groups_layers_by_reason() -> None:
    report = FusionReport((0,), {1: "of A (by 3)", 2: "of A (by 4)", 3: "of B", 5: "of A"})
    assert (
        str(report)
        == "1 of 5 layers fused; layers 1-2, 5 as in the model, because of A (by 3); layer 3 as in the model, because of B"
    )


@pytest.mark.parametrize(
    ("name", "round_first", "weight"), [("llama", True, 0.0), ("gemma2", False, 1.0), ("gemma4", False, 0.0)]
)
def test_norms_are_found_by_their_bits(name, round_first, weight) -> None:
    module = make(name, torch.bfloat16).get_decoder().layers[0].input_layernorm
    norm = norm_of(module, 64, torch.bfloat16)
    assert norm.round_first is round_first
    assert torch.equal(norm.weight, weight + module.weight.float())
    assert norm_of(torch.nn.LayerNorm(64, bias=False), 64, torch.float32) is None
    assert norm_of(module, 32, torch.bfloat16) is None


def test_a_second_fuse_leaves_the_memory_that_graphs_of_the_first_point_to():
    target = Target(make("qwen3"), check=False)
    first = fuse(target)
    pointers = {name: p.data_ptr() for name, p in target.model.named_parameters()}
    assert fuse(target) is first
    other = fuse(target, FusedOptions(narrow=False))
    assert other is not first
    assert {name: p.data_ptr() for name, p in target.model.named_parameters()} == pointers
    weights = [layer.parts.qkv.weight.data_ptr() for layer in first.held[: len(first.fused)]]
    assert weights == [layer.parts.qkv.weight.data_ptr() for layer in other.held[: len(other.fused)]]


@pytest.mark.parametrize("name", FAMILIES)
def test_cos_and_sin_are_those_of_the_models_own_forward(name) -> None:
    target = fused(name)
    [rotary] = [m for m in target.decoder.children() if isinstance(vars(m).get("forward"), CachedRotary)]
    kinds = [(kind,) for kind in sorted(set(target.config.layer_types))] if name in ("gemma3", "gemma4") else [()]
    x, positions = torch.zeros(1, 5, 8), torch.tensor([[0, 3, 2, 511, 1]])
    for kind in kinds:
        for got, expected in zip(rotary(x, positions, *kind), type(rotary).forward(rotary, x, positions, *kind), strict=True):
            assert torch.equal(got, expected)
