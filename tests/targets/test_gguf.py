"""GGUF files: the weights they keep, their tokenizer and chat template, what is refused, and that reading repeats nothing."""

from __future__ import annotations

import gguf
import pytest
import torch
from families import make
from gguf_files import SPECIAL, TEMPLATE, write_llama
from paged import own_forward
from pairs import request, run, small_engine

from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.targets import gguf as reader
from flashdraft.targets import load_target, load_tokenizer

KINDS = {"F32": 0.0, "Q8_0": 0.02, "Q4_1": 0.3}  # how far their weights may be from the model's


@pytest.fixture(scope="module")
def original():
    return make("llama", num_hidden_layers=2)


@pytest.fixture(scope="module", params=KINDS)
def stored(request, original, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / f"tiny-{request.param}.gguf"
    return path, write_llama(path, original, gguf.GGMLQuantizationType[request.param])


def test_weights_are_what_the_file_keeps(stored, original):
    path, kept = stored
    target = load_target(path, dtype="float32")
    loaded = target.model.state_dict()
    assert loaded.keys() == kept.keys()
    for name, tensor in kept.items():
        torch.testing.assert_close(loaded[name], tensor, atol=1e-6, rtol=1e-6)
        limit = KINDS[path.stem.split("-")[1]]
        torch.testing.assert_close(tensor, original.state_dict()[name].float(), atol=limit + 1e-6, rtol=0)


def test_greedy_tokens_are_those_of_a_model_with_these_weights(stored):
    path, kept = stored
    own = make("llama", num_hidden_layers=2)
    own.load_state_dict(kept)
    prompt = list(range(5, 25))
    [output] = run(small_engine(load_target(path, dtype="float32")), [request(prompt, max_tokens=20)])
    logits, _ = own_forward(own, prompt + output.tokens)
    assert output.tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_the_tokenizer_and_the_chat_template_come_from_the_file(stored):
    tokenizer = load_tokenizer(stored[0])
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.eos_token == SPECIAL[0]
    ids = tokenizer("hello, wörld")["input_ids"]
    assert ids[:2] == [256, 257], "`he` and `ll` are tokens by the file's merges"
    assert tokenizer.decode(ids) == "hello, wörld"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], add_generation_prompt=True)["input_ids"]
    assert [tokenizer.convert_ids_to_tokens(i) for i in chat] == ["<|user|>", "he", "<|assistant|>"]


def test_auto_means_bfloat16_and_the_end_token_is_known(stored, original):
    target = load_target(stored[0])
    assert target.dtype == torch.bfloat16
    assert target.eos_token_ids == {original.config.vocab_size - len(SPECIAL)}


def test_loading_parses_the_file_once_and_builds_the_name_table_once(stored, monkeypatch, capfd):
    parsed, tables = [], []
    read, build = gguf.GGUFReader.__init__, gguf.get_tensor_name_map
    monkeypatch.setattr(
        gguf.GGUFReader, "__init__", lambda self, path, mode="r": (parsed.append(path), read(self, path, mode))[1]
    )
    monkeypatch.setattr(gguf, "get_tensor_name_map", lambda *args: (tables.append(args), build(*args))[1])
    names = gguf.GGUFReader, gguf.get_tensor_name_map
    load_target(stored[0])
    assert (len(parsed), len(tables)) == (1, 1)
    load_tokenizer(stored[0])
    assert len(parsed) == 2
    assert names == (gguf.GGUFReader, gguf.get_tensor_name_map), "the package is as it was"
    assert capfd.readouterr() == ("", "")


def test_a_failed_reading_leaves_the_package_as_it_was(tmp_path):
    names = gguf.GGUFReader, gguf.get_tensor_name_map
    with pytest.raises(ZeroDivisionError), reader.reading():
        raise ZeroDivisionError
    assert names == (gguf.GGUFReader, gguf.get_tensor_name_map)


@pytest.mark.parametrize("keep", [3, 20, 3000, 0.5, 0.999])
def test_a_file_cut_short_is_one_sentence(stored, tmp_path, keep):
    content = stored[0].read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[: keep if keep > 1 else int(len(content) * keep)])
    with pytest.raises(CheckpointError, match=r"cut\.gguf") as refusal:
        load_target(path)
    assert "\n" not in str(refusal.value)
    if keep == 20:
        with pytest.raises(CheckpointError, match="no usable tokenizer"):
            load_tokenizer(path)


def test_a_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "page.gguf").write_text("<html>not found</html>")
    with pytest.raises(CheckpointError, match=r"page\.gguf is not a GGUF file \(wrong magic bytes\): download it again"):
        load_target(tmp_path / "page.gguf")
    with pytest.raises(CheckpointError, match="no such GGUF file"):
        load_tokenizer(tmp_path / "absent.gguf")


def test_an_unknown_architecture_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "perceptron")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="architecture perceptron is not supported"):
        load_target(tmp_path / "odd.gguf")


def test_without_the_package_the_command_that_installs_it_is_named(stored, monkeypatch):
    find = reader.importlib.util.find_spec
    monkeypatch.setattr(reader.importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name))
    with pytest.raises(ConfigError, match="needs gguf: run `pip install gguf accelerate`"):
        load_target(stored[0])
