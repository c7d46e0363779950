"""One rank of a prefill worker: its engine instances, and the tasks of its rooms.

The same handler serves rank 0 in the leader's process and every other rank in its own. It decides
nothing: what the room table has decided comes in, in order, and what came of it goes back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from pdrt.config import WorkerConfig
from pdrt.errors import EngineError
from pdrt.ids import Incarnation, RoomId
from pdrt.kv.layout import KvLayout
from pdrt.kv.pool import KvPool
from pdrt.protocol.effects import CloseEngine, OpenEngine
from pdrt.protocol.room_writer import RankEnd
from pdrt.transfer.checksums import PageChecksums
from pdrt.transfer.engine import Sender
from pdrt.transfer.engines import make_senders
from pdrt.transfer.room_task import Close, RankRoom, RoomTask, ToRoom, Transfer, rank_plan

ToPrefillRank = OpenEngine | CloseEngine | RankRoom | ToRoom


class EngineOpened(msgspec.Struct, frozen=True, tag=True):
    """Answers `OpenEngine`."""

    decode: Incarnation
    generation: int


class EngineRefused(msgspec.Struct, frozen=True, tag=True):
    """Answers `OpenEngine`: the segments cannot be reached from here."""

    decode: Incarnation
    generation: int
    why: str


class EngineClosed(msgspec.Struct, frozen=True, tag=True):
    """Answers `CloseEngine`: the instance can touch nothing any more."""

    decode: Incarnation
    generation: int


class RoomEnded(msgspec.Struct, frozen=True, tag=True):
    """The last act of a room's task."""

    room: RoomId
    end: RankEnd


FromPrefillRank = EngineOpened | EngineRefused | EngineClosed | RoomEnded


class PrefillParts(msgspec.Struct, frozen=True):
    """What a rank sends from, and with."""

    rank: int
    ranks: int
    layout: KvLayout
    """Of the whole model."""
    senders: Mapping[str, Sender]
    """By engine."""
    checksums: PageChecksums | None = None
    """With `--kv-checksum`."""


class PrefillRank:
    """Everything that a rank knows; on its process's loop."""

    def __init__(
        self,
        parts: PrefillParts,
        inbox_max: int,
        start: Callable[[Coroutine[Any, Any, None], str], None],
        answer: Callable[[FromPrefillRank], None],
    ) -> None:
        """`inbox_max`: of each room. `start` runs a task, by name, for as long as it takes."""
        self.parts = parts
        self.tasks: dict[RoomId, RoomTask] = {}
        """Of the rooms that have not ended here."""
        self._instances: dict[tuple[Incarnation, int], _Instance] = {}
        """By decode incarnation and generation."""
        self._inbox_max = inbox_max
        self._start = start
        self._answer = answer

    def handle(self, message: ToPrefillRank) -> None:
        match message:
            case OpenEngine():
                self._open_engine(message)
            case CloseEngine():
                self._start(self._close_engine(message), "close engine")
            case RankRoom():
                self._open_room(message)
            case ToRoom(room, event):
                if task := self.tasks.get(room):
                    task.post(event)

    def follows_step(self, message: ToPrefillRank) -> bool:
        """Pages count as finished once this rank, too, has computed them. Closing waits for
        nothing."""
        return isinstance(message, ToRoom) and not isinstance(message.event, Close)

    # Engines

    def _open_engine(self, message: OpenEngine) -> None:
        parts, segments = self.parts, message.segments
        plan = rank_plan(parts.layout, parts.rank, parts.ranks, len(segments))
        transfer = Transfer(parts.senders[segments[0].engine], plan, parts.checksums)
        instance = _Instance(transfer)
        self._instances[message.decode, message.generation] = instance
        self._start(self._opens(message, instance), "open engine")

    async def _opens(self, message: OpenEngine, instance: _Instance) -> None:
        decode, generation = message.decode, message.generation
        answer: FromPrefillRank = EngineOpened(decode, generation)
        try:
            await instance.transfer.sender.open(decode, generation, message.segments)
        except EngineError as error:
            answer = EngineRefused(decode, generation, str(error))
        instance.is_settled.set()
        self._answer(answer)

    async def _close_engine(self, message: CloseEngine) -> None:
        """Also of one that could not be opened. Where another rank was refused, it may come while
        this one still opens: what is opened then would never be closed."""
        key = message.decode, message.generation
        instance = self._instances[key]
        await instance.is_settled.wait()
        await instance.transfer.sender.close_instance(*key)
        del self._instances[key]
        self._answer(EngineClosed(*key))

    # Rooms

    def _open_room(self, room: RankRoom) -> None:
        """Its task exists before any forward that fills it."""
        transfer = self._instances[room.room.decode, room.generation].transfer
        task = RoomTask(room, transfer, self._inbox_max, self._room_ended)
        self.tasks[task.room] = task
        self._start(task.run(), f"room {task.room}")

    def _room_ended(self, room: RoomId, end: RankEnd) -> None:
        del self.tasks[room]
        self._answer(RoomEnded(room, end))

    def check(self) -> tuple[RoomId, ...]:
        """Raise AssertionError where the state contradicts itself."""
        for task in self.tasks.values():
            task.writer.check()
            assert (task.room.decode, task.generation) in self._instances, task.room
        return tuple(self.tasks)

    def close(self) -> None:
        """At exit."""
        for sender in self.parts.senders.values():
            sender.close()
        if self.parts.checksums is not None:
            self.parts.checksums.close()


class _Instance:
    """An engine instance, from the moment it is asked for until it is destroyed."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.is_settled = asyncio.Event()
        """It is open, or could not be opened."""


def prefill_parts(
    rank: int, ranks: int, config: WorkerConfig, layout: KvLayout, pool: KvPool
) -> PrefillParts:
    """What rank `rank` of `ranks` sends from its `pool`. `layout`: of the whole model.

    Raises:
        ConfigError: no engine can send from where the pool is.
    """
    checksums = PageChecksums(pool) if config.model.kv_checksum else None
    return PrefillParts(rank, ranks, layout, make_senders(config, pool), checksums)
