"""What tests of `flashdraft bench` share: a scripted server that counts tokens, and runs in a process that may be killed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import servers
from evaluating import stream
from servers import Say, Server

from flashdraft.eval.bench import run_bench
from flashdraft.eval.bench_options import Options
from flashdraft.eval.bench_run import Settings

OURS = b"flashdraft:engine_steps_total 1.0\n"
TEMPLATE = 10  # tokens of the chat template
LENGTH = 4  # tokens of an answer


def tokens(body: dict[str, Any]) -> int:
    """A word of one syllable is a token, a longer one two."""
    words = re.findall(r"\w+|[!?.]", body["messages"][-1]["content"])
    return TEMPLATE + sum(1 + (len(word) > 4) for word in words)


def good(body: dict[str, Any]) -> tuple[int, Any]:
    count = min(body["max_tokens"], LENGTH)
    drafts = body.get("speculation", {}).get("enabled", True)
    steps = [(2, 3)] if drafts and count == LENGTH else [(0, 0)] * (count - 1)
    return stream(["so "] * count, *steps, finish="length", usage={"prompt_tokens": tokens(body)})


def silent(body: dict[str, Any]) -> tuple[int, Any]:
    """Of a server that says nothing of its speculation."""
    return stream(["so "] * min(body["max_tokens"], LENGTH), finish="length", usage={"prompt_tokens": tokens(body)})


def card(**fields: Any) -> bytes:
    return json.dumps({"data": [{"id": "target", **fields}]}).encode()


@contextmanager
def serving(say: Say = good, *, ours: bool = True, counts: bool = True) -> Iterator[Server]:
    """ours: requests may leave the draft out. counts: there is /tokenize."""
    with servers.serving(say) as server:
        if ours:
            server.pages["/metrics"] = OURS
        if counts:
            server.others["/tokenize"] = lambda body: (200, {"count": tokens(body)})
        yield server


def options(output: Path, url: str | None, **given: Any) -> Options:
    own = {"max_tokens": LENGTH, "rounds": 2} | given.pop("settings", {})
    defaults: dict[str, Any] = {"loads": (1, 2), "prompt_tokens": (40,)}
    return Options(settings=Settings(**own), output=output, endpoint=url, **{**defaults, **given})


def measure(output: str, url: str) -> None:
    """Work for a process that is killed."""
    run_bench(options(Path(output), url))


def lines(output: Path, kind: str) -> list[dict[str, Any]]:
    found = (json.loads(line) for line in (output / "requests.jsonl").read_text().splitlines())
    return [record for record in found if record["kind"] == kind]


def results(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "bench.json").read_text())
    return found
