"""The draft's equations: against another engine's logits, and one rule at a time."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tiny_config import TINY
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from flashdraft.checkpoint import load_draft
from flashdraft.draft import (
    DFlashConfig,
    DFlashDraft,
    count_parameters,
    default_layer_ids,
    dense_visibility,
    propose_offline,
)
from flashdraft.errors import ConfigError

ARCHIVE = Path(__file__).parent / "fixtures/dflash/golden.tar.xz"
CASES = ["full", "window4_bidirectional", "window16_causal_by_default", "unsorted_layer_ids", "own_head", "for_gemma4"]
TINY = TINY.with_(num_hidden_layers=2, windows=(None,) * 2, causal=(False,) * 2)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def randomized(config: DFlashConfig, scale: float = 0.3) -> DFlashDraft:
    draft = DFlashDraft(config)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.1 if parameter.ndim == 1 else scale)
    return draft


def layer_outputs(model: nn.Module, token_ids: Tensor) -> list[Tensor]:
    """Every decoder layer's output [T, H] (`hidden_states` would give the last one after the final norm)."""
    outputs: list[Tensor] = []

    def keep(_module: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        outputs.append((output if isinstance(output, Tensor) else output[0])[0])

    hooks = [layer.register_forward_hook(keep) for layer in model.model.layers]
    model(token_ids[None])
    for hook in hooks:
        hook.remove()
    return outputs


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_draft_logits_equal_those_of_the_other_engine_at_every_step(golden: Path, name: str) -> None:
    case = json.loads((golden / "cases.json").read_text())[name]
    expected = load_file(golden / case["expect"])
    token_ids = expected["token_ids"]
    target = AutoModelForCausalLM.from_pretrained(golden / case["target"], dtype=torch.float32)
    # The table and the head as they are: Gemma scales its embeddings and caps its logits, a draft does neither.
    embed = partial(F.embedding, weight=target.get_input_embeddings().weight)
    head = partial(F.linear, weight=target.get_output_embeddings().weight)
    draft = load_draft(golden / case["draft"], dtype=torch.float32)
    outputs = layer_outputs(target, token_ids)
    features = torch.cat([outputs[i] for i in draft.config.target_layer_ids], -1)
    assert len(case["steps"]) == 8
    for step in case["steps"]:
        prefix, anchor = step["prefix_len"], step["anchor"]
        assert anchor == token_ids[prefix]
        logits = propose_offline(draft, features[:prefix], anchor, embed, head)
        torch.testing.assert_close(logits, expected[f"step{step['step']}.draft_logits"], rtol=0, atol=2e-5)


def test_every_golden_case_is_tested(golden: Path) -> None:
    assert list(json.loads((golden / "cases.json").read_text())) == CASES


def test_the_reference_configuration_has_the_published_parameter_counts() -> None:
    config = DFlashConfig.for_target(
        hidden_size=2560,
        vocab_size=262144,
        num_target_layers=42,
        mask_token_id=4,
        target_layer_ids=(5, 11, 17, 23, 35),
        has_own_lm_head=True,
    )
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.intermediate_size) == (
        32,
        8,
        128,
        5120,
    )
    assert config.windows == (1024,) * 5
    assert config.causal == (False,) * 5
    assert (config.num_proposals, config.num_features) == (7, 5)
    with torch.device("meta"):
        draft = DFlashDraft(config)
    assert count_parameters(draft) == {
        "fc": 32_768_000,
        "layers": 5 * 65_541_376,
        "norms": 5_120,
        "lm_head": 671_088_640,
        "embed_tokens": 0,
        "all": 1_031_568_640,
    }


@pytest.mark.parametrize(
    ("layers", "features", "ids"),
    [
        (30, 1, (15,)),
        (42, 5, (1, 10, 20, 30, 39)),
        (36, 5, (1, 9, 17, 25, 33)),
        (28, 4, (1, 9, 17, 25)),
        (30, 5, (1, 8, 14, 20, 27)),  # 7.5 -> 8 and 20.5 -> 20: half to even
        (8, 2, (1, 5)),
    ],
)
def test_default_feature_layers_are_spread_evenly(layers: int, features: int, ids: tuple[int, ...]) -> None:
    assert default_layer_ids(layers, features) == ids


@pytest.mark.parametrize(("layers", "features"), [(6, 5), (4, 2), (2, 2), (42, 0)])
def test_feature_layers_that_cannot_be_spread_are_refused(layers: int, features: int) -> None:
    with pytest.raises(ConfigError, match="give target_layer_ids, or fewer features"):
        default_layer_ids(layers, features)


@pytest.mark.parametrize(
    ("hidden", "heads", "head_dim"), [(576, 16, 64), (896, 32, 64), (2048, 32, 128), (4096, 64, 128), (64, 4, 64)]
)
def test_a_draft_for_any_target_has_heads_of_a_quarter_more_than_its_width(hidden: int, heads: int, head_dim: int) -> None:
    config = DFlashConfig.for_target(hidden_size=hidden, vocab_size=100, num_target_layers=30, mask_token_id=0)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (heads, heads // 4, head_dim)
    assert heads * head_dim >= 1.25 * hidden


def test_for_target_takes_overrides_and_refuses_unknown_ones() -> None:
    make = partial(DFlashConfig.for_target, hidden_size=64, vocab_size=100, num_target_layers=30, mask_token_id=0)
    config = make(window=None, num_hidden_layers=2, block_size=4, rms_norm_eps=1e-5)
    assert (config.windows, config.causal, config.block_size, config.rms_norm_eps) == ((None, None), (False, False), 4, 1e-5)
    with pytest.raises(ConfigError, match="unknown fields \\['blocksize'\\]"):
        make(blocksize=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *[
            ({name: bad}, f"{name} must be a positive integer")
            for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
            for bad in (0, -1, 2.0, True)
        ],
        *[
            ({name: 0}, f"{name} must be a positive integer")
            for name in ("head_dim", "vocab_size", "num_target_layers", "block_size", "max_position_embeddings")
        ],
        ({"block_size": 1}, "block_size must be at least 2"),
        ({"windows": (4,)}, "one entry for each of the 2 layers"),
        ({"causal": (True,) * 3}, "one entry for each of the 2 layers"),
        ({"windows": (4, 0)}, "sliding_window must be positive"),
        ({"num_key_value_heads": 3}, "4 attention heads are not a multiple of 3"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"target_layer_ids": ()}, "distinct layers of 0..5"),
        ({"target_layer_ids": (1, 1)}, "distinct layers of 0..5"),
        ({"target_layer_ids": (-1, 1)}, "distinct layers of 0..5"),
        ({"target_layer_ids": (1, 6)}, "distinct layers of 0..5"),
        ({"mask_token_id": 40}, "mask_token_id 40 lies outside the vocabulary of 40"),
        ({"mask_token_id": -1}, "must be an existing embedding row"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_together_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TINY.with_(**change)


def test_feature_layer_ids_are_kept_ascending() -> None:
    assert TINY.with_(target_layer_ids=(4, 0, 2)).target_layer_ids == (0, 2, 4)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_visibility_is_the_rule_of_the_format(window: int | None, causal: bool) -> None:
    queries, keys = torch.arange(3, 9), torch.arange(12)
    valid = keys != 5
    visible = dense_visibility(queries, keys, window, causal, valid)
    for i, q in enumerate(queries.tolist()):
        for k in keys.tolist():
            expected = (window is None or abs(q - k) < window) and (k <= q or not causal) and k != 5
            assert bool(visible[i, k]) == expected, (q, k)


def propose(config: DFlashConfig, features: Tensor, draft: DFlashDraft | None = None, block_size: int | None = None) -> Tensor:
    torch.manual_seed(1)
    draft = randomized(config) if draft is None else draft
    table = torch.randn(config.vocab_size, config.hidden_size)
    head: Callable[[Tensor], Tensor] = lambda x: x @ table.T  # noqa: E731
    return propose_offline(draft, features, 7, partial(F.embedding, weight=table), head, block_size)


@torch.no_grad()
def test_a_window_hides_the_context_before_it_and_no_window_does_not() -> None:
    features = torch.randn(20, 32)
    changed = features.clone()
    changed[:12] += 1.0  # slot k sits at position 20 + k, so a window of 8 ends at position 13 for the anchor
    windowed, full = TINY.with_(windows=(8, 8)), TINY
    torch.testing.assert_close(propose(windowed, features), propose(windowed, changed), rtol=0, atol=0)
    assert (propose(full, features) - propose(full, changed)).abs().max() > 1e-3


@torch.no_grad()
def test_a_causal_draft_proposes_the_same_for_a_shorter_block_and_a_bidirectional_one_does_not() -> None:
    features = torch.randn(6, 32)
    causal = TINY.with_(causal=(True, True))
    torch.testing.assert_close(propose(causal, features)[:3], propose(causal, features, block_size=4), rtol=1e-5, atol=1e-5)
    assert (propose(TINY, features)[:3] - propose(TINY, features, block_size=4)).abs().max() > 1e-3


@torch.no_grad()
def test_logit_scale_comes_before_the_soft_cap() -> None:
    features, scaled = torch.randn(6, 32), TINY.with_(logit_scale=0.5, final_logit_softcapping=2.0)
    plain = propose(TINY, features)
    torch.testing.assert_close(propose(scaled, features), 2 * torch.tanh(plain * 0.5 / 2))


@torch.no_grad()
def test_input_embedding_scale_multiplies_the_rows_of_the_block_only() -> None:
    draft, features = randomized(TINY), torch.randn(6, 32)
    scaled = DFlashDraft(TINY.with_(input_embedding_scale=3.0))
    scaled.load_state_dict(draft.state_dict())
    table = torch.randn(40, 16)
    embed, head = partial(F.embedding, weight=table), nn.Linear(16, 40)
    torch.testing.assert_close(
        propose_offline(scaled, features, 7, embed, head),
        propose_offline(draft, features, 7, lambda ids: 3 * embed(ids), head),
    )


@torch.no_grad()
def test_the_draft_uses_its_own_head_and_otherwise_needs_one() -> None:
    own = randomized(TINY.with_(has_own_lm_head=True))
    hidden = torch.randn(3, 16)
    torch.testing.assert_close(own.logits(hidden, lambda x: x.new_zeros(1)), hidden @ own.lm_head.weight.T)
    with pytest.raises(ConfigError, match="no output head of its own"):
        DFlashDraft(TINY).logits(hidden)


def test_draft_ids_are_mapped_to_target_ids_by_offsets() -> None:
    draft = DFlashDraft(TINY.with_(draft_vocab_size=4, has_own_lm_head=True))
    draft.d2t.copy_(torch.tensor([0, 4, 5, 36]))
    assert draft.to_target_ids(torch.tensor([[3, 0], [1, 2]])).tolist() == [[39, 0], [5, 7]]
    assert draft.lm_head.weight.shape == (4, 16)
    ids = torch.tensor([3, 1])
    assert DFlashDraft(TINY).to_target_ids(ids) is ids


def test_attention_bias_adds_biases_to_the_four_projections_only() -> None:
    biased = {name for name, _ in DFlashDraft(TINY.with_(attention_bias=True)).named_parameters() if name.endswith("bias")}
    assert biased == {f"layers.{i}.self_attn.{p}_proj.bias" for i in range(2) for p in "qkvo"}


@torch.no_grad()
def test_context_keys_depend_on_their_position_and_values_do_not() -> None:
    draft, context = randomized(TINY), torch.randn(3, 16)
    near = draft.context_keys_values(context, torch.arange(3))
    far = draft.context_keys_values(context, torch.arange(100, 103))
    for (k0, v0), (k1, v1) in zip(near, far, strict=True):
        assert k0.shape == v0.shape == (3, 2, 8)
        assert (k0 - k1).abs().max() > 0.1
        torch.testing.assert_close(k0.norm(dim=-1), k1.norm(dim=-1))
        torch.testing.assert_close(v0, v1, rtol=0, atol=0)


def test_the_shapes_of_a_draft_are_those_of_the_format() -> None:
    draft = DFlashDraft(TINY.with_(has_own_lm_head=True, has_own_embeddings=True))
    shapes = SimpleNamespace(**{name.replace(".", "_"): tuple(t.shape) for name, t in draft.state_dict().items()})
    assert shapes.fc_weight == (16, 32)
    assert shapes.layers_1_self_attn_q_proj_weight == (32, 16)
    assert shapes.layers_1_self_attn_k_norm_weight == (8,)
    assert shapes.layers_0_mlp_down_proj_weight == (16, 32)
    assert shapes.lm_head_weight == shapes.embed_tokens_weight == (40, 16)
    assert len(vars(shapes)) == 5 + 2 * 11
