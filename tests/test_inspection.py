"""What inspection says of drafts and targets, and whether the two fit."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from tiny_config import TINY
from transformers import LlamaConfig, Qwen3Config

from flashdraft import inspection, model_files
from flashdraft.checkpoint import check_pair, save_draft
from flashdraft.config_json import dump_config
from flashdraft.draft import DFlashConfig, DFlashDraft
from flashdraft.errors import CheckpointError, ConfigError, UnsupportedModelError
from flashdraft.inspection import Inspection, inspect_path
from flashdraft.inspection_display import render

TINY = TINY.with_(windows=(9, 9, None))
PER_LAYER = 16 * 8 * (4 + 2 + 2 + 4) + 2 * 8 + 3 * 16 * 32 + 2 * 16


@pytest.fixture
def draft_dir(tmp_path: Path) -> Path:
    return save_draft(DFlashDraft(TINY.with_(has_own_lm_head=True)).to(torch.bfloat16), tmp_path / "draft")


@pytest.fixture
def target_dir(tmp_path: Path) -> Path:
    config = Qwen3Config(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=40,
        max_position_embeddings=1024,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=4,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def printed(report: Inspection) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render(report))
    return console.export_text()


@pytest.mark.parametrize("layout", ["dflash", "speculators"])
def test_a_draft_directory_is_described_from_its_files(tmp_path: Path, layout: Any) -> None:
    path = save_draft(DFlashDraft(TINY.with_(has_own_lm_head=True)).to(torch.bfloat16), tmp_path / "d", layout=layout)
    report = inspect_path(path)
    assert (report.kind, report.layout, report.dtype, report.quantization) == ("draft", layout, "bfloat16", None)
    layers = 3 * PER_LAYER
    assert report.parameters == {
        "fc": 512,
        "layers": layers,
        "norms": 32,
        "lm_head": 640,
        "embed_tokens": 0,
        "all": 512 + layers + 32 + 640,
    }
    assert report.parameters_per_layer == PER_LAYER
    assert report.size_on_disk == (path / "model.safetensors").stat().st_size
    assert (report.windows, report.causal, report.feature_layers) == ((9, 9, None), (False,) * 3, (1, 4))
    assert json.loads(json.dumps(report.to_json()))["config"]["mask_token_id"] == 3


def test_a_bare_reference_config_gives_the_published_counts(tmp_path: Path) -> None:
    config = DFlashConfig.for_target(
        hidden_size=2560,
        vocab_size=262144,
        num_target_layers=42,
        mask_token_id=4,
        target_layer_ids=(5, 11, 17, 23, 35),
        has_own_lm_head=True,
    )
    (tmp_path / "config.json").write_text(json.dumps(dump_config(config, "bfloat16")))
    report = inspect_path(tmp_path / "config.json")
    assert report.parameters["all"] == 1_031_568_640
    assert (report.size_on_disk, report.dtype) == (None, "bfloat16")
    text = printed(report)
    assert "layers (5 of 65,541,376) │ 327,706,880" in " ".join(text.split())
    assert "1,031,568,640" in text
    assert "no weights" in text
    assert "0-4: window 1,024, bidirectional" in text
    assert "[5, 11, 17, 23, 35] of 42" in text


def test_layers_that_see_alike_are_shown_together(draft_dir: Path) -> None:
    assert "0-1: window 9, bidirectional; 2: all positions, bidirectional" in printed(inspect_path(draft_dir))


def test_inspecting_reads_headers_and_no_weights(draft_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = model_files.safe_open

    class HeaderOnly:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.opened = real(*args, **kwargs)

        def __enter__(self) -> HeaderOnly:
            self.file = self.opened.__enter__()
            return self

        def __exit__(self, *args: object) -> None:
            self.opened.__exit__(*args)

        def keys(self) -> list[str]:
            return self.file.keys()

        def get_slice(self, name: str) -> Any:
            return self.file.get_slice(name)

    monkeypatch.setattr(model_files, "safe_open", HeaderOnly)
    assert inspect_path(draft_dir).dtype == "bfloat16"


def test_a_quantized_draft_is_described_though_it_cannot_be_loaded(draft_dir: Path) -> None:
    raw = json.loads((draft_dir / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}
    (draft_dir / "config.json").write_text(json.dumps(raw))
    report = inspect_path(draft_dir)
    assert report.quantization == "W4A16_NVFP4"
    assert "W4A16_NVFP4" in printed(report)


def test_a_target_is_described_from_its_configuration(target_dir: Path) -> None:
    report = inspect_path(target_dir)
    assert (report.kind, report.layout, report.dtype, report.size_on_disk) == ("target", "transformers", "bfloat16", None)
    layer = 16 * 8 * (2 + 1 + 1 + 2) + 2 * 8 + 3 * 16 * 24 + 2 * 16
    assert report.parameters_per_layer == layer
    assert report.parameters == {
        "embeddings": 640,
        "layers": 6 * layer,
        "norms": 16,
        "lm_head": 640,
        "other": 0,
        "all": 1296 + 6 * layer,
    }
    assert report.windows == (None,) * 4 + (8,) * 2
    assert report.causal == (True,) * 6
    assert "0-3: all positions, causal; 4-5: window 8, causal" in printed(report)
    save_file({"model.norm.weight": torch.zeros(16)}, target_dir / "model.safetensors")
    assert inspect_path(target_dir).dtype == "float32"
    assert inspect_path(target_dir).size_on_disk == (target_dir / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    "name", ["nope/config.json", "./nope", "../nope", "~/nope-nope", "nope/model.safetensors", "nope.gguf"]
)
def test_what_looks_like_a_path_is_never_looked_up_on_the_hub(
    draft_dir: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "_download", None)
    for arguments in ({"path": name}, {"path": draft_dir, "target": name}):
        with pytest.raises(CheckpointError, match="no such"):
            inspect_path(**arguments)


def test_numbers_are_printed_in_groups_of_three_digits(draft_dir: Path, target_dir: Path) -> None:
    big = TINY.with_(vocab_size=4000, mask_token_id=1023)
    report = inspect_path(save_draft(DFlashDraft(big), draft_dir.parent / "big"), target=target_dir)
    text = " ".join(printed(report).split())
    assert "8 slots, mask token 1,023" in text
    assert "its vocabulary has 4,000 tokens" in text
    assert "1023" not in text


def test_a_tied_head_counts_once(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40}
    LlamaConfig(**sizes, tie_word_embeddings=True).save_pretrained(tmp_path)
    parameters = inspect_path(tmp_path).parameters
    assert (parameters["embeddings"], parameters["lm_head"]) == (640, 0)


def test_a_pair_that_fits_is_shown_size_by_size(draft_dir: Path, target_dir: Path) -> None:
    report = inspect_path(draft_dir, target=target_dir)
    assert report.misfit is None
    assert [(row.what, row.draft, row.target, row.verdict) for row in report.pair] == [
        ("hidden size", 16, 16, "fits"),
        ("vocabulary", 40, 40, "fits"),
        ("target layers", 6, 6, "fits"),
        ("mask token below", 3, 40, "fits"),
        ("positions", 777, 1024, "differs"),
    ]
    text = " ".join(printed(report).split())
    assert "target layers" in text
    assert "differs: the pair can be served" in text
    assert "--max-model-len 777 or less" in text


def test_a_pair_that_does_not_fit_says_where_and_why(draft_dir: Path, target_dir: Path) -> None:
    raw = json.loads((target_dir / "config.json").read_text())
    raw |= {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5, "hidden_size": 32, "vocab_size": 3}
    (target_dir / "config.json").write_text(json.dumps(raw))
    report = inspect_path(draft_dir, target=target_dir)
    assert [row.verdict for row in report.pair] == ["misfit", "misfit", "misfit", "misfit", "differs"]
    assert "its hidden size is 16, the target's 32" in (report.misfit or "")
    assert "misfit" in printed(report)


def test_more_target_layers_than_stated_differ_and_fit(draft_dir: Path, target_dir: Path) -> None:
    raw = json.loads((target_dir / "config.json").read_text())
    raw |= {"num_hidden_layers": 7, "layer_types": ["full_attention"] * 7}
    (target_dir / "config.json").write_text(json.dumps(raw))
    report = inspect_path(draft_dir, target=target_dir)
    assert (report.pair[2].verdict, report.misfit) == ("differs", None)


def test_of_a_hub_id_a_target_costs_only_its_json_files(
    draft_dir: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def locate(path: str | Path, revision: str | None = None, *, weights: bool = True) -> Path:
        asked.append((str(path), weights))
        return {"owner/draft": draft_dir, "owner/target": target_dir}.get(str(path), Path(path))

    monkeypatch.setattr(inspection, "locate", locate)
    assert inspect_path("owner/target").kind == "target"
    assert asked == [("owner/target", False)]
    asked.clear()
    report = inspect_path("owner/draft", target="owner/target")
    assert (report.path, report.target, report.misfit) == ("owner/draft", "owner/target", None)
    assert asked == [("owner/draft", False), ("owner/draft", True), ("owner/target", False)]


def test_what_is_neither_a_draft_nor_a_target_is_refused(tmp_path: Path, target_dir: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        inspect_path(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(CheckpointError, match="neither a draft's nor a model's that transformers knows"):
        inspect_path(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(CheckpointError, match="holds a vit, which is no causal language model"):
        inspect_path(tmp_path)
    with pytest.raises(ConfigError, match="only a draft can be checked"):
        inspect_path(target_dir, target=target_dir)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ('{"model_type": ["llama"]}', "nor a model's that transformers knows"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "nor a model's that transformers knows"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_configuration_that_transformers_chokes_on_is_one_clear_sentence(tmp_path: Path, raw: str, message: str) -> None:
    (tmp_path / "config.json").write_text(raw)
    with pytest.raises(CheckpointError, match=message):
        inspect_path(tmp_path)


def test_names_that_are_no_directory_are_one_clear_sentence(draft_dir: Path) -> None:
    for name in ("", "a" * 5000):
        with pytest.raises(CheckpointError, match=r"is empty|cannot be looked up|is not a directory"):
            inspect_path(name)
        with pytest.raises(CheckpointError, match=r"is empty|cannot be looked up|is not a directory"):
            inspect_path(draft_dir, target=name)


def test_names_print_as_they_are_brackets_and_all(draft_dir: Path, target_dir: Path) -> None:
    odd = "br[/a]t [red]x[/nope] :smile:"
    draft = draft_dir.rename(draft_dir.parent / odd.replace("/", "_"))
    raw = json.loads((draft / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": odd}
    (draft / "config.json").write_text(json.dumps(raw))
    report = inspect_path(draft, target=target_dir)
    report = dataclasses.replace(report, path=f"{odd} 1", target=f"{odd} 2", misfit=f"{odd} 3")
    text = printed(report)
    assert all(f"{odd} {i}" in text for i in (1, 2, 3))
    assert text.count(odd) == 4  # and the quantization


SIZES = {"hidden_size": 16, "vocab_size": 40, "num_layers": 6}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 32}, "its hidden size is 16, the target's 32"),
        ({"vocab_size": 41}, "its vocabulary has 40 tokens, the target's 41"),
        ({"vocab_size": 3}, "its mask token 3 is no row of the target's 3 embeddings"),
        ({"num_layers": 5}, r"it reads layers \[1, 4\] of 6, the target has 5 layers"),
        ({"num_layers": 4, "hidden_size": 8}, "its hidden size is 16, the target's 8; it reads layers"),
    ],
)
def test_a_draft_that_does_not_fit_its_target_is_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=f"the draft does not fit the target: .*{message}"):
        check_pair(TINY, **{**SIZES, **change})


@pytest.mark.parametrize("layers", [6, 8])
def test_a_target_with_every_feature_layer_fits(layers: int) -> None:
    check_pair(TINY, **{**SIZES, "num_layers": layers})


def test_the_kv_cache_of_a_request_is_told_of_a_target_and_of_a_pair(draft_dir: Path, target_dir: Path) -> None:
    """Qwen3 of six layers, two of them sliding, one head of 8: a unit holds a page of two layers."""
    alone = inspect_path(target_dir)
    layer = 16 * 1 * (8 + 8) * 2  # bytes of a page of one layer in bfloat16
    assert alone.request_tokens == 1024
    assert alone.request_memory == 65 * 4 * layer + 65 * 2 * layer  # 1,025 positions; a window and two chunks are more than all
    shorter = inspect_path(target_dir, max_model_len=100)
    assert (shorter.request_tokens, shorter.request_memory) == (100, 7 * 6 * layer)
    with pytest.raises(ConfigError, match="--max-model-len 2000 is more than the 1024 positions"):
        inspect_path(target_dir, max_model_len=2000)
    pair = inspect_path(draft_dir, target=target_dir)
    assert pair.misfit is None
    assert pair.request_tokens == min(1024, TINY.max_position_embeddings)
    assert pair.request_memory > inspect_path(target_dir, max_model_len=pair.request_tokens).request_memory
    told = f"one request of {pair.request_tokens:,} tokens takes 0.3 MiB of KV cache ({pair.request_memory:,} bytes"
    assert told in printed(pair)
    with pytest.raises(ConfigError, match="give --target beside --max-model-len"):
        inspect_path(draft_dir, max_model_len=100)


def test_a_target_whose_layers_cannot_be_served_is_described_all_the_same(tmp_path: Path) -> None:
    config = LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9)
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    assert inspect_path(tmp_path).request_memory is None
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        inspect_path(tmp_path, max_model_len=64)
