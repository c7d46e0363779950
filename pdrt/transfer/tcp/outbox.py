"""What waits to be sent to one decode rank. Put in by the loop, taken by connections' threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from pdrt.protocol.room_writer import WriteOutcome
from pdrt.transfer.engine import ByteRange, OnSettled
from pdrt.transfer.sending import batches
from pdrt.transfer.tcp.wire import PIECE_BYTES_MAX, PIECE_RANGES_MAX

BATCH_BYTES_MAX = 8 << 20
"""What one connection sends before it asks for answers, and once more while it waits for them."""
BATCH_PIECES_MAX = 64

_SEVERITY = (WriteOutcome.COMPLETED, WriteOutcome.FAILED, WriteOutcome.UNSETTLED)


class Write:
    """One accepted write. Everything but `room` is the loop's."""

    def __init__(self, room: int, on_settled: OnSettled) -> None:
        self.room = room
        """Serial."""
        self.pieces_left = 0
        self._on_settled = on_settled
        self._outcome = WriteOutcome.COMPLETED
        self._detail = ""
        self._is_answered = False

    def ended(self, outcome: WriteOutcome, detail: str) -> None:
        """One of its pieces has. The worst of them counts; UNSETTLED is said at once, as nothing
        could make it better."""
        assert self.pieces_left > 0
        self.pieces_left -= 1
        if _SEVERITY.index(outcome) > _SEVERITY.index(self._outcome):
            self._outcome, self._detail = outcome, detail
        is_certain = not self.pieces_left or self._outcome is WriteOutcome.UNSETTLED
        if is_certain and not self._is_answered:
            self._is_answered = True
            self._on_settled(self._outcome, self._detail)


class Piece:
    """A part of a write that goes through one connection."""

    __slots__ = ("length", "ranges", "write")

    def __init__(self, write: Write, ranges: list[ByteRange], length: int) -> None:
        self.write = write
        self.ranges = ranges
        self.length = length


def pieces_of(write: Write, ranges: Sequence[ByteRange]) -> list[Piece]:
    """All of a write, in pieces within the wire's bounds."""
    pieces = [
        Piece(write, batch, sum(part.length for part in batch))
        for batch in batches(ranges, PIECE_BYTES_MAX, PIECE_RANGES_MAX)
    ]
    write.pieces_left = len(pieces)
    return pieces


class Outbox:
    """First in, first out, over as many connections as there are."""

    def __init__(self, connections_max: int) -> None:
        self._connections_max = connections_max
        self._pieces: deque[Piece] = deque()
        self._bytes = 0
        self._idle = 0
        """Threads that wait for a piece."""
        self._is_closed = False
        self._changed = threading.Condition()

    def put(self, pieces: Sequence[Piece]) -> int:
        """Returns how many of what waits now nobody is idle for."""
        with self._changed:
            self._pieces.extend(pieces)
            self._bytes += sum(piece.length for piece in pieces)
            self._changed.notify(len(pieces))
            return max(0, len(self._pieces) - self._idle)

    def take(self, idle_seconds: float) -> list[Piece]:
        """What one connection is to send next, at least a piece; nothing when it is to end: the
        outbox is closed, or there was nothing to do for so long."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._pieces or self._is_closed, idle_seconds)
            self._idle -= 1
            return [] if self._is_closed or not self._pieces else self._batch()

    def _batch(self) -> list[Piece]:
        # What waits is shared out, so that connections have about as much each.
        share = min(BATCH_BYTES_MAX, self._bytes // self._connections_max)
        batch = [self._pieces.popleft()]
        size = batch[0].length
        while self._pieces and len(batch) < BATCH_PIECES_MAX:
            if size + self._pieces[0].length > share:
                break
            batch.append(self._pieces.popleft())
            size += batch[-1].length
        self._bytes -= size
        return batch

    def withdraw(self) -> list[Piece]:
        """Whatever no connection has taken."""
        with self._changed:
            waiting = list(self._pieces)
            self._pieces.clear()
            self._bytes = 0
            return waiting

    def close(self) -> list[Piece]:
        """Connections end once they have their answers. Returns what they have not taken."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        return self.withdraw()
