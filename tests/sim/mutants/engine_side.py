"""Mutants of `RoomWriter` and of what engines' adapters must do."""

from __future__ import annotations

from typing import Any

from pdrt.protocol.room_writer import RoomWriter, Write, WriteOutcome
from tests.sim import fabric
from tests.sim.core import Kind
from tests.sim.fabric import InFlight, Raw
from tests.sim.mutants.registry import Patch, mutant
from tests.sim.process import Process


@mutant(Kind.DESTINATION, Kind.CONTENT, Kind.SOURCE)
def outstanding_counted_at_start() -> list[Patch]:
    """I4: a write is outstanding from the moment it is accepted."""
    write, settled, read = RoomWriter._write, RoomWriter.settled, InFlight.read

    def write_later(self: RoomWriter, rank: int, sources: Any, targets: Any) -> Write:
        accepted = write(self, rank, sources, targets)
        del self._outstanding[accepted.write_id]
        return accepted

    def starts(self: InFlight, part: int, network_seconds: float) -> None:
        if not self.is_answered:
            self.writer._outstanding.setdefault(self.write_id, 0)
        read(self, part, network_seconds)

    def settles(self: RoomWriter, write_id: int, outcome: WriteOutcome, **more: Any) -> Any:
        self._outstanding.setdefault(write_id, 0)
        return settled(self, write_id, outcome, **more)

    return [
        (RoomWriter, "_write", write_later),
        (RoomWriter, "settled", settles),
        (InFlight, "read", starts),
    ]


@mutant(Kind.DESTINATION, Kind.SOURCE)
def unsettled_as_drained() -> list[Patch]:
    """An engine's error proves nothing: it is UNSETTLED, not FAILED."""
    original = fabric.outcome_of

    def outcome_of(raw: Raw) -> WriteOutcome:
        return WriteOutcome.FAILED if raw is Raw.ERROR else original(raw)

    return [(fabric, "outcome_of", outcome_of)]


@mutant(Kind.DESTINATION, Kind.SOURCE)
def retry_hides_unsettled() -> list[Patch]:
    """A room that ever had an unsettled write ends UNSETTLED, whatever a retry achieved."""
    original = InFlight.answer

    def answer(self: InFlight, raw: Raw) -> None:
        if self.is_answered or self.instance.is_destroyed or raw is not Raw.ERROR:
            original(self, raw)
            return
        self.is_answered = True
        self.instance.writes.remove(self)
        again = InFlight(self.instance, self.writer, self.write_id, self.heads, self.pages)
        self.instance.submit(again)

    return [(InFlight, "answer", answer)]


@mutant(Kind.LIVENESS)
def write_without_a_bound() -> list[Patch]:
    """`write_seconds_max`: a write without progress is UNSETTLED."""

    def expire(self: InFlight) -> None:
        return

    return [(InFlight, "expire", expire)]


@mutant(Kind.FENCES, is_calm=True)
def silence_judged_with_unread_messages() -> list[Patch]:
    """Lost peers: silence is judged after everything inbound has been read."""

    def take_tick(self: Process) -> None:
        self.step(self.handle_timer, self.world.sim.now)
        if not self.is_backlogged:
            self.drain_inbox()

    return [(Process, "take_tick", take_tick)]
