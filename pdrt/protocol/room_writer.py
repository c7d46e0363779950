"""One room on one prefill rank: which writes are out, and when the room has drained. Pure.

    OPEN     finished pages are accepted and written
    CLOSING  nothing more is submitted; what is outstanding is waited for
    (gone)   the end has been reported, as the last act

A write is outstanding from the moment it is handed to the engine, a forward that fills source
pages from the moment it is planned. A room that ever had an unsettled write ends UNSETTLED.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

import msgspec

from pdrt.ids import RoomId
from pdrt.protocol.checksums import merged
from pdrt.protocol.messages import Outcome, Reason, SliceChecksums


class WriteOutcome(Enum):
    """How one accepted write ended. Exactly one of these, exactly once."""

    COMPLETED = "completed"
    FAILED = "failed"
    """Ended badly, and settled: nothing of it can land any more."""
    UNSETTLED = "unsettled"
    """No proof that it has ended."""


class RankEnd(msgspec.Struct, frozen=True):
    """How a room ended on one rank."""

    outcome: Outcome
    reason: Reason | None
    bytes_written: int
    detail: str = ""
    checksums: tuple[SliceChecksums, ...] = ()
    """When COMPLETE, with `--kv-checksum`: of all that was written, at its source."""


class Write(msgspec.Struct, frozen=True):
    """Effect: copy source pages onto target pages of one decode rank."""

    write_id: int
    decode_rank: int
    source_pages: tuple[int, ...]
    target_pages: tuple[int, ...]


class ReportEnd(msgspec.Struct, frozen=True):
    """Effect: tell the leader how the room ended here. The last one."""

    end: RankEnd


WriterEffect = Write | ReportEnd


class WriterState(Enum):
    OPEN = "open"
    CLOSING = "closing"
    GONE = "gone"


class WriterEvent(Enum):
    FORWARD_STARTED = "forward_started"
    FORWARD_ENDED = "forward_ended"
    PAGES_FINISHED = "pages_finished"
    FINISHED = "finished"
    SETTLED = "settled"
    CLOSED = "closed"
    DRAINED = "drained"


TRANSITIONS: dict[tuple[WriterState, WriterEvent], WriterState] = {
    (WriterState.OPEN, WriterEvent.FORWARD_STARTED): WriterState.OPEN,
    (WriterState.OPEN, WriterEvent.FORWARD_ENDED): WriterState.OPEN,
    (WriterState.OPEN, WriterEvent.PAGES_FINISHED): WriterState.OPEN,
    (WriterState.OPEN, WriterEvent.FINISHED): WriterState.OPEN,
    (WriterState.OPEN, WriterEvent.SETTLED): WriterState.OPEN,
    (WriterState.OPEN, WriterEvent.CLOSED): WriterState.CLOSING,
    (WriterState.OPEN, WriterEvent.DRAINED): WriterState.GONE,
    # The leader may have planned a forward before it heard that the room closed here: it runs on
    # every rank or on none. What it fills is not written.
    (WriterState.CLOSING, WriterEvent.FORWARD_STARTED): WriterState.CLOSING,
    (WriterState.CLOSING, WriterEvent.FORWARD_ENDED): WriterState.CLOSING,
    (WriterState.CLOSING, WriterEvent.PAGES_FINISHED): WriterState.CLOSING,
    (WriterState.CLOSING, WriterEvent.FINISHED): WriterState.CLOSING,
    (WriterState.CLOSING, WriterEvent.SETTLED): WriterState.CLOSING,
    (WriterState.CLOSING, WriterEvent.CLOSED): WriterState.CLOSING,
    (WriterState.CLOSING, WriterEvent.DRAINED): WriterState.GONE,
}
"""An event that is not listed raises and changes nothing."""


class RoomWriter:
    """The single writer of one room on one rank. Methods are events; they return effects, which
    the caller applies before it calls again."""

    def __init__(
        self,
        room: RoomId,
        page_bytes: Mapping[int, int],
        target_pages: Sequence[int],
        first_page: int,
    ) -> None:
        """`page_bytes`: what this rank sends of each page, by decode rank, perhaps to none.
        `target_pages`: destinations of the prompt's pages from index `first_page` on, perhaps
        none."""
        self.room = room
        self.state = WriterState.OPEN
        self._page_bytes = dict(page_bytes)
        self._target_pages = tuple(target_pages)
        # Index, in the prompt, of the next page to write.
        self._next_page = first_page
        self._first_page = first_page
        self._forwards = 0
        # Every write accepted and not settled, with its bytes. Never removed by anything else.
        self._outstanding: dict[int, int] = {}
        self._next_write = 0
        self._finished = False
        self._unsettled = False
        self._reason: Reason | None = None
        self._detail = ""
        self._bytes_written = 0
        # Of completed writes by id, which rises with the pages.
        self._checksums: dict[int, tuple[SliceChecksums, ...]] = {}

    @property
    def outstanding(self) -> int:
        """Writes accepted and not settled."""
        return len(self._outstanding)

    def forward_started(self) -> list[WriterEffect]:
        """A forward that fills source pages of this room has been planned."""
        self._enter(WriterEvent.FORWARD_STARTED)
        self._forwards += 1
        return []

    def forward_ended(self) -> list[WriterEffect]:
        """That forward has returned, well or badly."""
        assert self._forwards > 0, self.room
        self._enter(WriterEvent.FORWARD_ENDED)
        self._forwards -= 1
        return self._drain_if_quiet()

    def pages_finished(self, source_pages: Sequence[int], finished: int) -> list[WriterEffect]:
        """The prompt's pages up to index `finished` are complete; `source_pages` by index."""
        self._enter(WriterEvent.PAGES_FINISHED)
        first, self._next_page = self._next_page, max(self._next_page, finished)
        if self.state is not WriterState.OPEN or first >= finished or not self._target_pages:
            return []
        sources = tuple(source_pages[first:finished])
        targets = self._target_pages[first - self._first_page : finished - self._first_page]
        assert len(sources) == len(targets) == finished - first, (self.room, first, finished)
        return [self._write(rank, sources, targets) for rank in self._page_bytes]

    def finished(self) -> list[WriterEffect]:
        """The whole prompt has been computed and its pages handed over to `pages_finished`."""
        end = self._first_page + len(self._target_pages)
        # COMPLETE must mean that everything wanted has been written (I6).
        is_written = not self._target_pages or self._next_page >= end
        assert self.state is not WriterState.OPEN or is_written, (self.room, self._next_page, end)
        self._enter(WriterEvent.FINISHED)
        self._finished = True
        return self._drain_if_quiet()

    def settled(
        self,
        write_id: int,
        outcome: WriteOutcome,
        detail: str = "",
        checksums: tuple[SliceChecksums, ...] = (),
    ) -> list[WriterEffect]:
        """The engine's one answer to an accepted write. `checksums` of what it wrote, if wanted."""
        assert write_id in self._outstanding, (self.room, write_id)
        self._enter(WriterEvent.SETTLED)
        size = self._outstanding.pop(write_id)
        match outcome:
            case WriteOutcome.COMPLETED:
                self._bytes_written += size
                self._checksums[write_id] = checksums
            case WriteOutcome.FAILED:
                self._close(Reason.WRITE_FAILED, detail)
            case WriteOutcome.UNSETTLED:
                self._unsettled = True
                self._close(Reason.WRITE_UNSETTLED, detail)
        return self._drain_if_quiet()

    def close(self, reason: Reason, detail: str = "") -> list[WriterEffect]:
        """Submit nothing more. The first reason stays."""
        self._enter(WriterEvent.CLOSED)
        self._close(reason, detail)
        return self._drain_if_quiet()

    def check(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        assert (self._reason is None) == (self.state is WriterState.OPEN) or (
            self.state is WriterState.GONE
        ), self.state
        assert not (self.state is WriterState.GONE and (self._outstanding or self._forwards))
        assert not (self._unsettled and self.state is WriterState.OPEN)

    def _write(self, rank: int, sources: tuple[int, ...], targets: tuple[int, ...]) -> Write:
        self._next_write += 1
        self._outstanding[self._next_write] = len(sources) * self._page_bytes[rank]
        return Write(self._next_write, rank, sources, targets)

    def _enter(self, event: WriterEvent) -> None:
        assert (self.state, event) in TRANSITIONS, (self.room, self.state, event)
        self.state = TRANSITIONS[self.state, event]

    def _close(self, reason: Reason, detail: str) -> None:
        if self._reason is None:
            self._reason, self._detail = reason, detail
        self.state = WriterState.CLOSING

    def _drain_if_quiet(self) -> list[WriterEffect]:
        if self._outstanding or self._forwards:
            return []
        if self.state is WriterState.OPEN and not self._finished:
            return []
        if self._unsettled:
            outcome = Outcome.UNSETTLED
        elif self.state is WriterState.CLOSING:
            outcome = Outcome.ENDED
        else:
            outcome = Outcome.COMPLETE
        self._enter(WriterEvent.DRAINED)
        parts = (part for write in sorted(self._checksums) for part in self._checksums[write])
        checksums = merged(parts) if outcome is Outcome.COMPLETE else ()
        end = RankEnd(outcome, self._reason, self._bytes_written, self._detail, checksums)
        return [ReportEnd(end)]
