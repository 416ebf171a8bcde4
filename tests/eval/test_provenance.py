"""What results say of where they come from."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from flashdraft.eval.provenance import of_command, of_endpoint


def test_a_password_in_an_address_is_not_kept(monkeypatch):
    client = SimpleNamespace(base="https://me:secret@host:8000/v1", text=lambda path: None)
    served: Any = SimpleNamespace(client=client, model="m", engine="vllm")
    monkeypatch.setattr(sys, "argv", ["flashdraft", "eval", "mini", "--endpoint", client.base, "--seed", "1"])
    found = {**of_endpoint(served, "http://me@host"), **of_command({})}
    assert found["endpoint"] == "https://host:8000/v1"
    assert found["baseline"] == "http://host"
    assert found["command"] == "flashdraft eval mini --endpoint https://host:8000/v1 --seed 1"
