"""Carries out the room table's effects: the bootstrap channel, engine instances and room tasks.
Decides nothing. Effects are applied through one FIFO queue, in the order they were decided.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from pdrt.config import WorkerConfig
from pdrt.errors import ConfigError, EngineError
from pdrt.ids import RoomId, routing_id
from pdrt.kv.layout import KvLayout, slice_plan
from pdrt.protocol.codec import encode
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
from pdrt.transfer.room_task import Close, RoomEvent, RoomTask, SlicePlan, Transfer
from pdrt.transfer.worker_loop import ExitCode, WorkerLoop

log = logging.getLogger(__name__)

RoomEffect = OpenRoom | CloseRoom | ReleaseSource


class Handover:
    """The prefill worker's side of every bootstrap channel."""

    def __init__(
        self,
        table: RoomTable,
        transfer: Transfer,
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
        self.on_end: Callable[[Drained], None] = lambda drained: None
        """A room is over, and this was said of it."""
        self._transfer = transfer
        self._inbox_max = config.protocol.inbox_max
        self._loop = loop
        self._tasks: dict[RoomId, RoomTask] = {}
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
                if isinstance(effect.message, Drained):
                    self.on_end(effect.message)
                self._channel.send(routing_id(effect.decode), encode(effect.message))
            case OpenEngine():
                self._loop.start(self._open_engine(effect), "open engine")
            case CloseEngine():
                self._loop.start(self._close_engine(effect), "close engine")
            case OpenRoom():
                self._open_room(effect)
            case CloseRoom():
                self.on_room(effect)
                self.post(effect.room, Close(effect.reason, effect.detail))
            case ReleaseSource():
                self.on_room(effect)
            case EndWorker():
                self._loop.end(ExitCode.CANNOT_GO_ON, effect.why)

    def _receive(self, _: bytes, frame: bytes) -> None:
        """The sender is who the message says, not the socket's idea of a peer."""
        message = self._reader.read(frame)
        if message is None or self._loop.is_ending:
            return
        refusal = self.judge(message) if isinstance(message, Grant) else None
        self.apply(self.table.receive(message, time.monotonic(), refusal))

    def drain(self) -> None:
        """Read everything that has arrived."""
        self._channel.drain()

    # Engines

    async def _open_engine(self, effect: OpenEngine) -> None:
        decode, generation = effect.decode, effect.generation
        try:
            await self._transfer.sender.open(decode, generation, effect.segments)
        except EngineError as error:
            log.error("cannot reach a decode pool: %s", error)
            now = time.monotonic()
            self.apply(self.table.engine_refused(decode, generation, str(error), now))
            return
        self.apply(self.table.engine_opened(decode, generation, 0, time.monotonic()))

    async def _close_engine(self, effect: CloseEngine) -> None:
        await self._transfer.sender.close_instance(effect.decode, effect.generation)
        now = time.monotonic()
        self.apply(self.table.engine_closed(effect.decode, effect.generation, 0, now))

    # Rooms

    def _open_room(self, effect: OpenRoom) -> None:
        """The room's task exists before any forward that fills the room."""
        task = RoomTask(effect.grant, self._transfer, self._inbox_max, self._rank_ended)
        self._tasks[task.room] = task
        self._loop.start(task.run(), f"room {task.room}")
        self.on_room(effect)

    def post(self, room: RoomId, event: RoomEvent) -> None:
        """Tell the room's task; a room that has ended hears nothing any more."""
        if task := self._tasks.get(room):
            task.post(event)

    def _rank_ended(self, room: RoomId, end: RankEnd) -> None:
        del self._tasks[room]
        self.apply(self.table.rank_ended(room, 0, end, time.monotonic()))

    def check(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        assert self._tasks.keys() == self.table.rooms.keys()
        for task in self._tasks.values():
            task.writer.check()

    def close(self) -> None:
        """At exit."""
        self._channel.close()
        self._transfer.sender.close()
        if self._transfer.checksums is not None:
            self._transfer.checksums.close()


def single_rank_plan(layout: KvLayout) -> SlicePlan:
    """One rank to one rank: whole pages."""
    return SlicePlan(
        copies=tuple(slice_plan(layout, 1, 1)[0]),
        source_page_bytes=layout.page_bytes,
        target_page_bytes={0: layout.page_bytes},
    )
