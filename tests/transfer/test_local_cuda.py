"""The local engine between two processes whose pools are on a GPU: a fake one, whose copies are in
place only when their event has been waited for."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
import torch

from pdrt.errors import ConfigError, EngineError
from pdrt.ids import Incarnation, RoomId
from pdrt.kv.cuda import ATTRIBUTE_MPS_ENABLED
from pdrt.kv.pool import KvPool
from pdrt.protocol.messages import Segment
from pdrt.protocol.room_writer import WriteOutcome
from pdrt.transfer.engine import ByteRange, WriteRequest
from pdrt.transfer.local import LocalReceiver, LocalSender
from pdrt.transfer.local_cuda import COPIES_MAX
from pdrt.transfer.local_memory import CudaDescriptor, LocalDescriptor
from tests.decode.deployment import HANG_SECONDS, NEVER, until
from tests.transfer import receiver
from tests.transfer.fake_cuda import FakeCuda, FakePool
from tests.transfer.forked import Forked
from tests.transfer.receiver import LAYOUT, PAGES

DECODE = Incarnation(0xD0)
SIZE = LAYOUT.page_bytes
POOL = PAGES * SIZE
PAGE = (ByteRange(0, SIZE, SIZE),)
COMPLETED, FAILED, UNSETTLED = WriteOutcome.COMPLETED, WriteOutcome.FAILED, WriteOutcome.UNSETTLED


class Remote(Forked):
    """The receiver's process."""

    def __init__(self, library: FakeCuda) -> None:
        super().__init__(receiver.cuda, library.path)
        self.segment = Segment(0, "local", self.first)

    def descriptor(self) -> CudaDescriptor:
        found = msgspec.msgpack.decode(self.segment.descriptor, type=LocalDescriptor)
        assert isinstance(found, CudaDescriptor)
        return found

    def holds(self, expected: torch.Tensor) -> bool:
        """Its pool does, as it sees it."""
        self.connection.send("digest")
        digest: str = self.connection.recv()
        return digest == hashlib.sha256(expected.numpy().tobytes()).hexdigest()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> FakeCuda:
    return FakeCuda.build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def cuda(library: FakeCuda) -> Iterator[FakeCuda]:
    yield library
    library.reset()


@pytest.fixture
def remote(cuda: FakeCuda) -> Iterator[Remote]:
    remote = Remote(cuda)
    yield remote
    remote.end()


class Writes:
    """A sender, and the answers to its writes."""

    def __init__(self, cuda: FakeCuda, write_seconds_max: float = NEVER) -> None:
        self.pool = FakePool(cuda.device(), POOL)
        self.pool.bytes.copy_(torch.randint(0, 256, (POOL,), dtype=torch.uint8))
        self.sender = LocalSender(self.pool, write_seconds_max)  # type: ignore[arg-type]
        self.answers: dict[int, list[WriteOutcome]] = {}
        self.details: list[str] = []

    def write(self, number: int, ranges: tuple[ByteRange, ...], generation: int = 1) -> None:
        self.answers[number] = []

        def settled(outcome: WriteOutcome, detail: str) -> None:
            self.answers[number].append(outcome)
            self.details.append(detail)

        request = WriteRequest(RoomId(DECODE, number), generation, 0, ranges)
        self.sender.write(request, settled)

    async def settled(self, *numbers: int) -> None:
        await until(lambda: all(self.answers[n] for n in numbers), "the answers")


@pytest.fixture
async def writes(cuda: FakeCuda) -> AsyncIterator[Writes]:
    made = Writes(cuda)
    yield made
    made.sender.close()


async def opened(writes: Writes, remote: Remote, generation: int = 1) -> None:
    await writes.sender.open(DECODE, generation, [remote.segment])


# Copies


async def test_a_write_is_over_when_its_event_says_so(
    writes: Writes, remote: Remote, cuda: FakeCuda
) -> None:
    await opened(writes, remote)
    empty = torch.zeros(POOL, dtype=torch.uint8)
    cuda.hold()
    writes.write(1, PAGE)
    await until(lambda: cuda.waiting, "the copy")
    assert writes.answers == {1: []}
    assert remote.holds(empty)
    cuda.let_go()
    await writes.settled(1)
    assert writes.answers == {1: [COMPLETED]}
    empty[SIZE : 2 * SIZE] = writes.pool.bytes[:SIZE]
    assert remote.holds(empty)


async def test_more_ranges_than_are_queued_at_once(writes: Writes, remote: Remote) -> None:
    """Every second 8 bytes of the pool, one by one."""
    await opened(writes, remote)
    ranges = tuple(ByteRange(at, at, 8) for at in range(0, POOL, 16))
    assert len(ranges) > 3 * COPIES_MAX
    writes.write(1, ranges)
    await writes.settled(1)
    expected = torch.zeros(POOL, dtype=torch.uint8)
    expected.view(-1, 16)[:, :8] = writes.pool.bytes.view(-1, 16)[:, :8]
    assert remote.holds(expected)
    assert writes.sender._pieces_copied == -(-len(ranges) // COPIES_MAX), "for the watchdogs"


async def test_a_copy_that_is_refused_has_ended(
    writes: Writes, remote: Remote, cuda: FakeCuda
) -> None:
    """FAILED: what was queued before it is in place, and not on its way."""
    await opened(writes, remote)
    cuda.fail("cudaMemcpyAsync", after=1)
    writes.write(1, (ByteRange(0, 0, SIZE), ByteRange(SIZE, 2 * SIZE, SIZE)))
    await writes.settled(1)
    assert writes.answers == {1: [FAILED]}
    assert "cudaMemcpyAsync: an error on purpose (700)" in writes.details[0]
    expected = torch.zeros(POOL, dtype=torch.uint8)
    expected[:SIZE] = writes.pool.bytes[:SIZE]
    assert remote.holds(expected)
    cuda.reset()
    writes.write(2, PAGE)
    await writes.settled(2)
    assert writes.answers[2] == [COMPLETED]


@pytest.mark.parametrize("call", ["cudaEventRecord", "cudaEventSynchronize"])
async def test_an_event_that_fails_says_nothing_of_the_copies(
    writes: Writes, remote: Remote, cuda: FakeCuda, call: str
) -> None:
    """UNSETTLED, and the instance is never closed: the leader's bound on that ends the worker."""
    await opened(writes, remote)
    cuda.fail(call)
    writes.write(1, PAGE)
    await writes.settled(1)
    assert writes.answers == {1: [UNSETTLED]}
    assert call in writes.details[0]
    with pytest.raises(EngineError, match="no new writes"):
        writes.write(2, PAGE)
    cuda.reset()
    closing = asyncio.create_task(writes.sender.close_instance(DECODE, 1))
    await opened(writes, remote, generation=2)
    writes.write(3, PAGE, generation=2)
    await writes.settled(3)
    await writes.sender.close_instance(DECODE, 2)
    assert not closing.done()
    closing.cancel()


async def test_a_gpu_that_hangs(remote: Remote, cuda: FakeCuda) -> None:
    writes = Writes(cuda, write_seconds_max=0.05)
    await opened(writes, remote)
    cuda.hold()
    writes.write(1, PAGE)
    await writes.settled(1)
    assert writes.answers == {1: [UNSETTLED]}
    closing = asyncio.create_task(writes.sender.close_instance(DECODE, 1))
    await asyncio.sleep(0)
    assert not closing.done(), "the copy is still out"
    cuda.let_go()
    async with asyncio.timeout(HANG_SECONDS):
        await closing
    assert writes.answers == {1: [UNSETTLED]}


# Mapping


async def test_a_closed_instance_gives_its_mapping_back(
    writes: Writes, remote: Remote, cuda: FakeCuda
) -> None:
    before = cuda.allocations
    await opened(writes, remote)
    await opened(writes, remote, generation=2)
    assert cuda.allocations == before + 2
    await writes.sender.close_instance(DECODE, 1)
    await writes.sender.close_instance(DECODE, 2)
    assert cuda.allocations == before


async def refused(writes: Writes, cuda: FakeCuda, *segments: Segment, match: str) -> None:
    before = cuda.allocations
    with pytest.raises(EngineError, match=match):
        await writes.sender.open(DECODE, 1, segments)
    assert cuda.allocations == before
    with pytest.raises(EngineError, match="no new writes"):
        writes.write(1, PAGE)
    await writes.sender.close_instance(DECODE, 1)


def changed(remote: Remote, rank: int = 0, **fields: object) -> Segment:
    descriptor = msgspec.structs.replace(remote.descriptor(), **fields)
    return Segment(rank, "local", msgspec.msgpack.encode(descriptor))


async def test_what_cannot_be_mapped_names_both_gpus(
    writes: Writes, remote: Remote, cuda: FakeCuda
) -> None:
    cuda.fail("cudaIpcOpenMemHandle", status=217)
    segment = changed(remote, device="0000:1C:00.0")
    await refused(writes, cuda, segment, match=r"0000:1B:00\.0 .*0000:1C:00\.0.*\(217\)")


async def test_a_rank_that_cannot_be_mapped_leaves_none_mapped(
    writes: Writes, remote: Remote, cuda: FakeCuda
) -> None:
    bad = changed(remote, rank=1, handle=bytes(64))
    await refused(writes, cuda, remote.segment, bad, match="cannot map")


async def test_another_process_by_now(writes: Writes, remote: Remote, cuda: FakeCuda) -> None:
    process = msgspec.structs.replace(remote.descriptor().process, start_time=1)
    await refused(writes, cuda, changed(remote, process=process), match="is not the decode worker")


@pytest.mark.parametrize("fields", [{"handle": b""}, {"handle": bytes(65)}, {"size_bytes": 0}])
async def test_no_handle(
    writes: Writes, remote: Remote, cuda: FakeCuda, fields: dict[str, object]
) -> None:
    await refused(writes, cuda, changed(remote, **fields), match="no handle")


async def test_a_receiver_that_is_dead(writes: Writes, remote: Remote, cuda: FakeCuda) -> None:
    remote.end()
    await refused(writes, cuda, remote.segment, match="cannot map the decode pool")


async def test_pools_of_two_kinds(writes: Writes, remote: Remote, cuda: FakeCuda) -> None:
    on_host = KvPool(LAYOUT, PAGES, torch.device("cpu"))
    segment = await LocalReceiver(on_host).open_segment(0, "tcp://a:1", 1)
    await refused(writes, cuda, segment, match=r"in host memory.*GPU 0000:1B:00\.0.*--device")
    sender = LocalSender(on_host, NEVER)
    with pytest.raises(EngineError, match=r"GPU 0000:1B:00\.0.*in host memory.*--device"):
        await sender.open(DECODE, 1, [remote.segment])
    sender.close()
    on_host.close()


# Where death would not fence


async def test_mps_is_refused_on_both_sides(cuda: FakeCuda) -> None:
    pool = FakePool(cuda.device(), POOL)
    cuda.set_attribute(ATTRIBUTE_MPS_ENABLED, 1)
    with pytest.raises(ConfigError, match=r"MPS.*--transfer"):
        LocalReceiver(pool)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="MPS"):
        LocalSender(pool, NEVER)  # type: ignore[arg-type]


@pytest.mark.parametrize("call", ["cudaDeviceGetAttribute", "cudaIpcGetMemHandle"])
async def test_a_pool_that_cannot_be_shared(cuda: FakeCuda, call: str) -> None:
    """Or of which is not known whether it may be."""
    pool = FakePool(cuda.device(), POOL)
    cuda.fail(call, status=801)
    with pytest.raises(ConfigError, match=rf"{call}.*\(801\).*--transfer"):
        LocalReceiver(pool)  # type: ignore[arg-type]
