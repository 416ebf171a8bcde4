"""Drafts that others publish, as small random stand-ins in their layouts: every key is honoured, ignored for good reason, or
refused by name. Which keys: the files of z-lab, RedHat's Speculators, NVIDIA's NeMo and SGLang's converter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import prompts, request, run, small_engine, tiny_target
from safetensors.torch import save_file
from torch import Tensor, nn

from flashdraft.checkpoint import load_draft
from flashdraft.draft import DFlashConfig, DFlashDraft
from flashdraft.errors import CheckpointError, ConfigError, FlashdraftError
from flashdraft.inspection import inspect_path

SLIDING, FULL = "sliding_attention", "full_attention"
EXPECTED = DFlashConfig(
    hidden_size=64,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=96,
    num_target_layers=3,
    target_layer_ids=(0, 2),
    mask_token_id=2,
    block_size=4,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position_embeddings=2048,
    windows=(None, None),
    causal=(False, False),
)
_DECODER: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1, "head_dim": 16,
    "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 32, "layer_types": [FULL, FULL],
    "max_position_embeddings": 2048, "max_window_layers": 2, "model_type": "qwen3", "num_attention_heads": 4,
    "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "sliding_window": None, "use_cache": True,
    "use_sliding_window": False, "vocab_size": 96,
}  # fmt: skip
ZLAB: dict[str, Any] = {
    **_DECODER,
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 4,
    "dflash_config": {"mask_token_id": 2, "target_layer_ids": [0, 2]},
    "dtype": "float32",
    "num_target_layers": 3,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "transformers_version": "4.57.1",
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "auf": False,
    "aux_hidden_state_layer_ids": [1, 3],
    "block_size": 4,
    "draft_vocab_size": 96,
    "dtype": "float32",
    "emb_dim": 256,
    "gru_hidden_dim": 1024,
    "lambda_base_decay_ratio": 1.0,
    "lambda_base_start": 1.0,
    "mask_token_id": 2,
    "max_anchors": 3072,
    "projector_type": "dflash",
    "pure_draft_prefix_len": 1,
    "sample_from_anchor": False,
    "shift_label": False,
    "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
        ],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "owner/target"},
    },
    "speculators_model_type": "dflash",
    "speculators_version": "0.6.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {**_DECODER, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}},
    "transformers_version": "5.15.0",
}


def weights(config: DFlashConfig, prefix: str = "", dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(5)
    draft = DFlashDraft(config)
    for parameter in draft.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15)
    state = dict(draft.state_dict())
    if "d2t" in state:
        state["d2t"] = torch.arange(len(state["d2t"])) % 3 * 0 + torch.arange(len(state["d2t"]))  # id i is target id 2 i
    return {prefix + n: t.to(dtype) if t.is_floating_point() else t for n, t in state.items()}


def write(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor], shards: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = sorted(tensors)
    files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in names if files[n] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def changed(raw: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Keys replaced by dotted names; ... removes one."""
    raw = json.loads(json.dumps(raw))
    for name, value in changes.items():
        section, key = raw, name
        while "." in key:
            outer, key = key.split(".", 1)
            section = section.setdefault(outer, {})
        section.pop(key, None)
        if value is not ...:
            section[key] = value
    return raw


IDS, INNER, LAYER = "dflash_config.target_layer_ids", "dflash_config.", "transformer_layer_config."
WINDOW = {"layer_types": [SLIDING, FULL], "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}
ALL_SLIDING = {**WINDOW, "layer_types": [SLIDING] * 2}
# layout, changes to its config.json, what the configuration then differs in
HONOURED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (ZLAB, {}, {}),
    (ZLAB, {"architectures": ["Qwen3DFlashDraftModel"]}, {}),
    (ZLAB, {"architectures": ...}, {}),
    (ZLAB, {IDS: [2, 0]}, {}),  # columns of fc follow ascending ids, whatever the file's order
    (ZLAB, {IDS: ..., "target_layer_ids": [0, 2]}, {}),
    (ZLAB, {"eagle_aux_hidden_state_layer_ids": [1, 3]}, {}),
    (ZLAB, {IDS: ..., "eagle_aux_hidden_state_layer_ids": [1, 3]}, {}),
    (ZLAB, {"dflash_config.mask_token_id": ..., "mask_token_id": 2}, {}),
    (ZLAB, {"block_size": ..., INNER + "block_size": 4}, {}),
    (ZLAB, {INNER + "block_size": 4, INNER + "mask_token": "<|MASK|>", INNER + "use_qk_norm": True, "mlp_ratio": 0.5}, {}),
    (ZLAB, {"rope_theta": ..., "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}}, {"rope_theta": 1e7}),
    (ZLAB, {"num_target_layers": ...}, {}),
    (ZLAB, {"target_hidden_size": 64, "draft_vocab_size": 96}, {}),
    (ZLAB, ALL_SLIDING, {"windows": (8, 8), "causal": (True, True)}),
    (ZLAB, {**ALL_SLIDING, INNER + "causal": False}, {"windows": (8, 8)}),
    (ZLAB, {**ALL_SLIDING, "is_causal": False}, {"windows": (8, 8)}),
    (ZLAB, {"is_causal": True, INNER + "causal": False}, {"causal": (True, True)}),
    (ZLAB, WINDOW, {"windows": (8, None), "causal": (True, False)}),
    (ZLAB, {**WINDOW, INNER + "causal": True}, {"windows": (8, None), "causal": (True, True)}),
    (ZLAB, {INNER + "use_swa": True, INNER + "swa_window_size": 8, INNER + "causal": False}, {"windows": (8, 8)}),
    (ZLAB, {"sliding_window": 8, "use_sliding_window": True, INNER + "use_swa": True}, {"windows": (8, 8)}),
    (ZLAB, {"attention_bias": True}, {"attention_bias": True}),
    (ZLAB, {"input_embedding_scale": 2.0}, {"input_embedding_scale": 2.0}),
    (ZLAB, {INNER + "input_embedding_scale": 2.0}, {"input_embedding_scale": 2.0}),
    (ZLAB, {INNER + "output_multiplier": 0.25, INNER + "final_logit_softcapping": 20.0},
     {"logit_scale": 0.25, "final_logit_softcapping": 20.0}),
    (ZLAB, {"logit_scale": 0.5, "final_logit_softcapping": 0}, {"logit_scale": 0.5}),
    (ZLAB, {"has_own_lm_head": True}, {"has_own_lm_head": True}),
    (ZLAB, {"tie_word_embeddings": False}, {"has_own_lm_head": True}),  # not stated: the tensor is in the file
    (ZLAB, {"tie_word_embeddings": False}, {"has_own_lm_head": True, "has_own_embeddings": True}),
    (ZLAB, {"draft_vocab_size": 40}, {"draft_vocab_size": 40, "has_own_lm_head": True}),
    (SPECULATORS, {}, {}),
    (SPECULATORS, {"architectures": ["DFlashSpeculator"], "speculators_version": "0.4.0"}, {}),
    (SPECULATORS, {"aux_hidden_state_layer_ids": [3, 1]}, {}),
    (SPECULATORS, {"block_size": ...}, {}),
    (SPECULATORS, {"sliding_window_non_causal": ...}, {}),
    (SPECULATORS, {LAYER + key: value for key, value in WINDOW.items()}, {"windows": (8, None), "causal": (True, False)}),
    (SPECULATORS, {**{LAYER + key: value for key, value in ALL_SLIDING.items()}, "sliding_window_non_causal": True},
     {"windows": (8, 8)}),
    (SPECULATORS, {**{LAYER + key: value for key, value in ALL_SLIDING.items()}, "sliding_window_non_causal": ...},
     {"windows": (8, 8)}),
    (SPECULATORS, {LAYER + "has_own_lm_head": True}, {"has_own_lm_head": True}),
    (SPECULATORS, {"draft_vocab_size": 40}, {"draft_vocab_size": 40, "has_own_lm_head": True, "has_own_embeddings": True}),
    (SPECULATORS, {LAYER + "rope_parameters": ..., LAYER + "rope_theta": 1e4}, {"rope_theta": 1e4}),
]  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> Any:
    """A target and what it answers on its own."""
    target, asked = tiny_target(), prompts(2, longest=20)
    outputs = run(small_engine(target), [request(prompt, max_tokens=12) for prompt in asked])
    return target, asked, [output.tokens for output in outputs]


@pytest.mark.parametrize(("layout", "changes", "differs"), HONOURED, ids=range(len(HONOURED)))
def test_a_draft_in_anothers_layout_is_the_draft_it_was_there(layout, changes, differs, pair, tmp_path) -> None:
    expected = EXPECTED.with_(**differs)
    tensors = weights(expected)
    stored = tensors
    if expected.draft_vocab_size:  # Speculators writes both directions
        mask = torch.zeros(96, dtype=torch.bool)
        mask[torch.arange(40) * 2] = True
        stored = {**tensors, "t2d": mask}
    folder = write(tmp_path / "draft", changed(layout, changes), stored)
    draft = load_draft(folder)
    assert draft.config == expected
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in draft.state_dict().items())
    report = inspect_path(folder)
    assert (report.kind, report.layout) == ("draft", "speculators" if layout is SPECULATORS else "dflash")
    assert (report.feature_layers, report.windows, report.causal) == ((0, 2), expected.windows, expected.causal)
    target, asked, answers = pair
    outputs = run(small_engine(target, draft), [request(prompt, max_tokens=12) for prompt in asked])
    assert [output.tokens for output in outputs] == answers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("prefix", "shards"), [("", 1), ("model.", 1), ("", 3), ("model.", 2)])
def test_tensors_are_found_in_several_files_under_a_prefix_in_any_type(prefix, shards, dtype, tmp_path) -> None:
    expected = EXPECTED.with_(has_own_lm_head=True)
    tensors = weights(expected, dtype=dtype)
    named = {name if name == "lm_head.weight" else prefix + name: tensor for name, tensor in tensors.items()}
    folder = write(tmp_path / "draft", ZLAB, named, shards)
    draft = load_draft(folder)
    assert draft.config == expected
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in draft.state_dict().items())
    report = inspect_path(folder)
    assert report.dtype == str(dtype).removeprefix("torch.")
    assert report.parameters["lm_head"] == 96 * 64


def test_a_tensor_under_two_names_is_refused(tmp_path) -> None:
    tensors = weights(EXPECTED)
    folder = write(tmp_path / "draft", ZLAB, {**tensors, "model.fc.weight": tensors["fc.weight"].clone()})
    with pytest.raises(CheckpointError, match=r"holds fc\.weight twice"):
        load_draft(folder)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("mask_hidden", "unexpected mask_hidden"),
        ("verifier_lm_head.weight", r"unexpected verifier_lm_head\.weight"),
        ("layers.0.attention_conv.base_kernel", r"unexpected layers\.0\.attention_conv\.base_kernel"),
        ("markov_head.weight", r"unexpected markov_head\.weight"),
    ],
)
def test_tensors_of_other_equations_are_refused_by_name(extra, message, tmp_path) -> None:
    folder = write(tmp_path / "draft", ZLAB, {**weights(EXPECTED), extra: torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match=message):
        load_draft(folder)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (ZLAB, {"architectures": ["DFlash2DraftModel"]}, "describes DFlash2DraftModel, not a DFlash draft"),
    (ZLAB, {"architectures": ["DFlashLagunaForCausalLM"]}, "describes DFlashLagunaForCausalLM, not a DFlash draft"),
    (ZLAB, {IDS: [0, 0]}, "must be distinct layers"),
    (ZLAB, {IDS: ...}, r"needs dflash_config\.target_layer_ids"),
    (ZLAB, {"eagle_aux_hidden_state_layer_ids": [0, 2]}, "which should be one more each, differ"),
    (ZLAB, {INNER + "block_size": 16}, "block_size is 4 at the top level and 16 in dflash_config"),
    (ZLAB, {"mask_token_id": 5}, "mask_token_id is 5 at the top level and 2 in dflash_config"),
    (ZLAB, {INNER + "mask_token_id": ..., INNER + "mask_token": "<|MASK|>"}, "lacks mask_token_id"),
    (ZLAB, {"logit_scale": 0.5, INNER + "output_multiplier": 0.25}, "logit_scale 0.5 and output_multiplier 0.25 differ"),
    (ZLAB, {INNER + "selector_rank": 256}, r"dflash_config\.selector_rank '256' is not known here"),
    (ZLAB, {INNER + "fc_layernorm": True}, "fc_layernorm True is not supported"),
    (ZLAB, {INNER + "use_qk_norm": False}, "use_qk_norm False is not supported"),
    (ZLAB, {INNER + "attention_sink_bias": True}, "attention_sink_bias True is not supported"),
    (ZLAB, {INNER + "attention_value_scale": 0.6}, "attention_value_scale 0.6 is not supported"),
    (ZLAB, {"is_neox_style": False}, "is_neox_style False is not supported"),
    (ZLAB, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    (ZLAB, {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    (ZLAB, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE of type 'yarn'"),
    (ZLAB, {"target_hidden_size": 128}, "target_hidden_size 128 differs from hidden_size 64"),
    (ZLAB, {"layer_types": [SLIDING, SLIDING]}, "sliding layers without a window"),
    (ZLAB, {"quantization_config": {"quantization": {"quant_algo": "NVFP4"}}}, "is nested .* one level up"),
    (ZLAB, {"quantization_config": {"quant_method": "compressed-tensors"}}, "by compressed-tensors, .* use the unquantized"),
    (SPECULATORS, {"speculators_model_type": "dspark"}, "type 'dspark', not 'dflash'"),
    (SPECULATORS, {"speculators_model_type": "dflash2"}, "type 'dflash2', not 'dflash'"),
    (SPECULATORS, {"projector_type": "domino", "shift_label": True}, "is not supported"),
    (SPECULATORS, {"sample_from_anchor": True}, "sample_from_anchor True is not supported"),
    (SPECULATORS, {LAYER + "hc_mult": 4}, "hc_mult 4 is not supported"),
    (SPECULATORS, {"mask_token_id": None}, "lacks mask_token_id"),
    (SPECULATORS, {"draft_vocab_size": 97}, "draft_vocab_size 97 exceeds vocab_size 96"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "changes", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_would_be_computed_wrongly_is_refused_by_name(layout, changes, message, tmp_path) -> None:
    folder = write(tmp_path / "draft", changed(layout, changes), weights(EXPECTED))
    with pytest.raises((ConfigError, CheckpointError), match=message) as refusal:
        load_draft(folder)
    assert "\n" not in str(refusal.value)


def test_another_kind_of_draft_is_not_inspected_as_the_target_that_its_model_type_names(tmp_path) -> None:
    folder = write(tmp_path / "draft", changed(ZLAB, {"architectures": ["DFlash2DraftModel"]}), weights(EXPECTED))
    with pytest.raises(FlashdraftError, match="describes DFlash2DraftModel, not a DFlash draft"):
        inspect_path(folder)
