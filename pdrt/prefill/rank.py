"""One rank of a prefill worker: its engine instances, and the tasks of its rooms.

The same handler serves rank 0 in the leader's process and every other rank in its own. It decides
nothing: what the room table has decided comes in, in order, and what came of it goes back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from pdrt.config import WorkerConfig
from pdrt.errors import EngineError
from pdrt.ids import Incarnation, RoomId, short
from pdrt.kv.layout import KvLayout
from pdrt.kv.pool import KvPool
from pdrt.model.resources import device_words
from pdrt.protocol.effects import CloseEngine, OpenEngine
from pdrt.protocol.room_writer import RankEnd
from pdrt.transfer.checksums import PageChecksums
from pdrt.transfer.engine import Sender
from pdrt.transfer.engines import make_senders
from pdrt.transfer.rank_messages import Held, HeldEngine, HeldRoom, RankReport
from pdrt.transfer.room_task import Close, RankRoom, RoomTask, ToRoom, Transfer, rank_plan
from pdrt.transfer.slow_calls import OPEN_SHARE, named_when_slow

log = logging.getLogger(__name__)

HANGING_MAX = 16
"""Engines whose opening has not come back, each of which holds a thread. With so many, none is
opened before one of them has."""

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
    device: str = ""
    """What it computes on, in words."""
    open_seconds_max: float = 8.0
    """Of one engine instance; one that takes longer counts as refused."""


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
        self._hanging: set[tuple[str, Incarnation]] = set()
        """Engines, and whom they were to reach: refused, as their opening has not come back."""
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
        name = segments[0].engine
        instance = _Instance(name, Transfer(parts.senders[name], plan, parts.checksums))
        self._instances[message.decode, message.generation] = instance
        self._start(self._opens(message, instance), "open engine")
        loop, seconds_max = asyncio.get_running_loop(), parts.open_seconds_max
        instance.timer = loop.call_later(seconds_max, self._give_up, message, instance, seconds_max)

    async def _opens(self, message: OpenEngine, instance: _Instance) -> None:
        decode, generation = message.decode, message.generation
        answer: FromPrefillRank = EngineOpened(decode, generation)
        try:
            self._refuse_hanging(instance.name, decode)
            await instance.transfer.sender.open(decode, generation, message.segments)
        except EngineError as error:
            answer = EngineRefused(decode, generation, str(error))
        instance.is_decided.set()
        if instance.is_given_up:
            await self._settled_late(message, instance)
            return
        if instance.timer is not None:
            instance.timer.cancel()
        self._answer(answer)

    def _refuse_hanging(self, name: str, decode: Incarnation) -> None:
        """Raises EngineError. What hangs is not asked again and again."""
        if (name, decode) in self._hanging:
            raise EngineError("it was asked before to open, and has not come back yet")
        if len(self._hanging) >= HANGING_MAX:
            raise EngineError(f"{len(self._hanging)} engines have not come back from being opened")

    def _give_up(self, message: OpenEngine, instance: _Instance, seconds_max: float) -> None:
        """It has not opened in time. Another engine may be tried meanwhile, and other peers are
        not concerned."""
        if instance.is_decided.is_set():
            return
        instance.is_given_up = True
        instance.is_decided.set()
        self._hanging.add((instance.name, message.decode))
        why = f"rank {self.parts.rank} has not opened it within {seconds_max:g} s"
        self._answer(EngineRefused(message.decode, message.generation, why))

    async def _settled_late(self, message: OpenEngine, instance: _Instance) -> None:
        """Nobody writes through it; it is closed, if there is anything to close."""
        decode, generation = message.decode, message.generation
        log.warning(
            "an engine that was given up has come back",
            extra={"engine": instance.name, "decode": short(decode), "generation": generation},
        )
        await instance.transfer.sender.close_instance(decode, generation)
        self._hanging.discard((instance.name, decode))

    async def _close_engine(self, message: CloseEngine) -> None:
        """Also of one that could not be opened. Where another rank was refused, it may come while
        this one still opens: what is opened then would never be closed. One that was given up is
        as good as closed: no room was ever opened on it, and it is closed should it come back."""
        key = message.decode, message.generation
        instance = self._instances[key]
        await instance.is_decided.wait()
        if not instance.is_given_up:
            with named_when_slow(
                self.parts.open_seconds_max,
                f"closing the {instance.name} engine",
                decode=short(message.decode),
                generation=message.generation,
            ):
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

    def check(self) -> tuple[Held, ...]:
        """Raise AssertionError where the state contradicts itself. Returns the rooms that have not
        ended here, and the engines."""
        for task in self.tasks.values():
            task.writer.check()
            assert (task.room.decode, task.generation) in self._instances, task.room
        rooms = [HeldRoom(x.room, x.generation, x.pages) for x in self.tasks.values()]
        engines = [HeldEngine(*key, x.name) for key, x in self._instances.items()]
        return (*rooms, *engines)

    def report(self) -> RankReport:
        """What is to be seen of it."""
        return RankReport(self.parts.device)

    def close(self) -> None:
        """At exit."""
        for instance in self._instances.values():
            if instance.timer is not None:
                instance.timer.cancel()
        for sender in self.parts.senders.values():
            sender.close()
        if self.parts.checksums is not None:
            self.parts.checksums.close()


class _Instance:
    """An engine instance, from the moment it is asked for until it is destroyed."""

    def __init__(self, name: str, transfer: Transfer) -> None:
        self.name = name
        """Of the engine."""
        self.transfer = transfer
        self.is_decided = asyncio.Event()
        """It is open, could not be opened, or was given up."""
        self.timer: asyncio.TimerHandle | None = None
        self.is_given_up = False
        """It was refused before its opening came back."""


def prefill_parts(
    rank: int, ranks: int, config: WorkerConfig, layout: KvLayout, pool: KvPool
) -> PrefillParts:
    """What rank `rank` of `ranks` sends from its `pool`. `layout`: of the whole model.

    Raises:
        ConfigError: no engine can send from where the pool is.
    """
    checksums = PageChecksums(pool) if config.model.kv_checksum else None
    return PrefillParts(
        rank,
        ranks,
        layout,
        make_senders(config, pool),
        checksums,
        device_words(config.device, str(pool.tensor.device)),
        OPEN_SHARE * config.protocol.retire_seconds_max,
    )
