"""What a worker's leader and its other ranks say to each other, whatever their role is. The rest of
each union stands beside the handler that serves it (`prefill.rank`, `decode.rank`).

Inside one worker all processes run the same code from the same command: frames carry no version,
and one that does not decode ends the worker.
"""

from __future__ import annotations

import msgspec

from pdrt.ids import RoomId

# Leader -> rank


class Step(msgspec.Struct, frozen=True, tag=True):
    """Take part in the leader's next forward. Steps run one after the other, in this order."""

    body: bytes
    """The executor's own encoding of what is computed."""


class Check(msgspec.Struct, frozen=True, tag=True):
    """Check all invariants; answer `Checked`."""

    serial: int


# Rank -> leader


class Alive(msgspec.Struct, frozen=True, tag=True):
    """The rank's event loop turns. Any other message says so too."""


class StepFailed(msgspec.Struct, frozen=True, tag=True):
    """A forward raised. The ranks' collectives are out of step: the worker cannot go on."""

    why: str


class Checked(msgspec.Struct, frozen=True, tag=True):
    """Answers `Check`."""

    serial: int
    rooms: tuple[RoomId, ...] = ()
    """Those that are open on this rank."""
    broken: str | None = None
    """What its invariants say against it."""
