"""NVFP4 drafts on disk: both layouts, both algorithms, and every disagreement between config.json, tensors and scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_drafts import CONFIG, quantized
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flashdraft.checkpoint import convert, load_draft, save_draft
from flashdraft.draft import DFlashDraft
from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.inspection import inspect_path
from flashdraft.quant.linear import RoundedInputLinear, linears, swap
from flashdraft.train.prepare import first_draft
from flashdraft.train.recipe import Recipe


def edit_tensors(folder: Path, change: dict[str, Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in change.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


def edit_section(folder: Path, **change: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(raw))


def same(a: DFlashDraft, b: DFlashDraft) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(
        t.dtype == theirs[n].dtype and torch.equal(t.float(), theirs[n].float()) for n, t in mine.items()
    )


@pytest.mark.parametrize("layout", ["dflash", "speculators"])
@pytest.mark.parametrize("w4a4", [False, True])
@pytest.mark.parametrize("changes", [{}, {"has_own_lm_head": True}, {"attention_bias": True, "has_own_embeddings": True}])
def test_a_quantized_draft_comes_back_bit_for_bit(tmp_path: Path, layout: Any, w4a4: bool, changes: dict[str, Any]) -> None:
    draft = quantized(w4a4, ("fc",) if w4a4 else (), **changes)
    folder = save_draft(draft, tmp_path / "draft", layout=layout)
    back = load_draft(folder, packed=True)
    assert same(draft, back)
    assert [type(m) for m in back.modules()] == [type(m) for m in draft.modules()]
    other = convert(folder, tmp_path / "other", "speculators" if layout == "dflash" else "dflash")
    assert same(draft, load_draft(other, packed=True))


def test_config_json_says_what_readers_look_for(tmp_path: Path) -> None:
    raw = json.loads((save_draft(quantized(ignore=("fc",), has_own_lm_head=True), tmp_path / "a") / "config.json").read_text())
    assert raw["has_own_lm_head"] is True
    section = raw["quantization_config"]
    assert (section["quant_method"], section["quant_algo"], section["group_size"]) == ("modelopt", "W4A16_NVFP4", 16)
    assert section["ignore"] == section["exclude_modules"] == ["fc"]
    number = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    assert section["config_groups"] == {"group_0": {"weights": number, "targets": ["Linear"]}}
    ignored = ("layers.1.self_attn.qkv_proj", "layers.1.mlp.gate_up_proj")
    raw = json.loads((save_draft(quantized(True, ignored), tmp_path / "b") / "config.json").read_text())
    section = raw["quantization_config"]
    assert section["quant_algo"] == "NVFP4"
    assert section["ignore"] == [*ignored, "lm_head"]
    assert section["config_groups"]["group_0"]["input_activations"] == number


@pytest.mark.parametrize("w4a4", [False, True])
def test_every_module_with_scales_is_not_ignored_and_the_other_way_round(tmp_path: Path, w4a4: bool) -> None:
    folder = save_draft(quantized(w4a4, ("fc", "layers.0.mlp.gate_up_proj")), tmp_path / "draft")
    tensors = load_file(folder / "model.safetensors")
    ignored = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
    scaled = {name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")}
    parts = {"layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"}
    assert set(linears(DFlashDraft(CONFIG))) - scaled == {"fc", *parts}
    assert set(ignored) == {"fc", "layers.0.mlp.gate_up_proj", "lm_head"}
    for layer in ("layers.0", "layers.1"):
        for part in ("weight_scale_2", *(["input_scale"] if w4a4 else [])):
            values = [tensors[f"{layer}.self_attn.{name}_proj.{part}"] for name in "qkv"]
            assert torch.equal(values[0], values[1])
            assert torch.equal(values[0], values[2])


def test_loading_expands_to_the_dequantized_weights(tmp_path: Path) -> None:
    draft = quantized(has_own_lm_head=True)
    back = load_draft(save_draft(draft, tmp_path / "draft"), dtype=torch.float32)
    assert {type(leaf) for leaf in linears(back).values()} == {nn.Linear}
    assert torch.equal(back.fc.weight, draft.fc.packed.dequantize())
    assert back.norm.weight.dtype == back.lm_head.weight.dtype == torch.float32
    half = load_draft(tmp_path / "draft")
    assert half.fc.weight.dtype == torch.bfloat16, "without a dtype that of the unquantized tensors"
    assert torch.equal(half.fc.weight, draft.fc.packed.dequantize().bfloat16())


def test_a_w4a4_draft_rounds_its_inputs_and_cannot_be_saved_expanded(tmp_path: Path) -> None:
    save_draft(quantized(), tmp_path / "draft")
    save_draft(quantized(True, ("fc",)), tmp_path / "draft" / "w4a4")
    back = load_draft(tmp_path / "draft", revision="w4a4")
    assert type(back.fc) is nn.Linear
    assert isinstance(back.layers[0].mlp.up_proj, RoundedInputLinear)
    with pytest.raises(CheckpointError, match=r"packed=True"):
        save_draft(back, tmp_path / "other")
    report = inspect_path(tmp_path / "draft")
    assert (report.quantization, report.revisions, report.unquantized) == ("W4A16_NVFP4", ("w4a4",), ())
    report = inspect_path(tmp_path / "draft", revision="w4a4")
    assert (report.quantization, report.unquantized, len(report.quantized)) == ("NVFP4", ("fc",), 8)
    assert report.quantized[0] == "layers.0.self_attn.qkv_proj"


Q, K, GATE = "layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj", "layers.1.mlp.gate_proj"


@pytest.mark.parametrize(
    ("tensors", "section", "message"),
    [
        ({}, {"ignore": ["fc"]}, "ignored by quantization_config but with scales in the file: fc"),
        ({}, {"ignore": ["layers.1.mlp.gate_up_proj"]}, rf"with scales in the file: {GATE}, layers.1.mlp.up_proj"),
        ({}, {"exclude_modules": ["*down_proj"]}, "with scales in the file: layers.0.mlp.down_proj, layers.1.mlp.down_proj"),
        ({}, {"quant_algo": "NVFP4"}, r"missing .*fc.input_scale"),
        ({}, {"quant_algo": "NVFP4_AWQ"}, "quantized by NVFP4_AWQ, and only"),
        ({}, {"group_size": 32}, "group_size is 32"),
        ({}, {"ignore": "fc"}, "ignore must be a list"),
        ({"fc.weight_scale": None}, {}, "missing fc.weight_scale"),
        (
            {"fc.weight_scale": None, "fc.weight_scale_2": None, "fc.weight": torch.zeros(32, 64, dtype=torch.bfloat16)},
            {},
            "neither ignored by quantization_config nor with a weight_scale in the file: fc",
        ),
        (
            {f"{K}.weight_scale": None, f"{K}.weight_scale_2": None, f"{K}.weight": torch.zeros(32, 32)},
            {"ignore": [K]},
            "quantized only in part, which readers run as one product: layers.0.self_attn.qkv_proj",
        ),
        (
            {"fc.weight": torch.zeros(32, 64)},
            {},
            r"mis-shaped fc.weight \[32, 64\] instead of \[32, 32\].* wrong type fc.weight F32",
        ),
        ({"fc.weight_scale": torch.ones(32, 4)}, {}, "of the wrong type fc.weight_scale F32"),
        ({"fc.input_scale": torch.ones(())}, {}, "unexpected fc.input_scale"),
        ({"fc.weight_scale_2": torch.zeros(())}, {}, r"fc.weight_scale_2 0 hold scales that are NaN, zero or negative"),
        ({"fc.weight_scale_2": torch.tensor(torch.nan)}, {}, "fc.weight_scale_2"),
        ({"fc.weight_scale": torch.zeros(32, 4).to(torch.float8_e4m3fn)}, {}, "fc.weight_scale hold scales"),
        ({"fc.weight_scale": torch.full((32, 4), torch.nan).to(torch.float8_e4m3fn)}, {}, "fc.weight_scale hold scales"),
        ({"fc.weight_scale": (-torch.ones(32, 4)).to(torch.float8_e4m3fn)}, {}, "hold scales"),
        ({f"{Q}.weight_scale_2": torch.tensor(1.0)}, {}, r"layers.0.self_attn.qkv_proj \(weight_scale_2\) has other scales"),
        ({"norm.weight": torch.full((32,), torch.nan)}, {}, "norm.weight hold NaN"),
    ],
)
def test_disagreements_are_listed(tmp_path: Path, tensors: dict[str, Any], section: dict[str, Any], message: str) -> None:
    folder = save_draft(quantized(), tmp_path / "draft")
    edit_tensors(folder, tensors)
    edit_section(folder, **section)
    for packed in (False, True):
        with pytest.raises(CheckpointError, match=message):
            load_draft(folder, packed=packed)


@pytest.mark.parametrize("w4a4", [False, True])
def test_training_does_not_start_from_four_bits(tmp_path: Path, w4a4: bool) -> None:
    folder = save_draft(quantized(w4a4), tmp_path / "draft")
    with pytest.raises(ConfigError, match=r"is quantized .* start from the draft it was made from"):
        first_draft(str(folder), Recipe(), None)  # type: ignore[arg-type]


def test_without_a_quantization_config_the_tensors_are_refused(tmp_path: Path) -> None:
    folder = save_draft(quantized(), tmp_path / "draft")
    raw = json.loads((folder / "config.json").read_text())
    del raw["quantization_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"unexpected fc.weight_scale, fc.weight_scale_2.*wrong type fc.weight U8"):
        load_draft(folder)


def test_inspection_lists_a_disagreement_without_loading(tmp_path: Path) -> None:
    folder = save_draft(quantized(), tmp_path / "draft")
    edit_section(folder, ignore=["fc"])
    assert inspect_path(folder).faults == ("ignored by quantization_config but with scales in the file: fc",)


def test_an_own_quantized_head_with_another_fc_is_whole(tmp_path: Path) -> None:
    folder = save_draft(quantized(has_own_lm_head=True), tmp_path / "draft")
    edit_tensors(folder, {name: None for name in ("lm_head.weight", "lm_head.weight_scale", "lm_head.weight_scale_2")})
    with pytest.raises(CheckpointError, match=r"missing lm_head.weight"):
        load_draft(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: swap(d, K, nn.Linear(32, 32, bias=False)), "quantized only in part"),
        (lambda d: d.get_submodule(Q).weight_scale_2.fill_(7.0), "has other scales in one linear"),
        (lambda d: d.fc.weight_scale_2.fill_(torch.nan), "NaN, zero or negative"),
        (lambda d: setattr(d.fc, "input_scale", torch.tensor(1.0)), "some linears .* have an input_scale and some have none"),
    ],
)
def test_a_draft_that_readers_would_misread_is_not_saved(tmp_path: Path, change: Any, message: str) -> None:
    draft = quantized()
    change(draft)
    with pytest.raises(CheckpointError, match=message):
        save_draft(draft, tmp_path / "draft")
    assert not (tmp_path / "draft").exists()
