"""One task per room: the order in which it hears of things, and what it reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from pdrt.errors import EngineError
from pdrt.ids import Incarnation, RoomId
from pdrt.kv.layout import SliceCopy
from pdrt.protocol.messages import Outcome, Reason, Segment
from pdrt.protocol.room_writer import RankEnd, Write, WriteOutcome
from pdrt.transfer.engine import ByteRange, OnSettled, WriteRequest, coalesce
from pdrt.transfer.room_task import (
    Close,
    ForwardEnded,
    ForwardStarted,
    PagesFinished,
    RoomTask,
    SlicePlan,
    Transfer,
    rank_room,
)
from tests.protocol.traces import Prefill

PLAN = SlicePlan((SliceCopy(0, 0, 0, 64),), source_page_bytes=64, target_page_bytes={0: 64})
SOURCES = [4, 5, 6]


class ManualSender:
    """An engine whose writes settle when the test says so."""

    name = "manual"

    def __init__(self) -> None:
        self.requests: list[WriteRequest] = []
        self.settle: list[OnSettled] = []
        self.refusal: str | None = None

    async def open(self, decode: Incarnation, generation: int, segments: Sequence[Segment]) -> None:
        raise NotImplementedError

    async def close_instance(self, decode: Incarnation, generation: int) -> None:
        raise NotImplementedError

    def write(self, request: WriteRequest, on_settled: OnSettled) -> None:
        if self.refusal is not None:
            raise EngineError(self.refusal)
        self.requests.append(request)
        self.settle.append(on_settled)

    def close(self) -> None:
        pass


class Room:
    """A running room task, and what it reported."""

    def __init__(self, inbox_max: int = 64) -> None:
        self.sender = ManualSender()
        self.ends: list[tuple[RoomId, RankEnd]] = []
        self.task = RoomTask(
            rank_room(Prefill().make_grant()),
            Transfer(self.sender, PLAN),
            inbox_max,
            lambda room, end: self.ends.append((room, end)),
        )

    async def quiet(self) -> None:
        """Until everything that can happen has happened."""
        for _ in range(10):
            await asyncio.sleep(0)

    @property
    def end(self) -> RankEnd:
        [(_, end)] = self.ends
        return end


@pytest.fixture
async def room() -> AsyncIterator[Room]:
    room = Room()
    running = asyncio.create_task(room.task.run())
    yield room
    running.cancel()


async def test_pages_are_written_as_they_finish_and_the_end_is_reported_once(room: Room) -> None:
    room.task.post(ForwardStarted())
    room.task.post(PagesFinished(SOURCES, 2, False))
    await room.quiet()
    [request] = room.sender.requests
    assert [(x.source_offset, x.target_offset, x.length) for x in request.ranges] == [
        (4 * 64, 1 * 64, 2 * 64)
    ], "neighbours on both sides are one range"
    room.task.post(PagesFinished(SOURCES, 3, True))
    room.task.post(ForwardEnded())
    await room.quiet()
    for settle in room.sender.settle:
        settle(WriteOutcome.COMPLETED, "")
    await room.quiet()
    assert (room.end.outcome, room.end.bytes_written) == (Outcome.COMPLETE, 3 * 64)


async def test_forward_that_starts_before_a_failure_is_heard_is_waited_for(room: Room) -> None:
    """The write has failed and the task has not run yet; the leader starts the next chunk."""
    room.task.post(PagesFinished(SOURCES, 1, False))
    await room.quiet()
    room.sender.settle[0](WriteOutcome.FAILED, "reset")
    room.task.post(ForwardStarted())
    await room.quiet()
    assert room.ends == [], "a source page would be free while a forward fills it"
    room.task.post(PagesFinished(SOURCES, 2, False))
    room.task.post(ForwardEnded())
    await room.quiet()
    assert (room.end.outcome, room.end.reason) == (Outcome.ENDED, Reason.WRITE_FAILED)
    assert len(room.sender.requests) == 1, "what it filled is not written"


async def test_close_waits_for_what_the_engine_holds(room: Room) -> None:
    room.task.post(PagesFinished(SOURCES, 3, True))
    room.task.post(Close(Reason.CLIENT_GONE, ""))
    await room.quiet()
    assert room.ends == []
    room.sender.settle[0](WriteOutcome.UNSETTLED, "no answer")
    await room.quiet()
    assert (room.end.outcome, room.end.reason) == (Outcome.UNSETTLED, Reason.CLIENT_GONE)


async def test_write_that_the_engine_refuses_is_settled_and_failed(room: Room) -> None:
    room.sender.refusal = "no such instance"
    room.task.post(PagesFinished(SOURCES, 3, True))
    await room.quiet()
    assert (room.end.outcome, room.end.reason) == (Outcome.ENDED, Reason.WRITE_FAILED)
    assert "no such instance" in room.end.detail


async def test_unexpected_exception_ends_this_room_unsettled_after_its_forwards(
    room: Room,
) -> None:
    room.task.post(ForwardStarted())
    room.task.post(PagesFinished(SOURCES, 2, True))
    await room.quiet()
    assert room.ends == []
    room.task.post(ForwardEnded())
    await room.quiet()
    assert (room.end.outcome, room.end.reason) == (Outcome.UNSETTLED, Reason.TASK_FAILED)


async def test_full_inbox_closes_the_room() -> None:
    room = Room(inbox_max=2)
    room.task.post(ForwardStarted())
    room.task.post(ForwardEnded())
    room.task.post(PagesFinished(SOURCES, 3, True))
    running = asyncio.create_task(room.task.run())
    await room.quiet()
    assert room.end.reason is Reason.INBOX_FULL
    assert room.sender.requests == []
    await running


async def test_chunks_overlap_their_transfers(room: Room) -> None:
    """The second chunk is written while the first has not settled; the end waits for both."""
    for finished in (1, 2, 3):
        room.task.post(ForwardStarted())
        room.task.post(PagesFinished(SOURCES, finished, finished == 3))
        room.task.post(ForwardEnded())
        await room.quiet()
    assert len(room.sender.requests) == 3
    for settle in reversed(room.sender.settle):
        assert room.ends == []
        settle(WriteOutcome.COMPLETED, "")
        await room.quiet()
    assert (room.end.outcome, room.end.bytes_written) == (Outcome.COMPLETE, 3 * 64)


@pytest.mark.parametrize("posted", [0, 1, 2, 3])
async def test_closed_in_every_state(room: Room, posted: int) -> None:
    """Before anything, in a forward, with a write out, with all written: clean, and once."""
    for event in [ForwardStarted(), PagesFinished(SOURCES, 1, False), ForwardEnded()][:posted]:
        room.task.post(event)
        await room.quiet()
    room.task.post(Close(Reason.CLIENT_GONE))
    room.task.post(Close(Reason.SHUTDOWN))
    await room.quiet()
    assert room.ends == [] or posted == 0
    if 1 <= posted <= 2:
        room.task.post(ForwardEnded())
    for settle in room.sender.settle:
        settle(WriteOutcome.COMPLETED, "")
    await room.quiet()
    assert (room.end.outcome, room.end.reason) == (Outcome.ENDED, Reason.CLIENT_GONE)


async def test_one_unsettled_write_outweighs_all_others(room: Room) -> None:
    for finished in (1, 2, 3):
        room.task.post(PagesFinished(SOURCES, finished, finished == 3))
    await room.quiet()
    outcomes = [WriteOutcome.FAILED, WriteOutcome.UNSETTLED, WriteOutcome.COMPLETED]
    for settle, outcome in zip(room.sender.settle, outcomes, strict=True):
        settle(outcome, "")
    await room.quiet()
    assert room.end.outcome is Outcome.UNSETTLED


async def test_broken_engine_that_answers_twice(room: Room) -> None:
    """Nothing can be believed of that write: the room is not COMPLETE."""
    room.task.post(PagesFinished(SOURCES, 1, False))
    room.task.post(PagesFinished(SOURCES, 3, True))
    await room.quiet()
    room.sender.settle[0](WriteOutcome.COMPLETED, "")
    room.sender.settle[0](WriteOutcome.COMPLETED, "")
    await room.quiet()
    assert (room.end.outcome, room.end.reason) == (Outcome.UNSETTLED, Reason.TASK_FAILED)


async def test_what_comes_after_the_end_changes_nothing(room: Room) -> None:
    room.task.post(PagesFinished(SOURCES, 3, True))
    await room.quiet()
    room.task.post("nonsense")  # type: ignore[arg-type]
    await room.quiet()
    assert room.end.outcome is Outcome.UNSETTLED
    room.sender.settle[0](WriteOutcome.COMPLETED, "")
    room.task.post(Close(Reason.SHUTDOWN))
    room.task.post(PagesFinished(SOURCES, 3, True))
    await room.quiet()
    assert len(room.ends) == 1


async def test_engine_that_breaks_in_a_write(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it was accepted is not known."""

    def write(request: WriteRequest, on_settled: OnSettled) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(room.sender, "write", write)
    room.task.post(PagesFinished(SOURCES, 3, True))
    await room.quiet()
    assert (room.end.outcome, room.end.reason) == (Outcome.UNSETTLED, Reason.TASK_FAILED)
    assert "broken" in room.end.detail


async def test_full_inbox_takes_what_proves_an_end() -> None:
    room = Room(inbox_max=1)
    running = asyncio.create_task(room.task.run())
    room.task.post(ForwardStarted())
    await room.quiet()
    room.task.post(PagesFinished(SOURCES, 1, False))
    await room.quiet()
    room.task.post(ForwardEnded())
    room.sender.settle[0](WriteOutcome.COMPLETED, "")
    room.task.post(Close(Reason.CLIENT_GONE))
    await room.quiet()
    assert (room.end.outcome, room.end.bytes_written) == (Outcome.ENDED, 64)
    await running


# Ranges


@pytest.mark.parametrize(
    "pages",
    [
        [(4, 7)],
        [(4, 7), (5, 8), (6, 9)],
        [(4, 7), (5, 8), (6, 3), (7, 4)],
        [(4, 7), (6, 8), (5, 9)],
        [(4, 7), (4, 8), (5, 8)],
        [(0, 1), (1, 0), (2, 1), (9, 2)],
    ],
)
def test_whole_pages_that_follow_each_other_on_both_sides_are_one_range(
    pages: list[tuple[int, int]],
) -> None:
    sources, targets = zip(*pages, strict=True)
    pieces = [ByteRange(source * 64, target * 64, 64) for source, target in pages]
    assert PLAN.ranges(Write(1, 0, sources, targets)) == coalesce(pieces)


def test_parts_of_pages_are_a_range_each() -> None:
    half = SlicePlan((SliceCopy(0, 32, 0, 32),), source_page_bytes=64, target_page_bytes={0: 32})
    assert half.ranges(Write(1, 0, (4, 5), (7, 8))) == (
        ByteRange(4 * 64 + 32, 7 * 32, 32),
        ByteRange(5 * 64 + 32, 8 * 32, 32),
    )
