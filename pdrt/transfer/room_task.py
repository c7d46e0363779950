"""One task per room and rank: the single writer of that room's transfer.

Others put events into its inbox; it alone drives the `RoomWriter`, submits writes, and reports
the end, as its last act. An unexpected exception ends this room as UNSETTLED and nothing else,
and not before the forwards that fill its source pages have returned.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from pdrt.errors import EngineError
from pdrt.ids import RoomId
from pdrt.kv.layout import KvLayout, SliceCopy, rank_heads, slice_plan
from pdrt.protocol.messages import Grant, Outcome, Reason, SliceChecksums
from pdrt.protocol.room_writer import (
    RankEnd,
    ReportEnd,
    RoomWriter,
    Write,
    WriteOutcome,
    WriterEffect,
)
from pdrt.transfer.checksums import PageChecksums
from pdrt.transfer.engine import ByteRange, OnSettled, Sender, WriteRequest, coalesce

log = logging.getLogger(__name__)


class RankRoom(msgspec.Struct, frozen=True, tag=True):
    """Opens a room on a rank: what that must know of its grant."""

    room: RoomId
    generation: int
    pages: tuple[int, ...]
    """Destinations of the prompt's pages from `first_page` on; perhaps none."""
    first_page: int


def rank_room(grant: Grant) -> RankRoom:
    """Of a grant that has been accepted."""
    return RankRoom(grant.room, grant.generation, grant.pages, grant.first_page)


class ForwardStarted(msgspec.Struct, frozen=True, tag=True):
    """A forward that fills source pages has been planned."""


class ForwardEnded(msgspec.Struct, frozen=True, tag=True):
    """It has returned."""


class PagesFinished(msgspec.Struct, frozen=True, tag=True):
    """The prompt's pages up to index `finished` are complete."""

    source_pages: Sequence[int]
    finished: int
    is_last: bool
    """The whole prompt has been computed."""


class Close(msgspec.Struct, frozen=True, tag=True):
    """Submit nothing more."""

    reason: Reason
    detail: str = ""


LeaderEvent = ForwardStarted | ForwardEnded | PagesFinished | Close
"""What the leader tells a room, on every rank."""


class ToRoom(msgspec.Struct, frozen=True, tag=True):
    """To the task of one room."""

    room: RoomId
    event: LeaderEvent


class Settled(msgspec.Struct, frozen=True):
    """The engine's one answer to a write."""

    write_id: int
    outcome: WriteOutcome
    detail: str
    checksums: tuple[SliceChecksums, ...] = ()


RoomEvent = LeaderEvent | Settled
OnEnd = Callable[[RoomId, RankEnd], None]


class SlicePlan(msgspec.Struct, frozen=True):
    """What this rank sends of each page, and how far apart pages are on both sides."""

    copies: tuple[SliceCopy, ...]
    source_page_bytes: int
    target_page_bytes: Mapping[int, int]
    """By decode rank."""

    def page_bytes(self) -> dict[int, int]:
        """Bytes of one page sent to each decode rank."""
        sizes: dict[int, int] = {}
        for copy in self.copies:
            sizes[copy.decode_rank] = sizes.get(copy.decode_rank, 0) + copy.length
        return sizes

    def copies_of(self, write: Write) -> list[SliceCopy]:
        """Those that go to the decode rank of this write."""
        return [copy for copy in self.copies if copy.decode_rank == write.decode_rank]

    def ranges(self, write: Write) -> tuple[ByteRange, ...]:
        """The byte ranges of one write."""
        copies = self.copies_of(write)
        stride = self.target_page_bytes[write.decode_rank]
        whole = SliceCopy(write.decode_rank, 0, 0, stride)
        if copies == [whole] and stride == self.source_page_bytes:
            runs = page_runs(write.source_pages, write.target_pages)
            return tuple(ByteRange(s * stride, t * stride, n * stride) for s, t, n in runs)
        pieces = [
            ByteRange(
                source_offset=source * self.source_page_bytes + copy.source_offset,
                target_offset=target * stride + copy.target_offset,
                length=copy.length,
            )
            for source, target in zip(write.source_pages, write.target_pages, strict=True)
            for copy in copies
        ]
        return coalesce(pieces)


def page_runs(sources: Sequence[int], targets: Sequence[int]) -> list[tuple[int, int, int]]:
    """First source page, first target page and length of each run of pages that follow each other
    on both sides."""
    runs: list[tuple[int, int, int]] = []
    first = 0
    for index in range(1, len(sources) + 1):
        count = index - first
        is_next = (
            index < len(sources)
            and sources[index] == sources[first] + count
            and targets[index] == targets[first] + count
        )
        if not is_next:
            runs.append((sources[first], targets[first], count))
            first = index
    return runs


def rank_plan(layout: KvLayout, rank: int, ranks: int, decode_ranks: int) -> SlicePlan:
    """What rank `rank` of `ranks` sends to a decode worker. `layout`: of the whole model.

    Raises:
        ValueError: its heads do not divide over the ranks of one side.
    """
    sources, targets = (rank_heads(layout.kv_heads, n) for n in (ranks, decode_ranks))
    return SlicePlan(
        copies=tuple(slice_plan(layout, ranks, decode_ranks)[rank]),
        source_page_bytes=sources[rank].count * layout.head_bytes,
        target_page_bytes={n: held.count * layout.head_bytes for n, held in enumerate(targets)},
    )


class Transfer(msgspec.Struct, frozen=True):
    """How this rank sends its pages."""

    sender: Sender
    plan: SlicePlan
    checksums: PageChecksums | None = None
    """With `--kv-checksum`."""


class RoomTask:
    """Owns one room on this rank. `post` is the only way in."""

    def __init__(self, room: RankRoom, transfer: Transfer, inbox_max: int, on_end: OnEnd) -> None:
        page_bytes = transfer.plan.page_bytes()
        self.room = room.room
        self.writer = RoomWriter(room.room, page_bytes, room.pages, room.first_page)
        self.generation = room.generation
        self.pages = room.pages
        """Destinations."""
        self._transfer = transfer
        self._on_end = on_end
        self._inbox: deque[RoomEvent] = deque()
        self._inbox_max = inbox_max
        self._wake = asyncio.Event()
        self._is_ended = False
        # Forwards that have been posted and have not returned, whatever became of this task.
        self._forwards = 0

    def post(self, event: RoomEvent) -> None:
        """Never blocks. A full inbox closes the room; what proves that something has ended
        (`Settled`, `ForwardEnded`) is always taken, being bounded by what was begun."""
        match event:
            case ForwardStarted():
                self._forwards += 1
            case ForwardEnded():
                self._forwards -= 1
        if len(self._inbox) >= self._inbox_max and isinstance(event, PagesFinished):
            event = Close(Reason.INBOX_FULL, f"{len(self._inbox)} events are waiting")
        if isinstance(event, ForwardStarted):
            # The forward runs already: nothing that is still unheard may end the room before it.
            self._inbox.appendleft(event)
        else:
            self._inbox.append(event)
        self._wake.set()

    async def run(self) -> None:
        """Until the room has drained. Cancelling it is for shutdown only."""
        try:
            while not self._is_ended:
                await self._wake.wait()
                self._wake.clear()
                while self._inbox and not self._is_ended:
                    self._apply(self._handle(self._inbox.popleft()))
        except Exception as error:
            log.exception("room task failed", extra={"room": self.room})
            while self._forwards:
                self._wake.clear()
                await self._wake.wait()
            bytes_written = 0
            end = RankEnd(Outcome.UNSETTLED, Reason.TASK_FAILED, bytes_written, repr(error))
            self._end(end)

    def _handle(self, event: RoomEvent) -> list[WriterEffect]:
        match event:
            case ForwardStarted():
                return self.writer.forward_started()
            case ForwardEnded():
                return self.writer.forward_ended()
            case PagesFinished():
                return self.writer.pages_finished(event.source_pages, event.finished) + (
                    self.writer.finished() if event.is_last else []
                )
            case Close():
                return self.writer.close(event.reason, event.detail)
            case Settled():
                return self.writer.settled(
                    event.write_id, event.outcome, event.detail, event.checksums
                )

    def _apply(self, effects: Sequence[WriterEffect]) -> None:
        for effect in effects:
            match effect:
                case Write():
                    self._write(effect)
                case ReportEnd():
                    self._end(effect.end)

    def _write(self, write: Write) -> None:
        request = WriteRequest(
            room=self.room,
            generation=self.generation,
            decode_rank=write.decode_rank,
            ranges=self._transfer.plan.ranges(write),
        )

        on_settled = self._settles(write)
        try:
            self._transfer.sender.write(request, on_settled)
        except EngineError as error:
            on_settled(WriteOutcome.FAILED, str(error))

    def _settles(self, write: Write) -> OnSettled:
        """What the engine calls."""
        if self._transfer.checksums is not None:
            copies = self._transfer.plan.copies_of(write)
            checksums = self._transfer.checksums.of_source(write.source_pages, copies)
            return self._settles_with(write, checksums)

        def on_settled(outcome: WriteOutcome, detail: str) -> None:
            self.post(Settled(write.write_id, outcome, detail))

        return on_settled

    def _settles_with(
        self, write: Write, checksums: asyncio.Future[tuple[SliceChecksums, ...]]
    ) -> OnSettled:
        """The write counts as outstanding until its checksums are there too, as they are read from
        its source pages."""

        def on_settled(outcome: WriteOutcome, detail: str) -> None:
            def on_checksums(done: asyncio.Future[tuple[SliceChecksums, ...]]) -> None:
                if not done.cancelled():  # at exit
                    self.post(Settled(write.write_id, outcome, detail, done.result()))

            checksums.add_done_callback(on_checksums)

        return on_settled

    def _end(self, end: RankEnd) -> None:
        self._is_ended = True
        self._on_end(self.room, end)
