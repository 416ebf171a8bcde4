"""What a fit writes beside its draft; its card is that of tests/test_card.py."""

from __future__ import annotations

from flashdraft.fit.ready import MOST_POINTS, curves


def test_long_curves_are_thinned() -> None:
    rows = [{"step": i, "loss": 1 / (i + 1), "expected_al": 1.0} for i in range(1000)]
    held = [{"step": 500, "heldout": {"over_steps": 1.5}, "final": False}]
    found = curves([*rows, *held])
    assert 100 <= len(found["loss"]) <= MOST_POINTS
    assert found["loss"][0] == [0, 1.0]
    assert found["heldout_al"] == [[500, 1.5]]
