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
    HANGING_MAX,
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
from pdrt.transfer.rank_messages import HeldEngine, HeldRoom
from pdrt.transfer.room_task import (
    Close,
    ForwardEnded,
    ForwardStarted,
    PagesFinished,
    RankRoom,
    ToRoom,
)
from tests.decode.deployment import HANG_SECONDS
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
        self.hangs: dict[Incarnation, asyncio.Event] = {}

    async def open(self, decode: Incarnation, generation: int, segments: Sequence[Segment]) -> None:
        self.did.append("opening")
        if decode in self.hangs:
            await self.hangs[decode].wait()
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
        self.other = ScriptedSender()
        senders = {"scripted": self.sender, "other": self.other}
        parts = PrefillParts(1, 2, LAYOUT, senders, open_seconds_max=3600.0)
        self.rank = PrefillRank(parts, 64, self._start, self.said.append)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(asyncio.create_task(work, name=name))

    async def hangs(self, decode: Incarnation) -> asyncio.Event:
        """The opening of an engine does not come back, and is given up. Returns what lets it."""
        said, parts = len(self.said), self.rank.parts
        release = self.sender.hangs[decode] = asyncio.Event()
        self.rank.parts = msgspec.structs.replace(parts, open_seconds_max=0.0)
        self.rank.handle(OpenEngine(decode, 1, SEGMENTS))
        self.rank.parts = parts
        async with asyncio.timeout(HANG_SECONDS):
            while len(self.said) == said:  # noqa: ASYNC110 (it is told by nothing else)
                await asyncio.sleep(0)
        return release

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


# Engines that hang


async def test_one_that_does_not_open_is_refused_and_can_be_closed(rank: Rank) -> None:
    """Another engine takes its place meanwhile. It would end the worker to wait for it."""
    release = await rank.hangs(DECODE)
    assert rank.said == [EngineRefused(DECODE, 1, "rank 1 has not opened it within 0 s")]
    await rank.told(CLOSE)
    assert rank.said[1:] == [EngineClosed(DECODE, 1)]
    segments = tuple(msgspec.structs.replace(x, engine="other") for x in SEGMENTS)
    await rank.told(OpenEngine(DECODE, 1, segments))
    assert rank.said[2:] == [EngineOpened(DECODE, 1)]
    release.set()
    await rank.told()
    assert rank.sender.did == ["opening", "open", "closed"], "what opens late is closed"
    assert rank.other.did == ["opening", "open"]
    assert rank.rank.check() == (HeldEngine(DECODE, 1, "other"),)


async def test_one_that_hangs_is_not_asked_again_before_it_comes_back(rank: Rank) -> None:
    release = await rank.hangs(DECODE)
    await rank.told(CLOSE)
    await rank.told(OPEN)
    why = "it was asked before to open, and has not come back yet"
    assert rank.said[2:] == [EngineRefused(DECODE, 1, why)]
    assert rank.sender.did == ["opening"]
    release.set()
    await rank.told(CLOSE)
    await rank.told(OPEN)
    assert rank.said[4:] == [EngineOpened(DECODE, 1)]


async def test_one_that_hangs_disturbs_no_other_peer(rank: Rank) -> None:
    await rank.hangs(DECODE)
    another = Incarnation(0xD1)
    await rank.told(OpenEngine(another, 1, SEGMENTS), CloseEngine(another, 1))
    assert rank.said[1:] == [EngineOpened(another, 1), EngineClosed(another, 1)]


async def test_engines_that_hang_are_bounded(rank: Rank) -> None:
    peers = [Incarnation(0xD0 + n) for n in range(HANGING_MAX + 1)]
    for peer in peers[:-1]:
        await rank.hangs(peer)
    await rank.told(OpenEngine(peers[-1], 1, SEGMENTS))
    why = f"{HANGING_MAX} engines have not come back from being opened"
    assert rank.said[-1] == EngineRefused(peers[-1], 1, why)


# Rooms


async def test_a_room_writes_this_ranks_slices(rank: Rank) -> None:
    """Heads 3, 4 and 5: one of them is decode rank 1's, two are rank 2's."""
    await rank.told(OPEN, PAGES, ToRoom(ROOM, ForwardStarted()))
    finished = ToRoom(ROOM, PagesFinished([4, 9], 2, is_last=True))
    assert rank.rank.check() == (HeldRoom(ROOM, 1, (7, 5)), HeldEngine(DECODE, 1, "scripted"))
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
    assert rank.rank.check() == (HeldEngine(DECODE, 1, "scripted"),)


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
