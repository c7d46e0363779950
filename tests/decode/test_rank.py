"""The handler of a decode rank, in the leader's process or in its own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
import pytest

from pdrt.decode.rank import (
    DecodeParts,
    DecodeRank,
    FromDecodeRank,
    PagesChecked,
    SegmentClosed,
    SegmentOpened,
    SegmentRefused,
    ToDecodeRank,
)
from pdrt.errors import EngineError
from pdrt.ids import Incarnation, RoomId
from pdrt.protocol.effects import ChecksumPages, CloseOffers, CloseSegment, OpenSegment
from pdrt.protocol.messages import Segment, SliceChecksums
from pdrt.protocol.writers import FenceKind
from pdrt.transfer.writable import WritableRooms

ENDPOINT = "tcp://127.0.0.1:1"
ROOM = RoomId(Incarnation(0xD0), 1)


class ScriptedReceiver:
    fence = FenceKind.RETIRE_GENERATION

    def __init__(self, name: str, did: list[str]) -> None:
        self.name = name
        self.refusal: str | None = None
        self._did = did

    async def open_segment(self, rank: int, endpoint: str, generation: int) -> Segment:
        if self.refusal is not None:
            raise EngineError(self.refusal)
        return Segment(rank, self.name, f"{endpoint} {generation}".encode())

    async def close_segment(self, endpoint: str, generation: int) -> None:
        await asyncio.sleep(0)
        self._did.append(f"{self.name} closed {endpoint} {generation}")

    async def close_offer(self, endpoint: str, generation: int) -> None:
        await asyncio.sleep(0)
        self._did.append(f"{self.name} closed the offer {endpoint} {generation}")

    def close(self) -> None:
        self._did.append(f"{self.name} closed")


class ScriptedChecksums:
    def of_target(
        self, pages: Sequence[int], slices: Sequence[SliceChecksums]
    ) -> asyncio.Future[tuple[SliceChecksums, ...]]:
        done = asyncio.get_running_loop().create_future()
        done.set_result(tuple(msgspec.structs.replace(x, pages=tuple(pages)) for x in slices))
        return done

    def close(self) -> None:
        pass


class Rank:
    """Rank 1."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.said: list[FromDecodeRank] = []
        self.receivers = {name: ScriptedReceiver(name, self.did) for name in ("one", "two")}
        checksums: Any = ScriptedChecksums()
        parts = DecodeParts(1, self.receivers, WritableRooms(8), checksums)
        self._tasks: list[asyncio.Task[None]] = []
        self.rank = DecodeRank(parts, self._start, self.said.append)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(asyncio.create_task(work, name=name))

    async def told(self, message: ToDecodeRank) -> None:
        self.rank.handle(message)
        await asyncio.gather(*self._tasks)


@pytest.fixture
async def rank() -> Rank:
    return Rank()


async def test_a_segment_is_opened_through_every_engine(rank: Rank) -> None:
    await rank.told(OpenSegment(ENDPOINT, 4))
    name = f"{ENDPOINT} 4".encode()
    segments = (Segment(1, "one", name), Segment(1, "two", name))
    assert rank.said == [SegmentOpened(ENDPOINT, 4, segments)]


async def test_a_pool_that_cannot_be_exposed(rank: Rank) -> None:
    rank.receivers["two"].refusal = "no port is left"
    await rank.told(OpenSegment(ENDPOINT, 4))
    assert rank.said == [SegmentRefused("no port is left")]


async def test_a_segment_is_closed_once_no_engine_can_write_through_it(rank: Rank) -> None:
    await rank.told(OpenSegment(ENDPOINT, 4))
    await rank.told(CloseSegment(ENDPOINT, 4))
    assert rank.did == [f"one closed {ENDPOINT} 4", f"two closed {ENDPOINT} 4"]
    assert rank.said[1:] == [SegmentClosed(ENDPOINT, 4)]


async def test_what_no_writer_took_is_closed_at_once_and_only_once(rank: Rank) -> None:
    await rank.told(OpenSegment(ENDPOINT, 4))
    rank.rank.handle(CloseOffers(ENDPOINT, 4, "two"))
    await rank.told(CloseSegment(ENDPOINT, 4))
    assert sorted(rank.did) == [f"one closed the offer {ENDPOINT} 4", f"two closed {ENDPOINT} 4"]
    assert rank.said[1:] == [SegmentClosed(ENDPOINT, 4)], "an offer's end is not answered"


async def test_checksums_are_of_its_own_slices(rank: Rank) -> None:
    slices = tuple(SliceChecksums(n, 0, 8, (1, 2)) for n in (0, 1, 2))
    await rank.told(ChecksumPages(ROOM, (7, 9), slices))
    assert rank.said == [PagesChecked(ROOM, (SliceChecksums(1, 0, 8, (7, 9)),))]


async def test_it_lets_go_of_every_engine(rank: Rank) -> None:
    rank.rank.close()
    assert rank.did == ["one closed", "two closed"]


@pytest.mark.parametrize(
    "message",
    [
        OpenSegment(ENDPOINT, 1),
        CloseOffers(ENDPOINT, 1, "tcp"),
        CloseSegment(ENDPOINT, 1),
        ChecksumPages(ROOM, (1,), (SliceChecksums(0, 0, 8, (2**64 - 1,)),)),
    ],
)
def test_what_it_is_told_survives_the_channel(message: Any) -> None:
    frame = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(frame, type=ToDecodeRank) == message
