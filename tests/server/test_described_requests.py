"""What the OpenAPI description allows and what it forbids, by schemathesis: answered or refused, never with 5xx."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

schemathesis = pytest.importorskip("schemathesis")
TALK = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize")
BARE = ("/flush_cache", "/health", "/version", "/metrics", "/v1/models", "/v1/models/{name}")  # nothing to send wrongly
CASES = [(path, "positive") for path in TALK + BARE] + [(path, "negative") for path in TALK]


@pytest.fixture(scope="module")
def described(says):
    says.runner.script, says.runner.accepted = says.llm.tokenizer.encode('{"a": "the quick fox"}'), 3
    return schemathesis.openapi.from_url(f"{says.url}/openapi.json")


def test_every_path_is_described(described):
    assert {operation.ok().path for operation in described.get_all_operations()} == {*TALK, *BARE}


@pytest.mark.slow
@pytest.mark.parametrize(("path", "mode"), CASES)
def test_no_request_makes_an_error_of_ours(says, described, path, mode):
    [operation] = [found for one in described.get_all_operations() if (found := one.ok()).path == path]

    @settings(max_examples=30, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    def check(case):
        response = case.call(timeout=20)
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    check()
    says.wait_idle()
    assert says.http.get("/health").status_code == 200
