"""The mooncake engine over TCP, with the library itself, between real processes."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
import torch

from pdrt.config import MooncakeConfig
from pdrt.errors import ConfigError, EngineError
from pdrt.ids import RoomId
from pdrt.kv.pool import KvPool
from pdrt.protocol.messages import Segment
from pdrt.protocol.room_writer import WriteOutcome
from pdrt.protocol.writers import FenceKind
from pdrt.transfer.engine import ByteRange, WriteRequest
from pdrt.transfer.mooncake import receiver as receiver_module
from pdrt.transfer.mooncake import sender as sender_module
from pdrt.transfer.mooncake.descriptor import MooncakeDescriptor
from pdrt.transfer.mooncake.library import load
from pdrt.transfer.mooncake.receiver import MooncakeReceiver
from pdrt.transfer.mooncake.sender import MooncakeSender
from pdrt.transfer.mooncake.sockets import listening_ports
from tests.decode.deployment import NEVER, until
from tests.descriptors import open_descriptors
from tests.transfer.mooncake_peers import (
    CONFIG,
    DECODE,
    HALF,
    HOST,
    PAGE,
    PAGES,
    SIZE,
    Peer,
    content,
    digest,
    impatient,
    new_pool,
    receive,
    send,
)

try:
    impatient()
    load(CONFIG)
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)

ENDPOINT = "tcp://127.0.0.1:1"
COMPLETED, FAILED, UNSETTLED = WriteOutcome


class Decode:
    """A receiver here."""

    def __init__(self) -> None:
        self.pool = new_pool(0)
        self.receiver = MooncakeReceiver(self.pool, HOST, CONFIG)

    async def open(self, generation: int = 1, endpoint: str = ENDPOINT) -> Segment:
        return await self.receiver.open_segment(0, endpoint, generation)

    def close(self) -> None:
        self.receiver.close()
        self.pool.close()


class Prefill:
    """A sender here, and the answers to its writes."""

    def __init__(self, write_seconds_max: float = NEVER) -> None:
        self.pool = new_pool(0)
        generator = torch.Generator().manual_seed(7)
        self.pool.tensor.copy_(torch.rand(self.pool.tensor.shape, generator=generator))
        self.sender = MooncakeSender(self.pool, HOST, CONFIG, write_seconds_max)
        self.answers: dict[int, list[WriteOutcome]] = {}

    def write(self, number: int, *ranges: ByteRange, generation: int = 1, rank: int = 0) -> None:
        self.answers[number] = []
        request = WriteRequest(RoomId(DECODE, number), generation, rank, ranges)
        self.sender.write(request, lambda outcome, _: self.answers[number].append(outcome))

    async def settled(self, *numbers: int) -> None:
        await until(lambda: all(self.answers[n] for n in numbers), "the answers")

    def close(self) -> None:
        self.sender.close()
        self.pool.close()


def page(source: int, target: int) -> ByteRange:
    return ByteRange(source * PAGE, target * PAGE, PAGE)


@pytest.fixture
async def decode() -> AsyncIterator[Decode]:
    decode = Decode()
    yield decode
    decode.close()


@pytest.fixture
async def prefill() -> AsyncIterator[Prefill]:
    prefill = Prefill()
    yield prefill
    prefill.close()


@pytest.fixture
def writer() -> Iterator[Peer]:
    writer = Peer(send, 0xAB, NEVER)
    yield writer
    writer.end()


async def test_content_lands_in_the_other_process(prefill: Prefill) -> None:
    remote = Peer(receive)
    await prefill.sender.open(DECODE, 1, [remote.ask("open", ENDPOINT, 1)])
    targets = [(each * 13 + 5) % PAGES for each in range(PAGES)]
    numbers = range(PAGES // 32)
    for number in numbers:
        mine = range(32 * number, 32 * number + 32)
        prefill.write(number, *(page(source, targets[source]) for source in mine))
    await prefill.settled(*numbers)
    assert set(map(tuple, prefill.answers.values())) == {(COMPLETED,)}
    expected = KvPool(prefill.pool.layout, PAGES, torch.device("cpu"))
    for source, target in enumerate(targets):
        expected.tensor[target] = prefill.pool.tensor[source]
    assert remote.ask("digest") == digest(expected)
    await prefill.sender.close_instance(DECODE, 1)
    remote.end()


async def test_one_long_range(decode: Decode, prefill: Prefill) -> None:
    await prefill.sender.open(DECODE, 1, [await decode.open()])
    prefill.write(1, ByteRange(PAGE, 3 * PAGE + 1, SIZE - 4 * PAGE))
    await prefill.settled(1)
    assert prefill.answers == {1: [COMPLETED]}
    landed = content(decode.pool)[3 * PAGE + 1 :][: SIZE - 4 * PAGE]
    assert torch.equal(landed, content(prefill.pool)[PAGE:][: SIZE - 4 * PAGE])
    assert not content(decode.pool)[: 3 * PAGE + 1].any()
    await prefill.sender.close_instance(DECODE, 1)


# Fences


async def until_mid_write(decode: Decode, first: int) -> None:
    """The writer's bytes have begun to land there."""
    await until(content(decode.pool)[first : first + PAGE].any, "the first bytes")


async def stopped_in_mid_write(decode: Decode, writer: Peer, generation: int = 1) -> None:
    """It writes the first half of the pool, again and again."""
    segment = await decode.open(generation)
    assert await asyncio.to_thread(writer.ask, "open", generation, segment) is None
    writer.ask("repeat", generation, 0, HALF)
    await until_mid_write(decode, 0)
    writer.stop()


async def test_nothing_lands_after_the_fence(
    decode: Decode, prefill: Prefill, writer: Peer
) -> None:
    """The writer is stopped in mid-write and continued after the fence; its neighbour goes on."""
    await prefill.sender.open(DECODE, 2, [await decode.open(2, "tcp://neighbour:1")])
    await stopped_in_mid_write(decode, writer)
    upper = ByteRange(HALF, HALF, HALF)
    for number in range(4):
        prefill.write(number, upper, generation=2)
    await decode.receiver.close_segment(ENDPOINT, 1)
    content(decode.pool)[:HALF].zero_()  # the pages' next owner
    writer.go_on()
    outcomes = await asyncio.to_thread(writer.ask, "end_writes")
    assert UNSETTLED.value in outcomes
    await asyncio.to_thread(writer.ask, "close", 1)
    await prefill.settled(*range(4))
    assert set(map(tuple, prefill.answers.values())) == {(COMPLETED,)}
    assert not content(decode.pool)[:HALF].any(), "a late byte"
    assert torch.equal(content(decode.pool)[HALF:], content(prefill.pool)[HALF:])


async def test_without_a_fence_late_bytes_land(
    decode: Decode, writer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the test above can fail: unregistering alone lets in what has been accepted. All of it
    may have been in the network when the writer was stopped, so it is tried some times."""
    monkeypatch.setattr("pdrt.transfer.mooncake.instance.shut_down_sessions", lambda port: set())
    for generation in range(1, 9):
        await stopped_in_mid_write(decode, writer, generation)
        await decode.receiver.close_segment(ENDPOINT, generation)
        content(decode.pool)[:HALF].zero_()
        writer.go_on()
        await asyncio.to_thread(writer.ask, "end_writes")
        if content(decode.pool)[:HALF].any():
            return
        await asyncio.to_thread(writer.ask, "close", generation)
    pytest.fail("nothing came late")


async def test_a_writer_killed_in_mid_write(writer: Peer) -> None:
    """What it has left in the network does not land, though its target slept meanwhile."""
    target = Peer(receive)
    assert writer.ask("open", 1, target.ask("open", ENDPOINT, 1)) is None
    writer.ask("repeat", 1, 0, HALF)
    await until(lambda: target.ask("written", 0, PAGE), "the first bytes")
    target.stop()
    writer.end()
    target.tell("retire", ENDPOINT, 1)
    target.go_on()
    assert target.connection.recv() is None
    successor = Peer(send, 0xCD, NEVER)
    assert successor.ask("open", 2, target.ask("open", ENDPOINT, 2)) is None
    successor.ask("repeat", 2, HALF, SIZE)
    assert set(successor.ask("end_writes")) == {COMPLETED.value}
    assert target.ask("written", HALF, SIZE) == HALF, "the same endpoint is served anew"
    assert target.ask("written", 0, HALF) == 0, "late bytes"
    successor.end()
    target.end()


async def test_what_cannot_be_seen_to_close_is_destroyed(
    decode: Decode, writer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fallback is a fence as well, and holds the ports of what it has destroyed."""

    def blind(port: int) -> set[int]:
        raise OSError("too many open files")

    monkeypatch.setattr("pdrt.transfer.mooncake.instance.shut_down_sessions", blind)
    await stopped_in_mid_write(decode, writer)
    threads = engine_threads()
    (instance,) = decode.receiver._open.values()
    await decode.receiver.close_segment(ENDPOINT, 1)
    content(decode.pool)[:HALF].zero_()
    await until(lambda: engine_threads() < threads, "the end of its threads")
    writer.go_on()
    assert UNSETTLED.value in await asyncio.to_thread(writer.ask, "end_writes")
    assert not content(decode.pool)[:HALF].any(), "a late byte"
    for port in (instance.port, instance.data_port):
        with socket.socket(socket.AF_INET6) as other, pytest.raises(OSError):
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("::", port))


# Bounds


def engine_threads() -> int:
    """Threads of this process that Python has not made."""
    return len(os.listdir("/proc/self/task")) - threading.active_count()


async def test_tombstones_have_a_bound(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_module, "TOMBSTONES_MAX", 3)
    ports: set[int] = set()
    for generation in range(1, 7):
        assert (decode.receiver.restart_reason is None) == (generation <= 3)
        segment = await decode.open(generation)
        ports.add(msgspec.msgpack.decode(segment.descriptor, type=MooncakeDescriptor).data_port)
        await decode.receiver.close_segment(ENDPOINT, generation)
    assert len(ports) == 6, "ports of a retired engine never come again"
    assert "fenced" in str(decode.receiver.restart_reason)
    with pytest.raises(EngineError, match="6 mooncake engines"):
        await decode.open(7)


async def test_an_offer_that_nobody_took_leaves_nothing_behind(
    decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many more of them than there may be tombstones, beside one that is written through."""
    monkeypatch.setattr(receiver_module, "TOMBSTONES_MAX", 1)
    await decode.open(1, "tcp://neighbour:1")
    ports = listening_ports()  # those of earlier tests may end meanwhile
    for generation in range(1, 6):
        await decode.open(generation)
        assert listening_ports() - ports
        await decode.receiver.close_offer(ENDPOINT, generation)
        assert listening_ports() <= ports
    assert decode.receiver.restart_reason is None


async def shrunk_to(threads: int, descriptors: int) -> None:
    """What was about to end has."""
    await until(
        lambda: engine_threads() <= threads and len(open_descriptors()) <= descriptors,
        f"{threads} threads and {descriptors} descriptors",
    )


async def test_what_engines_cost_is_given_back(decode: Decode, prefill: Prefill) -> None:
    """Three pairs at a time; and none of them costs more than the bound of the documentation."""
    after: list[tuple[int, int]] = []
    for _ in range(3):
        threads, descriptors = engine_threads(), len(open_descriptors())
        for generation in range(1, 4):
            await prefill.sender.open(DECODE, generation, [await decode.open(generation)])
            prefill.write(generation, page(0, generation), generation=generation)
            await prefill.settled(generation)
        await shrunk_to(threads + 6 * 3, descriptors + 6 * 10)
        for generation in range(1, 4):
            await prefill.sender.close_instance(DECODE, generation)
        decode.receiver.close()
        if after:  # the first time, some more are made for good
            await shrunk_to(*after[0])
        after.append((engine_threads(), len(open_descriptors())))


# Settling


async def test_a_target_that_stands_still_is_unsettled(prefill: Prefill) -> None:
    """By our clock; and closing the instance does not wait for it."""
    prefill.close()
    impatient_prefill = Prefill(write_seconds_max=0.5)
    target = Peer(receive)
    await impatient_prefill.sender.open(DECODE, 1, [target.ask("open", ENDPOINT, 1)])
    target.stop()
    # Its runs fill the window and more: the next write cannot begin.
    impatient_prefill.write(1, *[ByteRange(0, 0, HALF)] * 8)
    impatient_prefill.write(2, page(0, 0))
    await impatient_prefill.settled(1, 2)
    assert impatient_prefill.answers == {1: [UNSETTLED], 2: [FAILED]}
    with pytest.raises(EngineError, match="takes no new writes"):
        impatient_prefill.write(3, page(0, 0))
    await impatient_prefill.sender.close_instance(DECODE, 1)
    assert impatient_prefill.answers == {1: [UNSETTLED], 2: [FAILED], 3: []}
    impatient_prefill.close()
    target.end()


async def test_a_target_that_dies_is_unsettled(prefill: Prefill) -> None:
    target = Peer(receive)
    await prefill.sender.open(DECODE, 1, [target.ask("open", ENDPOINT, 1)])
    target.end()
    prefill.write(1, page(0, 0))
    await prefill.settled(1)
    assert prefill.answers == {1: [UNSETTLED]}
    await prefill.sender.close_instance(DECODE, 1)


async def test_a_retired_generation_takes_nothing(decode: Decode, prefill: Prefill) -> None:
    await prefill.sender.open(DECODE, 1, [await decode.open()])
    await decode.receiver.close_segment(ENDPOINT, 1)
    prefill.write(1, page(0, 0))
    await prefill.settled(1)
    assert prefill.answers == {1: [UNSETTLED]}
    assert not content(decode.pool).any()
    await prefill.sender.close_instance(DECODE, 1)


# What is not accepted


async def test_what_a_sender_refuses(decode: Decode, prefill: Prefill) -> None:
    await prefill.sender.open(DECODE, 1, [await decode.open()])
    for target in (SIZE, SIZE - PAGE + 1, -1, 2**62):
        with pytest.raises(EngineError, match="outside"):
            prefill.write(1, page(0, 0), ByteRange(0, target, PAGE))
    with pytest.raises(EngineError, match="rank 3"):
        prefill.write(1, page(0, 0), rank=3)
    with pytest.raises(EngineError, match="generation 2"):
        prefill.write(1, page(0, 0), generation=2)
    await prefill.sender.close_instance(DECODE, 1)
    await prefill.sender.close_instance(DECODE, 1)
    with pytest.raises(EngineError, match="generation 1"):
        prefill.write(1, page(0, 0))
    assert prefill.answers == {1: []}


async def refused(prefill: Prefill, segment: Segment, match: str) -> None:
    threads = engine_threads()
    with pytest.raises(EngineError, match=match):
        await prefill.sender.open(DECODE, 1, [segment])
    # Threads that were about to end at first may have.
    await until(lambda: engine_threads() <= threads, "the threads of what was refused")


async def test_segments_that_cannot_be_reached(
    decode: Decode, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = await decode.open()
    descriptor = msgspec.msgpack.decode(segment.descriptor, type=MooncakeDescriptor)

    def changed(**fields: object) -> Segment:
        other = msgspec.structs.replace(descriptor, **fields)
        return Segment(0, "mooncake", msgspec.msgpack.encode(other))

    with socket.create_server((HOST, 0)) as silent:
        port = silent.getsockname()[1]
        await refused(prefill, changed(data_port=1), f"{HOST}:1 .*cannot be reached")
        await refused(prefill, changed(address=4096), "refuses to be reached")
        silent.listen(0)
        # The kernel answers nobody any more once the backlog is full: like a firewall that drops.
        waiting = [socket.create_connection((HOST, port))]
        monkeypatch.setattr(sender_module, "CONNECT_SECONDS_MAX", 0.2)
        await refused(prefill, changed(port=port), "does not answer within.*firewall")
        for each in waiting:
            each.close()
    await refused(prefill, changed(protocol="rdma"), "decode has .*rdma, prefill tcp")
    await refused(prefill, Segment(0, "local", b""), "'local'.*'mooncake'")
    await refused(prefill, Segment(0, "mooncake", b"\xc1"), "malformed")


async def test_what_it_says_of_itself(decode: Decode) -> None:
    assert decode.receiver.fence is FenceKind.RETIRE_GENERATION
    one = await decode.open(1)
    two = await decode.open(1, "tcp://other:1")
    assert one.engine == "mooncake" and one.descriptor != two.descriptor


async def test_another_protocol_is_not_tcp_in_disguise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes TCP in silence where it cannot have what it was asked for."""
    monkeypatch.delenv("MC_FORCE_TCP")
    pool = new_pool(0)
    receiver = MooncakeReceiver(pool, HOST, MooncakeConfig(mooncake_protocol="efa"))
    with pytest.raises(EngineError, match="asked for efa and uses TCP"):
        await receiver.open_segment(0, ENDPOINT, 1)
    pool.close()


async def test_addresses_that_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_module, "_has_random_addresses", lambda: False)
    pool = new_pool(0)
    with pytest.raises(ConfigError, match="not randomized"):
        MooncakeReceiver(pool, HOST, CONFIG)
    pool.close()
