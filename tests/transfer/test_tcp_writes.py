"""The tcp engine: what is written lands where it belongs, and nowhere else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from pdrt.errors import EngineError
from pdrt.ids import RoomId
from pdrt.protocol.room_writer import WriteOutcome
from pdrt.protocol.writers import FenceKind
from pdrt.transfer.engine import ByteRange, WriteRequest
from pdrt.transfer.tcp import connection
from pdrt.transfer.tcp.outbox import (
    BATCH_BYTES_MAX,
    BATCH_PIECES_MAX,
    Outbox,
    Write,
    pieces_of,
)
from pdrt.transfer.tcp.wire import PIECE_BYTES_MAX, PIECE_RANGES_MAX
from tests.decode.deployment import HANG_SECONDS
from tests.transfer.tcp_pair import DECODE, LAYOUT, PAGES, SIZE, TcpPair, outcome_of

COMPLETED = WriteOutcome.COMPLETED


@pytest.fixture
async def pair() -> AsyncIterator[TcpPair]:
    pair = TcpPair()
    yield pair
    pair.close()


async def test_pages_land_where_they_are_told_to(pair: TcpPair) -> None:
    await pair.open()
    targets = [(page * 13 + 5) % PAGES for page in range(PAGES)]
    answers = []
    for first in range(0, PAGES, 32):
        room = pair.admit(targets[first : first + 32])
        answers.append(pair.write(room, [(p, targets[p]) for p in range(first, first + 32)]))
    assert [await outcome_of(answer) for answer in answers] == [COMPLETED] * 8
    expected = torch.empty_like(pair.source.tensor)
    expected[targets] = pair.source.tensor
    assert torch.equal(pair.target.tensor, expected)


async def test_a_write_of_many_pieces_is_one_write(pair: TcpPair) -> None:
    """Larger than a piece, in one range, over all connections."""
    await pair.open()
    room = pair.admit(range(PAGES))
    assert PAGES * SIZE > 4 * PIECE_BYTES_MAX
    answer = pair.write_ranges(room, (ByteRange(0, 0, PAGES * SIZE),))
    assert await outcome_of(answer) is COMPLETED
    assert torch.equal(pair.target.tensor, pair.source.tensor)


async def test_slices_of_heads_touch_nothing_else(pair: TcpPair) -> None:
    await pair.open()
    head = LAYOUT.head_bytes
    room = pair.admit(range(PAGES))
    ranges = tuple(ByteRange(n * SIZE + head, n * SIZE + 2 * head, head) for n in range(PAGES))
    assert await outcome_of(pair.write_ranges(room, ranges)) is COMPLETED
    expected = torch.zeros_like(pair.source.tensor)
    expected[:, 2] = pair.source.tensor[:, 1]
    assert torch.equal(pair.target.tensor, expected)


async def test_more_ranges_than_a_piece_holds(pair: TcpPair) -> None:
    await pair.open()
    room = pair.admit(range(PAGES))
    step, count = PAGES * SIZE // 2000 // 8 * 8, 2000
    assert count > 3 * PIECE_RANGES_MAX
    ranges = tuple(ByteRange(n * step, n * step, 8) for n in range(count))
    assert await outcome_of(pair.write_ranges(room, ranges)) is COMPLETED
    source, target = pair.source.tensor.view(-1), pair.target.tensor.view(-1)
    expected = torch.zeros_like(source)
    for n in range(count):
        expected[n * step // 4 : n * step // 4 + 2] = source[n * step // 4 : n * step // 4 + 2]
    assert torch.equal(target, expected)


async def test_an_idle_connection_ends_and_is_dialled_again(
    pair: TcpPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "IDLE_SECONDS", 0.05)
    await pair.open()
    [segment] = pair.receiver.segments.values()
    async with asyncio.timeout(HANG_SECONDS):
        while segment.connections:
            segment.changed.clear()
            await segment.changed.wait()
    for page in range(4):
        assert await outcome_of(pair.write(pair.admit([page]), [(page, page)])) is COMPLETED
    assert torch.equal(pair.target.tensor[:4], pair.source.tensor[:4])


async def test_closing_an_instance_leaves_no_connection(pair: TcpPair) -> None:
    await pair.open()
    [segment] = pair.receiver.segments.values()
    await asyncio.gather(*(pair.write(pair.admit([n]), [(n, n)]) for n in range(20)))
    await pair.sender.close_instance(DECODE, 1)
    async with asyncio.timeout(HANG_SECONDS):
        while segment.connections:
            segment.changed.clear()
            await segment.changed.wait()
    with pytest.raises(EngineError, match="takes no new writes"):
        pair.write(pair.admit([0]), [(0, 0)])
    await pair.sender.close_instance(DECODE, 1)  # of one that is not there


async def test_what_the_receiver_says_of_itself(pair: TcpPair) -> None:
    assert pair.receiver.fence is FenceKind.RETIRE_GENERATION
    one = await pair.open(1)
    two = await pair.open(2)
    assert one.engine == two.engine == "tcp"
    assert one.descriptor != two.descriptor


async def test_an_unknown_rank_is_refused_before_anything_begins(pair: TcpPair) -> None:
    await pair.open()
    room = pair.admit([0])
    with pytest.raises(EngineError, match="rank 3"):
        pair.sender.write(
            WriteRequest(room, 1, 3, (ByteRange(0, 0, 8),)), lambda outcome, detail: None
        )


# What connections take


def make_write() -> Write:
    return Write(1, lambda outcome, detail: None)


def test_a_connection_takes_its_share_and_no_more_than_its_window() -> None:
    outbox = Outbox(connections_max=4)
    pieces = pieces_of(make_write(), (ByteRange(0, 0, 64 * PIECE_BYTES_MAX),))
    assert outbox.put(pieces) == 64
    first = outbox.take(0)
    assert sum(piece.length for piece in first) == BATCH_BYTES_MAX
    few = Outbox(connections_max=4)
    few.put(pieces[:8])
    assert len(few.take(0)) == 2, "a quarter"
    single = Outbox(connections_max=4)
    single.put(pieces[:1])
    assert len(single.take(0)) == 1, "at least one"


def test_small_pieces_are_counted_too() -> None:
    outbox = Outbox(connections_max=1)
    for _ in range(2 * BATCH_PIECES_MAX):
        outbox.put(pieces_of(make_write(), (ByteRange(0, 0, 8),)))
    assert len(outbox.take(0)) == BATCH_PIECES_MAX


def test_nothing_is_taken_of_a_closed_outbox() -> None:
    outbox = Outbox(connections_max=1)
    pieces = pieces_of(make_write(), (ByteRange(0, 0, 8),))
    assert outbox.take(0) == [], "nothing there"
    outbox.put(pieces)
    assert outbox.close() == pieces
    assert outbox.take(0) == []


@pytest.mark.parametrize("worst", [WriteOutcome.FAILED, WriteOutcome.UNSETTLED])
def test_the_worst_piece_counts_once(worst: WriteOutcome) -> None:
    heard: list[tuple[WriteOutcome, str]] = []
    write = Write(RoomId(DECODE, 1).serial, lambda *answer: heard.append(answer))
    write.pieces_left = 3
    write.ended(COMPLETED, "")
    write.ended(worst, "why")
    assert bool(heard) is (worst is WriteOutcome.UNSETTLED), "nothing makes that better"
    write.ended(COMPLETED, "")
    assert heard == [(worst, "why")]
