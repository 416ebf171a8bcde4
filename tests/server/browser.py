"""A headless Chromium, driven over a pipe by its DevTools protocol: no package is needed for it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page. `run` evaluates JavaScript in it."""

    def __init__(self, reading: int, writing: int) -> None:
        self._in, self._out, self._numbers = os.fdopen(reading, "rb", 0), os.fdopen(writing, "wb", 0), itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        session = {} if self._session is None else {"sessionId": self._session}
        self._out.write(json.dumps({"id": number, "method": method, "params": params, **session}).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return dict(message["result"])

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = self._in.read(1 << 16)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def run(self, script: str) -> Any:
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, condition: str, seconds: float = 20) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := self.run(condition)):
            assert time.monotonic() < deadline, (condition, self.run("document.body.innerText"))
            time.sleep(0.02)
        return value

    def close(self) -> None:
        self._session = None
        self.call("Browser.close")
        self._in.close()
        self._out.close()


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    assert CHROMIUM is not None
    down, up = os.pipe(), os.pipe()  # DevTools reads from descriptor 3 and writes to 4

    def place() -> None:
        os.dup2(down[0], 13)
        os.dup2(up[1], 14)
        os.dup2(13, 3)
        os.dup2(14, 4)

    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]
    command = [CHROMIUM, *options, "--disable-dev-shm-usage", f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(command, preexec_fn=place, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(down[0])
    os.close(up[1])
    browser = None
    try:
        browser = Browser(up[0], down[1])
        yield browser
    finally:
        if browser is not None:
            browser.close()
        process.wait(10)
