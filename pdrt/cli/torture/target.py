"""The end that is written to: a decode rank's pool and receiver, without the rest of a worker."""

from __future__ import annotations

import asyncio
import time

from pdrt.cli.torture.engines import make_receiver
from pdrt.cli.torture.messages import (
    Answer,
    Bytes,
    Command,
    Compare,
    Done,
    Fence,
    Fenced,
    Look,
    Opened,
    OpenSegment,
    Ready,
    Reuse,
    Setup,
)
from pdrt.cli.torture.party import LAYOUT, bytes_of, make_pool, pattern
from pdrt.ids import Incarnation
from pdrt.protocol.writers import FenceKind
from pdrt.transfer.processes import ProcessHandle, this_process
from pdrt.transfer.writable import AdmitRoom, WritableRooms

RANK = 0
DEATH_POLL_SECONDS = 0.0005


class Target:
    """Pages change owner here by command; what lands in them afterwards is counted."""

    def __init__(self, setup: Setup, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._pool = make_pool(setup.pages, setup.device)
        self._rooms = WritableRooms(LAYOUT.page_bytes)
        self._receiver = make_receiver(setup.end, self._pool, RANK, self._rooms)
        self._writers: dict[tuple[str, int], ProcessHandle] = {}

    def ready(self) -> Answer:
        return Ready(self._incarnation, this_process())

    async def handle(self, command: Command) -> Answer:
        match command:
            case OpenSegment():
                return await self._open(command)
            case Fence():
                return await self._fence(command)
            case Reuse(first, count):
                bytes_of(self._pool, first, count).zero_()
                return Done()
            case Look(first, count):
                return Bytes(int(bytes_of(self._pool, first, count).count_nonzero()))
            case Compare(first, count, seed):
                found = bytes_of(self._pool, first, count).cpu()
                return Bytes(int((found != pattern(count, seed)).sum()))
        raise AssertionError(command)

    async def _open(self, command: OpenSegment) -> Answer:
        """As at the handshake: what proves a writer's death is in hand before it may write."""
        name = command.endpoint, command.generation
        if self._receiver.fence is FenceKind.PROCESS_DEATH:
            self._writers[name] = ProcessHandle(command.writer)
        pages = tuple(range(command.first, command.first + command.count))
        # Not dismissed before its pages are reused: what is tried is the fence, and it alone.
        self._rooms.admit(AdmitRoom(command.room, *name, pages))
        return Opened(await self._receiver.open_segment(RANK, *name))

    async def _fence(self, command: Fence) -> Answer:
        began = time.perf_counter()
        name = command.endpoint, command.generation
        if (writer := self._writers.pop(name, None)) is not None:
            writer.kill()
            while not writer.is_dead():  # noqa: ASYNC110 (as workers look, on their tick)
                await asyncio.sleep(DEATH_POLL_SECONDS)
            writer.close()
        await self._receiver.close_segment(*name)
        return Fenced(time.perf_counter() - began)
