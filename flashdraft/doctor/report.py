"""What `flashdraft doctor` says, on the terminal and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich import box
from rich.markup import escape
from rich.table import Table

from flashdraft import __version__
from flashdraft.doctor.measuring import Measure
from flashdraft.doctor.search import Gain
from flashdraft.errors import counted
from flashdraft.train.display import out, positions
from flashdraft.train.validation import by_position


@dataclass(frozen=True)
class Finding:
    """A cause of low acceptance, and what to do about it."""

    cause: str
    says: str
    mend: list[str]
    gain: Gain | None = None  # with this one mended, all others found being so already; None: seen in the files alone


@dataclass
class Report:
    """What one run found."""

    facts: dict[str, Any]
    measure: Measure
    proposals: int
    tried: list[tuple[str, str, float]] = field(default_factory=list)  # cause, what it would mean, AL at some anchors
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    mended: Measure | None = None  # with all that was found

    def to_json(self) -> dict[str, Any]:
        return {
            "flashdraft": __version__,
            **self.facts,
            "acceptance": _acceptance(self.measure, self.proposals),
            "findings": [asdict(finding) for finding in self.findings],
            "mended": None if self.mended is None else _acceptance(self.mended, self.proposals),
            "tried": [{"cause": c, "says": s, "acceptance_length": round(v, 4)} for c, s, v in self.tried],
            "notes": self.notes,
        }


def _acceptance(measure: Measure, proposals: int) -> dict[str, Any]:
    return {
        "acceptance_length": round(measure.mean, 4),
        "by_position": by_position(measure.accepted, proposals),
        "answers": int((~np.isnan(measure.lengths)).sum()),
        "not_finite": round(measure.broken, 4),
    }


def show(report: Report) -> None:
    found = _acceptance(report.measure, report.proposals)
    out.print(
        f"acceptance length {found['acceptance_length']:.2f} over {counted(found['answers'], 'answer')} of the target; "
        f"by position {positions(found['by_position'])}"
    )
    if report.tried:
        out.print(_table(report))
    for number, finding in enumerate(report.findings, 1):
        out.print(f"{number}. {escape(finding.cause)}: {escape(finding.says)}", style="bold red")
        if (gain := finding.gain) is not None:
            out.print(
                f"   acceptance length {gain.before:.2f}, and {gain.after:.2f} otherwise "
                f"({gain.low:+.2f} to {gain.high:+.2f}, paired by answer, 95 %)"
            )
        for line in finding.mend:
            out.print(f"   mend: {line}", markup=False)
    if len(report.findings) > 1 and report.mended is not None:
        out.print(f"with all of it mended: acceptance length {report.mended.mean:.2f}")
    for note in report.notes:
        out.print(f"note: {note}", markup=False)
    if not report.findings:
        out.print("nothing found", style="green")


def _table(report: Report) -> Table:
    table = Table(title="what else was measured, at some anchors", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("cause", no_wrap=True)
    table.add_column("if so")
    table.add_column("AL", justify="right", no_wrap=True)
    for cause, says, value in report.tried:
        table.add_row(escape(cause), escape(says), f"{value:.2f}")
    return table
