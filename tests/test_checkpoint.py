"""Drafts on disk: both layouts there and back, every key of config.json, and one clear sentence for every broken file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_config import TINY
from torch import Tensor

from flashdraft.checkpoint import convert, load_draft, read_config, save_draft
from flashdraft.config_json import config_sha256
from flashdraft.draft import DFlashConfig, DFlashDraft
from flashdraft.errors import CheckpointError, ConfigError

EVERY_KEY = TINY.with_(
    block_size=5,
    rms_norm_eps=1e-5,
    windows=(9, 9, 9),
    attention_bias=True,
    input_embedding_scale=0.25,
    logit_scale=2.5,
    final_logit_softcapping=30.0,
    draft_vocab_size=12,
    has_own_lm_head=True,
    has_own_embeddings=True,
)
SAVED = {
    "plain": TINY,
    "every key": EVERY_KEY,
    "causal": TINY.with_(causal=(True,) * 3),
    "windowed and causal": TINY.with_(windows=(9,) * 3, causal=(True,) * 3),
    "mixed, bidirectional": TINY.with_(windows=(9, None, 9)),
    "mixed, causal": TINY.with_(windows=(9, None, 9), causal=(True,) * 3),
    "mixed, causal where windowed": TINY.with_(windows=(9, None, 9), causal=(True, False, True)),
}


def randomized(config: DFlashConfig, dtype: torch.dtype = torch.float32) -> DFlashDraft:
    draft = DFlashDraft(config).to(dtype)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.normal_()
    if draft.d2t is not None:
        draft.d2t.copy_(torch.arange(len(draft.d2t)))  # 0, 2, 4, ...
    return draft


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_draft(randomized(TINY), tmp_path / "draft")


def edit_config(folder: Path, **changes: object) -> None:
    """Set keys of config.json; a value of ... removes the key; `dflash_config__causal` reaches inside.

    The weights lose their stamp, as if other programs had written both files.
    """
    edit_weights(folder, lambda tensors: None)
    raw = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        *outer, last = key.split("__")
        section = raw
        for name in outer:
            section = section.setdefault(name, {})
        if value is ...:
            section.pop(last, None)
        else:
            section[last] = value
    (folder / "config.json").write_text(json.dumps(raw))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: t.clone() for name, t in tensors.items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("layout", ["dflash", "speculators"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_saving_and_loading_keeps_every_bit_and_the_configuration(
    tmp_path: Path, name: str, layout: str, dtype: torch.dtype
) -> None:
    draft = randomized(SAVED[name], dtype)
    loaded = load_draft(save_draft(draft, tmp_path / "d", layout=layout))
    assert loaded.config == draft.config == read_config(tmp_path / "d")
    state = draft.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    for key, tensor in loaded.state_dict().items():
        assert tensor.dtype == state[key].dtype
        assert torch.equal(tensor, state[key]), key
    assert all(p.requires_grad for p in loaded.parameters())


@pytest.mark.parametrize("name", SAVED)
def test_converting_there_and_back_changes_nothing(tmp_path: Path, name: str) -> None:
    first = save_draft(randomized(SAVED[name], torch.bfloat16), tmp_path / "a", target="owner/target", metadata={"run": "7"})
    second = convert(first, tmp_path / "b", "speculators")
    third = convert(second, tmp_path / "c", "dflash")
    assert (first / "config.json").read_text() == (third / "config.json").read_text()
    before, after = load_file(first / "model.safetensors"), load_file(third / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert read_config(first) == read_config(second)
    verifier = json.loads((second / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == "owner/target"
    with safe_open(third / "model.safetensors", "pt") as opened:
        stamp = {"config_sha256": config_sha256(read_config(first))}
        assert opened.metadata() == {"format": "pt", "run": "7", "target": "owner/target", **stamp}


@pytest.mark.parametrize(
    "config",
    [TINY.with_(windows=(9, 8, 9)), TINY.with_(windows=(9, None, 9), causal=(False, True, False))],
    ids=["windows", "causal"],
)
def test_a_configuration_the_format_has_no_words_for_is_not_written(tmp_path: Path, config: DFlashConfig) -> None:
    with pytest.raises(ConfigError, match="a draft's files"):
        save_draft(DFlashDraft(config), tmp_path / "d")
    assert list(tmp_path.iterdir()) == []


def test_a_sharded_draft_loads_like_a_single_file(saved: Path) -> None:
    whole = load_draft(saved)
    tensors = load_file(saved / "model.safetensors")
    shards = {"model-1.safetensors": sorted(tensors)[:9], "model-2.safetensors": sorted(tensors)[9:]}
    for shard, names in shards.items():
        save_file({name: tensors[name].clone() for name in names}, saved / shard)
    (saved / "model.safetensors").unlink()
    index = {"weight_map": {name: shard for shard, names in shards.items() for name in names}}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, tensor in load_draft(saved).state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name])
    # Saving over it leaves no shard behind that a reader could pick up.
    save_draft(whole, saved)
    assert sorted(p.name for p in saved.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"fc.weight": "gone.safetensors"}}, "lacks gone.safetensors"),
        ({"weight_map": {"fc.weight": "../draft/model.safetensors"}}, "has no weight_map"),
        ({"weight_map": {"fc.weight": "x" * 5000}}, "lacks x"),
        ({}, "has no weight_map"),
    ],
)
def test_an_index_that_leads_nowhere_is_refused(saved: Path, index: dict[str, object], message: str) -> None:
    (saved / "model.safetensors").unlink()
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        load_draft(saved)


def test_every_tensor_that_does_not_fit_is_named_in_one_error(saved: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["norm.weight"], tensors["layers.2.mlp.up_proj.weight"]
        tensors["model.extra"] = torch.zeros(2)
        tensors["lm_head.bias"] = torch.zeros(2)
        tensors["fc.weight"] = torch.zeros(16, 48)
        tensors["hidden_norm.weight"] = torch.zeros(16, dtype=torch.uint8)

    edit_weights(saved, change)
    with pytest.raises(CheckpointError) as caught:
        load_draft(saved)
    message = str(caught.value)
    assert "missing layers.2.mlp.up_proj.weight, norm.weight;" in message
    assert "unexpected extra, lm_head.bias;" in message
    assert "mis-shaped fc.weight [16, 48] instead of [16, 32];" in message
    assert "of the wrong type hidden_norm.weight U8." in message
    assert str(saved) in message


def test_nan_and_infinite_weights_are_refused_by_name(saved: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["fc.weight"][3, 4] = float("nan")
        tensors["norm.weight"][0] = float("inf")

    edit_weights(saved, change)
    with pytest.raises(CheckpointError, match=r"fc\.weight, norm\.weight hold NaN or infinite values"):
        load_draft(saved)


def set_head(rows: int) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({"lm_head.weight": torch.randn(rows, 16)})


def test_a_head_counts_as_the_drafts_own_where_its_tensor_is(saved: Path) -> None:
    edit_weights(saved, set_head(40))
    with pytest.raises(CheckpointError, match=r"unexpected lm_head\.weight"):
        load_draft(saved)  # has_own_lm_head is false
    edit_config(saved, has_own_lm_head=...)
    assert load_draft(saved).config.has_own_lm_head
    assert read_config(saved).has_own_lm_head


def test_a_head_that_is_announced_and_absent_is_refused(saved: Path) -> None:
    edit_config(saved, has_own_lm_head=True, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"missing lm_head\.weight"):
        load_draft(saved)


@pytest.mark.parametrize("flag", [True, ...])
def test_a_tied_head_is_the_drafts_own_embeddings(saved: Path, flag: object, tmp_path: Path) -> None:
    edit_config(saved, has_own_lm_head=flag, tie_word_embeddings=True)
    edit_weights(saved, lambda tensors: tensors.update({"embed_tokens.weight": torch.randn(40, 16)}))
    draft = load_draft(saved)
    assert draft.lm_head.weight is draft.embed_tokens.weight
    # Written out in full: readers that see has_own_lm_head look for the tensor.
    again = load_draft(save_draft(draft, tmp_path / "again"))
    assert torch.equal(again.lm_head.weight, draft.embed_tokens.weight)
    assert again.config == draft.config


def test_a_tied_draft_without_embeddings_shares_the_targets(saved: Path) -> None:
    edit_config(saved, has_own_lm_head=..., tie_word_embeddings=True)
    draft = load_draft(saved)
    assert draft.lm_head is None
    assert draft.embed_tokens is None


def small_vocabulary(folder: Path, d2t: Tensor, t2d: Tensor | None = None) -> None:
    edit_config(folder, draft_vocab_size=3, has_own_lm_head=True)
    extra = {"lm_head.weight": torch.randn(3, 16), "d2t": d2t, **({} if t2d is None else {"t2d": t2d})}
    edit_weights(folder, lambda tensors: tensors.update(extra))


def test_a_smaller_vocabulary_needs_its_head_and_its_mapping(saved: Path) -> None:
    edit_config(saved, draft_vocab_size=3)
    with pytest.raises(CheckpointError, match=r"missing d2t, lm_head\.weight"):
        load_draft(saved)


def test_a_mapping_of_draft_ids_is_loaded_and_checked(saved: Path) -> None:
    mask = torch.zeros(40, dtype=torch.bool)
    mask[[0, 5, 39]] = True
    small_vocabulary(saved, torch.tensor([0, 4, 37], dtype=torch.int32), mask)
    draft = load_draft(saved, dtype=torch.bfloat16)
    assert draft.d2t.tolist() == [0, 4, 37]
    assert draft.d2t.dtype == torch.long
    assert draft.fc.weight.dtype == torch.bfloat16
    for offsets in ([0, 4, 38], [-1, 4, 37], [1, 0, 5]):
        small_vocabulary(saved, torch.tensor(offsets), mask)
        with pytest.raises(CheckpointError, match="d2t must map each draft id to its own id below 40"):
            load_draft(saved)
    small_vocabulary(saved, torch.tensor([0, 5, 37]), mask)
    with pytest.raises(CheckpointError, match="t2d does not mark the tokens"):
        load_draft(saved)


def test_mixed_types_load_as_the_widest_and_a_given_type_wins(saved: Path) -> None:
    edit_weights(saved, lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].bfloat16()}))
    assert {t.dtype for t in load_draft(saved).parameters()} == {torch.float32}
    assert {t.dtype for t in load_draft(saved, dtype=torch.float16).parameters()} == {torch.float16}


def test_the_revision_of_a_local_draft_is_a_sub_directory(saved: Path) -> None:
    save_draft(randomized(TINY.with_(block_size=4)), saved / "short")
    assert load_draft(saved, revision="short").config.block_size == 4
    assert read_config(saved, revision="short").block_size == 4
    for revision in ("long", "..", "short/../short"):
        with pytest.raises(
            CheckpointError, match=re.escape(f"no revision {revision!r}: choose one of its sub-directories ['short']")
        ):
            load_draft(saved, revision=revision)


def test_a_hub_id_is_downloaded_at_its_revision(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: (calls.append((a, k)), str(saved))[1])
    assert load_draft("owner/draft", revision="v2").config == TINY
    assert read_config("owner/draft") == TINY
    assert calls[0] == (
        ("owner/draft",),
        {"revision": "v2", "allow_patterns": ["*.json", "*.safetensors", "training_prompts.npy"]},
    )
    assert calls[1] == (("owner/draft",), {"revision": None, "allow_patterns": ["*.json"]})


def test_a_network_that_breaks_off_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an error of the HTTP library, which derives from none that Python knows."""

    def broken(*_: object, **__: object) -> None:
        raise Exception("peer closed connection")

    monkeypatch.setattr("huggingface_hub.snapshot_download", broken)
    with pytest.raises(CheckpointError, match=r"nor readable from the hub \(peer closed connection\)"):
        load_draft("owner/draft")


def test_a_hub_id_that_cannot_be_reached_says_so() -> None:
    with pytest.raises(CheckpointError, match="owner/no-such-draft is neither a local directory nor readable from the hub"):
        load_draft("owner/no-such-draft")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", b"{", "cannot be read as JSON"),
        ("config.json", b"\xff\xfe", "cannot be read as JSON"),
        ("config.json", b"[]", "holds no JSON object"),
        ("config.json", b"[" * 100_000, "nested too deeply"),
        (
            "config.json",
            b'{"architectures": ["LlamaForCausalLM"], "hidden_size": 16}',
            "describes LlamaForCausalLM, not a DFlash draft",
        ),
        ("config.json", b'{"architectures": ["DFlash2DraftModel"], "dflash_config": {}}', "describes DFlash2DraftModel"),
        ("config.json", b'{"model_type": "qwen3"}', "describes qwen3, not a DFlash draft"),
        ("model.safetensors", None, "has no weights"),
        ("model.safetensors", b"", "corrupt or cut short"),
        ("model.safetensors", b"not safetensors at all", "corrupt or cut short"),
    ],
)
def test_a_broken_file_is_one_clear_sentence(saved: Path, file: str, content: bytes | None, message: str) -> None:
    if content is None:
        (saved / file).unlink()
    else:
        (saved / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_draft(saved)
    assert str(saved) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_truncated_weights_are_refused_at_any_length(saved: Path) -> None:
    whole = (saved / "model.safetensors").read_bytes()
    for length in (4, 8, 100, len(whole) // 2, len(whole) - 1):
        (saved / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="corrupt or cut short"):
            load_draft(saved)


NOWHERE = ["nowhere", "a/b/c", "./nope", "../x", "nope/config.json", "{tmp}/nowhere", "{tmp}/draft/model.safetensors"]


@pytest.mark.parametrize("path", NOWHERE)
def test_a_path_that_is_no_draft_is_refused(saved: Path, path: str) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        load_draft(path.format(tmp=saved.parent))


def test_a_draft_of_another_quantization_is_refused(saved: Path) -> None:
    edit_config(saved, quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
    with pytest.raises(CheckpointError, match=r"quantized by FP8, and only quant_algo W4A16_NVFP4 and NVFP4"):
        load_draft(saved)
    assert read_config(saved) == TINY


def test_a_draft_with_a_mask_embedding_of_its_own_is_refused(saved: Path) -> None:
    (saved / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="has a mask embedding of its own"):
        load_draft(saved)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "the name of the draft or target is empty"),
        ("a" * 5000, "aaa[.]{3} (cannot be looked up|is not a directory)"),
        ("/" + "a" * 300, "aaa[.]{3} (cannot be looked up|is not a directory)"),
        ("~nobody-of-that-name/draft", "cannot be looked up|is not a directory"),
        ("a\0b", "is not a directory"),
    ],
)
def test_a_name_that_no_directory_can_have_is_one_clear_sentence(path: str, message: str) -> None:
    for read in (load_draft, read_config):
        with pytest.raises(CheckpointError, match=message) as caught:
            read(path)
        assert len(str(caught.value)) < 400
