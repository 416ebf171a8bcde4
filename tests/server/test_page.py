"""The page at /, in a real browser: a message, its streamed answer, speculation on, off and side by side."""

from __future__ import annotations

import re

import pytest
from browser import CHROMIUM, chromium
from scripted import scripted

from flashdraft.server.app import STATIC


def test_the_page_needs_nothing_from_elsewhere(served):
    page = served.http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for path in re.findall(r'(?:src|href)="(static/[^"]+)"', page.text):
        assert served.http.get(f"/{path}").status_code == 200
    for file in STATIC.iterdir():
        text = file.read_text(encoding="utf-8")
        assert "http://" not in text
        assert "https://" not in text
        assert "innerHTML" not in text


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_a_conversation_in_a_browser(llm, tmp_path):
    with scripted(llm) as client, chromium(tmp_path) as browser:
        said = "the quick <b>brown</b> fox"
        client.runner.script = [*llm.tokenizer.encode(f"<think>why</think>{said}"), 1]
        client.runner.accepted, client.runner.seconds = 2, 0.01
        browser.call("Page.navigate", url=client.url)
        assert browser.until("document.readyState === 'complete' && document.getElementById('model').textContent === 'tiny'")

        def ask(boxes: int) -> list[str]:
            before = browser.run("document.querySelectorAll('.answer').length")
            browser.run("document.getElementById('text').value = 'hello'; document.getElementById('form').requestSubmit()")
            done = f"document.querySelectorAll('.answer[data-done]').length === {before + boxes}"
            browser.until(f"{done} && document.getElementById('stop').hidden")
            texts = browser.run("[...document.querySelectorAll('.answer .content')].map((e) => e.textContent)")
            return list(texts[before:])

        assert ask(1) == [said]
        assert browser.run("document.querySelector('.answer .thought').textContent") == "why"
        assert browser.run("document.querySelector('.answer details').open") is False
        assert browser.run("document.querySelectorAll('.answer b').length") == 0  # text is never markup
        assert browser.run("document.querySelectorAll('.content .accepted').length") > 0
        assert browser.run("document.querySelectorAll('.content .own').length") > 0
        numbers = browser.run("document.querySelector('.answer .numbers').textContent")
        assert re.search(r"with speculation: \d+ tokens, [\d.]+ tokens/s, AL 3\.00|AL 2\.\d\d", numbers), numbers
        browser.run("document.getElementById('speculation').click()")
        assert ask(1) == [said]
        assert "without speculation" in browser.run("[...document.querySelectorAll('.answer .numbers')].pop().textContent")
        browser.run("document.getElementById('both').click()")
        assert ask(2) == [said, said]
        assert browser.run("[...document.querySelectorAll('.answers')].pop().dataset.same") == "true"
        browser.run("document.getElementById('reset').click()")
        assert browser.run("document.querySelectorAll('.answer').length") == 0
