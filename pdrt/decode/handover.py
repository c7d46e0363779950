"""Carries out the lease table's effects: sockets, what ranks are told, and means to fence. Decides
nothing.

Effects are applied through one FIFO queue, so that messages leave in the order of their `seq`
even when applying one effect raises the next event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from pdrt.config import WorkerConfig
from pdrt.decode.rank import (
    FromDecodeRank,
    PagesChecked,
    SegmentClosed,
    SegmentOpened,
    SegmentRefused,
    ToDecodeRank,
)
from pdrt.errors import ConfigError, PeerRefused
from pdrt.ids import Incarnation, routing_id, short
from pdrt.protocol.codec import encode, other_version
from pdrt.protocol.effects import (
    ChecksumPages,
    CloseFence,
    CloseOffers,
    CloseSegment,
    Connect,
    DecodeEffect,
    Disconnect,
    EndLease,
    EndWorker,
    FailRoom,
    KillWriter,
    LeaseReady,
    OpenFence,
    OpenSegment,
    PagesDiffer,
    SendToPrefill,
    TakeFirstToken,
)
from pdrt.protocol.leases import LeaseTable
from pdrt.protocol.messages import Grant, PrefillToDecode, RankProcess
from pdrt.protocol.writers import WriterPeer
from pdrt.transfer.channel import DealerChannel
from pdrt.transfer.cluster_key import read_key
from pdrt.transfer.effect_queue import EffectQueue
from pdrt.transfer.frames import FrameReader
from pdrt.transfer.handshake import Failure
from pdrt.transfer.processes import ProcessHandle
from pdrt.transfer.rank_group import RankGroup
from pdrt.transfer.worker_loop import ExitCode, WorkerLoop
from pdrt.transfer.writable import AdmitRoom, DismissRoom

log = logging.getLogger(__name__)

RoomEffect = TakeFirstToken | PagesDiffer | LeaseReady | FailRoom | EndLease


DecodeRanks = RankGroup[ToDecodeRank, FromDecodeRank]

RETRY_SECONDS = 1.0
"""Until what could not be opened for want of file descriptors is tried again."""


class _Fence:
    """Pidfds of one writer's processes."""

    def __init__(self, ranks: Sequence[RankProcess]) -> None:
        """Raises PeerRefused, and OSError where it may be tried again."""
        self.handles: list[ProcessHandle] = []
        if not ranks:
            raise PeerRefused("the prefill worker names no process that could be fenced")
        try:
            for rank in ranks:
                self.handles.append(ProcessHandle(rank))
        except (PeerRefused, OSError):
            self.close()
            raise

    def close(self) -> None:
        for handle in self.handles:
            handle.close()


def _say_engine(peer: WriterPeer) -> None:
    """Once for each writer, and again where a later generation has another engine."""
    log.info(
        "a prefill worker writes here",
        extra={
            "endpoint": peer.endpoint,
            "engine": peer.engine,
            "why_none_better": "; ".join(peer.passed_over) or None,
        },
    )


class Handover:
    """The decode worker's side of every bootstrap channel."""

    def __init__(
        self,
        table: LeaseTable,
        ranks: DecodeRanks,
        config: WorkerConfig,
        loop: WorkerLoop,
        on_room: Callable[[RoomEffect], None],
    ) -> None:
        """`on_room` applies what concerns requests and pages."""
        self.table = table
        self._ranks = ranks
        ranks.on_answer = self._answered
        ranks.on_alive = table.rank_heard
        self._config = config
        self._key = read_key(config.security)
        self._loop = loop
        self._on_room = on_room
        self._reader: FrameReader[PrefillToDecode] = FrameReader(
            PrefillToDecode, config.protocol.frame_bytes_max, "prefill worker"
        )
        self.rejected = self._reader.rejected
        self.refused: Counter[str] = Counter()
        """Handshakes that failed, by reason."""
        self._channels: dict[str, DealerChannel] = {}
        self._versions: dict[str, str] = {}
        """Of connected endpoints that speak another version: which, in words."""
        self._fences: dict[tuple[str, Incarnation], _Fence] = {}
        # By endpoint, and by endpoint and writer: what could not be opened yet.
        self._retries: dict[str | tuple[str, Incarnation], asyncio.TimerHandle] = {}
        self.apply = EffectQueue(self._apply).apply

    def _apply(self, effect: DecodeEffect) -> None:
        match effect:
            case SendToPrefill():
                if isinstance(effect.message, Grant):
                    self._admit(effect.endpoint, effect.message)
                channel = self._channels.get(effect.endpoint)
                if channel is not None:
                    channel.send(encode(effect.message))
            case Connect():
                self._connect(effect.endpoint)
            case Disconnect():
                self._forget_retry(effect.endpoint)
                self._versions.pop(effect.endpoint, None)
                if channel := self._channels.pop(effect.endpoint, None):
                    channel.close()
            case OpenSegment() | CloseOffers() | CloseSegment() | ChecksumPages():
                self._ranks.tell(effect)
            case OpenFence():
                self._open_fence(effect)
            case CloseFence():
                self._close_fence(effect.endpoint, effect.writer)
            case KillWriter():
                self._kill(effect)
            case EndWorker():
                self._loop.end(ExitCode.CANNOT_GO_ON, effect.why)
            case LeaseReady() | EndLease():
                self._ranks.tell(DismissRoom(effect.room))
                self._on_room(effect)
            case _:
                self._on_room(effect)

    def _admit(self, endpoint: str, grant: Grant) -> None:
        """Before anybody can write: engines that apply writes themselves ask for it."""
        self._ranks.tell(AdmitRoom(grant.room, endpoint, grant.generation, grant.pages))

    # Channels

    def _connect(self, endpoint: str) -> None:
        def on_frame(frame: bytes) -> None:
            message = self._reader.read(frame)
            self._note_version(endpoint, frame)
            if message is None or self._loop.is_ending:
                return
            peer = self.table.pairing.peers.get(endpoint)
            before = peer and (peer.writer, peer.engine)
            self.apply(self.table.receive(endpoint, message, time.monotonic()))
            if peer and peer.engine is not None and (peer.writer, peer.engine) != before:
                _say_engine(peer)

        try:
            channel = DealerChannel(
                endpoint,
                routing_id(self.table.pairing.incarnation),
                on_frame,
                self._config.protocol.frame_bytes_max,
                self._key,
            )
        except ConfigError as error:
            log.error("cannot dial a prefill worker", extra={"why": error})
        except OSError as error:
            self._retry(endpoint, lambda: self._connect(endpoint), error)
        else:
            channel.on_refused = self._count_refused
            self._channels[endpoint] = channel

    def _note_version(self, endpoint: str, frame: bytes) -> None:
        difference = other_version(frame)
        if difference is None:
            self._versions.pop(endpoint, None)
        else:
            self._versions[endpoint] = f"prefill speaks {difference}"

    def _count_refused(self, failure: Failure) -> None:
        self.refused[failure.value] += 1

    def refusals(self) -> dict[str, str]:
        """Endpoints that no handshake opens, or that speak another version, and why, in words."""
        channels = self._channels.items()
        closed = {e: channel.refusal for e, channel in channels if channel.refusal is not None}
        return {**self._versions, **closed}

    def drain(self) -> None:
        """Read everything that has arrived."""
        for channel in list(self._channels.values()):
            channel.drain()
        self._ranks.drain()

    # Ranks

    def _answered(self, rank: int, message: FromDecodeRank) -> None:
        table, now = self.table, time.monotonic()
        match message:
            case SegmentOpened(endpoint, generation, segments):
                self.apply(table.segment_opened(endpoint, generation, rank, segments, now))
            case SegmentRefused(why):
                why = f"rank {rank} cannot expose its KV pool: {why}"
                self._loop.end(ExitCode.CANNOT_GO_ON, why)
            case SegmentClosed(endpoint, generation):
                self.apply(table.segment_closed(endpoint, generation, rank, now))
            case PagesChecked(room, slices):
                self.apply(table.checksummed(room, rank, slices, now))

    # Fences

    def _open_fence(self, effect: OpenFence) -> None:
        endpoint, writer = effect.endpoint, effect.writer
        try:
            fence = _Fence(effect.ranks)
        except PeerRefused as error:
            log.error("cannot pair: %s", error, extra={"endpoint": endpoint})
            self.apply(self.table.fence_refused(endpoint, writer, str(error)))
            return
        except OSError as error:
            self._retry((endpoint, writer), lambda: self._open_fence(effect), error)
            return
        self._fences[endpoint, writer] = fence
        for handle in fence.handles:
            asyncio.get_running_loop().add_reader(handle.fd, self._look_if_dead, endpoint, writer)
        self.apply(self.table.fence_opened(endpoint, writer))

    def _look_if_dead(self, endpoint: str, writer: Incarnation) -> None:
        fence = self._fences[endpoint, writer]
        for handle in fence.handles:
            if handle.is_dead():
                asyncio.get_running_loop().remove_reader(handle.fd)
        if all(handle.is_dead() for handle in fence.handles):
            log.warning(
                "prefill worker is dead", extra={"endpoint": endpoint, "writer": short(writer)}
            )
            self.apply(self.table.writer_dead(endpoint, writer, time.monotonic()))

    def _close_fence(self, endpoint: str, writer: Incarnation) -> None:
        self._forget_retry((endpoint, writer))
        fence = self._fences.pop((endpoint, writer), None)
        if fence is None:
            return
        for handle in fence.handles:
            asyncio.get_running_loop().remove_reader(handle.fd)
        fence.close()

    def _retry(
        self, what: str | tuple[str, Incarnation], opens: Callable[[], None], error: OSError
    ) -> None:
        """No grants go there until it is open."""
        log.warning("cannot open something; trying again", extra={"for": what, "why": error})

        def again() -> None:
            del self._retries[what]
            opens()

        self._retries[what] = asyncio.get_running_loop().call_later(RETRY_SECONDS, again)

    def _forget_retry(self, what: str | tuple[str, Incarnation]) -> None:
        if timer := self._retries.pop(what, None):
            timer.cancel()

    def _kill(self, effect: KillWriter) -> None:
        log.error(
            "killing a prefill worker to get pages back",
            extra={
                "endpoint": effect.endpoint,
                "writer": short(effect.writer),
                "why": effect.why,
            },
        )
        for handle in self._fences[effect.endpoint, effect.writer].handles:
            try:
                handle.kill()
            except PermissionError as error:
                # Its pages stay quarantined until somebody else ends it.
                log.error("cannot kill process %d: %s", handle.pid, error)

    def close(self) -> None:
        """At exit."""
        for what in list(self._retries):
            self._forget_retry(what)
        for channel in self._channels.values():
            channel.close()
        for endpoint, writer in list(self._fences):
            self._close_fence(endpoint, writer)
