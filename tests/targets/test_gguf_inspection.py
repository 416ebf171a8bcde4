"""What inspection says of a GGUF file, alone and as the target of a draft."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from families import make
from gguf_files import write_llama
from saved import saved_pair

from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.inspection import inspect_path


@pytest.fixture(scope="module")
def original():
    return make("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def file(original, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_llama(path, original, gguf.GGMLQuantizationType.Q8_0)
    return path


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return saved_pair(tmp_path_factory.mktemp("pair")).draft


def test_a_gguf_file_is_described_from_its_header(file: Path, original, capfd) -> None:
    report, config = inspect_path(file), original.config
    assert (report.kind, report.layout, report.quantization) == ("target", "gguf", "GGUF")
    assert report.dtype == "Q8_0, float32"
    assert report.size_on_disk == file.stat().st_size
    assert (report.layers, report.config["vocab_size"]) == (2, config.vocab_size)
    assert report.config["max_position_embeddings"] == config.max_position_embeddings
    assert report.parameters["all"] == sum(p.numel() for p in original.parameters())
    assert capfd.readouterr() == ("", "")


def test_a_draft_is_checked_against_a_gguf_file(draft: Path, file: Path, original) -> None:
    report = inspect_path(draft, target=file)
    sizes = {row.what: (row.target, row.verdict) for row in report.pair}
    assert sizes["hidden size"] == (original.config.hidden_size, "misfit")
    assert sizes["vocabulary"] == (original.config.vocab_size, "misfit")
    assert "does not fit the target" in (report.misfit or "")


def test_a_gguf_file_is_a_target_without_revisions(file: Path) -> None:
    with pytest.raises(ConfigError, match="only a draft can be checked"):
        inspect_path(file, target=file)
    with pytest.raises(ConfigError, match="is a file and has no revision 'v2'"):
        inspect_path(file, revision="v2")


@pytest.mark.parametrize(
    ("content", "message"), [(b"PK", "not a GGUF file"), (b"GGUF" + b"\xff" * 40, "no model that transformers can read")]
)
def test_a_gguf_file_that_is_none_is_one_clear_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        inspect_path(tmp_path / "bad.gguf")
