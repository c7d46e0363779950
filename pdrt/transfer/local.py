"""The `local` engine: both workers on one host, KV copied by memcpy into the receiver's memfd.

A segment names the receiver's process and the memfd's descriptor in it; the sender opens it
through /proc, which grants that to processes of the same user only. Nothing has a name in a file
system, so nothing is left behind by a kill. Mapped memory cannot be taken back from a living
process: the fence is the death of the writer (`processes.ProcessHandle`).
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from pdrt.errors import ConfigError, EngineError
from pdrt.ids import Incarnation
from pdrt.kv.pool import KvPool
from pdrt.protocol.messages import RankProcess, Segment
from pdrt.protocol.room_writer import WriteOutcome
from pdrt.protocol.writers import FenceKind
from pdrt.transfer.engine import OnSettled, WriteRequest
from pdrt.transfer.processes import pid_namespace, start_time, this_process

NAME = "local"
COPY_BYTES_MAX = 4 * 1024 * 1024
"""One memcpy; after each, progress is noted for the watchdogs."""

ASLEEP_SECONDS = 1.0
"""A watchdog this late was itself asleep, and so was the copying thread: it accuses nobody."""


class LocalDescriptor(msgspec.Struct, frozen=True):
    """Where a receiver's pool is."""

    process: RankProcess
    fd: int
    """Of the memfd, in that process."""
    inode: int
    size_bytes: int
    name: str
    """Of the segment: prefill endpoint and generation. Two pairings never look alike."""


class LocalReceiver:
    """The decode side: one memfd serves every peer and generation."""

    name = NAME
    fence = FenceKind.PROCESS_DEATH

    def __init__(self, pool: KvPool) -> None:
        """Raises ConfigError when the pool is not in host memory."""
        self._process = this_process()
        self._fd = _memfd(pool)
        self._size_bytes = pool.size_bytes

    async def open_segment(self, rank: int, endpoint: str, generation: int) -> Segment:
        """Describe the pool. Every generation is the same memory: what fences is death."""
        descriptor = LocalDescriptor(
            process=self._process,
            fd=self._fd,
            inode=os.fstat(self._fd).st_ino,
            size_bytes=self._size_bytes,
            name=f"{endpoint} {generation}",
        )
        return Segment(rank=rank, engine=NAME, descriptor=msgspec.msgpack.encode(descriptor))

    async def close_segment(self, endpoint: str, generation: int) -> None:
        """Nothing to tear down, and nothing proved by it."""

    def close(self) -> None:
        """Nothing to let go of: the pool's owner closes it."""


class _Instance:
    """The mapped pools of one decode incarnation's ranks."""

    def __init__(self, mappings: dict[int, mmap.mmap]) -> None:
        self.mappings = mappings
        self.addresses = {
            rank: ctypes.addressof(ctypes.c_char.from_buffer(m)) for rank, m in mappings.items()
        }
        self.sizes = {rank: len(m) for rank, m in mappings.items()}
        self.writes = 0
        """Accepted and not out of the copying thread."""
        self.idle = asyncio.Event()
        self.idle.set()
        self.takes_writes = True


class LocalSender:
    """The prefill side: one copying thread per rank, in order of acceptance."""

    name = NAME

    def __init__(self, pool: KvPool, write_seconds_max: float) -> None:
        """Raises ConfigError when the pool is not in host memory."""
        _memfd(pool)
        self._pool = pool
        self._write_seconds_max = write_seconds_max
        self._instances: dict[tuple[Incarnation, int], _Instance] = {}
        self._thread = ThreadPoolExecutor(1, "pdrt-copy")
        self._loop = asyncio.get_running_loop()
        # Bumped by the copying thread alone, after every piece; read by the watchdogs.
        self._pieces_copied = 0

    async def open(self, decode: Incarnation, generation: int, segments: Sequence[Segment]) -> None:
        """Map every rank's memfd.

        Raises:
            EngineError: one cannot be mapped; says why and what to do.
        """
        assert (decode, generation) not in self._instances, (decode, generation)
        mappings: dict[int, mmap.mmap] = {}
        for segment in segments:
            if segment.engine != NAME:
                raise EngineError(f"decode offers engine {segment.engine!r}, here is {NAME!r}")
            mappings[segment.rank] = _map(segment)
        self._instances[decode, generation] = _Instance(mappings)

    def write(self, request: WriteRequest, on_settled: OnSettled) -> None:
        """Queue the copy on the copying thread.

        Raises:
            EngineError: not accepted.
        """
        instance = self._instances.get((request.decode, request.generation))
        if instance is None or not instance.takes_writes:
            raise EngineError(f"generation {request.generation} takes no new writes")
        size = instance.sizes.get(request.decode_rank)
        if size is None:
            raise EngineError(f"decode rank {request.decode_rank} has shown no segment")
        for piece in request.ranges:
            if not (0 <= piece.target_offset <= size - piece.length):
                raise EngineError(f"{piece} lies outside of the peer's pool ({size} bytes)")
            assert 0 <= piece.source_offset <= self._pool.size_bytes - piece.length, piece
        instance.writes += 1
        instance.idle.clear()
        answer = _OneAnswer(on_settled)
        self._watch(answer, instance, self._pieces_copied)
        future = self._thread.submit(self._copy, instance, request)

        def copied(done: Future[None]) -> None:
            # Neither a dropped copy nor one that outlives the loop has anybody to answer to.
            if not done.cancelled() and not self._loop.is_closed():
                error = done.exception()
                self._loop.call_soon_threadsafe(self._copied, instance, answer, error)

        future.add_done_callback(copied)

    def _copy(self, instance: _Instance, request: WriteRequest) -> None:
        """On the copying thread. ctypes lets go of the GIL during each memmove."""
        source = self._pool.address
        target = instance.addresses[request.decode_rank]
        for piece in request.ranges:
            for offset in range(0, piece.length, COPY_BYTES_MAX):
                ctypes.memmove(
                    target + piece.target_offset + offset,
                    source + piece.source_offset + offset,
                    min(COPY_BYTES_MAX, piece.length - offset),
                )
                self._pieces_copied += 1

    def _copied(self, instance: _Instance, answer: _OneAnswer, error: BaseException | None) -> None:
        instance.writes -= 1
        if not instance.writes:
            instance.idle.set()
        if error is None:
            answer.give(WriteOutcome.COMPLETED, "")
        else:
            # The thread has left the copy: it ended badly, but it has ended.
            answer.give(WriteOutcome.FAILED, f"copy failed: {error}")

    def _watch(self, answer: _OneAnswer, instance: _Instance, pieces_copied: int) -> None:
        """UNSETTLED for a write that is outstanding too long without any progress."""

        def look() -> None:
            if answer.is_given:
                return
            was_asleep = self._loop.time() - due > ASLEEP_SECONDS
            if was_asleep or self._pieces_copied != pieces_copied:
                self._watch(answer, instance, self._pieces_copied)
                return
            instance.takes_writes = False
            answer.give(
                WriteOutcome.UNSETTLED,
                f"no progress for {self._write_seconds_max:.0f} s",
            )

        due = self._loop.time() + self._write_seconds_max
        answer.timer = self._loop.call_at(due, look)

    async def close_instance(self, decode: Incarnation, generation: int) -> None:
        """Wait for what is being copied, then unmap. A copy that hangs keeps this waiting: the
        leader ends the worker then."""
        instance = self._instances.pop((decode, generation), None)
        if instance is None:
            return
        instance.takes_writes = False
        await instance.idle.wait()
        instance.addresses.clear()
        for mapping in instance.mappings.values():
            mapping.close()

    def close(self) -> None:
        """At exit: queued copies are dropped, the process ends with its thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class _OneAnswer:
    """A write's one answer: what comes after the first is no answer any more."""

    def __init__(self, on_settled: OnSettled) -> None:
        self._on_settled = on_settled
        self.timer: asyncio.TimerHandle | None = None
        self.is_given = False

    def give(self, outcome: WriteOutcome, detail: str) -> None:
        if self.is_given:
            return
        self.is_given = True
        if self.timer is not None:
            self.timer.cancel()
        self._on_settled(outcome, detail)


def _memfd(pool: KvPool) -> int:
    if pool.fd is None:
        raise ConfigError(
            "the KV pool is in GPU memory, which the local engine cannot hand over yet; "
            "use --device cpu"
        )
    return pool.fd


def _map(segment: Segment) -> mmap.mmap:
    """Open and verify the memfd that a segment names; map it shared."""
    try:
        descriptor = msgspec.msgpack.decode(segment.descriptor, type=LocalDescriptor)
    except msgspec.MsgspecError as error:
        raise EngineError(f"segment of rank {segment.rank} is malformed: {error}") from error
    process = descriptor.process
    if process.pid_namespace != pid_namespace():
        raise EngineError(
            "prefill and decode are in different PID namespaces: the local engine needs both in "
            "one (docker: --pid)"
        )
    path = f"/proc/{process.pid}/fd/{descriptor.fd}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise EngineError(
            f"cannot open the decode pool of process {process.pid}: {error.strerror}; the local "
            "engine needs both workers on one host under one user"
        ) from error
    try:
        found = os.fstat(fd)
        # After opening: had the pid been reused in between, the start time would tell.
        if start_time(process.pid) != process.start_time or found.st_ino != descriptor.inode:
            raise EngineError(f"process {process.pid} is not the decode worker that named it")
        if found.st_size != descriptor.size_bytes:
            raise EngineError(f"decode pool has {found.st_size} bytes, not {descriptor.size_bytes}")
        mapping = mmap.mmap(fd, descriptor.size_bytes, mmap.MAP_SHARED)
        mapping.madvise(mmap.MADV_DONTFORK)
        return mapping
    except (OSError, ValueError) as error:
        raise EngineError(f"cannot map the decode pool: {error}") from error
    finally:
        os.close(fd)
