"""The `local` engine: both workers on one host, KV copied straight into the receiver's pool, which
the sender maps: a memfd (`local_host`) or GPU memory (`local_cuda`).

Mapped memory cannot be taken back from a living process: the fence is the death of the writer
(`processes.ProcessHandle`).
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pdrt.errors import EngineError
from pdrt.ids import Incarnation
from pdrt.kv.pool import KvPool
from pdrt.protocol.messages import Segment
from pdrt.protocol.room_writer import WriteOutcome
from pdrt.protocol.writers import FenceKind
from pdrt.transfer.engine import OnSettled, WriteRequest
from pdrt.transfer.local_cuda import CudaMemory
from pdrt.transfer.local_host import HostMemory
from pdrt.transfer.local_memory import CopyUnsettledError, LocalDescriptor, Mapping, Memory
from pdrt.transfer.processes import pid_namespace
from pdrt.transfer.sending import check_inside, instance_for, route_for, shown_by
from pdrt.transfer.slow_calls import on_own_thread, tell

NAME = "local"
ASLEEP_SECONDS = 1.0
"""A watchdog this late was itself asleep, and so was the copying thread: it accuses nobody."""
TELL_SECONDS = 0.002
"""While there is more to copy, the loop hears no more often of what has ended: each time it takes
the GIL, the copying thread waits for it and is woken late, for as long as copying 1 MB takes."""


def memory_of(pool: KvPool) -> Memory:
    """How `local` reaches a pool.

    Raises:
        ConfigError: it cannot; says why and what to do.
    """
    return HostMemory(pool) if pool.cuda is None else CudaMemory(pool.cuda)


class LocalReceiver:
    """The decode side: one pool serves every peer and generation."""

    name = NAME
    fence = FenceKind.PROCESS_DEATH

    def __init__(self, pool: KvPool) -> None:
        """Raises ConfigError: no writer to this pool could be fenced."""
        self._memory = memory_of(pool)

    async def open_segment(self, rank: int, endpoint: str, generation: int) -> Segment:
        """Describe the pool. Every generation is the same memory: what fences is death."""
        descriptor = self._memory.describe(f"{endpoint} {generation}")
        return Segment(rank=rank, engine=NAME, descriptor=msgspec.msgpack.encode(descriptor))

    async def close_segment(self, endpoint: str, generation: int) -> None:
        """Nothing to tear down, and nothing proved by it."""

    async def close_offer(self, endpoint: str, generation: int) -> None:
        """The same."""

    def close(self) -> None:
        """Nothing to let go of: the pool's owner closes it."""


class _Instance:
    """The mapped pools of one decode incarnation's ranks."""

    def __init__(self, mappings: dict[int, Mapping]) -> None:
        self.mappings = mappings
        """By rank."""
        self.addresses = {rank: mapping.address for rank, mapping in mappings.items()}
        self.writes = 0
        """Accepted and not known to be over."""
        self.idle = asyncio.Event()
        self.idle.set()
        self.takes_writes = True


class _Copy(NamedTuple):
    """One accepted write, as the copying thread has it."""

    instance: _Instance
    request: WriteRequest
    answer: _OneAnswer


class LocalSender:
    """The prefill side: one copying thread per rank, in order of acceptance, until it is closed."""

    name = NAME

    def __init__(self, pool: KvPool, write_seconds_max: float) -> None:
        """Raises ConfigError: this process could not be fenced as a writer."""
        self._memory = memory_of(pool)
        self._write_seconds_max = write_seconds_max
        self._instances: dict[tuple[Incarnation, int], _Instance] = {}
        self._loop = asyncio.get_running_loop()
        # Bounded by what rooms have accepted; None: end.
        self._queued: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        # Bumped by the copying thread alone, after every piece; read by the watchdogs.
        self._pieces_copied = 0
        # The copying thread's: what has ended, and how, that the loop has not heard of.
        self._ended: list[tuple[_Copy, Exception | None]] = []
        self._told_at = 0.0
        self._thread = threading.Thread(target=self._copy_queued, name="pdrt-copy", daemon=True)
        self._thread.start()

    async def open(self, decode: Incarnation, generation: int, segments: Sequence[Segment]) -> None:
        """Map every rank's pool, on a thread: a large one of a GPU takes its time.

        Raises:
            EngineError: one cannot be mapped; says why and what to do.
        """
        assert (decode, generation) not in self._instances, (decode, generation)
        mappings = await on_own_thread(self._map, segments)
        self._instances[decode, generation] = _Instance(mappings)

    def _map(self, segments: Sequence[Segment]) -> dict[int, Mapping]:
        mappings: dict[int, Mapping] = {}
        try:
            for segment in segments:
                mappings[segment.rank] = self._memory.map(_descriptor_of(segment))
        except EngineError:
            for mapping in mappings.values():
                mapping.close()
            raise
        return mappings

    def write(self, request: WriteRequest, on_settled: OnSettled) -> None:
        """Queue the copy on the copying thread.

        Raises:
            EngineError: not accepted.
        """
        instance = instance_for(self._instances, request)
        mapping = route_for(instance.mappings, request)
        check_inside(request.ranges, self._memory.size_bytes, mapping.size_bytes)
        instance.writes += 1
        instance.idle.clear()
        answer = _OneAnswer(on_settled)
        self._watch(answer, instance, self._pieces_copied)
        self._queued.put(_Copy(instance, request, answer))

    # On the copying thread

    def _copy_queued(self) -> None:
        """Until it is told to end."""
        while (copy := self._next()) is not None:
            failure = self._failure_of(copy)
            # Looked up only now: what was there before may have been told from within the copy.
            self._ended.append((copy, failure))
            self._tell_if_due()
        self._tell()

    def _next(self) -> _Copy | None:
        """Before it waits for more, the loop hears of all that has ended."""
        if self._queued.empty():
            self._tell()
        return self._queued.get()

    def _failure_of(self, copy: _Copy) -> Exception | None:
        """Carry it out. Whatever it fails with is judged on the loop."""
        try:
            self._copy(copy.instance, copy.request)
        except Exception as error:
            return error
        return None

    def _copy(self, instance: _Instance, request: WriteRequest) -> None:
        target = instance.addresses[request.decode_rank]
        self._memory.copy(target, request.ranges, self._progressed)

    def _progressed(self) -> None:
        self._pieces_copied += 1
        if self._ended:
            self._tell_if_due()

    def _tell_if_due(self) -> None:
        if time.monotonic() - self._told_at >= TELL_SECONDS:
            self._tell()

    def _tell(self) -> None:
        ended, self._ended = self._ended, []
        self._told_at = time.monotonic()
        if ended:
            tell(self._loop, self._settle, ended)

    # On the loop

    def _settle(self, ended: Sequence[tuple[_Copy, Exception | None]]) -> None:
        for copy, error in ended:
            self._copied(copy.instance, copy.answer, error)

    def _copied(self, instance: _Instance, answer: _OneAnswer, error: Exception | None) -> None:
        if isinstance(error, CopyUnsettledError):
            # It stays outstanding, so the instance is never idle again: the leader ends the worker.
            instance.takes_writes = False
            answer.give(WriteOutcome.UNSETTLED, str(error))
            return
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
        await on_own_thread(_unmap, list(instance.mappings.values()))

    def close(self) -> None:
        """At exit: queued copies are dropped, what is being copied is the thread's last."""
        for instance in self._instances.values():
            instance.takes_writes = False
        with contextlib.suppress(queue.Empty):
            while True:
                self._queued.get_nowait()
        self._queued.put(None)


def _descriptor_of(segment: Segment) -> LocalDescriptor:
    """Raises EngineError: it is not ours, or its process is in another PID namespace."""
    descriptor: LocalDescriptor = shown_by(segment, NAME, LocalDescriptor)
    if descriptor.process.pid_namespace != pid_namespace():
        raise EngineError(
            "prefill and decode are in different PID namespaces: the local engine needs both in "
            "one (docker: --pid)"
        )
    return descriptor


def _unmap(mappings: Sequence[Mapping]) -> None:
    for mapping in mappings:
        mapping.close()


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
