"""Whether a worker does what it is there for, and if not, why not, in words. Pure.

A forward that does not return makes its worker unhealthy, and ends it after five times as long:
only a new process helps then. Unhealthy too is a worker whose work waits while nothing moves, and
one whose forwards fail one after the other: it looks idle, and would draw everybody's requests.

What cannot speak is not judged here: a loop that stands still is told by its silence, to peers,
gateways, `pdrt up` and whoever asks for /health. Whoever was itself asleep blames nobody, itself
included: of a pause in which the loop did not turn, no more counts than a tick may be late.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import msgspec

FORWARDS_FAILED_MAX = 8
"""In a row. One request fails three rooms at most (`rooms_per_request_max`): a single one that no
forward can compute does not make a worker unhealthy."""
FORWARDS_FAILED_PAUSE_SECONDS = 10.0
"""After the latest failure a worker is tried again: only work shows that it has recovered."""
WHY_CHARS_MAX = 200
END_FACTOR = 5
"""A forward that takes so many times as long as it may ends its worker. Generous: on a slow machine
a large model may take minutes for a chunk, and to end it would mean to end it again and again."""


class Ailment(Enum):
    """Why a worker is not healthy; the value is a metric's label."""

    FORWARD_HANGS = "forward_hangs"
    FORWARDS_FAIL = "forwards_fail"
    NO_PROGRESS = "no_progress"
    ADMISSION_STOPPED = "admission_stopped"
    """Decode: the quarantine or the table of rooms is full."""
    PEERS_FULL = "peers_full"
    """Prefill: it remembers as many decode workers as it may."""


class Complaint(msgspec.Struct, frozen=True):
    """One reason, for machines and for people."""

    ailment: Ailment
    text: str


def hangs(complaints: Sequence[Complaint]) -> bool:
    """A forward does not return."""
    return any(complaint.ailment is Ailment.FORWARD_HANGS for complaint in complaints)


class Liveness:
    """Fed by its worker at every tick, and whenever something moves."""

    def __init__(self, stall_seconds_max: float, tick_late_seconds: float, now: float) -> None:
        """`stall_seconds_max`: a forward, and waiting work, may stand still for so long.
        `tick_late_seconds`: a tick that comes later than this has been asleep."""
        self._stall_seconds_max = stall_seconds_max
        self._end_seconds = END_FACTOR * stall_seconds_max
        self._tick_late_seconds = tick_late_seconds
        self._ticked_at = now
        self._step_age = 0.0
        # Of the age of the forward that runs, time in which the loop did not turn.
        self._step_slept = 0.0
        self._still_seconds = 0.0
        self._has_moved = False
        self._waiting = 0
        self._failed = 0
        """Forwards in a row, up to now."""
        self._failed_at = now
        self._failure = ""

    # What happens

    def moved(self) -> None:
        """This worker has got on with something. What comes and what is cancelled is no progress:
        it would hide that nothing else happens."""
        self._has_moved = True

    def forward_ended(self) -> None:
        """It has returned, well."""
        self._failed = 0
        self._has_moved = True

    def forward_failed(self, why: str, now: float) -> None:
        """It raised."""
        self._failed += 1
        self._failed_at, self._failure = now, why[:WHY_CHARS_MAX]
        self._has_moved = True

    def tick(self, step_age: float, waiting: int, now: float) -> None:
        """`step_age`: of the forward that runs, seconds since it was begun; 0 when none does.
        `waiting`: pieces of work that this worker could do something about."""
        pause, self._ticked_at = now - self._ticked_at, now
        # Not all of it: a loop that is late at every tick is slow, and judges itself in the end.
        slept = max(0.0, pause - self._tick_late_seconds)
        if step_age < self._step_age:
            self._step_slept = 0.0
        self._step_age = step_age
        self._step_slept = min(self._step_slept + slept, step_age)
        self._waiting = waiting
        if self._has_moved or not waiting:
            self._still_seconds = 0.0
        else:
            self._still_seconds += pause - slept
        self._has_moved = False

    # What is said of it

    def complaints(self, now: float) -> list[Complaint]:
        """Empty while all is well."""
        complaints: list[Complaint] = []
        if self._forward_seconds > self._stall_seconds_max:
            complaints.append(
                Complaint(
                    Ailment.FORWARD_HANGS,
                    f"a forward has been running for {self._forward_seconds:.0f} s; the worker "
                    f"ends itself at {self._end_seconds:.0f} s "
                    f"(--stall-seconds-max times {END_FACTOR})",
                )
            )
        elif self._still_seconds > self._stall_seconds_max:
            complaints.append(
                Complaint(
                    Ailment.NO_PROGRESS,
                    f"nothing has moved for {self._still_seconds:.0f} s while {self._waiting} "
                    "wait; if it stays so, drain it or restart it",
                )
            )
        if self._has_failed_too_often(now):
            complaints.append(
                Complaint(
                    Ailment.FORWARDS_FAIL,
                    f"{self._failed} forwards in a row have failed, the last one with "
                    f"{self._failure}; if it stays so, restart it",
                )
            )
        return complaints

    def must_end(self) -> str | None:
        """Why only a new process helps; None while there is hope."""
        if self._forward_seconds <= self._end_seconds:
            return None
        return f"a forward has been running for {self._forward_seconds:.0f} s"

    @property
    def _forward_seconds(self) -> float:
        return self._step_age - self._step_slept

    def _has_failed_too_often(self, now: float) -> bool:
        is_recent = now - self._failed_at < FORWARDS_FAILED_PAUSE_SECONDS
        return self._failed >= FORWARDS_FAILED_MAX and is_recent
