"""What a comparison says of its answers."""

from __future__ import annotations

import pytest

from flashdraft.compare import Comparison, Turn
from flashdraft.prompts import repetition
from flashdraft.terminal import show_comparison


def test_a_difference_is_explained_with_what_to_do(capsys):
    def turn(prompt, same):
        return Turn(prompt, "c", 10, 1.0, 1.0, None, same, 0.0, [2])

    setup = {"device": "a CPU", "threads": 1, "dtype": "float16", "torch": "2", "transformers": "5"}
    show_comparison(Comparison([turn("a", True), turn("b[/x]", False), turn("b[/x]", False)], 7, None, setup))
    out = capsys.readouterr().out
    assert "DIFFERENT for 2 of 3 answers (prompts b[/x])" in out
    assert "nearly tied" in out
    assert "--dtype float32" in out


def test_looping_answers_are_left_out_of_the_clean_ratio():
    def turn(tokens, on, off, repeated):
        return Turn("p", "c", tokens, on, off, None, True, repeated, [2, 3])

    result = Comparison([turn(10, 1.0, 2.0, 0.0), turn(30, 1.0, 6.0, 0.5)], 7, None, {})
    assert result.summary().speedup == pytest.approx(4.0)
    assert result.without_loops().speedup == pytest.approx(2.0)
    assert result.without_loops().answers == 1
    assert result.summary().acceptance_length == pytest.approx(2.5)
    assert result.summary().acceptance_by_position == [1.0, 0.5, 0, 0, 0, 0, 0]
    assert repetition([1, 2, 3] * 10) > 0.3 > repetition(list(range(30)))
