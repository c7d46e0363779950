"""What trials have shown: verdicts, as a table and as JSON. Judgements are pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from enum import Enum

import msgspec
from rich.table import Table
from rich.text import Text

from pdrt.cli.torture.trial import LEASE_PAGES, Fault, Outcome

STYLES = {"holds": "green", "BROKEN": "red bold", "not run": "yellow"}
LEGEND = """\
fence: from the command until it returned, median and most. late: bytes that landed in the pages
after their next owner had them. neighbour: writes of another prefill worker meanwhile, completed /
not. back: the same pages written whole in the next generation. with a timeout: late bytes where
the pages were reused because their writer had been silent for so long, without a fence."""


class Verdict(Enum):
    HOLDS = "holds"
    BROKEN = "BROKEN"
    NOT_RUN = "not run"


class Row(msgspec.Struct, frozen=True):
    """One kind of fault."""

    fault: Fault
    outcomes: tuple[Outcome, ...] = ()
    """Behind the fence."""
    timed_out: Outcome | None = None
    """The counter-example."""
    detail: str = ""
    """Why it was not run."""
    error: str = ""
    """What ended its trials."""

    @property
    def verdict(self) -> Verdict:
        if self.detail:
            return Verdict.NOT_RUN
        is_broken = self.error or any(complaints(outcome) for outcome in self.outcomes)
        return Verdict.BROKEN if is_broken else Verdict.HOLDS


def complaints(outcome: Outcome) -> list[str]:
    """How a fence was found wanting; empty when it holds."""
    found = []
    if outcome.late_bytes:
        found.append(f"{outcome.late_bytes:,} bytes landed after the fence")
    neighbour = outcome.neighbour
    if neighbour.failed or neighbour.unsettled:
        found.append(f"the neighbour's writes failed: {neighbour.detail}")
    if outcome.neighbour_wrong_bytes:
        found.append(f"{outcome.neighbour_wrong_bytes:,} wrong bytes in the neighbour's pages")
    if outcome.back.completed < LEASE_PAGES:
        found.append(f"the pages cannot be used again: {outcome.back.detail}")
    if outcome.back_wrong_bytes:
        found.append(f"{outcome.back_wrong_bytes:,} wrong bytes in the pages when used again")
    return found


def is_broken(rows: Sequence[Row]) -> bool:
    return any(row.verdict is Verdict.BROKEN for row in rows)


def table(rows: Sequence[Row], timeout_seconds: float) -> Table:
    """For people."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("fault", "verdict", "trials"):
        made.add_column(column)
    for column in ("fence ms", "late", "neighbour", "back", f"with {timeout_seconds:g} s timeout"):
        made.add_column(column, justify="right")
    for row in rows:
        verdict = Text(row.verdict.value, style=STYLES[row.verdict.value])
        made.add_row(row.fault.value, verdict, str(len(row.outcomes)), *_figures(row))
    return made


def _figures(row: Row) -> list[str]:
    if not row.outcomes:
        return []
    fences = [1e3 * o.fence_seconds for o in row.outcomes if o.fence_seconds is not None]
    completed = sum(o.neighbour.completed for o in row.outcomes)
    bad = sum(o.neighbour.failed + o.neighbour.unsettled for o in row.outcomes)
    back = sum(o.back.completed >= LEASE_PAGES for o in row.outcomes)
    return [
        f"{statistics.median(fences):.2f} / {max(fences):.2f}",
        f"{max(o.late_bytes for o in row.outcomes):,}",
        f"{completed} / {bad}",
        f"{back} of {len(row.outcomes)}",
        "-" if row.timed_out is None else f"{row.timed_out.late_bytes:,}",
    ]


def remarks(rows: Sequence[Row]) -> list[str]:
    """Why something was not run, or is broken."""
    found = [f"{row.fault.value}: {why}" for row in rows if (why := row.detail or row.error)]
    for row in rows:
        for number, outcome in enumerate(row.outcomes, 1):
            found += [f"{row.fault.value}, trial {number}: {why}" for why in complaints(outcome)]
    return found


def facts(engine: str, timeout_seconds: float, rows: Sequence[Row]) -> bytes:
    """JSON."""
    content = {
        "engine": engine,
        "timeout_seconds": timeout_seconds,
        "rows": [msgspec.to_builtins(row) | {"verdict": row.verdict.value} for row in rows],
    }
    return msgspec.json.format(msgspec.json.encode(content))
