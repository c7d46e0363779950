"""The two ends that `transfer.py` measures, each a process as a worker's: JSON lines in, JSON lines
out.

A receiver exposes a pool and sits there. A sender is told what to send, and says when it began
and when its last write had settled, on the clock that all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import torch
import uvloop
from as_worker import as_worker
from raw_sockets import Sending, listen, receive

from pdrt.cli.torture.engines import End, make_receiver, make_sender
from pdrt.config import MooncakeConfig
from pdrt.errors import EngineError, PdrtError
from pdrt.ids import Incarnation, RoomId
from pdrt.kv.layout import KvLayout, rank_layout, slice_plan
from pdrt.kv.pool import KvPool
from pdrt.protocol.messages import Segment
from pdrt.protocol.room_writer import Write, WriteOutcome
from pdrt.transfer.engine import ByteRange, WriteRequest
from pdrt.transfer.room_task import SlicePlan
from pdrt.transfer.writable import AdmitRoom, WritableRooms

LLAMA_8B = KvLayout(page_size=16, kv_heads=8, layers=32, head_dim=128, dtype="bfloat16")
"""Llama-3.1-8B's: 2 MiB a page."""
PROMPT_TOKENS, CHUNK_TOKENS = 2048, 512
"""What is computed in one step becomes one write to each decode rank."""
PAGES = PROMPT_TOKENS // LLAMA_8B.page_size
RUNS_PER_WRITE = 16
ENDPOINT, GENERATION, ROOM = "tcp://prefill:1", 1, 1
HOST = "127.0.0.1"
SOCKET_BYTES = 1 << 28
"""What raw sockets are read into: as much as a pool."""


class Show(msgspec.Struct, frozen=True, tag=True):
    """To a receiver, before anything else."""

    engine: str
    decode: Incarnation
    rank: int
    ranks: int
    connections: int
    """Of raw sockets; 0: none are wanted."""


class Shown(msgspec.Struct, frozen=True, tag=True):
    segment: Segment
    """Of all senders, which are ranks of one worker."""
    socket_port: int


class Reach(msgspec.Struct, frozen=True, tag=True):
    """To a sender, before anything else. Answered with an empty `Took`."""

    engine: str
    rank: int
    ranks: int
    decode: Incarnation
    segments: tuple[Segment, ...]
    """By decode rank."""
    socket_port: int
    connections: int


class Runs(msgspec.Struct, frozen=True, tag=True):
    """Through the engine, all queued at once."""

    run_bytes: int
    runs: int


class Copy(Runs, frozen=True, tag=True):
    """The same by memcpy, in this process, between warm memory."""


class Raw(Runs, frozen=True, tag=True):
    """The same through raw sockets."""


class Sync(Runs, frozen=True, tag=True):
    """The same by mooncake's own default call, one run at a time, on an engine of its own."""


class Prompt(msgspec.Struct, frozen=True, tag=True):
    """This rank's share of a prompt's KV, from `at` on."""

    at: float


class Took(msgspec.Struct, frozen=True, tag=True):
    began: float
    ended: float


Job = Runs | Copy | Raw | Sync | Prompt
Answer = TypeVar("Answer")


class Party:
    """This file in another process, as a context: it ends with its stdin."""

    def __init__(self, role: str) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, __file__, role], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __enter__(self) -> Party:
        return self

    def __exit__(self, *_: object) -> None:
        self._popen.communicate()

    def tell(self, message: msgspec.Struct) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(msgspec.json.encode(message) + b"\n")
        self._popen.stdin.flush()

    def answer(self, kind: type[Answer]) -> Answer:
        """Raises PdrtError when it has died; its words are on stderr."""
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        if not line:
            raise PdrtError("a process of the benchmark has ended")
        return msgspec.json.decode(line, type=kind)

    def ask(self, message: msgspec.Struct, kind: type[Answer]) -> Answer:
        self.tell(message)
        return self.answer(kind)


def say(message: msgspec.Struct) -> None:
    os.write(1, msgspec.json.encode(message) + b"\n")


def pool_of(rank: int, ranks: int) -> KvPool:
    """A rank's pool, touched."""
    pool = KvPool(rank_layout(LLAMA_8B, rank, ranks), PAGES, torch.device("cpu"))
    pool.tensor.fill_(1)
    return pool


async def receiver() -> None:
    show = msgspec.json.decode(sys.stdin.buffer.readline(), type=Show)
    pool = pool_of(show.rank, show.ranks)
    with as_worker("decode", pool, show.rank, show.ranks):
        await _receive(show, pool)


async def _receive(show: Show, pool: KvPool) -> None:
    rooms = WritableRooms(pool.layout.page_bytes)
    engine = make_receiver(End(show.engine, HOST), pool, show.rank, rooms)
    segment = await engine.open_segment(show.rank, ENDPOINT, GENERATION)
    room = RoomId(show.decode, ROOM)
    rooms.admit(AdmitRoom(room, ENDPOINT, GENERATION, tuple(range(PAGES))))
    port = receive_raw(show.connections) if show.connections else 0
    say(Shown(segment, port))
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)  # at once, whatever threads the engines and sockets still have


def receive_raw(connections: int) -> int:
    """In a thread; the port."""
    listener = listen()
    arguments = (listener, memoryview(warm_memory()), connections)
    threading.Thread(target=receive, args=arguments, daemon=True).start()
    return int(listener.getsockname()[1])


def warm_memory() -> mmap.mmap:
    memory = mmap.mmap(-1, SOCKET_BYTES)
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1, SOCKET_BYTES)
    return memory


class Sender:
    """Carries out jobs, one after the other."""

    def __init__(self, reach: Reach, pool: KvPool) -> None:
        self._reach = reach
        self._pool = pool
        self._engine = make_sender(End(reach.engine, HOST), self._pool)
        self._room = RoomId(reach.decode, ROOM)
        source = (ctypes.c_char * self._pool.size_bytes).from_address(self._pool.address)
        self._memory = memoryview(source).cast("B")
        self._raw: Sending | None = None
        self._plain: PlainMooncake | None = None
        self._copy_target = 0

    async def open(self) -> None:
        reach = self._reach
        await self._engine.open(reach.decode, GENERATION, reach.segments)

    async def do(self, job: Job) -> Took:
        match job:
            case Copy():
                return self._copy(job)
            case Raw():
                return await asyncio.to_thread(self._send_raw, job)
            case Sync():
                return await asyncio.to_thread(self._sync, job)
            case Runs():
                return await self._write(runs_of(job))
            case Prompt():
                writes = self._prompt()
                await asyncio.sleep(max(0.0, job.at - time.monotonic()))
                return await self._write(writes)
        raise AssertionError(job)

    async def _write(self, writes: Sequence[tuple[int, Sequence[ByteRange]]]) -> Took:
        """Decode rank and ranges of each. All are queued before the first has settled."""
        requests = [
            WriteRequest(self._room, GENERATION, rank, tuple(ranges)) for rank, ranges in writes
        ]
        over = asyncio.get_running_loop().create_future()
        left = len(requests)

        def on_settled(outcome: WriteOutcome, detail: str) -> None:
            nonlocal left
            left -= 1
            if outcome is not WriteOutcome.COMPLETED and not over.done():
                over.set_exception(EngineError(f"a write ended {outcome.name}: {detail}"))
            if not left and not over.done():
                over.set_result(None)

        began = time.monotonic()
        for request in requests:
            self._engine.write(request, on_settled)
        await over
        return Took(began, time.monotonic())

    def _prompt(self) -> list[tuple[int, Sequence[ByteRange]]]:
        """As a room's task plans it; target pages lie anywhere."""
        reach, decode_ranks = self._reach, len(self._reach.segments)
        copies = slice_plan(LLAMA_8B, reach.ranks, decode_ranks)[reach.rank]
        target_bytes = {
            n: rank_layout(LLAMA_8B, n, decode_ranks).page_bytes for n in range(decode_ranks)
        }
        plan = SlicePlan(tuple(copies), self._pool.layout.page_bytes, target_bytes)
        writes: list[tuple[int, Sequence[ByteRange]]] = []
        chunk = CHUNK_TOKENS // LLAMA_8B.page_size
        for first in range(0, PAGES, chunk):
            source = tuple(range(first, first + chunk))
            target = tuple(PAGES - 1 - page for page in source)
            for rank in sorted({copy.decode_rank for copy in copies}):
                writes.append((rank, plan.ranges(Write(0, rank, source, target))))
        return writes

    def _copy(self, job: Copy) -> Took:
        if not self._copy_target:
            self._anonymous = warm_memory()
            self._copy_target = ctypes.addressof(ctypes.c_char.from_buffer(self._anonymous))
        source, target, size = self._pool.address, self._copy_target, job.run_bytes
        began = time.monotonic()
        for run in range(job.runs):
            ctypes.memmove(target + (job.runs - 1 - run) * size, source + run * size, size)
        return Took(began, time.monotonic())

    def _send_raw(self, job: Raw) -> Took:
        if self._raw is None:
            reach = self._reach
            self._raw = Sending(reach.socket_port, reach.connections, self._memory)
        began = time.monotonic()
        self._raw.send(job.run_bytes, job.runs)
        return Took(began, time.monotonic())

    def _sync(self, job: Sync) -> Took:
        if self._plain is None:
            self._plain = PlainMooncake(self._reach.segments[0], self._pool)
        began = time.monotonic()
        self._plain.write(job.run_bytes, job.runs)
        return Took(began, time.monotonic())


class PlainMooncake:
    """Mooncake as its own examples use it: memory is registered, and a call blocks for each run."""

    def __init__(self, segment: Segment, pool: KvPool) -> None:
        from pdrt.transfer.mooncake.descriptor import MooncakeDescriptor
        from pdrt.transfer.mooncake.library import load

        self._target = msgspec.msgpack.decode(segment.descriptor, type=MooncakeDescriptor)
        self._source = pool.address
        self._engine: Any = load(MooncakeConfig())()
        assert self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0
        assert self._engine.register_memory(pool.address, pool.size_bytes) == 0

    def write(self, run_bytes: int, runs: int) -> None:
        peer = f"{self._target.host}:{self._target.port}"
        for run in range(runs):
            source = self._source + run * run_bytes
            target = self._target.address + (runs - 1 - run) * run_bytes
            assert self._engine.transfer_sync_write(peer, source, target, run_bytes) == 0


def runs_of(job: Runs) -> list[tuple[int, Sequence[ByteRange]]]:
    """Contiguous in the source, in the opposite order in the target: none can be joined."""
    size = job.run_bytes
    pieces = [ByteRange(run * size, (job.runs - 1 - run) * size, size) for run in range(job.runs)]
    starts = range(0, job.runs, RUNS_PER_WRITE)
    return [(0, pieces[start : start + RUNS_PER_WRITE]) for start in starts]


async def sender() -> None:
    reach = msgspec.json.decode(sys.stdin.buffer.readline(), type=Reach)
    pool = pool_of(reach.rank, reach.ranks)
    with as_worker("prefill", pool, reach.rank, reach.ranks):
        await _send(Sender(reach, pool))


async def _send(made: Sender) -> None:
    await made.open()
    say(Took(0.0, 0.0))
    decoder: msgspec.json.Decoder[Job] = msgspec.json.Decoder(Job)
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        say(await made.do(decoder.decode(line)))
    os._exit(0)  # as the receiver


def main() -> None:
    """Ends at once also where it fails."""
    torch.set_num_threads(1)
    try:
        uvloop.run({"receiver": receiver, "sender": sender}[sys.argv[1]]())
    except BaseException:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main()
