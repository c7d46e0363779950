"""One rank of a decode worker: the segments through which its pool can be reached.

The same handler serves rank 0 in the leader's process and every other rank in its own. It decides
nothing: what the lease table has decided comes in, in order, and what came of it goes back.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from pdrt.config import WorkerConfig
from pdrt.errors import EngineError
from pdrt.ids import RoomId
from pdrt.kv.pool import KvPool
from pdrt.protocol.effects import ChecksumPages, CloseOffers, CloseSegment, OpenSegment
from pdrt.protocol.messages import Segment, SliceChecksums
from pdrt.transfer.checksums import PageChecksums
from pdrt.transfer.engine import Receiver
from pdrt.transfer.engines import make_receivers
from pdrt.transfer.mooncake.receiver import MooncakeReceiver
from pdrt.transfer.writable import AdmitRoom, DismissRoom, WritableRooms

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
        self._start = start
        self._answer = answer
        self._shown: dict[tuple[str, int], tuple[str, ...]] = {}
        """By endpoint and generation: the engines through which the pool is exposed."""

    def handle(self, message: ToDecodeRank) -> None:
        match message:
            case OpenSegment():
                self._start(self._open_segment(message), "open segment")
            case CloseOffers():
                self._start(self._close_offers(message), "close offers")
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
        receivers = self.parts.receivers.values()
        mooncake = next((r for r in receivers if isinstance(r, MooncakeReceiver)), None)
        return None if mooncake is None else mooncake.restart_reason

    async def _open_segment(self, message: OpenSegment) -> None:
        endpoint, generation = message.endpoint, message.generation
        segments: list[Segment] = []
        try:
            for receiver in self.parts.receivers.values():
                opened = await receiver.open_segment(self.parts.rank, endpoint, generation)
                segments.append(opened)
        except EngineError as error:
            self._answer(SegmentRefused(str(error)))
            return
        self._shown[endpoint, generation] = tuple(self.parts.receivers)
        self._answer(SegmentOpened(endpoint, generation, tuple(segments)))

    async def _close_offers(self, message: CloseOffers) -> None:
        name = message.endpoint, message.generation
        shown, self._shown[name] = self._shown[name], (message.engine,)
        for engine in shown:
            if engine != message.engine:
                await self.parts.receivers[engine].close_offer(*name)

    async def _close_segment(self, message: CloseSegment) -> None:
        name = message.endpoint, message.generation
        for engine in self._shown.pop(name):
            await self.parts.receivers[engine].close_segment(*name)
        self._answer(SegmentClosed(message.endpoint, message.generation))

    async def _checksum(self, message: ChecksumPages) -> None:
        assert self.parts.checksums is not None, message.room
        own = [x for x in message.slices if x.decode_rank == self.parts.rank]
        landed = await self.parts.checksums.of_target(message.pages, own)
        self._answer(PagesChecked(message.room, landed))

    def check(self) -> tuple[RoomId, ...]:
        """Leases are their leader's: there are no rooms here."""
        return ()

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
    return DecodeParts(rank, make_receivers(config, pool, rooms, rank), rooms, checksums)
