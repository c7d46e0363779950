"""The local engine between two real processes."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest
import torch

from pdrt.errors import EngineError
from pdrt.ids import Incarnation, RoomId
from pdrt.kv.pool import KvPool
from pdrt.protocol.messages import Segment
from pdrt.protocol.room_writer import WriteOutcome
from pdrt.protocol.writers import FenceKind
from pdrt.transfer import local
from pdrt.transfer.engine import ByteRange, WriteRequest, coalesce
from pdrt.transfer.local import LocalReceiver, LocalSender
from pdrt.transfer.local import _Instance as Instance
from pdrt.transfer.local_memory import HostDescriptor
from tests.decode.deployment import HANG_SECONDS, NEVER, until
from tests.descriptors import open_descriptors
from tests.transfer import receiver
from tests.transfer.copies import CopyGate
from tests.transfer.forked import Forked
from tests.transfer.receiver import LAYOUT, PAGES

DECODE = Incarnation(0xD0)
SIZE = LAYOUT.page_bytes


class Remote(Forked):
    """The receiver's process."""

    def __init__(self) -> None:
        super().__init__(receiver.main)
        self.segment = Segment(0, "local", self.first)

    @property
    def descriptor(self) -> HostDescriptor:
        return msgspec.msgpack.decode(self.segment.descriptor, type=HostDescriptor)

    def digest(self) -> str:
        """Of the pool's content, as its owner sees it."""
        self.connection.send("digest")
        return str(self.connection.recv())


@pytest.fixture(scope="module")
def remote() -> Iterator[Remote]:
    remote = Remote()
    yield remote
    remote.end()


class Writes:
    """A sender, and the answers to its writes."""

    def __init__(self, write_seconds_max: float = NEVER) -> None:
        self.pool = KvPool(LAYOUT, PAGES, torch.device("cpu"))
        generator = torch.Generator().manual_seed(7)
        self.pool.tensor.copy_(torch.rand(self.pool.tensor.shape, generator=generator))
        self.sender = LocalSender(self.pool, write_seconds_max)
        self.answers: dict[int, list[WriteOutcome]] = {}
        self.details: list[str] = []

    def write(
        self, number: int, pages: Sequence[tuple[int, int]], generation: int = 1, rank: int = 0
    ) -> None:
        """Copy whole pages, each (source, target)."""
        ranges = [ByteRange(source * SIZE, target * SIZE, SIZE) for source, target in pages]
        self.write_ranges(number, coalesce(ranges), generation, rank)

    def write_ranges(
        self, number: int, ranges: tuple[ByteRange, ...], generation: int = 1, rank: int = 0
    ) -> None:
        self.answers[number] = []

        def settled(outcome: WriteOutcome, detail: str) -> None:
            self.answers[number].append(outcome)
            self.details.append(detail)

        self.sender.write(WriteRequest(RoomId(DECODE, 1), generation, rank, ranges), settled)

    async def settled(self, *numbers: int) -> None:
        await until(lambda: all(self.answers[n] for n in numbers), "the answers")

    def close(self) -> None:
        self.sender.close()
        self.pool.close()


@pytest.fixture
async def writes() -> Writes:
    return Writes()


async def opened(writes: Writes, remote: Remote, generation: int = 1) -> None:
    await writes.sender.open(DECODE, generation, [remote.segment])


async def test_content_lands_in_the_other_process(writes: Writes, remote: Remote) -> None:
    await opened(writes, remote)
    pairs = [(page, (page * 13 + 5) % PAGES) for page in range(PAGES)]
    for number in range(8):
        writes.write(number, pairs[8 * number : 8 * number + 8])
    await writes.settled(*range(8))
    assert set(map(tuple, writes.answers.values())) == {(WriteOutcome.COMPLETED,)}
    expected = torch.empty_like(writes.pool.tensor)
    for source, target in pairs:
        expected[target] = writes.pool.tensor[source]
    assert remote.digest() == hashlib.sha256(expected.numpy().tobytes()).hexdigest()
    await writes.sender.close_instance(DECODE, 1)
    writes.close()


async def test_a_head_slice_touches_nothing_else(writes: Writes, remote: Remote) -> None:
    await opened(writes, remote)
    half = LAYOUT.head_bytes
    everything = (ByteRange(0, 0, PAGES * SIZE),)
    writes.write_ranges(0, everything)
    writes.write_ranges(1, (ByteRange(3 * SIZE + half, 9 * SIZE, half),))
    await writes.settled(0, 1)
    expected = writes.pool.tensor.clone()
    expected[9, 0] = writes.pool.tensor[3, 1]
    assert remote.digest() == hashlib.sha256(expected.numpy().tobytes()).hexdigest()
    writes.close()


async def test_an_answer_does_not_wait_for_the_write_behind_it(
    writes: Writes, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept back at first, it is told from within the next copy; that one's is not lost by it."""
    await opened(writes, remote)
    are_queued, is_first_answered = threading.Event(), threading.Event()
    original = LocalSender._copy
    monkeypatch.setattr(local, "TELL_SECONDS", math.inf)

    def copy(sender: LocalSender, instance: Instance, request: WriteRequest) -> None:
        assert are_queued.wait(HANG_SECONDS)
        if request is requests[1]:
            monkeypatch.setattr(local, "TELL_SECONDS", 0.0)
        original(sender, instance, request)
        if request is requests[1]:
            assert is_first_answered.wait(HANG_SECONDS)

    monkeypatch.setattr(LocalSender, "_copy", copy)
    pieces = ByteRange(0, SIZE, SIZE), ByteRange(SIZE, 0, SIZE)
    requests = [WriteRequest(RoomId(DECODE, 1), 1, 0, pieces) for _ in range(2)]
    outcomes: list[WriteOutcome] = []

    def settled(outcome: WriteOutcome, detail: str) -> None:
        outcomes.append(outcome)
        is_first_answered.set()

    for request in requests:
        writes.sender.write(request, settled)
    are_queued.set()
    await until(lambda: len(outcomes) == 2, "both answers")
    assert outcomes == [WriteOutcome.COMPLETED] * 2
    writes.close()


async def test_what_the_receiver_says_of_itself() -> None:
    pool = KvPool(LAYOUT, 4, torch.device("cpu"))
    receiver = LocalReceiver(pool)
    assert receiver.fence is FenceKind.PROCESS_DEATH
    one = await receiver.open_segment(0, "tcp://a:1", 1)
    two = await receiver.open_segment(0, "tcp://b:1", 7)
    first, second = (
        msgspec.msgpack.decode(segment.descriptor, type=HostDescriptor) for segment in (one, two)
    )
    assert first.name != second.name, "two pairings never look alike"
    same = msgspec.structs.replace(second, name=first.name)
    assert first == same, "one memory for everybody: only death fences"
    await receiver.close_segment("tcp://a:1", 1)
    receiver.close()
    pool.close()


# What is not what it says


def changed(remote: Remote, **fields: object) -> Segment:
    descriptor = msgspec.structs.replace(remote.descriptor, **fields)
    return Segment(0, "local", msgspec.msgpack.encode(descriptor))


def other_process(remote: Remote, **fields: object) -> Segment:
    return changed(remote, process=msgspec.structs.replace(remote.descriptor.process, **fields))


async def refused(writes: Writes, segment: Segment, match: str) -> None:
    before = open_descriptors()
    with pytest.raises(EngineError, match=match):
        await writes.sender.open(DECODE, 1, [segment])
    assert open_descriptors() <= before
    with pytest.raises(EngineError):
        writes.write(1, [(0, 0)])
    assert writes.answers[1] == []
    writes.close()


async def test_another_size(writes: Writes, remote: Remote) -> None:
    await refused(writes, changed(remote, size_bytes=PAGES * SIZE - 4096), "bytes, not")


@pytest.mark.parametrize("size", [0, -1, 2**62])
async def test_an_impossible_size(writes: Writes, remote: Remote, size: int) -> None:
    await refused(writes, changed(remote, size_bytes=size), "bytes, not")


async def test_another_inode(writes: Writes, remote: Remote) -> None:
    await refused(writes, changed(remote, inode=remote.descriptor.inode + 1), "is not the decode")


async def test_another_descriptor(writes: Writes, remote: Remote) -> None:
    await refused(writes, changed(remote, fd=0), "cannot open|is not the decode")


async def test_a_descriptor_that_is_not_open(writes: Writes, remote: Remote) -> None:
    await refused(writes, changed(remote, fd=987), "cannot open")


async def test_another_start_time(writes: Writes, remote: Remote) -> None:
    await refused(writes, other_process(remote, start_time=1), "is not the decode worker")


async def test_another_pid_namespace(writes: Writes, remote: Remote) -> None:
    await refused(writes, other_process(remote, pid_namespace=1), "PID namespaces")


async def test_an_empty_file(writes: Writes, remote: Remote) -> None:
    """It cannot be mapped, whatever it says."""
    fd = os.memfd_create("empty")
    here = LocalReceiver(writes.pool)
    segment = await here.open_segment(0, "tcp://a:1", 1)
    descriptor = msgspec.msgpack.decode(segment.descriptor, type=HostDescriptor)
    empty = msgspec.structs.replace(descriptor, fd=fd, inode=os.fstat(fd).st_ino, size_bytes=0)
    segment = Segment(0, "local", msgspec.msgpack.encode(empty))
    await refused(writes, segment, "cannot map")
    os.close(fd)


@pytest.mark.parametrize("descriptor", [b"", b"\xc1", b"\x80", b"\x81\xa2fd\x01"])
async def test_a_malformed_descriptor(writes: Writes, descriptor: bytes) -> None:
    await refused(writes, Segment(0, "local", descriptor), "malformed")


async def test_another_engine(writes: Writes, remote: Remote) -> None:
    segment = msgspec.structs.replace(remote.segment, engine="tcp")
    await refused(writes, segment, "'tcp'.*'local'")


async def test_a_receiver_that_dies(writes: Writes) -> None:
    """What is mapped lives on and harms nobody; nothing new can be mapped."""
    remote = Remote()
    await opened(writes, remote)
    remote.end()
    writes.write(1, [(0, 0)])
    await writes.settled(1)
    assert writes.answers[1] == [WriteOutcome.COMPLETED]
    await writes.sender.close_instance(DECODE, 1)
    await refused(writes, remote.segment, "cannot open the decode pool.*one host")


# What is not accepted


@pytest.mark.parametrize(
    "piece",
    [
        ByteRange(0, PAGES * SIZE, SIZE),
        ByteRange(0, PAGES * SIZE - SIZE + 1, SIZE),
        ByteRange(0, -1, SIZE),
        ByteRange(0, 2**62, SIZE),
    ],
)
async def test_a_target_outside_of_the_pool(
    writes: Writes, remote: Remote, piece: ByteRange
) -> None:
    await opened(writes, remote)
    good = ByteRange(0, 0, SIZE)
    with pytest.raises(EngineError, match="outside"):
        writes.write_ranges(1, (good, piece))
    await writes.sender.close_instance(DECODE, 1)
    assert writes.answers == {1: []}, "nothing of it was accepted"
    writes.close()


async def test_an_unknown_rank_is_refused(writes: Writes, remote: Remote) -> None:
    await opened(writes, remote)
    with pytest.raises(EngineError):
        writes.write(1, [(0, 0)], rank=3)
    writes.close()


async def test_an_unknown_or_closed_generation(writes: Writes, remote: Remote) -> None:
    await opened(writes, remote)
    with pytest.raises(EngineError, match="generation 2"):
        writes.write(1, [(0, 0)], generation=2)
    await writes.sender.close_instance(DECODE, 1)
    await writes.sender.close_instance(DECODE, 1)
    with pytest.raises(EngineError, match="generation 1"):
        writes.write(2, [(0, 0)])
    writes.close()


# Settling


async def test_closing_waits_for_what_is_outstanding(
    writes: Writes, remote: Remote, copies: CopyGate
) -> None:
    await opened(writes, remote)
    await opened(writes, remote, generation=2)
    copies.close()
    writes.write(1, [(0, 0)])
    writes.write(2, [(1, 1)])
    closing = asyncio.create_task(writes.sender.close_instance(DECODE, 1))
    await asyncio.sleep(0)
    await until(lambda: copies.waiting, "the copy")
    assert not closing.done()
    with pytest.raises(EngineError):
        writes.write(3, [(2, 2)])
    copies.step()
    await writes.settled(1)
    await asyncio.sleep(0)
    assert not closing.done(), "one write is still out"
    copies.open()
    await writes.settled(2)
    async with asyncio.timeout(120):
        await closing
    # The other instance goes on.
    writes.write(4, [(3, 3)], generation=2)
    await writes.settled(4)
    assert writes.answers[4] == [WriteOutcome.COMPLETED]
    writes.close()


async def test_a_copy_that_stalls_is_unsettled_once(remote: Remote, copies: CopyGate) -> None:
    writes = Writes(write_seconds_max=0.05)
    await opened(writes, remote)
    await opened(writes, remote, generation=2)
    copies.close()
    writes.write(1, [(0, 0)])
    writes.write(2, [(1, 1)])
    await writes.settled(1, 2)
    assert writes.answers == {1: [WriteOutcome.UNSETTLED], 2: [WriteOutcome.UNSETTLED]}
    assert "no progress" in writes.details[0]
    # It takes no new writes, and is not closed before the copy is out of the thread.
    with pytest.raises(EngineError, match="no new writes"):
        writes.write(3, [(2, 2)])
    closing = asyncio.create_task(writes.sender.close_instance(DECODE, 1))
    await asyncio.sleep(0)
    assert not closing.done()
    copies.open()
    async with asyncio.timeout(120):
        await closing
    assert writes.answers == {1: [WriteOutcome.UNSETTLED], 2: [WriteOutcome.UNSETTLED], 3: []}
    # Another instance was not concerned.
    writes.sender._write_seconds_max = NEVER
    writes.write(4, [(3, 3)], generation=2)
    await writes.settled(4)
    assert writes.answers[4] == [WriteOutcome.COMPLETED]
    writes.close()


async def test_a_copy_that_fails_is_settled(
    writes: Writes, remote: Remote, copies: CopyGate
) -> None:
    await opened(writes, remote)
    copies.failures = 1
    writes.write(1, [(0, 0)])
    writes.write(2, [(1, 1)])
    await writes.settled(1, 2)
    assert writes.answers == {1: [WriteOutcome.FAILED], 2: [WriteOutcome.COMPLETED]}
    assert "on purpose" in writes.details[0]
    writes.close()


class Timer:
    """One of `OwnTime`."""

    def __init__(self, due: float, callback: Callable[[], None]) -> None:
        self.due, self.callback = due, callback
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class OwnTime:
    """The loop as a sender knows it; its time passes when the test says so."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.call_soon_threadsafe = loop.call_soon_threadsafe
        self._now = 0.0
        self._timers: list[Timer] = []

    def time(self) -> float:
        return self._now

    def call_at(self, due: float, callback: Callable[[], None]) -> Timer:
        self._timers.append(Timer(due, callback))
        return self._timers[-1]

    def pass_by(self, seconds: float) -> None:
        self._now += seconds
        due = [timer for timer in self._timers if timer.due <= self._now]
        self._timers = [timer for timer in self._timers if timer.due > self._now]
        for timer in due:
            if not timer.is_cancelled:
                timer.callback()


async def test_progress_keeps_a_long_queue_from_being_unsettled(
    remote: Remote, copies: CopyGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than a write may take; then there is none."""
    # The next copy, which could tell of this one, waits at the gate.
    monkeypatch.setattr(local, "TELL_SECONDS", 0.0)
    writes = Writes(write_seconds_max=1.5)
    time = OwnTime()
    writes.sender._loop = time  # type: ignore[assignment]
    await opened(writes, remote)
    copies.close()
    for number in range(8):
        writes.write(number, [(number, number)])
    for number in range(6):
        time.pass_by(0.5)
        copies.step()
        await writes.settled(number)
    assert writes.answers[6] == writes.answers[7] == []
    for _ in range(2):
        time.pass_by(1.5)  # the first look sees the last copy's progress
    await writes.settled(6, 7)
    outcomes = [answer for (answer,) in writes.answers.values()]
    assert outcomes == [WriteOutcome.COMPLETED] * 6 + [WriteOutcome.UNSETTLED] * 2
    copies.open()
    writes.close()


async def test_closing_the_sender_is_silent(
    writes: Writes, remote: Remote, copies: CopyGate, caplog: pytest.LogCaptureFixture
) -> None:
    """At exit, with copies in the queue: they are dropped without a word."""
    await opened(writes, remote)
    copies.close()
    for number in range(3):
        writes.write(number, [(0, 0)])
    await until(lambda: copies.waiting, "the first copy")
    with caplog.at_level(logging.DEBUG):
        writes.sender.close()
        copies.open()
        await asyncio.to_thread(writes.sender._thread.join, HANG_SECONDS)
        await writes.settled(0)
        with pytest.raises(EngineError):
            writes.write(3, [(0, 0)])
    assert not writes.sender._thread.is_alive()
    assert writes.answers == {0: [WriteOutcome.COMPLETED], 1: [], 2: [], 3: []}
    said = [record for record in caplog.records if record.name.startswith(("pdrt", "asyncio"))]
    assert said == []
    writes.pool.close()


def test_coalescing_keeps_order_and_bytes() -> None:
    pieces = [ByteRange(0, 100, 10), ByteRange(10, 110, 10), ByteRange(20, 130, 10)]
    assert coalesce(pieces) == (ByteRange(0, 100, 20), ByteRange(20, 130, 10))
    assert coalesce([]) == ()
    backwards = [ByteRange(10, 10, 10), ByteRange(0, 0, 10)]
    assert coalesce(backwards) == tuple(backwards)
