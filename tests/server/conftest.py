"""One tiny pair for all tests of the server; each file starts servers of its own."""

from __future__ import annotations

import pytest
from scripted import scripted, serving, tiny_llm

from flashdraft.llm import LLM


@pytest.fixture(scope="session")
def llm(tmp_path_factory):
    return tiny_llm(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def served(llm):
    """A server of the tiny pair, which answers by chance."""
    with serving(lambda: LLM.from_parts(llm.tokenizer, llm.engine)) as client:
        yield client


@pytest.fixture(scope="module")
def says(llm):
    """A server whose target says what it is told to."""
    with scripted(llm) as client:
        yield client
        client.wait_idle()


@pytest.fixture
def say(says):
    """Say a text (or tokens) next, `accepted` proposals a step being right."""

    def set_script(script: str | list[int], accepted: int = 7) -> None:
        tokens = says.llm.tokenizer.encode(script) if isinstance(script, str) else script
        says.runner.script, says.runner.accepted = tokens, accepted
        says.runner.seconds, says.runner.fault = 0.0, None

    return set_script
