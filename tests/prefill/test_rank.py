"""The handler of a prefill rank, in the leader's process or in its own: what it is told and what it
answers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
import pytest

from pdrt.errors import EngineError
from pdrt.ids import Incarnation, RoomId
from pdrt.prefill.rank import (
    EngineClosed,
    EngineOpened,
    EngineRefused,
    FromPrefillRank,
    PrefillParts,
    PrefillRank,
    RoomEnded,
    ToPrefillRank,
)
from pdrt.protocol.effects import CloseEngine, OpenEngine
from pdrt.protocol.messages import Outcome, Reason, Segment
from pdrt.protocol.room_writer import RankEnd, WriteOutcome
from pdrt.transfer.engine import ByteRange, OnSettled, WriteRequest
from pdrt.transfer.room_task import (
    Close,
    ForwardEnded,
    ForwardStarted,
    PagesFinished,
    RankRoom,
    ToRoom,
)
from tests.ranks.stand_in import LAYOUT

DECODE = Incarnation(0xD0)
ROOM = RoomId(DECODE, 1)
HEAD = LAYOUT.head_bytes
SEGMENTS = tuple(Segment(rank, "scripted", b"") for rank in range(3))
OPEN = OpenEngine(DECODE, 1, SEGMENTS)
CLOSE = CloseEngine(DECODE, 1)
PAGES = RankRoom(ROOM, 1, (7, 5), 0)


class ScriptedSender:
    """An engine that opens when the test says so, and settles every write at once."""

    name = "scripted"

    def __init__(self) -> None:
        self.did: list[str] = []
        self.writes: list[WriteRequest] = []
        self.may_open = asyncio.Event()
        self.may_open.set()
        self.refusal: str | None = None

    async def open(self, decode: Incarnation, generation: int, segments: Sequence[Segment]) -> None:
        self.did.append("opening")
        await self.may_open.wait()
        if self.refusal is not None:
            raise EngineError(self.refusal)
        self.did.append("open")

    async def close_instance(self, decode: Incarnation, generation: int) -> None:
        self.did.append("closed")

    def write(self, request: WriteRequest, on_settled: OnSettled) -> None:
        self.writes.append(request)
        on_settled(WriteOutcome.COMPLETED, "")

    def close(self) -> None:
        pass


class Rank:
    """Rank 1 of 2, of a model with six KV heads: it holds the last three."""

    def __init__(self) -> None:
        self.sender = ScriptedSender()
        self.said: list[FromPrefillRank] = []
        self._tasks: list[asyncio.Task[None]] = []
        parts = PrefillParts(1, 2, LAYOUT, {"scripted": self.sender})
        self.rank = PrefillRank(parts, 64, self._start, self.said.append)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(asyncio.create_task(work, name=name))

    async def told(self, *messages: ToPrefillRank) -> None:
        """Until everything that can happen has happened."""
        for message in messages:
            self.rank.handle(message)
        for _ in range(10):
            await asyncio.sleep(0)
        for task in self._tasks:
            assert not task.done() or task.exception() is None
        self.rank.check()


@pytest.fixture
async def rank() -> Rank:
    return Rank()


async def test_an_engine_is_opened_and_closed(rank: Rank) -> None:
    await rank.told(OPEN)
    assert rank.said == [EngineOpened(DECODE, 1)]
    await rank.told(CLOSE)
    assert rank.said[1:] == [EngineClosed(DECODE, 1)]


async def test_one_that_cannot_be_opened_says_why_and_can_be_closed(rank: Rank) -> None:
    rank.sender.refusal = "nobody there"
    await rank.told(OPEN)
    assert rank.said == [EngineRefused(DECODE, 1, "nobody there")]
    await rank.told(CLOSE)
    assert rank.said[1:] == [EngineClosed(DECODE, 1)]
    rank.sender.refusal = None
    await rank.told(OPEN)
    assert rank.said[2:] == [EngineOpened(DECODE, 1)], "another engine may be tried"


async def test_one_that_is_closed_while_it_opens_is_closed_after_that(rank: Rank) -> None:
    """Another rank was refused meanwhile."""
    rank.sender.may_open.clear()
    await rank.told(OPEN, CLOSE)
    assert rank.sender.did == ["opening"]
    rank.sender.may_open.set()
    await rank.told()
    assert rank.sender.did == ["opening", "open", "closed"]
    assert rank.said == [EngineOpened(DECODE, 1), EngineClosed(DECODE, 1)]


async def test_a_room_writes_this_ranks_slices(rank: Rank) -> None:
    """Heads 3, 4 and 5: one of them is decode rank 1's, two are rank 2's."""
    await rank.told(OPEN, PAGES, ToRoom(ROOM, ForwardStarted()))
    finished = ToRoom(ROOM, PagesFinished([4, 9], 2, is_last=True))
    assert rank.rank.check() == (ROOM,)
    await rank.told(finished, ToRoom(ROOM, ForwardEnded()))
    assert [write.decode_rank for write in rank.sender.writes] == [1, 2]
    to_first, to_second = (write.ranges for write in rank.sender.writes)
    source, target = 3 * HEAD, 2 * HEAD
    assert to_first == (
        ByteRange(4 * source, 7 * target + HEAD, HEAD),
        ByteRange(9 * source, 5 * target + HEAD, HEAD),
    )
    assert to_second == (
        ByteRange(4 * source + HEAD, 7 * target, target),
        ByteRange(9 * source + HEAD, 5 * target, target),
    )
    complete = RankEnd(Outcome.COMPLETE, None, 2 * 3 * HEAD)
    assert rank.said[1:] == [RoomEnded(ROOM, complete)]
    assert rank.rank.check() == ()


async def test_a_room_that_has_ended_hears_nothing(rank: Rank) -> None:
    close = ToRoom(ROOM, Close(Reason.CLIENT_GONE))
    await rank.told(OPEN, PAGES, close)
    ended = RankEnd(Outcome.ENDED, Reason.CLIENT_GONE, 0)
    assert rank.said[1:] == [RoomEnded(ROOM, ended)]
    await rank.told(close, ToRoom(ROOM, ForwardStarted()), ToRoom(ROOM, ForwardEnded()))
    assert len(rank.said) == 2


async def test_what_speaks_of_a_forward(rank: Rank) -> None:
    finished = PagesFinished([1], 1, is_last=False)
    for event in (ForwardStarted(), ForwardEnded(), finished):
        assert rank.rank.follows_step(ToRoom(ROOM, event))
    for message in (ToRoom(ROOM, Close(Reason.DEADLINE)), PAGES, OPEN, CLOSE):
        assert not rank.rank.follows_step(message)


@pytest.mark.parametrize(
    "message",
    [
        OPEN,
        CLOSE,
        PAGES,
        ToRoom(ROOM, Close(Reason.DEADLINE, "late")),
        ToRoom(ROOM, ForwardEnded()),
    ],
)
def test_what_it_is_told_survives_the_channel(message: Any) -> None:
    frame = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(frame, type=ToPrefillRank) == message


@pytest.mark.parametrize(
    "message",
    [
        EngineOpened(DECODE, 2),
        EngineRefused(DECODE, 2, "no"),
        EngineClosed(DECODE, 2),
        RoomEnded(ROOM, RankEnd(Outcome.UNSETTLED, Reason.WRITE_UNSETTLED, 12, "slow")),
    ],
)
def test_what_it_says_survives_the_channel(message: Any) -> None:
    frame = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(frame, type=FromPrefillRank) == message
