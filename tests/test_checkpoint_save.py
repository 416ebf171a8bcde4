"""Saving a draft: the old files or the new, never a mixture that loads, and nothing of anybody else's overwritten."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_config import TINY

from flashdraft import checkpoint
from flashdraft.checkpoint import load_draft, read_config, save_draft
from flashdraft.draft import DFlashConfig, DFlashDraft
from flashdraft.errors import CheckpointError, ConfigError

TINY = TINY.with_(rope_theta=500000)  # a whole number, which config.json gives back as a float
OTHER = TINY.with_(block_size=5, attention_bias=True, has_own_lm_head=True, has_own_embeddings=True)


def randomized(config: DFlashConfig) -> DFlashDraft:
    draft = DFlashDraft(config)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.normal_()
    return draft


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_draft(randomized(TINY), tmp_path / "draft")


class KilledError(BaseException):
    """Stands for a kill: no handler of ours sees it."""


def save_killed_between_the_files(draft: DFlashDraft, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, calls = os.replace, []

    def second_kills(source: Path, destination: Path) -> None:
        calls.append(destination)
        if len(calls) == 2:
            raise KilledError
        replace(source, destination)

    with monkeypatch.context() as patch:
        patch.setattr("flashdraft.checkpoint.os.replace", second_kills)
        with pytest.raises(KilledError):
            save_draft(draft, folder)


@pytest.mark.parametrize("change", [{"rope_theta": 1e4}, {"block_size": 4}, {"windows": (9, 9, 9)}, {"mask_token_id": 5}])
def test_a_save_killed_between_the_two_files_does_not_load_as_a_mixture(
    saved: Path, change: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_killed_between_the_files(randomized(TINY.with_(**change)), saved, monkeypatch)
    with pytest.raises(CheckpointError, match=r"config\.json and model\.safetensors were not written together: save or copy"):
        load_draft(saved)
    new = randomized(TINY.with_(**change))
    assert load_draft(save_draft(new, saved)).config == new.config  # and it can be saved over


def test_a_killed_save_over_a_draft_of_other_programs_is_refused_too(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(load_file(saved / "model.safetensors"), saved / "model.safetensors")  # no stamp
    save_killed_between_the_files(randomized(TINY.with_(rope_theta=1e4)), saved, monkeypatch)
    with pytest.raises(CheckpointError, match="were not written together"):
        load_draft(saved)


def test_a_killed_save_into_an_empty_directory_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_killed_between_the_files(randomized(TINY), tmp_path, monkeypatch)
    with pytest.raises(CheckpointError, match="has no weights"):
        load_draft(tmp_path)
    assert load_draft(save_draft(randomized(TINY), tmp_path)).config == TINY


def test_what_a_killed_save_left_beside_a_directory_is_removed_by_the_next_and_that_of_a_running_one_stays(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
        save_file(tensors, file, metadata=metadata)
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", kill)
        patch.setattr(checkpoint.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(KilledError):
            save_draft(randomized(TINY), saved)
    (ours,) = saved.parent.glob(".flashdraft-*.tmp")
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True)
    of_ended = ours.rename(ours.with_name(ours.name.replace(str(os.getpid()), ended.stdout.strip())))
    of_running = ours.with_name(ours.name.replace(str(os.getpid()), str(os.getppid())))
    of_running.mkdir()
    of_another_draft = saved.parent / f".flashdraft-{'0' * 16}.{ended.stdout.strip()}.tmp"
    of_another_draft.mkdir()
    save_draft(randomized(TINY), saved)
    assert not of_ended.exists()
    assert sorted(saved.parent.glob(".flashdraft-*.tmp")) == sorted([of_running, of_another_draft])


def test_order_and_spelling_of_config_json_do_not_part_it_from_its_weights(saved: Path) -> None:
    raw = json.loads((saved / "config.json").read_text())
    raw = {"_comment": "ours", **dict(reversed(raw.items())), "tie_word_embeddings": None, "rope_theta": 500000}
    (saved / "config.json").write_text(json.dumps(raw))
    assert load_draft(saved).config == TINY


def test_a_config_json_edited_by_hand_is_refused(saved: Path) -> None:
    raw = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**raw, "rope_theta": 1e4}))
    with pytest.raises(CheckpointError, match="were not written together"):
        load_draft(saved)
    assert read_config(saved).rope_theta == 1e4


def test_weights_without_a_stamp_load_with_whatever_configuration_fits_them(saved: Path) -> None:
    save_file(load_file(saved / "model.safetensors"), saved / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**raw, "rope_theta": 1e4}))
    assert load_draft(saved).config.rope_theta == 1e4


def test_a_failed_save_leaves_the_old_draft_and_nothing_else(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {p.name: p.read_bytes() for p in saved.iterdir()}

    def fail(*_args: object, **_kwargs: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(CheckpointError, match=r"cannot be written \(No space left on device\)"):
        save_draft(randomized(TINY), saved)
    with pytest.raises(CheckpointError, match=r"cannot be written \(No space left on device\)"):
        save_draft(randomized(TINY), saved.parent / "new")
    assert {p.name: p.read_bytes() for p in saved.iterdir()} == before
    assert [p.name for p in saved.parent.iterdir()] == ["draft"]


def test_saving_over_a_draft_replaces_it_and_keeps_other_files(saved: Path) -> None:
    (saved / "README.md").write_text("notes")
    draft = randomized(OTHER)
    save_draft(draft, saved)
    assert load_draft(saved).config == OTHER
    assert sorted(p.name for p in saved.iterdir()) == ["README.md", "config.json", "model.safetensors"]


def test_saving_over_something_else_is_refused(saved: Path) -> None:
    (saved / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    with pytest.raises(CheckpointError, match="holds something other than a draft"):
        save_draft(randomized(TINY), saved)
    with pytest.raises(CheckpointError, match="holds something other than a draft"):
        save_draft(randomized(TINY), saved / "config.json")
    with pytest.raises(ConfigError, match="unknown layout 'gguf'"):
        save_draft(randomized(TINY), saved.parent / "new", layout="gguf")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_weights_without_a_config_json_are_somebody_elses(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"other")
    with pytest.raises(CheckpointError, match="holds something other than a draft"):
        save_draft(randomized(TINY), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == b"other"


def test_a_link_to_a_directory_is_followed_and_one_to_nowhere_refused(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(saved)
    assert load_draft(save_draft(randomized(OTHER), tmp_path / "link")).config == OTHER == read_config(saved)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is a symbolic link that leads nowhere"):
        save_draft(randomized(TINY), tmp_path / "dangling")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("draft/config.json/below", "cannot be (written|read)"),
        ("a" * 256, "aaa[.]{3} cannot be (looked up|written)"),
        ("a" * 5000, "aaa[.]{3} cannot be (looked up|written)"),
        ("a\0b", "cannot be written"),
    ],
)
def test_a_place_that_cannot_be_written_is_one_clear_sentence(saved: Path, path: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        save_draft(randomized(TINY), f"{saved.parent}/{path}")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert [p.name for p in saved.parent.iterdir()] == ["draft"]


def test_an_empty_name_does_not_mean_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="is empty"):
        save_draft(randomized(TINY), "")
    assert list(tmp_path.iterdir()) == []


def test_the_longest_name_that_a_directory_can_have_will_do(tmp_path: Path) -> None:
    assert load_draft(save_draft(randomized(TINY), tmp_path / ("a" * 255))).config == TINY


def test_a_directory_in_the_place_of_the_weights_is_refused_and_kept(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    (saved / "model.safetensors").mkdir()
    before = (saved / "config.json").read_text()
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_draft(randomized(OTHER), saved)
    assert (saved / "model.safetensors").is_dir()
    assert (saved / "config.json").read_text() == before


def test_metadata_that_are_no_strings_are_refused_by_name(saved: Path) -> None:
    before = (saved / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="metadata of a draft are strings by name, and 'step' is not"):
        save_draft(randomized(TINY), saved, metadata={"step": 5})  # type: ignore[dict-item]
    assert (saved / "model.safetensors").read_bytes() == before
