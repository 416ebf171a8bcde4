"""LoRA adapters: what merging computes, equal to the layer it stands for, and one sentence for an adapter that does not fit."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from families import make
from paged import own_forward
from safetensors.torch import save_file
from saved import saved_pair
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from flashdraft import LLM, SamplingParams
from flashdraft.cli import main
from flashdraft.errors import CheckpointError, ConfigError, FlashdraftError, UnsupportedModelError
from flashdraft.targets import load_target, load_tokenizer
from flashdraft.targets.load import adapter_hash
from flashdraft.targets.lora import LoraConfig, merge_lora
from flashdraft.targets.target import packed_attend

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": MODULES, "bias": "none", "task_type": "CAUSAL_LM"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    make("llama").save_pretrained(folder)
    return folder


def random_tensors(model: nn.Module, config: LoraConfig) -> dict[str, torch.Tensor]:
    """A and B for every module that the configuration names, none of them zero."""
    generator, tensors = torch.Generator().manual_seed(3), {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head" and config.targets_module(name):
            r = config.rank_of(name)
            shapes = {"A": (r, module.in_features), "B": (module.out_features, r)}
            for side, shape in shapes.items():
                tensors[f"base_model.model.{name}.lora_{side}.weight"] = torch.randn(shape, generator=generator) * 0.1
    return tensors


def write(folder: Path, content: dict, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(content))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def adapter(folder: Path, **changes) -> Path:
    content = PLAIN | changes
    return write(folder, content, random_tensors(make("llama"), LoraConfig.from_json("x", content)))


class AsLayer(nn.Module):
    """x W^T + scale * (x A^T) B^T: what the adapter means."""

    def __init__(self, base, a, b, scale):
        super().__init__()
        self.base, self.a, self.b, self.scale = base, a, b, scale

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.a.T) @ self.b.T


def as_layers(config: LoraConfig, tensors: dict[str, torch.Tensor], scales) -> nn.Module:
    model = make("llama")
    for key in [key for key in tensors if ".lora_A." in key]:
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        parent, _, leaf = name.rpartition(".")
        layer = AsLayer(model.get_submodule(name), tensors[key], tensors[key.replace("lora_A", "lora_B")], scales(name))
        setattr(model.get_submodule(parent), leaf, layer)
    return model


SETTINGS = {
    "names": ({}, lambda name: 6 / 4),
    "rank-stabilized": ({"use_rslora": True}, lambda name: 6 / math.sqrt(4)),
    "a regular expression": ({"target_modules": r".*\.(self_attn|mlp)\.(q|down)_proj"}, lambda name: 1.5),
    "all-linear": ({"target_modules": "all-linear"}, lambda name: 1.5),
    "old files without target_modules": ({"target_modules": None}, lambda name: 1.5),
    "layers": ({"layers_to_transform": [1, 3], "layers_pattern": "layers"}, lambda name: 1.5),
    "excluded modules": ({"exclude_modules": ["o_proj", "model.layers.0.mlp.up_proj"]}, lambda name: 1.5),
    "ranks and alphas by pattern": (
        {"rank_pattern": {"q_proj": 2, "layers.2.mlp.up_proj": 8}, "alpha_pattern": {"^model.layers.1.*": 12}},
        lambda name: (
            (12 if name.startswith("model.layers.1.") else 6)
            / (2 if "q_proj" in name else 8 if name == "model.layers.2.mlp.up_proj" else 4)
        ),
    ),
}


@pytest.mark.parametrize("changes", SETTINGS)
def test_a_merged_target_computes_what_base_plus_scaled_low_rank_layers_compute(saved, tmp_path, changes):
    settings, scales = SETTINGS[changes]
    content = PLAIN | settings
    config = LoraConfig.from_json("x", content)
    tensors = random_tensors(make("llama"), config)
    assert tensors
    ids = list(range(3, 40))
    wanted = own_forward(as_layers(config, tensors, scales), ids)[0]
    merged = load_target(saved, lora=write(tmp_path, content, tensors))
    attend = packed_attend(torch.zeros(len(ids)), torch.arange(len(ids)))
    got = merged.forward(torch.tensor(ids), torch.arange(len(ids)), attend)[0]
    assert (wanted - own_forward(make("llama"), ids)[0]).abs().max() > 0.1
    torch.testing.assert_close(got, wanted, atol=2e-4, rtol=1e-4)


def test_a_bfloat16_weight_is_rounded_once_from_the_exact_sum(saved, tmp_path):
    content = PLAIN | {"target_modules": ["q_proj"]}
    tensors = {k: v.bfloat16() for k, v in random_tensors(make("llama"), LoraConfig.from_json("x", content)).items()}
    target = load_target(saved, dtype="bfloat16", lora=write(tmp_path, content, tensors))
    name = "model.layers.2.self_attn.q_proj"
    a, b = (tensors[f"base_model.model.{name}.lora_{side}.weight"].double() for side in "AB")
    base = make("llama").get_submodule(name).weight.bfloat16().double()
    torch.testing.assert_close(target.model.get_submodule(name).weight, (base + 1.5 * b @ a).bfloat16(), atol=0, rtol=0)


def test_a_sum_beyond_float16_is_refused_and_is_none_in_bfloat16(saved, tmp_path):
    folder = write(tmp_path, PLAIN | {"lora_alpha": 1e7}, random_tensors(make("llama"), LoraConfig.from_json("x", PLAIN)))
    sentence = refusal(ConfigError, saved, dtype="float16", lora=folder)
    assert "is beyond what torch.float16 holds: give --dtype bfloat16" in sentence
    assert load_target(saved, dtype="bfloat16", lora=folder).num_layers == 4


def test_a_tall_weight_is_merged_part_by_part(monkeypatch, saved, tmp_path):
    folder = adapter(tmp_path)
    whole = load_target(saved, lora=folder).model.state_dict()
    monkeypatch.setattr("flashdraft.targets.lora.ROWS", 7)
    assert all(torch.equal(whole[key], value) for key, value in load_target(saved, lora=folder).model.state_dict().items())


def test_a_transposed_weight_takes_a_transposed_product_whatever_fan_in_fan_out_says(tmp_path):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=2, n_positions=64))
    layer = model.transformer.h[1].attn.c_attn
    a, b, before = torch.randn(4, 32), torch.randn(96, 4), layer.weight.clone()
    prefix = "base_model.model.transformer.h.1.attn.c_attn.lora_"
    content = PLAIN | {"target_modules": r"transformer\.h\.1\.attn\.c_attn", "fan_in_fan_out": True}
    folder = write(tmp_path, content, {f"{prefix}A.weight": a, f"{prefix}B.weight": b})
    merge_lora(model, LoraConfig.from_json("x", content), folder / "adapter_model.safetensors")
    torch.testing.assert_close(layer.weight, before + 1.5 * (b @ a).T, atol=1e-5, rtol=1e-5)


def refusal(kind: type[FlashdraftError], *args, **options) -> str:
    with pytest.raises(kind) as caught:
        load_target(*args, **options)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert len(sentence) < 600
    return sentence


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"peft_type": "IA3"}, UnsupportedModelError, "peft_type 'IA3' cannot be merged, only LORA"),
        ({"peft_type": None}, UnsupportedModelError, "peft_type None cannot be merged"),
        ({"task_type": "SEQ_CLS"}, UnsupportedModelError, "an adapter for SEQ_CLS, which a target is not"),
        ({"use_dora": True}, UnsupportedModelError, "it sets use_dora 'True', which is not merged here: merge it with PEFT"),
        ({"bias": "lora_only"}, UnsupportedModelError, "it sets bias 'lora_only'"),
        ({"modules_to_save": ["lm_head"]}, UnsupportedModelError, "it sets modules_to_save"),
        ({"init_lora_weights": "pissa"}, UnsupportedModelError, "it sets init_lora_weights 'pissa'"),
        ({"a_setting_of_2030": 1}, UnsupportedModelError, "it sets a_setting_of_2030 '1'"),
        ({"bias": None}, None, ""),
        ({"use_rslora": "false"}, CheckpointError, "'false' is neither true nor false"),
        ({"lora_alpha": 1e308}, ConfigError, "is beyond what torch.float32 holds: its values or lora_alpha are too large"),
        ({"r": 0}, CheckpointError, "r must be at least 1"),
        ({"r": "wide"}, CheckpointError, "adapter_config.json has a missing or bad value (ValueError"),
        ({"lora_alpha": None}, CheckpointError, "adapter_config.json has a missing or bad value (TypeError"),
        ({"lora_alpha": float("nan")}, CheckpointError, "lora_alpha a finite number"),
        ({"target_modules": "("}, CheckpointError, "adapter_config.json has a missing or bad value"),
        ({"target_modules": 5}, CheckpointError, "without a place in this model: base_model.model.model.layers.0"),
        ({"rank_pattern": [1]}, CheckpointError, "adapter_config.json has a missing or bad value (AttributeError"),
        ({"r": 8}, CheckpointError, "of another shape: base_model.model.model.layers.0"),
        ({"target_modules": ["q_proj"]}, CheckpointError, "without a place in this model: base_model.model.model.layers.0"),
        ({"target_modules": [*MODULES, "lm_head"]}, None, ""),
    ],
)
def test_a_configuration_that_cannot_be_merged_is_refused(saved, tmp_path, changes, kind, message):
    folder = adapter(tmp_path)
    (folder / "adapter_config.json").write_text(json.dumps(PLAIN | changes))
    if kind is None:
        assert load_target(saved, lora=folder).num_layers == 4
    else:
        sentence = refusal(kind, saved, lora=folder)
        assert str(folder) in sentence
        assert message in sentence


def without(tensors, end):
    return {key: tensor for key, tensor in tensors.items() if not key.endswith(end)}


def renamed(tensors, old, new):
    return {key.replace(old, new): tensor for key, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: renamed(t, "layers.3", "layers.4"), "without a place in this model: base_model.model.model.layers.4"),
        (lambda t: renamed(t, "base_model.model.", ""), "without a place in this model: model.layers.0"),
        (lambda t: without(t, "layers.1.mlp.up_proj.lora_B.weight"), "missing: model.layers.1.mlp.up_proj.lora_B"),
        (lambda t: {k: v for k, v in t.items() if "layers.2" not in k}, "missing: model.layers.2.self_attn.q_proj.lora_A"),
        (lambda t: {}, "holds no tensors"),
        (lambda t: {k: v * math.nan for k, v in t.items()}, "holds values that are no finite numbers"),
        (lambda t: {k: v.long() for k, v in t.items()}, "holds values that are no finite numbers"),
    ],
)
def test_tensors_that_do_not_fit_are_named_and_nothing_is_merged(saved, tmp_path, change, message):
    tensors = random_tensors(make("llama"), LoraConfig.from_json("x", PLAIN))
    folder = write(tmp_path, PLAIN | {"base_model_name_or_path": "someone/model"}, change(tensors))
    assert message in refusal(CheckpointError, saved, lora=folder)
    model = make("llama")
    with pytest.raises(CheckpointError):
        merge_lora(model, LoraConfig.from_json("x", PLAIN), folder / "adapter_model.safetensors")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), make("llama").parameters(), strict=True))


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.up_proj.lora_magnitude_vector.weight", "lm_head.base_layer.weight", "model.norm.weight"]
)
def test_a_file_with_more_than_lora_matrices_is_refused_by_the_tensors_name(saved, tmp_path, name):
    tensors = random_tensors(make("llama"), LoraConfig.from_json("x", PLAIN))
    folder = write(tmp_path, PLAIN, {**tensors, f"base_model.model.{name}": torch.ones(64)})
    assert f"holds more than LoRA matrices (base_model.model.{name})" in refusal(UnsupportedModelError, saved, lora=folder)


def test_an_adapter_of_a_model_of_other_sizes_names_the_model_it_was_made_for(tmp_path):
    pair = saved_pair(tmp_path, hidden_size=32)
    folder = adapter(tmp_path / "adapter", base_model_name_or_path="someone/model")
    sentence = refusal(CheckpointError, pair.target, lora=folder)
    assert "of another shape: base_model.model.model.layers.0" in sentence
    assert sentence.endswith("give the target that it was made for (someone/model)")


def test_a_tied_output_embedding_is_not_adapted(tmp_path):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=2, n_positions=64))
    content = PLAIN | {"target_modules": ["lm_head"]}
    tensors = {f"base_model.model.lm_head.lora_{s}.weight": torch.ones(n) for s, n in {"A": (4, 32), "B": (60, 4)}.items()}
    file = write(tmp_path, content, tensors) / "adapter_model.safetensors"
    with pytest.raises(UnsupportedModelError, match="adapts lm_head, whose weight is the input embedding's too"):
        merge_lora(model, LoraConfig.from_json("x", content), file)


@pytest.mark.parametrize("keep", [0, 7, 500])
def test_a_truncated_file_is_refused(saved, tmp_path, keep):
    file = adapter(tmp_path) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "cannot read adapter_model.safetensors" in refusal(CheckpointError, saved, lora=tmp_path)


def test_a_directory_that_is_no_adapter_is_refused(saved, tmp_path):
    assert "no adapter_config.json, so it is no LoRA adapter" in refusal(CheckpointError, saved, lora=saved)
    (adapter(tmp_path) / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    assert "no adapter_model.safetensors, so it is no LoRA adapter" in refusal(CheckpointError, saved, lora=tmp_path)
    (tmp_path / "adapter_model.safetensors").touch()
    (tmp_path / "adapter_config.json").write_text("{")
    assert "adapter_config.json is not valid JSON" in refusal(CheckpointError, saved, lora=tmp_path)


def test_an_empty_name_is_no_directory_here(saved):
    assert "the name of the adapter is empty" in refusal(CheckpointError, saved, lora="")


@pytest.mark.parametrize("name", ["./absent", "/no/such/place", "plain", "a/b/c", "~nobody-of-that-name/x", "/" + "a" * 5000])
def test_what_looks_like_a_path_is_never_looked_up_on_the_hub(saved, name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    assert ": no such directory; give an adapter's directory or a hub id" in refusal(CheckpointError, saved, lora=name)


def test_a_hub_id_that_cannot_be_read_names_it(saved):
    sentence = refusal(CheckpointError, saved, lora="nobody/nothing")
    assert sentence.startswith("nobody/nothing at revision main is neither a local directory nor readable from the hub")


def test_a_hub_id_is_read_from_the_hub(saved, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url, timeout: asked.append(url))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, allow_patterns: str(adapter(tmp_path)))
    assert load_target(saved, lora="someone/adapter").num_layers == 4
    assert re.search(r"someone/adapter/resolve/main/adapter_config.json$", asked[0])


def test_tokenizer_and_template_of_the_adapter_win_where_present(tmp_path):
    pair, other = saved_pair(tmp_path), saved_pair(tmp_path / "other", chat_template="{{ 'other' }}")
    folder = adapter(tmp_path / "adapter")
    base = load_tokenizer(pair.target).chat_template
    assert load_tokenizer(pair.target, lora=folder).chat_template == base
    (folder / "chat_template.jinja").write_text("{{ 'mine' }}")
    found = load_tokenizer(pair.target, lora=folder)
    assert (found.chat_template, found.eos_token) == ("{{ 'mine' }}", "</s>")
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="cannot read chat_template"):
        load_tokenizer(pair.target, lora=folder)
    (folder / "chat_template.jinja").unlink()
    theirs = load_tokenizer(other.target)
    theirs.save_pretrained(folder)
    assert load_tokenizer(pair.target, lora=folder).chat_template == "{{ 'other' }}"
    theirs.chat_template = None
    shutil.rmtree(folder)
    theirs.save_pretrained(adapter(folder))
    assert load_tokenizer(pair.target, lora=folder).chat_template == base


def test_a_pair_with_an_adapter_answers_otherwise_and_the_draft_changes_nothing(tmp_path):
    pair = saved_pair(tmp_path)
    base = load_target(pair.target, dtype="float32")
    tensors = random_tensors(base.model, LoraConfig.from_json("x", PLAIN))
    folder = write(tmp_path / "adapter", PLAIN, {key: tensor * 5 for key, tensor in tensors.items()})
    options = {"dtype": "float32", "device": "cpu", "max_model_len": 256}
    texts = [
        LLM(pair.target, draft, lora=lora, **options)
        .generate("the quick brown", SamplingParams(temperature=0))[0]
        .outputs[0]
        .token_ids
        for draft, lora in ((pair.draft, folder), (False, folder), (False, None))
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.fixture
def adapted(tmp_path):
    """A pair on disk, two adapters of its target, and its draft made to say which adapter it was trained for."""
    pair = saved_pair(tmp_path)
    model = load_target(pair.target, dtype="float32").model
    tensors = random_tensors(model, LoraConfig.from_json("x", PLAIN))
    mine = write(tmp_path / "mine", PLAIN, tensors)
    other = write(tmp_path / "other", PLAIN, {key: tensor * 2 for key, tensor in tensors.items()})

    def trained_for(lora) -> None:
        content = {"lora": None if lora is None else {"name": lora.name, "hash": adapter_hash(lora)}}
        (pair.draft / "training.json").write_text(json.dumps(content))

    return pair, mine, other, trained_for


@pytest.mark.parametrize(
    ("trained", "used", "sentence"),
    [
        (None, None, None),
        ("mine", "mine", None),
        (None, "mine", "belongs to the base model and not to"),
        ("mine", None, "was trained for the adapter mine and not for the target without it"),
        ("mine", "other", "was trained for the adapter mine and not for"),
    ],
)
def test_a_draft_of_another_adapter_or_of_none_is_said_to_be_one(adapted, trained, used, sentence):
    pair, mine, other, trained_for = adapted
    by_name = {None: None, "mine": mine, "other": other}
    trained_for(by_name[trained])
    found = LLM(pair.target, pair.draft, lora=by_name[used], dtype="float32", device="cpu").warning
    assert found is None if sentence is None else sentence in found
    assert LLM(pair.target, False, lora=by_name[used], dtype="float32", device="cpu").warning is None


@pytest.mark.parametrize("content", [None, "{", "[]", '{"lora": 5}', '{"lora": {"name": "x"}}'])
def test_of_a_draft_that_does_not_say_whose_it_is_nothing_is_said(adapted, content):
    pair, mine, _, _ = adapted
    if content is not None:
        (pair.draft / "training.json").write_text(content)
    assert LLM(pair.target, pair.draft, lora=mine, dtype="float32", device="cpu").warning is None


def test_the_command_line_says_whose_draft_it_is(adapted, monkeypatch, capsys):
    pair, mine, _, trained_for = adapted
    trained_for(None)
    command = ["generate", "the fox", "--target", pair.target, "--draft", pair.draft, "--lora", mine, "--max-tokens", 4]
    monkeypatch.setattr(sys, "argv", ["flashdraft", *map(str, command), "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (None, 0)
    assert "belongs to the base model and not to" in capsys.readouterr().err


def test_on_the_command_line_a_wrong_adapter_is_one_sentence_and_exit_code_2(tmp_path, monkeypatch, capsys):
    pair, folder = saved_pair(tmp_path), adapter(tmp_path / "adapter", base_model_name_or_path="someone/model")
    command = ["flashdraft", "generate", "hello", "--target", str(pair.target), "--device", "cpu", "--lora", str(folder)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"flashdraft: {folder} is no adapter of this target (tensors " in capsys.readouterr().err
