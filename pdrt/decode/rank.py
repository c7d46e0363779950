"""One rank of a decode worker: the segments through which its pool can be reached.

The same handler serves rank 0 in the leader's process and every other rank in its own. It decides
nothing: what the lease table has decided comes in, in order, and what came of it goes back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import msgspec

from pdrt.config import WorkerConfig
from pdrt.errors import EngineError
from pdrt.ids import RoomId
from pdrt.kv.pool import KvPool
from pdrt.model.resources import device_words
from pdrt.protocol.effects import ChecksumPages, CloseOffers, CloseSegment, OpenSegment
from pdrt.protocol.messages import Segment, SliceChecksums
from pdrt.transfer.checksums import PageChecksums
from pdrt.transfer.engine import Receiver
from pdrt.transfer.engines import make_receivers
from pdrt.transfer.mooncake.receiver import MooncakeReceiver
from pdrt.transfer.rank_messages import Held, HeldRoom, HeldSegment, RankReport
from pdrt.transfer.slow_calls import OPEN_SHARE, named_when_slow
from pdrt.transfer.tcp.receiver import TcpReceiver
from pdrt.transfer.writable import AdmitRoom, DismissRoom, WritableRooms

OneReceiver = TypeVar("OneReceiver")

ToDecodeRank = OpenSegment | CloseOffers | CloseSegment | AdmitRoom | DismissRoom | ChecksumPages


class SegmentOpened(msgspec.Struct, frozen=True, tag=True):
    """Answers `OpenSegment`: one segment for each engine."""

    endpoint: str
    generation: int
    segments: tuple[Segment, ...]


class SegmentRefused(msgspec.Struct, frozen=True, tag=True):
    """Answers `OpenSegment`: the pool cannot be exposed, to nobody."""

    why: str


class SegmentClosed(msgspec.Struct, frozen=True, tag=True):
    """Answers `CloseSegment`: nobody can write through it any more."""

    endpoint: str
    generation: int


class PagesChecked(msgspec.Struct, frozen=True, tag=True):
    """Answers `ChecksumPages`, with the slices that are this rank's own, in their order."""

    room: RoomId
    slices: tuple[SliceChecksums, ...]


FromDecodeRank = SegmentOpened | SegmentRefused | SegmentClosed | PagesChecked


class DecodeParts(msgspec.Struct, frozen=True):
    """Where pages land on a rank."""

    rank: int
    receivers: Mapping[str, Receiver]
    """By engine."""
    rooms: WritableRooms
    checksums: PageChecksums | None = None
    """With `--kv-checksum`."""
    device: str = ""
    """What it computes on, in words."""
    open_seconds_max: float = 8.0
    """Of one engine and segment."""


class DecodeRank:
    """On its process's loop."""

    def __init__(
        self,
        parts: DecodeParts,
        start: Callable[[Coroutine[Any, Any, None], str], None],
        answer: Callable[[FromDecodeRank], None],
    ) -> None:
        """`start` runs a task, by name, for as long as it takes."""
        self.parts = parts
        self.shown: dict[tuple[str, int], tuple[str, ...]] = {}
        """By endpoint and generation, from the moment that a segment is asked for until nobody can
        write through it any more: the engines through which it exposes the pool."""
        self._start = start
        self._answer = answer

    def handle(self, message: ToDecodeRank) -> None:
        match message:
            case OpenSegment(endpoint, generation):
                self.shown[endpoint, generation] = tuple(self.parts.receivers)
                self._start(self._open_segment(message), "open segment")
            case CloseOffers(endpoint, generation, engine):
                offers = [x for x in self.shown[endpoint, generation] if x != engine]
                self.shown[endpoint, generation] = (engine,)
                self._start(self._close_offers(message, offers), "close offers")
            case CloseSegment():
                self._start(self._close_segment(message), "close segment")
            case AdmitRoom():
                self.parts.rooms.admit(message)
            case DismissRoom(room):
                self.parts.rooms.dismiss(room)
            case ChecksumPages():
                self._start(self._checksum(message), "checksums")

    def follows_step(self, message: ToDecodeRank) -> bool:
        """Nothing here speaks of forwards: what lands, lands in pages that none of them uses."""
        return False

    @property
    def restart_reason(self) -> str | None:
        """Why the worker is to drain and exit, in words. What an engine uses up with each
        generation, it uses up on every rank alike."""
        mooncake = self._receiver(MooncakeReceiver)
        return None if mooncake is None else mooncake.restart_reason

    @property
    def data_endpoint(self) -> str | None:
        """Where it listens for KV; None without the tcp engine."""
        tcp = self._receiver(TcpReceiver)
        return None if tcp is None else tcp.endpoint

    def _receiver(self, kind: type[OneReceiver]) -> OneReceiver | None:
        """Of what one engine alone has to say."""
        return next((r for r in self.parts.receivers.values() if isinstance(r, kind)), None)

    async def _open_segment(self, message: OpenSegment) -> None:
        endpoint, generation = message.endpoint, message.generation
        segments: list[Segment] = []
        try:
            for name, receiver in self.parts.receivers.items():
                segments.append(await self._opened(name, receiver, message))
        except EngineError as error:
            self._answer(SegmentRefused(str(error)))
            return
        self._answer(SegmentOpened(endpoint, generation, tuple(segments)))

    async def _opened(self, name: str, receiver: Receiver, message: OpenSegment) -> Segment:
        """What hangs is left alone: the worker ends with it."""
        rank, seconds_max = self.parts.rank, self.parts.open_seconds_max
        try:
            async with asyncio.timeout(seconds_max):
                return await receiver.open_segment(rank, message.endpoint, message.generation)
        except TimeoutError as error:
            raise EngineError(
                f"the {name} engine has not opened a segment within {seconds_max:g} s"
            ) from error

    async def _close_offers(self, message: CloseOffers, offers: Sequence[str]) -> None:
        """What no writer has taken. Nobody waits for it."""
        for name in offers:
            with self._named_when_slow(name, message.endpoint, message.generation):
                receiver = self.parts.receivers[name]
                await receiver.close_offer(message.endpoint, message.generation)

    async def _close_segment(self, message: CloseSegment) -> None:
        endpoint, generation = message.endpoint, message.generation
        for name in self.shown[endpoint, generation]:
            with self._named_when_slow(name, endpoint, generation):
                await self.parts.receivers[name].close_segment(endpoint, generation)
        del self.shown[endpoint, generation]
        self._answer(SegmentClosed(endpoint, generation))

    def _named_when_slow(
        self, name: str, endpoint: str, generation: int
    ) -> AbstractContextManager[None]:
        what = f"closing a segment of the {name} engine"
        seconds = self.parts.open_seconds_max
        return named_when_slow(seconds, what, endpoint=endpoint, generation=generation)

    async def _checksum(self, message: ChecksumPages) -> None:
        assert self.parts.checksums is not None, message.room
        own = [x for x in message.slices if x.decode_rank == self.parts.rank]
        landed = await self.parts.checksums.of_target(message.pages, own)
        self._answer(PagesChecked(message.room, landed))

    def check(self) -> tuple[Held, ...]:
        """Raise AssertionError where the state contradicts itself. Leases are their leader's; what
        is here are the rooms that it has let in."""
        rooms = [HeldRoom(x.room, x.generation, x.pages) for x in self.parts.rooms.admitted()]
        return (*rooms, *(HeldSegment(*key) for key in self.shown))

    def report(self) -> RankReport:
        """What is to be seen of it."""
        tcp = self._receiver(TcpReceiver)
        if tcp is None:
            return RankReport(self.parts.device)
        return RankReport(self.parts.device, dict(tcp.refused), dict(tcp.refused_pieces))

    def close(self) -> None:
        """At exit."""
        for receiver in self.parts.receivers.values():
            receiver.close()
        if self.parts.checksums is not None:
            self.parts.checksums.close()


def decode_parts(rank: int, config: WorkerConfig, pool: KvPool) -> DecodeParts:
    """Through what rank `rank` exposes its `pool`.

    Raises:
        ConfigError: no engine can expose a pool where it is.
    """
    rooms = WritableRooms(pool.layout.page_bytes)
    checksums = PageChecksums(pool) if config.model.kv_checksum else None
    return DecodeParts(
        rank,
        make_receivers(config, pool, rooms, rank),
        rooms,
        checksums,
        device_words(config.device, str(pool.tensor.device)),
        OPEN_SHARE * config.protocol.retire_seconds_max,
    )
