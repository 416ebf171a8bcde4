"""The names a user may rely on: exactly these, each documented, none loaded before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import flashdraft

NAMES = {
    "LLM",
    "SamplingParams",
    "Completion",
    "DFlashConfig",
    "DFlashDraft",
    "load_draft",
    "save_draft",
    "Target",
    "load_target",
    "Engine",
    "EngineConfig",
    "FlashdraftError",
}


def test_the_public_names_are_exactly_the_listed_ones() -> None:
    assert set(flashdraft.__all__) == {*NAMES, "__version__"}
    assert set(flashdraft.__all__) <= set(dir(flashdraft))


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_public_name_is_documented_and_keeps_its_own_name(name: str) -> None:
    value = getattr(flashdraft, name)
    assert value.__name__ == name
    # A dataclass without a docstring gets its signature as one.
    assert len(value.__doc__ or "") > 20
    assert not value.__doc__.startswith(f"{name}(")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Verifier'"):
        _ = flashdraft.Verifier


def test_importing_the_package_loads_no_other_package() -> None:
    script = (
        "import flashdraft, sys; print(*{m.split('.')[0] for m in sys.modules} & {'torch', 'transformers', 'typer', 'numpy'})"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""
