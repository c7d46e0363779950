"""Carries out the room table's effects: the bootstrap channel, and what every rank is told. Decides
nothing. Effects are applied through one FIFO queue, in the order they were decided.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from pdrt.config import WorkerConfig
from pdrt.errors import ConfigError
from pdrt.ids import RoomId, routing_id
from pdrt.prefill.rank import (
    EngineClosed,
    EngineOpened,
    EngineRefused,
    FromPrefillRank,
    RoomEnded,
    ToPrefillRank,
)
from pdrt.protocol.codec import VERSION_FRAME, encode, other_version
from pdrt.protocol.effects import (
    CloseEngine,
    CloseRoom,
    EndWorker,
    OpenEngine,
    OpenRoom,
    PrefillEffect,
    ReleaseSource,
    SendToDecode,
)
from pdrt.protocol.messages import DecodeToPrefill, Drained, Grant
from pdrt.protocol.room_writer import RankEnd
from pdrt.protocol.rooms import RoomTable
from pdrt.transfer.channel import RouterChannel
from pdrt.transfer.cluster_key import read_key
from pdrt.transfer.effect_queue import EffectQueue
from pdrt.transfer.frames import FrameReader
from pdrt.transfer.handshake import Failure
from pdrt.transfer.rank_group import RankGroup
from pdrt.transfer.room_task import Close, LeaderEvent, ToRoom, rank_room
from pdrt.transfer.worker_loop import ExitCode, WorkerLoop

log = logging.getLogger(__name__)

RoomEffect = OpenRoom | CloseRoom | ReleaseSource
PrefillRanks = RankGroup[ToPrefillRank, FromPrefillRank]


class Handover:
    """The prefill worker's side of every bootstrap channel."""

    def __init__(
        self,
        table: RoomTable,
        ranks: PrefillRanks,
        config: WorkerConfig,
        loop: WorkerLoop,
    ) -> None:
        """Binds the bootstrap channel.

        Raises:
            ConfigError: the port cannot be bound.
        """
        self.table = table
        self.judge: Callable[[Grant], str | None] = lambda grant: None
        """Why a grant cannot be served, in words."""
        self.on_room: Callable[[RoomEffect], None] = lambda effect: None
        """Applies what concerns computation and pages."""
        self.on_rank_end: Callable[[int, str, RankEnd], None] = lambda rank, engine, end: None
        """A room is over on one rank; it was written through `engine`."""
        self.on_end: Callable[[Drained], None] = lambda drained: None
        """A room is over, and this was said of it."""
        self._ranks = ranks
        ranks.on_answer = self._answered
        ranks.on_alive = table.rank_heard
        self._loop = loop
        self.apply = EffectQueue(self._apply).apply
        frame_bytes_max = config.protocol.frame_bytes_max
        self._reader: FrameReader[DecodeToPrefill] = FrameReader(
            DecodeToPrefill, frame_bytes_max, "decode worker"
        )
        self.rejected = self._reader.rejected
        self.refused: Counter[str] = Counter()
        """Handshakes that failed, by reason."""
        self._channel = self._bind(config)
        self.endpoint = f"tcp://{config.host}:{self._channel.port}"

    def _bind(self, config: WorkerConfig) -> RouterChannel:
        key, frame_bytes_max = read_key(config.security), config.protocol.frame_bytes_max
        try:
            channel = RouterChannel(config.host, config.port, self._receive, frame_bytes_max, key)
        except ConfigError as error:
            raise ConfigError(f"{error}; choose another --port") from error
        channel.on_refused = self._count_refused
        return channel

    def _count_refused(self, failure: Failure) -> None:
        self.refused[failure.value] += 1

    def _apply(self, effect: PrefillEffect) -> None:
        match effect:
            case SendToDecode():
                self._channel.send(routing_id(effect.decode), encode(effect.message))
                # Afterwards: the other side waits for no log line.
                if isinstance(effect.message, Drained):
                    self.on_end(effect.message)
            case OpenEngine() | CloseEngine():
                self._ranks.tell(effect)
            case OpenRoom():
                self._ranks.tell(rank_room(effect.grant))
                self.on_room(effect)
            case CloseRoom():
                self.on_room(effect)
                self.post(effect.room, Close(effect.reason, effect.detail))
            case ReleaseSource():
                self.on_room(effect)
            case EndWorker():
                self._loop.end(ExitCode.CANNOT_GO_ON, effect.why)

    def _receive(self, peer: bytes, frame: bytes) -> None:
        """The sender is who the message says, not the socket's idea of a peer. That is good enough
        for somebody whose words are not known here."""
        message = self._reader.read(frame)
        if message is None and other_version(frame) is not None:
            self._channel.send(peer, VERSION_FRAME)
        if message is None or self._loop.is_ending:
            return
        refusal = self.judge(message) if isinstance(message, Grant) else None
        self.apply(self.table.receive(message, time.monotonic(), refusal))

    def drain(self) -> None:
        """Read everything that has arrived."""
        self._channel.drain()
        self._ranks.drain()

    # Ranks

    def post(self, room: RoomId, event: LeaderEvent) -> None:
        """Tell the room's task on every rank; one that has ended hears nothing any more."""
        self._ranks.tell(ToRoom(room, event))

    def _answered(self, rank: int, message: FromPrefillRank) -> None:
        table, now = self.table, time.monotonic()
        match message:
            case EngineOpened(decode, generation):
                self.apply(table.engine_opened(decode, generation, rank, now))
            case EngineRefused(decode, generation, why):
                log.error("cannot reach a decode pool: %s", why, extra={"rank": rank})
                self.apply(table.engine_refused(decode, generation, why, now))
            case EngineClosed(decode, generation):
                self.apply(table.engine_closed(decode, generation, rank, now))
            case RoomEnded(room, end):
                self.on_rank_end(rank, table.engine_of(room), end)
                self.apply(table.rank_ended(room, rank, end, now))

    def close(self) -> None:
        """At exit."""
        self._channel.close()
