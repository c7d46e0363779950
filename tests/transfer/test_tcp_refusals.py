"""The tcp engine: who is turned away, what is not taken, and that it harms nobody else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import msgspec
import pytest
import torch

from pdrt.errors import ConfigError, EngineError
from pdrt.ids import RoomId
from pdrt.protocol.messages import Segment
from pdrt.protocol.room_writer import WriteOutcome
from pdrt.transfer import writable
from pdrt.transfer.engine import ByteRange
from pdrt.transfer.tcp import connection
from pdrt.transfer.tcp.receiver import Place, TcpReceiver
from pdrt.transfer.tcp.wire import PIECE_BYTES_MAX, Greeted, pack_head
from pdrt.transfer.writable import AdmitRoom, WritableRooms
from tests.decode.deployment import HANG_SECONDS
from tests.transfer.tcp_pair import (
    DECODE,
    ENDPOINT,
    HOST,
    OTHER_ENDPOINT,
    PAGES,
    SIZE,
    Raw,
    TcpPair,
    descriptor_of,
    make_pool,
    outcome_of,
)

COMPLETED, FAILED = WriteOutcome.COMPLETED, WriteOutcome.FAILED


@pytest.fixture
async def pair() -> AsyncIterator[TcpPair]:
    pair = TcpPair()
    yield pair
    pair.close()


def is_untouched(pair: TcpPair) -> bool:
    return not bool(pair.target.tensor.any())


async def serves(pair: TcpPair) -> None:
    """Everybody else's writes still land."""
    room = pair.admit([PAGES - 1])
    assert await outcome_of(pair.write(room, [(1, PAGES - 1)])) is COMPLETED
    assert torch.equal(pair.target.tensor[PAGES - 1], pair.source.tensor[1])


# Connections


@pytest.mark.parametrize(
    ("changes", "reply"),
    [
        ({"token": b"x" * 16}, Greeted.WRONG_TOKEN),
        ({"token": bytes(16)}, Greeted.WRONG_TOKEN),
        ({"segment": 99}, Greeted.STALE),
        ({"rank": 1}, Greeted.STALE),
        ({"generation": 2}, Greeted.STALE),
    ],
)
async def test_a_stranger_is_turned_away_and_counted(
    pair: TcpPair, changes: dict[str, object], reply: Greeted
) -> None:
    shown = descriptor_of(await pair.open())
    raw = Raw(shown.port)
    assert await asyncio.to_thread(lambda: raw.greet(shown, **changes)) is reply
    assert await asyncio.to_thread(raw.is_hung_up_on)
    assert pair.receiver.refused == {reply.name.lower(): 1}
    await serves(pair)
    raw.close()


async def test_a_token_of_a_retired_generation_is_stale(pair: TcpPair) -> None:
    shown = descriptor_of(await pair.open(1))
    await pair.receiver.close_segment(ENDPOINT, 1)
    raw = Raw(shown.port)
    assert await asyncio.to_thread(raw.greet, shown) is Greeted.STALE
    assert await asyncio.to_thread(raw.is_hung_up_on)
    assert pair.receiver.refused == {"stale": 1}
    raw.close()


async def test_noise_ends_its_own_connection(pair: TcpPair) -> None:
    shown = descriptor_of(await pair.open())
    for noise in (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + bytes(64), bytes(200)):
        raw = Raw(shown.port)
        raw.socket.sendall(noise)
        assert await asyncio.to_thread(raw.is_hung_up_on)
        raw.close()
    await serves(pair)
    assert pair.receiver.refused == {"malformed": 2}


@pytest.mark.parametrize(
    "ranges",
    [[(0, PIECE_BYTES_MAX + 1)], [(0, 0)], [(0, 8), (8, 0)], [(n * 8, 8) for n in range(600)]],
    ids=["large", "empty", "empty range", "many ranges"],
)
async def test_a_piece_out_of_bounds_ends_its_connection(
    pair: TcpPair, ranges: list[tuple[int, int]]
) -> None:
    shown = descriptor_of(await pair.open())
    room = pair.admit(range(PAGES))
    raw = Raw(shown.port)
    assert await asyncio.to_thread(raw.greet, shown) is Greeted.ACCEPTED
    raw.socket.sendall(pack_head(room.serial, ranges, is_last=True))
    assert await asyncio.to_thread(raw.is_hung_up_on)
    assert is_untouched(pair)
    await serves(pair)
    assert pair.receiver.refused == {"malformed": 1}
    raw.close()


async def test_a_connection_that_says_nothing_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdrt.transfer.tcp.receiver.GREETING_SECONDS_MAX", 0.05)
    pair = TcpPair()
    raw = Raw(pair.receiver.port)
    assert await asyncio.to_thread(raw.is_hung_up_on)
    raw.close()
    pair.close()


async def test_strangers_are_bounded(pair: TcpPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdrt.transfer.tcp.receiver.STRANGERS_MAX", 4)
    raws = [Raw(pair.receiver.port) for _ in range(5)]
    assert await asyncio.to_thread(raws[-1].is_hung_up_on)
    assert pair.receiver.refused == {"crowded": 1}
    for raw in raws:
        raw.close()


async def test_a_port_that_cannot_be_bound_is_said() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*--host"):
        TcpReceiver(make_pool(1), WritableRooms(SIZE), Place(0, "192.0.2.1", HOST))


async def test_a_port_that_was_asked_for(pair: TcpPair) -> None:
    taken = pair.receiver.port
    with pytest.raises(ConfigError, match=rf"port {taken} .* choose another --data-port"):
        TcpReceiver(make_pool(1), WritableRooms(SIZE), Place(0, HOST, HOST, taken))


async def test_a_successor_has_the_port_that_was_asked_for() -> None:
    first = TcpReceiver(make_pool(1), WritableRooms(SIZE), Place(0, HOST, HOST))
    first.close()
    successor = TcpReceiver(make_pool(1), WritableRooms(SIZE), Place(0, HOST, HOST, first.port))
    assert successor.endpoint == f"{HOST}:{first.port}"
    successor.close()


# Writes


async def refused(pair: TcpPair, answer: asyncio.Future[tuple[WriteOutcome, str]]) -> str:
    outcome, detail = await asyncio.wait_for(answer, HANG_SECONDS)
    assert outcome is FAILED
    assert is_untouched(pair)
    return detail


async def test_a_room_writes_its_own_pages_only(pair: TcpPair) -> None:
    await pair.open()
    room = pair.admit([3, 4])
    assert "pages" in await refused(pair, pair.write(room, [(0, 5)]))
    assert "pages" in await refused(pair, pair.write(room, [(0, 3), (1, 4), (2, 5)]))
    across = (ByteRange(0, 4 * SIZE + 8, SIZE),)
    assert "pages" in await refused(pair, pair.write_ranges(room, across))
    beyond = (ByteRange(0, PAGES * SIZE, 8), ByteRange(0, (1 << 60), 8))
    assert "pages" in await refused(pair, pair.write_ranges(room, beyond))
    assert pair.receiver.refused_pieces == {"outside": 4}
    assert await outcome_of(pair.write(room, [(0, 3), (1, 4)])) is COMPLETED
    assert torch.equal(pair.target.tensor[3:5], pair.source.tensor[:2])


async def test_a_room_that_is_over_writes_nothing(pair: TcpPair) -> None:
    await pair.open()
    room = pair.admit([3])
    pair.rooms.dismiss(room)
    assert "over" in await refused(pair, pair.write(room, [(0, 3)]))
    assert pair.receiver.refused_pieces == {"no_room": 1}
    await serves(pair)


async def test_a_room_writes_through_its_own_pairing_only(pair: TcpPair) -> None:
    await pair.open(1)
    others = [
        pair.admit([3], endpoint=OTHER_ENDPOINT),
        pair.admit([3], generation=2),
    ]
    for room in others:
        assert "another" in await refused(pair, pair.write(room, [(0, 3)]))
    pair.serial += 1
    stranger = RoomId(0xD1, pair.serial)
    pair.rooms.admit(AdmitRoom(stranger, ENDPOINT, 1, (3,)))
    mine = RoomId(DECODE, pair.serial)
    assert "another" in await refused(pair, pair.write(mine, [(0, 3)]))
    assert pair.receiver.refused_pieces == {"other_pairing": 3}
    await serves(pair)


async def test_bytes_may_be_there_before_their_room_is(pair: TcpPair) -> None:
    """Other ranks hear of a room after its writer may have."""
    await pair.open()
    early = pair.write(RoomId(DECODE, 1), [(0, 3)])
    room = pair.admit([3])
    assert room.serial == 1
    assert await outcome_of(early) is COMPLETED
    assert torch.equal(pair.target.tensor[3], pair.source.tensor[0])


async def test_a_room_that_never_comes_is_not_waited_for_for_ever(
    pair: TcpPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writable, "ROOM_SECONDS_MAX", 0.05)
    await pair.open()
    assert "over" in await refused(pair, pair.write(RoomId(DECODE, 9), [(0, 3)]))
    await serves(pair)


async def test_other_rooms_of_the_same_batch_land(pair: TcpPair) -> None:
    """One connection, a refused piece between two good ones."""
    await pair.open()
    rooms = [pair.admit([page]) for page in range(3)]
    pair.rooms.dismiss(rooms[1])
    answers = [pair.write(room, [(n, n)]) for n, room in enumerate(rooms)]
    outcomes = [await outcome_of(answer) for answer in answers]
    assert outcomes == [COMPLETED, FAILED, COMPLETED]
    assert torch.equal(pair.target.tensor[0], pair.source.tensor[0])
    assert not pair.target.tensor[1].any()
    assert torch.equal(pair.target.tensor[2], pair.source.tensor[2])


# Peers that cannot be reached


async def test_a_closed_port_is_named(pair: TcpPair) -> None:
    with socket.create_server((HOST, 0)) as gone:
        port = gone.getsockname()[1]
    shown = descriptor_of(await pair.receiver.open_segment(0, ENDPOINT, 1))
    there = msgspec.structs.replace(shown, port=port)
    segment = Segment(0, "tcp", msgspec.msgpack.encode(there))
    with pytest.raises(EngineError, match=rf"rank 0 at 127\.0\.0\.1:{port} cannot be reached"):
        await pair.sender.open(DECODE, 1, [segment])


async def test_a_port_without_an_answer_is_named(
    pair: TcpPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a firewall that drops packets: a full backlog answers nothing either."""
    shown = descriptor_of(await pair.open())
    monkeypatch.setattr(connection, "DIAL_SECONDS_MAX", 0.2)
    with socket.socket() as full:
        full.bind((HOST, 0))
        full.listen(0)
        port = full.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex((HOST, port))
        there = msgspec.structs.replace(shown, port=port)
        segment = Segment(0, "tcp", msgspec.msgpack.encode(there))
        with pytest.raises(EngineError, match=rf"{HOST}:{port} .* no answer .*open TCP port"):
            await pair.sender.open(DECODE, 2, [segment])
        for filler in fillers:
            filler.close()


async def test_a_port_of_something_else_is_named(
    pair: TcpPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = descriptor_of(await pair.open())
    monkeypatch.setattr(connection, "DIAL_SECONDS_MAX", 0.2)
    with socket.create_server((HOST, 0)) as silent:
        there = msgspec.structs.replace(shown, port=silent.getsockname()[1])
        segment = Segment(0, "tcp", msgspec.msgpack.encode(there))
        with pytest.raises(EngineError, match="does not speak the tcp engine's protocol"):
            await pair.sender.open(DECODE, 2, [segment])


@pytest.mark.parametrize(
    ("segment", "words"),
    [
        (Segment(0, "tcp", b"nonsense"), "malformed"),
        (Segment(0, "local", b""), "'local'"),
    ],
)
async def test_a_segment_that_is_none_is_refused(
    pair: TcpPair, segment: Segment, words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        await pair.sender.open(DECODE, 1, [segment])


async def test_one_rank_out_of_reach_leaves_nothing_open(pair: TcpPair) -> None:
    good = await pair.receiver.open_segment(0, ENDPOINT, 1)
    bad = Segment(1, "tcp", good.descriptor)  # the port of rank 0
    with pytest.raises(EngineError, match=r"rank 1 .*turned us away"):
        await pair.sender.open(DECODE, 1, [good, bad])
    [segment] = pair.receiver.segments.values()
    async with asyncio.timeout(HANG_SECONDS):
        while segment.connections:
            segment.changed.clear()
            await segment.changed.wait()
    await pair.sender.open(DECODE, 1, [good])
