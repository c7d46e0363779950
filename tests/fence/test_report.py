"""What breaks a fence's verdict, and what a table says of it."""

from __future__ import annotations

import json

import msgspec
import pytest
from rich.console import Console

from pdrt.cli.torture.messages import Tally
from pdrt.cli.torture.report import Row, Verdict, complaints, facts, is_broken, remarks, table
from pdrt.cli.torture.trial import LEASE_PAGES, Fault, Outcome

HOLDS = Outcome(
    fence_seconds=0.002,
    late_bytes=0,
    neighbour=Tally(completed=100),
    neighbour_wrong_bytes=0,
    back=Tally(completed=LEASE_PAGES),
    back_wrong_bytes=0,
)
TIMED_OUT = msgspec.structs.replace(HOLDS, fence_seconds=None, late_bytes=4096)


def shown(rows: list[Row]) -> str:
    console = Console(width=160, no_color=True)
    with console.capture() as capture:
        console.print(table(rows, 5.0))
    return capture.get()


def test_a_fence_that_holds() -> None:
    row = Row(Fault.STOP, (HOLDS, HOLDS), TIMED_OUT)
    assert row.verdict is Verdict.HOLDS
    assert not complaints(HOLDS) and not is_broken([row]) and not remarks([row])
    text = shown([row])
    assert "holds" in text and "2.00 / 2.00" in text and "2 of 2" in text and "4,096" in text


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"late_bytes": 1}, "1 bytes landed after the fence"),
        ({"neighbour": Tally(5, 1, 0, "reset")}, "the neighbour's writes failed: reset"),
        ({"neighbour": Tally(5, 0, 1, "silence")}, "the neighbour's writes failed: silence"),
        ({"neighbour_wrong_bytes": 2}, "2 wrong bytes in the neighbour's pages"),
        ({"back": Tally(LEASE_PAGES - 1, 1, 0, "no")}, "the pages cannot be used again: no"),
        ({"back_wrong_bytes": 3}, "3 wrong bytes in the pages when used again"),
    ],
)
def test_what_breaks_it(change: dict[str, object], why: str) -> None:
    broken = msgspec.structs.replace(HOLDS, **change)
    assert complaints(broken) == [why]
    row = Row(Fault.DROP, (HOLDS, broken), TIMED_OUT)
    assert row.verdict is Verdict.BROKEN and is_broken([row])
    assert remarks([row]) == [f"{Fault.DROP.value}, trial 2: {why}"]


def test_an_error_breaks_it_and_what_was_not_tried_does_not() -> None:
    ended = Row(Fault.KILL, (HOLDS,), error="target hangs")
    assert ended.verdict is Verdict.BROKEN and "target hangs" in remarks([ended])[0]
    not_tried = Row(Fault.DROP, detail="for root")
    assert not_tried.verdict is Verdict.NOT_RUN and not is_broken([not_tried])
    assert "not run" in shown([not_tried])


def test_json() -> None:
    content = json.loads(facts("tcp", 5.0, [Row(Fault.STOP, (HOLDS,), TIMED_OUT)]))
    (row,) = content["rows"]
    assert content["engine"] == "tcp" and row["verdict"] == "holds"
    assert row["timed_out"]["late_bytes"] == 4096
