"""Publishing: W4A16 as main, W4A4 as a branch, the card with both, to a hub that is only pretended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_drafts import quantized
from saved import saved_pair
from typer.testing import CliRunner

from flashdraft.checkpoint import load_draft, save_draft
from flashdraft.cli import app
from flashdraft.errors import CheckpointError, ConfigError, FlashdraftError
from flashdraft.publish import publish


class FakeHub:
    """What HfApi would be asked for; `files` by branch."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: bool | None = None
        self.error: Exception | None = None

    def __call__(self, **_: Any) -> FakeHub:
        return self

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        if self.error is not None:
            raise self.error
        assert exist_ok
        self.private = private
        self.files.setdefault("main", {})

    def create_branch(self, repo_id: str, *, branch: str, exist_ok: bool) -> None:
        assert exist_ok
        self.files.setdefault(branch, dict(self.files["main"]))

    def upload_folder(
        self, *, repo_id: str, folder_path: Path, revision: str, allow_patterns: list[str], delete_patterns: list[str], **_: Any
    ) -> None:
        assert "*.safetensors" in delete_patterns
        kept = {name: data for name, data in self.files[revision].items() if not name.endswith(".safetensors")}
        self.files[revision] = kept | {name: (Path(folder_path) / name).read_bytes() for name in allow_patterns}

    def upload_file(self, *, repo_id: str, path_or_fileobj: Path, path_in_repo: str, revision: str, **_: Any) -> None:
        self.files[revision][path_in_repo] = Path(path_or_fileobj).read_bytes()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub()
    monkeypatch.setattr("huggingface_hub.HfApi", fake)
    return fake


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_draft(quantized(), tmp_path / "draft")
    save_draft(quantized(True, ("fc",)), tmp_path / "draft" / "w4a4")
    (tmp_path / "draft" / "README.md").write_text("A draft\n")
    (tmp_path / "draft" / "work").mkdir()
    (tmp_path / "draft" / "work" / "answers-00000.parquet").write_text("not for the hub")
    return tmp_path / "draft"


def download(hub: FakeHub, branch: str, folder: Path) -> Path:
    folder.mkdir()
    for name, data in hub.files[branch].items():
        (folder / name).write_bytes(data)
    return folder


def test_each_revision_is_a_branch_that_loads(hub: FakeHub, directory: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["publish", str(directory), "owner/name", "--private"])
    assert run.exit_code == 0, run.output
    assert "main (3 files), w4a4 (3 files)" in run.output
    assert hub.private is True
    assert set(hub.files["main"]) == set(hub.files["w4a4"]) == {"config.json", "model.safetensors", "README.md"}
    for branch, place in {"main": directory, "w4a4": directory / "w4a4"}.items():
        there = load_draft(download(hub, branch, tmp_path / branch), packed=True).state_dict()
        here = load_draft(place, packed=True).state_dict()
        assert all(torch.equal(here[name].float(), tensor.float()) for name, tensor in there.items())


def test_an_unquantized_draft_is_published_too(hub: FakeHub, tmp_path: Path) -> None:
    pair = saved_pair(tmp_path)
    (pair.draft / "README.md").write_text("A draft\n")
    assert list(publish(pair.draft, "owner/name", report=lambda _: None)) == ["main"]


@pytest.mark.parametrize(
    ("change", "repo", "error", "message"),
    [
        (lambda d: None, "name", ConfigError, "give OWNER/NAME"),
        (lambda d: (d / "README.md").unlink(), "a/b", ConfigError, r"has no README.md"),
        (lambda d: (d / "config.json").write_text("{}"), "a/b", CheckpointError, "not the directory of a draft"),
        (lambda d: (d / "w4a4" / "model.safetensors").write_bytes(b"x"), "a/b", CheckpointError, "corrupt or cut short"),
        (lambda d: (d / "w4a4" / "model.safetensors").unlink(), "a/b", CheckpointError, "has no weights"),
    ],
)
def test_nothing_goes_up_that_cannot_be_read(
    hub: FakeHub, directory: Path, change: Any, repo: str, error: type[FlashdraftError], message: str
) -> None:
    change(directory)
    with pytest.raises(error, match=message):
        publish(directory, repo, report=lambda _: None)
    assert hub.files == {}


@pytest.mark.parametrize("error", [OSError("no route"), ValueError("bad token"), Exception("refused")])
def test_what_the_hub_refuses_is_one_sentence(hub: FakeHub, directory: Path, error: Exception) -> None:
    """An HTTP library's errors, as of a network that is gone, derive from none that Python knows."""
    hub.error = error
    with pytest.raises(CheckpointError, match=rf"could not be published \({error}\).*hf auth login"):
        publish(directory, "owner/name", report=lambda _: None)


def test_a_directory_that_is_not_there_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not the directory of a draft"):
        publish(tmp_path / "none", "owner/name")
