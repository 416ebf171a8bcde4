"""What keeps the event loop free: news are spread over the steps, and many tokens are parsed at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flashdraft.engine.request import Output, Request, SamplingParams
from flashdraft.llm import Live
from flashdraft.server import loop as served
from flashdraft.server.jobs import Job
from flashdraft.server.parsers import reasoning, tools
from flashdraft.server.parsers.answer import AnswerParser, Formats, joined
from flashdraft.server.parsers.lexer import Markers, Piece
from flashdraft.text import HELD

MARKERS = Markers({10: Piece("<think>", True, ""), 11: Piece("</think>", True, "")}, ())
STREAMS = 64


class Stepping:
    """An engine loop without an engine: steps of 5 ms give every stream a token; who was told, and how many tokens."""

    def __init__(self) -> None:
        self.loop = served.EngineThread(lambda: None)  # type: ignore[arg-type, return-value]
        self.told: list[tuple[int, int]] = []
        self.loop._send = self._keep  # type: ignore[method-assign]
        self.outputs: list[Output] = []
        self.now = 100.0
        for i in range(STREAMS):
            request = Request([1], SamplingParams(), choice=i)
            output, stream = Output(request), SimpleNamespace(take_events=list, stop_string=None, finish=lambda: None)
            self.loop._progress[request.id] = served._Progress(Job(0), Live(request, stream, output))  # type: ignore[arg-type]
            self.outputs.append(output)

    def _keep(self, news: list[tuple[Any, Any]]) -> None:
        self.told += [(item.index, len(item.tokens)) for _, item in news]

    def step(self) -> list[tuple[int, int]]:
        self.told, self.now = [], self.now + 0.005
        for output in self.outputs:
            output.tokens.append(7)
        self.loop._tell(self.outputs, self.now)
        return self.told


def test_first_tokens_and_ends_are_told_at_once_and_the_rest_a_few_streams_a_step():
    stepping = Stepping()
    assert stepping.step() == [(i, 1) for i in range(STREAMS)]
    turns = [stepping.step() for _ in range(40)]
    assert max(len(turn) for turn in turns[20:]) < 10, "a whole flush at once"
    told = [index for turn in turns[20:] for index, _ in turn]
    assert len(set(told)) == STREAMS, "a stream waits longer than 100 ms"
    assert all(5 < tokens < 20 for turn in turns[20:] for _, tokens in turn)
    stepping.outputs[5].finish_reason = "length"
    index, _ = stepping.step()[0]
    assert index == 5


def test_slow_steps_are_told_whole():
    stepping = Stepping()
    for _ in range(3):
        stepping.now += 0.1
        assert sorted(stepping.step()) == [(i, 1) for i in range(STREAMS)]


def parser(opened: bool) -> AnswerParser:
    formats = Formats(None, reasoning.THINK, tools.HERMES)
    return AnswerParser(formats, MARKERS, opened=opened)


texts = st.text(alphabet="ab \n<", max_size=3)
items = st.one_of(st.tuples(st.sampled_from([7, 8, HELD]), texts), st.tuples(st.sampled_from([10, 11]), st.just("")))


@given(st.lists(items, max_size=12), st.integers(0, 12), st.booleans())
def test_many_tokens_at_once_are_what_they_are_one_by_one(news, cut, opened):
    one, many = parser(opened), parser(opened)
    expected = [event for token, text in news for event in one.push(token, text)] + one.finish()
    found = many.push_all(news[:cut]) + many.push_all(news[cut:]) + many.finish()
    assert joined(found) == joined(expected)
    assert many.reasoning_tokens == one.reasoning_tokens
