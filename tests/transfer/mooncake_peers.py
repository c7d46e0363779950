"""Receivers and senders of the mooncake engine in processes of their own, which do as they are
told: stopped, continued and killed from outside."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from pdrt.config import MooncakeConfig
from pdrt.errors import EngineError
from pdrt.ids import Incarnation, RoomId
from pdrt.kv.layout import KvLayout
from pdrt.kv.pool import KvPool
from pdrt.protocol.messages import Segment
from pdrt.protocol.room_writer import WriteOutcome
from pdrt.transfer.engine import ByteRange, WriteRequest
from pdrt.transfer.mooncake import poller
from pdrt.transfer.mooncake.receiver import MooncakeReceiver
from pdrt.transfer.mooncake.sender import MooncakeSender
from tests.transfer.forked import Forked

HOST = "127.0.0.1"
DECODE = Incarnation(0xD0)
LAYOUT = KvLayout(page_size=16, kv_heads=2, layers=8, head_dim=64, dtype="float32")
PAGE = LAYOUT.page_bytes
PAGES = 512
SIZE = PAGES * PAGE
HALF = SIZE // 2
CONFIG = MooncakeConfig(mooncake_protocol="tcp")
WRITES_AT_ONCE = 3
LIBRARY_SECONDS = "2"
"""How long the library waits for progress: a stopped peer is given up after that."""


def new_pool(byte: int) -> KvPool:
    """Every byte of it is `byte`."""
    pool = KvPool(LAYOUT, PAGES, torch.device("cpu"))
    content(pool).fill_(byte)
    return pool


def content(pool: KvPool) -> torch.Tensor:
    """Its bytes, flat."""
    return pool.tensor.view(torch.uint8).view(-1)


def digest(pool: KvPool) -> str:
    return hashlib.sha256(content(pool).numpy()).hexdigest()


def impatient() -> None:
    os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] = LIBRARY_SECONDS
    os.environ["MC_TCP_STATUS_TIMEOUT_SEC"] = LIBRARY_SECONDS


# In the processes


class _Receiving:
    """Answers each command with one message."""

    def __init__(self) -> None:
        self.pool = new_pool(0)
        self.receiver = MooncakeReceiver(self.pool, HOST, CONFIG)

    async def open(self, endpoint: str, generation: int) -> Segment:
        return await self.receiver.open_segment(0, endpoint, generation)

    async def retire(self, endpoint: str, generation: int) -> None:
        """… and hand all pages to an owner who clears them."""
        await self.receiver.close_segment(endpoint, generation)
        content(self.pool).zero_()

    async def digest(self) -> str:
        return digest(self.pool)

    async def written(self, first: int, end: int) -> int:
        """How many bytes there are not 0."""
        return int(torch.count_nonzero(content(self.pool)[first:end]))


class _Sending:
    """Every byte of its pool is `byte`; writes are repeated until it is told to end them."""

    def __init__(self, byte: int, write_seconds_max: float) -> None:
        # The longer a transfer, the more of it is still to come when its writer is stopped.
        poller.TCP_RUN_BYTES_MAX = HALF
        self.pool = new_pool(byte)
        self.sender = MooncakeSender(self.pool, HOST, CONFIG, write_seconds_max)
        self.repeating = True
        self.writing = 0
        self.outcomes: list[str] = []
        self.quiet = asyncio.Event()

    async def open(self, generation: int, segment: Segment) -> str | None:
        try:
            await self.sender.open(DECODE, generation, [segment])
        except EngineError as error:
            return str(error)
        return None

    async def repeat(self, generation: int, first: int, end: int) -> None:
        """Begin to write that part of the pool, again and again while writes complete, several
        times at once, so that something is always under way."""
        piece = ByteRange(first, first, end - first)
        request = WriteRequest(RoomId(DECODE, 1), generation, 0, (piece,))

        def settled(outcome: WriteOutcome, detail: str) -> None:
            self.outcomes.append(outcome.value)
            if outcome is WriteOutcome.COMPLETED and self.repeating:
                write()
            else:
                self.writing -= 1
            if not self.writing:
                self.quiet.set()

        def write() -> None:
            try:
                self.sender.write(request, settled)
            except EngineError:
                self.writing -= 1

        for _ in range(WRITES_AT_ONCE):
            self.writing += 1
            write()

    async def end_writes(self) -> list[str]:
        """How each of them ended, once the last has."""
        self.repeating = False
        await self.quiet.wait()
        return self.outcomes

    async def close(self, generation: int) -> None:
        self.repeating, self.quiet = True, asyncio.Event()
        await self.sender.close_instance(DECODE, generation)


async def _serve(connection: Connection, make: Callable[[], object]) -> None:
    impatient()
    serves = make()
    connection.send("ready")
    while True:
        try:
            name, *arguments = await asyncio.to_thread(connection.recv)
        except EOFError:  # the test is over
            return
        connection.send(await getattr(serves, name)(*arguments))


def receive(connection: Connection) -> None:
    asyncio.run(_serve(connection, _Receiving))


def send(connection: Connection, byte: int, write_seconds_max: float) -> None:
    asyncio.run(_serve(connection, lambda: _Sending(byte, write_seconds_max)))


# Beside them


class Peer(Forked):
    """One of these processes: `ask` a command, `stop`, `go_on`, `end`."""

    def ask(self, name: str, *arguments: object) -> Any:
        self.tell(name, *arguments)
        return self.connection.recv()

    def tell(self, name: str, *arguments: object) -> None:
        """Without waiting for the answer."""
        self.connection.send((name, *arguments))

    def stop(self) -> None:
        """Returns when it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        while self._state() != "T":
            time.sleep(0.001)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _state(self) -> str:
        with open(f"/proc/{self.pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0]
