"""What a transfer engine is to the rest: two small interfaces, one per side of a hand-over.

Every write that an engine accepts ends in exactly one of COMPLETED, FAILED and UNSETTLED. An
engine decides nothing: it copies, answers, opens and closes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from pdrt.ids import Incarnation, RoomId
from pdrt.protocol.messages import Segment
from pdrt.protocol.room_writer import WriteOutcome
from pdrt.protocol.writers import FenceKind


class ByteRange(msgspec.Struct, frozen=True):
    """One contiguous copy, in bytes from the start of each side's pool."""

    source_offset: int
    target_offset: int
    length: int


class WriteRequest(msgspec.Struct, frozen=True):
    """What one write copies, for which room, and into whose segment."""

    room: RoomId
    generation: int
    decode_rank: int
    ranges: tuple[ByteRange, ...]

    @property
    def decode(self) -> Incarnation:
        """Whose segment it is."""
        return self.room.decode


OnSettled = Callable[[WriteOutcome, str], None]
"""Called exactly once per accepted write, on the loop, with words for a person."""


class Receiver(Protocol):
    """The decode side of an engine, on one rank."""

    name: str
    fence: FenceKind

    async def open_segment(self, rank: int, endpoint: str, generation: int) -> Segment:
        """Expose this rank's pool to one prefill worker under a new generation.

        Raises:
            EngineError: it cannot be exposed.
        """

    async def close_segment(self, endpoint: str, generation: int) -> None:
        """Tear it down; returns once nobody can write through it any more."""

    async def close_offer(self, endpoint: str, generation: int) -> None:
        """Tear down one that no writer has taken: nothing was written through it."""

    def close(self) -> None:
        """Let go of everything, at exit."""


class Sender(Protocol):
    """The prefill side of an engine, on one rank."""

    name: str

    async def open(self, decode: Incarnation, generation: int, segments: Sequence[Segment]) -> None:
        """Make an instance that reaches these segments.

        Raises:
            EngineError: they cannot be reached; says why and what to do.
        """

    def write(self, request: WriteRequest, on_settled: OnSettled) -> None:
        """Accept a write; it is outstanding from now until `on_settled`.

        Raises:
            EngineError: not accepted (no such instance, or it takes no new writes).
        """

    async def close_instance(self, decode: Incarnation, generation: int) -> None:
        """Destroy an instance; returns once it can touch neither side's memory."""

    def close(self) -> None:
        """Let go of everything, at exit."""


def coalesce(ranges: Sequence[ByteRange]) -> tuple[ByteRange, ...]:
    """Join neighbours that are contiguous on both sides; order kept."""
    joined: list[ByteRange] = []
    for piece in ranges:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.source_offset + last.length == piece.source_offset
            and last.target_offset + last.length == piece.target_offset
        ):
            joined[-1] = ByteRange(
                last.source_offset, last.target_offset, last.length + piece.length
            )
        else:
            joined.append(piece)
    return tuple(joined)
