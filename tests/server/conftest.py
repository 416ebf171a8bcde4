"""One tiny pair for all tests of the server; each file starts servers of its own."""

from __future__ import annotations

import pytest
from scripted import hosted, scripted, serving, tiny_llm

from flashdraft.llm import LLM


@pytest.fixture(scope="session")
def llm(tmp_path_factory):
    return tiny_llm(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def hosted_served(llm):
    with hosted(llm) as client:
        yield client


@pytest.fixture(scope="session")
def hosted_says(llm, tmp_path_factory):
    with hosted(llm, tmp_path_factory.mktemp("says") / "control") as client:
        yield client


@pytest.fixture(scope="module", params=["thread", "process"])
def served(llm, request):
    """A server of the tiny pair, which answers by chance; its engine in a thread, and in a process that all files share."""
    if request.param == "process":
        yield request.getfixturevalue("hosted_served")
    else:
        with serving(lambda: LLM.from_parts(llm.tokenizer, llm.engine)) as client:
            yield client


@pytest.fixture(scope="module", params=["thread", "process"])
def says(llm, request):
    """A server whose target says what it is told to."""
    if request.param == "process":
        client = request.getfixturevalue("hosted_says")
        yield client
        client.wait_idle()
    else:
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
