"""Where a draft stops paying, and what is said of it: on speed-ups as they were measured, without a server."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from flashdraft.eval import bench_display, bench_page, bench_results, counters, figures

SPEED = {
    "answers": 8,
    "tokens": 256,
    "output_tokens_per_second": 100.0,
    "user_tokens_per_second": 50.0,
    "ttft": {"mean": 0.1, "p50": 0.1, "p90": 0.2, "p99": 1.2345},
    "itl": {"mean": 0.02, "p50": 0.02, "p90": 0.03, "p99": 0.04},
    "latency": {"mean": 2.0, "p50": 2.0, "p90": 2.5, "p99": 3.0},
}


def point(load: float, value: float, half: float = 0.05, **given: Any) -> dict[str, Any]:
    ratio = {"value": value, "low": value - half, "high": value + half, "n": 8}
    length = {"value": 2.5, "low": 2.4, "high": 2.6, "n": 8, "convention": "request_mean"}
    base = {"load": load, "rounds": 3, "prompt_tokens": 64.0, "refused": 0, "stopped": 0, "at_once": None, "flushed": True}
    arms = {"with": {**SPEED, "output_tokens_per_second": 100.0 * value}, "without": SPEED}
    return base | arms | {"speedup": ratio, "acceptance": length, "texts": {"compared": 8, "differing": 0}} | given


def workload(*points: dict[str, Any], **given: Any) -> dict[str, Any]:
    found = {"name": "64 tokens", "kind": "synthetic", "prompt_tokens": 64, "ended": None, "points": list(points)}
    return found | {"break_even": bench_results.break_even(points)} | given


def results(*workloads: dict[str, Any]) -> dict[str, Any]:
    found = {"schema": 1, "complete": True, "left": 0, "load": "concurrency", "draft": "a | <b>", "gates": []}
    return found | {"settings": {"rounds": 3}, "provenance": {"command": "flashdraft bench"}, "workloads": list(workloads)}


@pytest.mark.parametrize(
    ("ratios", "largest", "crossing", "said"),
    [
        (
            {1: 2.0, 4: 1.5},
            4,
            None,
            "the draft is faster up to 4 requests at once, the most that was measured: no break-even so far",
        ),
        ({1: 1.5, 4: 0.5}, 1, 2.0, "stops paying near 2.0 requests at once (break-even); measured up to 4"),
        (
            {1: 1.5, 2: 1.2, 4: 0.96},
            4,
            2**1.8333333,
            "near 3.6 requests at once (break-even); up to 4 the difference may be chance; measured up to 4",
        ),
        ({1: 0.5, 2: 0.4}, None, None, "the target alone is faster at every load that was measured, up to 2 requests at once"),
        (
            {1: 0.9, 2: 1.1},
            2,
            None,
            "the draft is faster at 2 requests at once, the most that was measured, and not at every smaller",
        ),
        (
            {1: 0.96, 2: 0.8},
            1,
            None,
            "up to 2 requests at once, though up to 1 the difference may be chance: the draft does not",
        ),
        ({1: 0.9, 2: 1.1, 4: 0.9}, 2, 2**1.5, "near 2.8 requests at once"),
    ],
)
def test_break_even(ratios: dict[int, float], largest: int | None, crossing: float | None, said: str) -> None:
    found = workload(*(point(load, value) for load, value in ratios.items()))
    assert found["break_even"]["largest"] == largest
    assert found["break_even"]["measured_to"] == max(ratios)
    assert found["break_even"]["crossing"] == (None if crossing is None else pytest.approx(crossing, rel=1e-4))
    assert said in (bench_display.break_even(found) or "")


def test_without_a_comparison_there_is_no_break_even() -> None:
    assert bench_results.break_even([point(1, 1.0, speedup=None)]) is None
    assert bench_display.break_even(workload(break_even=None)) is None


def test_markdown_has_every_percentile_of_each_arm() -> None:
    lines = bench_display.markdown(results(workload(point(4, 1.5)))).splitlines()
    assert lines[0] == "# Speed of a \\| \\<b>"
    assert "| 4 | draft | 8 | 64 | 150.0 | 50.0 | 2.50 | 1.50 | 1.45-1.55 |" in lines
    assert "| 4 | alone | 8 | 64 | 100.0 | 50.0 |  |  |  |" in lines
    assert "| 4 | draft | 100 | 200 | 1,234 | 20.0 | 30.0 | 40.0 | 2,000 | 2,500 | 3,000 |" in lines


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"acceptance": None}, "the server says nothing of its speculation"),
        ({"at_once": 16}, "at load 4 the server ran 16 at once, the others waited"),
        ({"prompt_tokens": 61.0}, "prompts had 61 tokens on average"),
        ({"stopped": 1}, "1 answer ended before --max-tokens"),
        ({"refused": 2}, "2 requests of 18 were refused"),
    ],
)
def test_what_makes_figures_less_than_they_seem_is_said(given: dict[str, Any], said: str) -> None:
    assert said in "\n".join(bench_display.notes(workload(point(4, 1.5, **given)), compares=True))


def test_gates_are_of_every_load() -> None:
    found = bench_results.gates([workload(point(1, 2.0), point(4, 1.1), point(8, 1.0, speedup=None))], 1.2)
    assert [gate["passed"] for gate in found] == [True, False, None]
    assert bench_display.gate_line(found[1]) == "64 tokens, load 4: 1.10 is below --min-speedup 1.2"


def test_requests_that_run_and_wait_are_read_of_either_engine() -> None:
    assert counters.queued('vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_waiting{engine="0"} 2.0\n') == (3, 2)
    assert counters.queued("sglang:num_running_reqs 5\nsglang:num_queue_reqs 0\n") == (5, 0)
    assert counters.queued("other 1\n") is None


def test_the_page_has_its_plots_and_tables_and_names_are_only_text(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = results(workload(point(1, 2.0), point(2, 1.2), point(4, 0.8)), workload(point(1, 1.0), name="mini", kind="suite"))
    bench_page.write(tmp_path, found)
    page = (tmp_path / "bench.html").read_text()
    assert page.count("data:image/png;base64") == 3
    assert "Speed of a | &lt;b&gt;" in page
    assert "64 tokens: the draft stops paying near 2.8 requests at once" in page
    for name in ("throughput", "latency", "speedup"):
        head = (tmp_path / f"bench-{name}.png").read_bytes()[:24]
        assert struct.unpack(">II", head[16:24])[0] == round(8.6 * figures.DPI)


def test_without_matplotlib_the_page_says_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "available", lambda: False)
    bench_page.write(tmp_path, results(workload(point(1, 2.0))))
    assert "pip install &#39;flashdraft[eval]&#39;" in (tmp_path / "bench.html").read_text()
