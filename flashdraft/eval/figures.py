"""One style for every plot (matplotlib, an optional package): colours that the colour-blind tell apart, legible, no display."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flashdraft.train.files import replacing

INSTALL = "pip install 'flashdraft[eval]'"
# Okabe and Ito's colours, without the yellow that white swallows.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#6b7480"
# Letters that matplotlib's own font lacks are drawn with one of these, where the machine has it.
OTHER_LETTERS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "WenQuanYi Zen Hei",
    "Microsoft YaHei",
    "PingFang SC",
    "Arial Unicode MS",
)
LONGEST = 30  # signs of a name in a plot; the tables have all of it
DPI = 144
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.labelcolor": "#1c2024",
    "axes.prop_cycle": f"cycler(color={list(COLOURS)})",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "figure.facecolor": "white",
    "font.size": 10,
    "grid.color": "#e3e7eb",
    "grid.linewidth": 0.8,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
    "text.parse_math": False,  # names may hold dollar signs
    "xtick.color": GREY,
    "xtick.labelcolor": "#1c2024",
    "ytick.color": GREY,
    "ytick.labelcolor": "#1c2024",
}


def available() -> bool:
    """Whether there is a matplotlib to draw with; one built for another numpy fails in many kinds."""
    try:
        import matplotlib.figure  # noqa: F401
    except Exception:
        return False
    return True


@contextmanager
def plot(path: Path, panels: int = 1, height: float = 3.6, width: float = 8.6) -> Iterator[list[Any]]:
    """Axes side by side, in the style of all plots; what is drawn on them when the block ends is the PNG `path`. In inches.

    Labels come from `label` or `names`. Call it where `available()`.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.font_manager import get_font_names

    installed = set(get_font_names())
    style: Any = {**STYLE, "font.family": ["DejaVu Sans", *(name for name in OTHER_LETTERS if name in installed)]}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield list(figure.subplots(1, panels, squeeze=False)[0])
        save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a PNG, whole or not at all."""
    with warnings.catch_warnings(), replacing(path) as partial:
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # drawn as a box; the tables have the name
        figure.savefig(partial, format="png", dpi=DPI)


def style_of(number: int) -> dict[str, str]:
    """Colour and marker of the series of this number, from 0."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def thousands(axis: Any) -> None:
    """Ticks of an axis as 12,000, and as 0.5 where there are fractions."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def label(text: str) -> str:
    """A name as it stands in a plot: one line, at most LONGEST signs."""
    text = " ".join(re.sub(r"[^\S ]|[^\w\s!-~\u2010-\u20bf]", " ", text).split()) or "?"
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2 - 1]}…{text[-(LONGEST // 2) :]}"


def names(given: Sequence[str]) -> list[str]:
    """Labels of several drafts or models: of paths only where they differ; told apart by a number if need be."""
    parts = [name.rstrip("/").split("/") for name in given]
    while all(len(part) > 1 for part in parts) and len({part[0] for part in parts}) == 1:
        parts = [part[1:] for part in parts]
    labels = [label("/".join(part[-1:] if len(parts) == 1 else part)) for part in parts]
    return [text if labels.count(text) == 1 else f"{text} ({number})" for number, text in enumerate(labels, 1)]
