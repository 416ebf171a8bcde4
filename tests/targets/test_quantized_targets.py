"""Targets in others' quantization formats: what is loaded is the plain model that the codes mean, or is refused by name."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest
import torch
from families import make
from paged import own_forward
from pairs import request, run, small_engine, tiny_draft
from quantized_files import FORMATS, edit, save, save_gpt_oss
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.quantizers.base import HfQuantizer

from flashdraft.errors import CheckpointError, UnsupportedModelError
from flashdraft.inspection import inspect_path
from flashdraft.targets import load_target
from flashdraft.targets.fused import fuse
from flashdraft.targets.recognition import is_plain
from flashdraft.targets.target import Target

DEQUANTIZES = hasattr(HfQuantizer, "get_load_operations")  # compressed-tensors: 5.24 does, 5.17 does not
COMPRESSED = DEQUANTIZES and importlib.util.find_spec("compressed_tensors") is not None


def needs_package(form: str) -> None:
    if form.startswith("compressed") and not COMPRESSED:
        pytest.skip("needs compressed-tensors")


@pytest.mark.parametrize("form", FORMATS)
def test_a_quantized_target_is_the_plain_model_that_its_codes_mean(form, tmp_path, capfd):
    needs_package(form)
    plain, own = save(tmp_path, form), make("llama").state_dict()
    away = max(float((own[name] - tensor).abs().max()) for name, tensor in plain.items())
    assert away > 1e-3, "a stand-in that rounds nothing would prove nothing"
    capfd.readouterr()
    target = load_target(tmp_path)
    assert capfd.readouterr() == ("", "")
    state = target.model.state_dict()
    assert state.keys() == plain.keys()
    rtol = 2**-8 if form == "compressed nvfp4" else 1e-6  # compressed-tensors multiplies its codes and scales in bfloat16
    assert all(torch.allclose(state[name], tensor, rtol=rtol, atol=1e-7) for name, tensor in plain.items())
    assert target.eos_token_ids == {2}
    report = inspect_path(tmp_path)
    assert report.quantization == form.partition(" ")[0].replace("compressed", "compressed-tensors")
    assert report.memory == sum(tensor.numel() * 4 for tensor in state.values())
    in_16_bits = load_target(tmp_path, dtype="bfloat16")
    assert in_16_bits.dtype == torch.bfloat16
    for name, tensor in in_16_bits.model.state_dict().items():
        assert torch.allclose(tensor.float(), plain[name], rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("form", ["fp8 blocks", "compressed int4", "gptq", "awq"])
def test_a_quantized_target_is_fused_and_decodes_losslessly_with_a_draft(form, tmp_path):
    needs_package(form)
    own = make("llama")
    own.load_state_dict(save(tmp_path, form))
    target = load_target(tmp_path)
    assert fuse(target).kept == {}
    prompt = list(range(3, 40))
    [output] = run(small_engine(target, tiny_draft(target)), [request(prompt, max_tokens=16)])
    logits, _ = own_forward(own, prompt + output.tokens)
    assert output.tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("form", ["fp8 blocks", "gptq", "compressed int4", "mxfp4"])
def test_quantized_experts_are_the_plain_ones_that_their_codes_mean(form, tmp_path):
    needs_package(form)
    family = "gpt-oss" if form == "mxfp4" else "qwen3moe"
    plain = save_gpt_oss(tmp_path / "m") if form == "mxfp4" else save(tmp_path / "m", form, family)
    state = load_target(tmp_path / "m").model.state_dict()
    make(family).save_pretrained(tmp_path / "plain")
    save_file(
        {n: t.contiguous() for n, t in plain.items()}, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"}
    )
    expected = load_target(tmp_path / "plain").model.state_dict()
    assert state.keys() == expected.keys()
    assert any("experts" in name for name in state)
    assert all(torch.allclose(state[name], tensor, rtol=1e-6, atol=1e-7) for name, tensor in expected.items())


_CT = FORMATS["compressed int4"][1]
_GROUP = _CT["config_groups"]["group_0"]


def group(**weights: object) -> dict[str, object]:
    return {**_GROUP, "weights": {**_GROUP["weights"], **weights}}


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        (
            "fp8 blocks",
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "quantized with bitsandbytes, whose packed weights",
        ),
        ("fp8 blocks", {"quant_method": "hqq"}, "quantized with hqq, whose packed weights are not read here"),
        ("fp8 blocks", {"quant_method": "fbgemm_fp8"}, "quantized with fbgemm_fp8, whose packed weights"),
        (
            "compressed int4",
            {"config_groups": {"a": _GROUP, "b": group(num_bits=8)}},
            "2 config_groups store weights in several",
        ),
        ("compressed int4", {"config_groups": {"a": group(actorder="group")}}, "order of activations .actorder group."),
        ("compressed int4", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config rotates activations"),
        ("compressed int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, r"weights are sparse \(sparse-24-bitmask\)"),
        (
            "compressed int4",
            {"config_groups": {"a": {**_GROUP, "format": "mxfp4-pack-quantized"}}},
            "format 'mxfp4-pack-quantized'",
        ),
        ("gptq", {"bits": 3}, "codes have 3 bits, and only 2, 4 and 8"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not read"),
        ("awq", {"version": "gemv"}, "version 'gemv' is not read, only gemm"),
        ("awq", {"bits": 8}, "codes have 8 bits, and only 4"),
    ],
)
def test_a_quantization_that_would_be_read_wrongly_is_refused_by_name(form, changes, message, tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: True if name == "compressed_tensors" else found(name, *rest)
    )
    monkeypatch.setattr(HfQuantizer, "get_load_operations", HfQuantizer.__init__, raising=False)
    save(tmp_path, form)
    edit(tmp_path, quantization_config={**FORMATS[form][1], **changes})
    with pytest.raises(UnsupportedModelError, match=message) as refusal:
        load_target(tmp_path)
    assert "use the unquantized target" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("form", "package"), [("compressed int4", "compressed-tensors"), ("fp8 blocks", "accelerate")])
def test_a_missing_package_is_named(form, package, tmp_path, monkeypatch):
    save(tmp_path, form)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    with pytest.raises(UnsupportedModelError, match=f"a package that is missing: pip install {package}"):
        load_target(tmp_path)


def test_a_transformers_that_leaves_compressed_linears_wrapped_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: True)
    monkeypatch.delattr(HfQuantizer, "get_load_operations", raising=False)
    save(tmp_path, "compressed int4")
    with pytest.raises(UnsupportedModelError, match="does not turn into plain weights: upgrade it"):
        load_target(tmp_path)


def change_tensors(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("gptq", lambda t: t.pop(f"{Q}.qzeros"), f"{Q} has no qzeros: download it again"),
        ("gptq", lambda t: t.update({f"{Q}.scales": torch.ones(2, 65)}), f"parts of {Q} do not fit each other"),
        ("gptq", lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"].long()}), f"codes of {Q} are torch.int64"),
        ("gptq", lambda t: t.update({f"{Q}.g_idx": t[f"{Q}.g_idx"] + 9}), f"parts of {Q} do not fit each other"),
        (
            "awq",
            lambda t: t.update({f"{Q}.qzeros": torch.ones(3, 8, dtype=torch.int32)}),
            f"parts of {Q} do not fit each other",
        ),
        ("fp8 blocks", lambda t: t.pop(f"{Q}.weight"), "missing: model.layers.1.self_attn.q_proj.weight"),
        ("fp8 blocks", lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(5, 1)}), "not divisible|cannot load"),
    ],
)
def test_codes_that_do_not_fit_their_scales_are_refused(form, change, message, tmp_path):
    save(tmp_path, form)
    change_tensors(tmp_path, change)
    with pytest.raises(CheckpointError, match=message) as refusal:
        load_target(tmp_path)
    assert "\n" not in str(refusal.value)


def test_blocks_that_transformers_would_cut_otherwise_are_refused(tmp_path):
    save(tmp_path, "fp8 blocks")
    edit(tmp_path, quantization_config={**FORMATS["fp8 blocks"][1], "weight_block_size": [64, 32]})
    # up_proj [96, 64]: a block of 64 rows and one of 32, which transformers would take for two of 48
    change_tensors(
        tmp_path,
        lambda t: t.update({n: s[: -(-len(s) // 2)].contiguous() for n, s in t.items() if n.endswith("weight_scale_inv")}),
    )
    with pytest.raises(UnsupportedModelError, match=r"\[96, 64\] ends in a part of a block of \[64, 32\]"):
        load_target(tmp_path)


def _with_scales(linear: nn.Linear) -> None:
    linear.register_buffer("weight_scale", torch.ones(1))


def _with_a_forward(linear: nn.Linear) -> None:
    linear.forward = functools.partial(lambda own, x: own(x) * 2, linear.forward)


def _with_codes(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(linear.weight.to(torch.float8_e4m3fn), requires_grad=False)


def _with_a_hook(linear: nn.Linear) -> None:
    linear.register_forward_pre_hook(lambda module, args: (args[0].round(decimals=1),))


@pytest.mark.parametrize("change", [_with_scales, _with_a_forward, _with_a_hook])
def test_fused_layers_do_not_read_the_weights_of_a_quantized_linear(change):
    """compressed-tensors, for one, leaves the class nn.Linear and changes what it does."""
    target = Target(make("llama"))
    linear = target.layers[1].mlp.up_proj
    change(linear)
    kept = fuse(target).kept
    assert kept == {1: "up_proj does more than its weight says, as quantized layers do"}


def test_a_linear_is_plain_until_anything_is_added_to_it():
    assert is_plain(nn.Linear(3, 2))
    assert is_plain(nn.Linear(3, 2, bias=False).bfloat16())
    for change in (_with_scales, _with_a_forward, _with_codes, _with_a_hook):
        linear = nn.Linear(4, 4)
        change(linear)
        assert not is_plain(linear)
