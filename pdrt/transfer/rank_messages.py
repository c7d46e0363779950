"""What a worker's leader and its other ranks say to each other, whatever their role is. The rest of
each union stands beside the handler that serves it (`prefill.rank`, `decode.rank`).

Inside one worker all processes run the same code from the same command: frames carry no version,
and one that does not decode ends the worker.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pdrt.ids import Incarnation, RoomId, short

PAGES_NAMED_MAX = 8
"""Of one room, in words."""


class RankReport(msgspec.Struct, frozen=True):
    """What a rank says of itself, for people. Counts are since its start."""

    device: str = ""
    """What it computes on."""
    refused_peers: Mapping[str, int] = {}
    """Connections that were turned away at its port for KV, by reason."""
    refused_writes: Mapping[str, int] = {}
    """Pieces of writes that it did not take, by reason."""


# What a rank holds. On both sides the same, or one of them is wrong.


class HeldRoom(msgspec.Struct, frozen=True, tag=True):
    """A room that has not ended there."""

    room: RoomId
    generation: int
    pages: tuple[int, ...]
    """Destinations."""

    @property
    def words(self) -> str:
        shown = ", ".join(map(str, self.pages[:PAGES_NAMED_MAX]))
        more = ", …" if len(self.pages) > PAGES_NAMED_MAX else ""
        return f"room {self.room} (generation {self.generation}, pages [{shown}{more}])"


class HeldSegment(msgspec.Struct, frozen=True, tag=True):
    """Of a decode rank: what one prefill worker can write through."""

    endpoint: str
    generation: int

    @property
    def words(self) -> str:
        return f"the segment of generation {self.generation} for {self.endpoint}"


class HeldEngine(msgspec.Struct, frozen=True, tag=True):
    """Of a prefill rank: what reaches the memory of one decode worker."""

    decode: Incarnation
    generation: int
    engine: str

    @property
    def words(self) -> str:
        whose = f"generation {self.generation} of decode worker {short(self.decode)}"
        return f"the {self.engine} engine of {whose}"


Held = HeldRoom | HeldSegment | HeldEngine

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

    report: RankReport = RankReport()


class StepFailed(msgspec.Struct, frozen=True, tag=True):
    """A forward raised. The ranks' collectives are out of step: the worker cannot go on."""

    why: str


class Checked(msgspec.Struct, frozen=True, tag=True):
    """Answers `Check`."""

    serial: int
    held: tuple[Held, ...] = ()
    """Everything that is open on this rank."""
    broken: str | None = None
    """What its invariants say against it."""
