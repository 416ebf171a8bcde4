"""Loading from directories and hub ids: what is accepted, and the one sentence for everything that is wrong."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from families import VOCAB, make
from paged import own_forward
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from flashdraft.errors import CheckpointError, ConfigError, FlashdraftError, UnsupportedModelError
from flashdraft.targets import load_target, load_tokenizer
from flashdraft.targets.target import packed_attend


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    make("llama").save_pretrained(folder, max_shard_size="100KB")
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2")
    fast.chat_template = "{{ messages[0].content }}"
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy to break."""
    return shutil.copytree(saved, tmp_path / "model")


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refusal(kind: type[FlashdraftError], load, *args, **options) -> str:
    with pytest.raises(kind) as caught:
        load(*args, **options)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert len(sentence) < 600
    return sentence


def test_a_directory_gives_the_saved_model_and_its_tokenizer_in_silence(saved, capfd):
    target, ids = load_target(saved), torch.arange(3, 12)
    tokenizer = load_tokenizer(str(saved))
    assert capfd.readouterr() == ("", "")
    assert target.dtype == torch.float32
    assert target.eos_token_ids == {2}
    logits, _ = target.forward(ids, torch.arange(9), packed_attend(ids * 0, torch.arange(9)))
    torch.testing.assert_close(logits, own_forward(make("llama"), ids.tolist())[0], atol=1e-4, rtol=0)
    assert tokenizer("w5 w7")["input_ids"] == [5, 7]
    assert tokenizer.chat_template == "{{ messages[0].content }}"


def test_the_dtype_is_the_checkpoints_own_unless_another_is_asked_for(folder):
    edit(folder / "config.json", dtype="float16")
    assert load_target(folder).dtype == torch.float16
    assert load_target(folder, dtype="bfloat16").dtype == torch.bfloat16
    assert load_target(folder, dtype=torch.float32).dtype == torch.float32
    edit(folder / "config.json", dtype="float64")
    assert load_target(folder).dtype == torch.bfloat16


def test_a_multimodal_model_gives_its_text_part(tmp_path):
    make("gemma3 multimodal").save_pretrained(tmp_path)
    target = load_target(tmp_path)
    assert type(target.model).__name__ == "Gemma3ForConditionalGeneration"
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (4, 64, VOCAB)


@pytest.mark.parametrize("dtype", ["int4", torch.int8, "float64", 16])
def test_a_dtype_that_we_do_not_serve_is_refused(saved, dtype):
    assert "dtype must be auto, float32, bfloat16, float16, got" in refusal(ConfigError, load_target, saved, dtype=dtype)


@pytest.mark.parametrize("name", ["./absent", "/no/such/place", "~/no/such/place", "plain", "one/two/three"])
def test_what_looks_like_a_path_is_never_looked_up_on_the_hub(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", None)
    for load in (load_target, load_tokenizer):
        assert f"{name}: no such directory; give a directory" in refusal(CheckpointError, load, name)


@pytest.mark.parametrize(
    "name", ["a" * 5000, "/" + "a" * 300, "a" * 3000 + "/b", "a" * 300 + ".gguf", "~nobody-of-that-name/x"]
)
def test_a_name_that_no_file_can_have_is_one_clear_sentence(name):
    for load in (load_target, load_tokenizer):
        assert re.search("cannot be looked up|no such", refusal(CheckpointError, load, name))


def test_an_empty_name_is_refused():
    for load in (load_target, load_tokenizer):
        assert "the name of the target is empty" in refusal(CheckpointError, load, "")


@pytest.mark.parametrize("kind", ["directory", "gguf"])
def test_a_revision_of_what_is_local_is_refused_not_ignored(saved, tmp_path, kind):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    name = saved if kind == "directory" else tmp_path / "m.gguf"
    for load in (load_target, load_tokenizer):
        sentence = refusal(ConfigError, load, name, revision="v2")
        assert sentence.endswith("has no revision 'v2'; revisions select hub versions: give the sub-directory instead")


def test_a_file_that_is_no_model_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    assert "no such directory" in refusal(CheckpointError, load_target, tmp_path / "notes.txt")
    assert "has no config.json" in refusal(CheckpointError, load_target, tmp_path)


def test_a_hub_id_that_cannot_be_read_names_the_id_the_revision_and_the_remedy():
    for load in (load_target, load_tokenizer):
        sentence = refusal(CheckpointError, load, "nobody/nothing", revision="v9")
        assert sentence.startswith("nobody/nothing at revision v9 is neither a local directory nor readable from the hub")
        assert sentence.endswith("check the name, the network and access")


@pytest.mark.parametrize("name", ["nope/config.json", "nope/model.safetensors", "./nope"])
def test_a_file_that_is_not_there_is_no_hub_id(name):
    for load in (load_target, load_tokenizer):
        assert refusal(CheckpointError, load, name).startswith(f"{name}: no such directory")


@pytest.mark.parametrize("load", [load_target, load_tokenizer])
def test_a_hub_that_does_not_answer_is_asked_once_and_nothing_is_printed(monkeypatch, capfd, load):
    class NoNetwork(Exception):
        """What an HTTP library raises: no OSError."""

    asked = []

    def head(url, **options):
        asked.append(url)
        raise NoNetwork("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", head)
    sentence = refusal(CheckpointError, load, "nobody/nothing")
    assert "nor readable from the hub (Name or service not known): check the name, the network" in sentence
    assert [url.rsplit("huggingface.co", 1)[-1] for url in asked] == ["/nobody/nothing/resolve/main/config.json"]
    assert capfd.readouterr() == ("", "")


def hub(cache: Path, folder: Path, monkeypatch) -> None:
    """A hub's cache that holds the folder as someone/tiny at revision v2."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = cache / "models--someone--tiny"
    shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "v2").write_text(commit)
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))


def test_a_hub_id_is_read_at_its_revision_from_the_hubs_cache(saved, tmp_path, monkeypatch):
    hub(tmp_path, saved, monkeypatch)
    assert load_target("someone/tiny", revision="v2").num_layers == 4
    assert len(load_tokenizer("someone/tiny", revision="v2")) == VOCAB
    assert "someone/tiny at revision main is neither" in refusal(CheckpointError, load_target, "someone/tiny")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "config.json is not valid JSON"),
        (b"\xff\xfe\x00", "config.json is not valid JSON"),
        ("[1]", "config.json is not a JSON object"),
        ("{}", "config.json has no model_type"),
        ("[" * 100_000, "config.json is nested too deeply"),
        ('{"model_type": ["llama"]}', "knows no model_type ['llama']; upgrade it"),
        ('{"model_type": "nonsense"}', "knows no model_type 'nonsense'; upgrade it"),
        ('{"model_type": "own", "auto_map": {"AutoConfig": "c.C"}}', "comes with code of its own, which is never run"),
        ('{"model_type": "clip"}', "clip is not a causal language model"),
        ('{"model_type": "t5"}', "t5 is not a causal language model"),
        ('{"model_type": "bart"}', "bart is an encoder-decoder model"),
        ('{"model_type": "mamba"}', "its linear_attention layers keep a state that every token changes"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "cannot load the model"),
        ('{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 7}', "cannot load the model"),
    ],
)
def test_a_bad_configuration_is_refused(folder, content, message):
    (folder / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in refusal(FlashdraftError, load_target, folder)


def test_repository_code_is_neither_run_nor_asked_about(folder, capfd):
    edit(folder / "config.json", auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
    (folder / "own.py").write_text("raise SystemExit('ran')")
    assert load_target(folder).num_layers == 4  # transformers' own Llama
    assert capfd.readouterr() == ("", "")


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def test_a_missing_shard_is_named(folder):
    shards(folder)[1].unlink()
    sentence = refusal(CheckpointError, load_target, folder)
    assert f"{shards(folder)[0].parent.name}: model-00002-of-" in sentence
    assert "named in model.safetensors.index.json, is missing" in sentence


@pytest.mark.parametrize("weight_map", [["a"], {"a": 5}, {"a": None}, "x", None])
def test_an_index_without_file_names_is_refused(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "index.json has no weight_map of tensor names to file names" in refusal(CheckpointError, load_target, folder)


def test_an_index_with_a_name_that_no_file_can_have_is_refused(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 5000}}))
    assert "named in model.safetensors.index.json, is missing" in refusal(CheckpointError, load_target, folder)


def test_a_directory_without_weights_is_refused(folder):
    for path in folder.glob("model*"):
        path.unlink()
    assert "no file named model.safetensors" in refusal(CheckpointError, load_target, folder)


@pytest.mark.parametrize("keep", [0, 5, 0.5, 0.99])
def test_a_truncated_safetensors_file_is_refused(folder, keep):
    path = shards(folder)[0]
    content = path.read_bytes()
    path.write_bytes(content[: keep if isinstance(keep, int) else int(len(content) * keep)])
    sentence = refusal(CheckpointError, load_target, folder)
    assert "cannot load the model" in sentence
    assert sentence.endswith("check its files or download them again")


def test_a_corrupt_torch_file_is_refused(folder):
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"not a pickle")
    assert "cannot load the model" in refusal(CheckpointError, load_target, folder)


def rewrite(folder: Path, change) -> None:
    tensors = {name: tensor for path in shards(folder) for name, tensor in load_file(path).items()}
    for path in folder.glob("model*"):
        path.unlink()
    save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})


def without(name):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def plus(name, tensor):
    return lambda tensors: {**tensors, name: tensor}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("model.norm.weight"), "missing: model.norm.weight"),
        (without("model.layers.3.mlp.up_proj.weight"), "missing: model.layers.3.mlp.up_proj.weight"),
        (plus("model.norm.weight", torch.ones(65)), "of another shape: model.norm.weight [65] instead of [64]"),
        (
            plus("model.layers.0.self_attn.q_proj.bias", torch.ones(64)),
            "without a place in this model: model.layers.0.self_attn.q_proj.bias",
        ),
        (
            plus("model.layers.4.mlp.up_proj.weight", torch.ones(96, 64)),
            "without a place in this model: model.layers.4.mlp.up_proj",
        ),
        (lambda tensors: {}, "missing: lm_head.weight, model.embed_tokens.weight, model.layers.0.input_layernorm.weight ..."),
    ],
)
def test_weights_that_do_not_belong_to_the_configuration_are_named(folder, change, message, capfd):
    rewrite(folder, change)
    sentence = refusal(CheckpointError, load_target, folder)
    assert f"{folder}: the weights are not those of its config.json (tensors {message}" in sentence
    assert capfd.readouterr() == ("", "")


def poisoned(name, value):
    def change(tensors):
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[0] = value
        return tensors

    return change


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.2.mlp.up_proj.weight", "model.norm.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_not_finite_are_named(folder, name, value, dtype):
    rewrite(folder, poisoned(name, value))
    sentence = refusal(CheckpointError, load_target, folder, dtype=dtype)
    assert sentence.endswith(f"its weights hold NaN or infinite values ({name}): download them again")


def test_logits_that_overflow_a_dtype_are_not_blamed_on_the_weights(folder):
    rewrite(folder, lambda tensors: {**tensors, "lm_head.weight": tensors["lm_head.weight"] * 6e4})
    assert load_target(folder).dtype == torch.float32
    sentence = refusal(CheckpointError, load_target, folder, dtype="float16")
    assert "NaN or infinite in float16" in sentence
    assert sentence.endswith("load it in another dtype (bfloat16 or float32)")


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt FP8"),
        ({"quant_algo": "FP8"}, "FP8"),
        ({"quant_method": "nonsense"}, "nonsense"),
        ({"bits": 4}, "unnamed"),
    ],
)
def test_a_quantization_that_would_be_skipped_is_refused_by_name(folder, section, kind, capfd):
    edit(folder / "config.json", quantization_config=section)
    assert f"{folder} is quantized ({kind}), which transformers" in refusal(CheckpointError, load_target, folder)
    assert capfd.readouterr() == ("", "")


def test_a_skipped_quantization_of_a_text_part_is_refused_too(tmp_path):
    make("gemma3 multimodal").save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    edit(tmp_path / "config.json", text_config={**text, "quantization_config": {"quant_method": "modelopt"}})
    assert "is quantized (modelopt)" in refusal(CheckpointError, load_target, tmp_path)


@pytest.mark.parametrize(
    ("dtype", "word"), [(torch.int32, "I32"), (torch.int8, "I8"), (torch.uint8, "U8"), (torch.float8_e4m3fn, "F8_E4M3")]
)
@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_codes_without_a_quantization_to_read_them_by_are_refused(folder, dtype, word, name):
    rewrite(folder, lambda tensors: {**tensors, name: tensors[name].to(dtype)})
    assert f"{folder}: {name} is stored as {word}, and its config.json" in refusal(CheckpointError, load_target, folder)


def test_codes_in_one_of_several_files_are_refused_from_the_hubs_cache_too(folder, tmp_path, monkeypatch):
    path = shards(folder)[-1]
    tensors = load_file(path)
    name = max(tensors)
    save_file({**tensors, name: tensors[name].to(torch.int8)}, path, metadata={"format": "pt"})
    assert f"{name} is stored as I8" in refusal(CheckpointError, load_target, folder)
    hub(tmp_path, folder, monkeypatch)
    assert f"someone/tiny: {name} is stored as I8" in refusal(CheckpointError, load_target, "someone/tiny", revision="v2")


def test_tensors_that_every_reader_leaves_aside_are_no_reason_to_refuse(folder):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "vision_tower.patch.weight": torch.ones(3)}
    extra |= {"vision_tower.position_ids": torch.arange(3), "causal.bias": torch.ones(2, 2, dtype=torch.bool)}
    rewrite(folder, lambda tensors: {**tensors, **extra})
    assert load_target(folder).num_layers == 4


def test_a_target_without_a_tokenizer_is_served_by_ids_and_says_so_when_asked(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert load_target(folder).num_layers == 4
    assert refusal(CheckpointError, load_tokenizer, folder).endswith("add its tokenizer.json and tokenizer_config.json")
    (folder / "tokenizer.json").write_text("{")
    assert "no usable tokenizer" in refusal(CheckpointError, load_tokenizer, folder)


def test_an_unsupported_family_is_refused_before_its_weights_are_read(folder):
    for path in folder.glob("model*"):
        path.unlink()
    edit(folder / "config.json", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert "'dynamic' changes with the longest position" in refusal(UnsupportedModelError, load_target, folder)


def test_a_target_without_tokenizer_files_says_what_to_add(tmp_path):
    LlamaConfig(vocab_size=32, hidden_size=16, num_attention_heads=2).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"no usable tokenizer.*tokenizer\.json"):
        load_tokenizer(tmp_path)
