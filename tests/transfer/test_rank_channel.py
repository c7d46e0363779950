"""The channel between a leader and a rank: order, bounds, and what loses it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from pdrt.transfer import rank_channel
from pdrt.transfer.rank_channel import FRAME_BYTES_MAX, LENGTH, RankChannel, encode
from pdrt.transfer.rank_messages import Alive, Check, Step
from tests.decode.deployment import HANG_SECONDS

Message = Step | Check | Alive


class End:
    """One end, and what it has heard."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.heard: list[Message] = []
        self.lost: list[str] = []
        self.on_message: Callable[[Message], None] = lambda message: None
        self.channel: RankChannel[Message] = RankChannel(end, Message, self._hear, self.lost.append)

    def _hear(self, message: Message) -> None:
        self.heard.append(message)
        self.on_message(message)


class Pair:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.leader, self.rank = End(ours), End(theirs)


async def until(is_true: Callable[[], object]) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    yield pair
    pair.leader.channel.close()
    pair.rank.channel.close()


async def test_messages_arrive_in_order_and_whole(pair: Pair) -> None:
    """Large ones among them, which no socket takes at once: sending waits for nobody."""
    sent: list[Message] = [Check(1), Step(bytes(3_000_000)), Check(2), Step(b"x"), Check(3)]
    for message in sent:
        pair.leader.channel.send(encode(message))
    await until(lambda: len(pair.rank.heard) == len(sent))
    assert pair.rank.heard == sent
    assert pair.rank.lost == pair.leader.lost == []


async def test_both_directions_at_once(pair: Pair) -> None:
    for number in range(200):
        pair.leader.channel.send(encode(Step(bytes(number * 50))))
        pair.rank.channel.send(encode(Check(number)))
    await until(lambda: len(pair.rank.heard) == len(pair.leader.heard) == 200)
    assert pair.leader.heard == [Check(number) for number in range(200)]


async def test_frames_that_come_byte_by_byte() -> None:
    ours, theirs = socket.socketpair()
    end = End(theirs)
    for byte in encode(Check(7)) + encode(Alive()):
        ours.send(bytes([byte]))
        end.channel.drain()
    assert end.heard == [Check(7), Alive()]
    end.channel.close()
    ours.close()


async def test_draining_reads_everything_that_has_arrived(pair: Pair) -> None:
    for number in range(100):
        pair.leader.channel.send(encode(Check(number)))
    pair.rank.channel.drain()
    assert pair.rank.heard == [Check(number) for number in range(100)]


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (LENGTH.pack(FRAME_BYTES_MAX + 1), "announced a frame of 67108865 bytes"),
        (LENGTH.pack(3) + b"\xc1\xc1\xc1", "no message"),
        (LENGTH.pack(0), "no message"),
        (encode(msgspec.defstruct("Other", [], tag=True)()), "no message"),
    ],
)
async def test_what_is_no_message_loses_the_channel_once(
    pair: Pair, frame: bytes, why: str
) -> None:
    """What came before it counts, what comes after it does not."""
    pair.leader.socket.send(encode(Check(1)) + frame + encode(Check(2)))
    await until(lambda: pair.rank.lost)
    assert pair.rank.heard == [Check(1)]
    [said] = pair.rank.lost
    assert why in said
    await until(lambda: pair.leader.lost)
    assert len(pair.leader.lost) == 1, "it hears of it as a closed channel"


async def test_a_peer_that_is_gone(pair: Pair) -> None:
    """What it said last is heard before it is missed."""
    pair.rank.channel.send(encode(Check(5)))
    pair.rank.channel.close()
    await until(lambda: pair.leader.lost)
    assert pair.leader.heard == [Check(5)]
    assert pair.leader.lost == ["it has closed its channel"]
    pair.leader.channel.send(encode(Check(1)))  # to nobody
    pair.leader.channel.drain()
    assert len(pair.leader.lost) == 1
    assert pair.rank.lost == [], "whoever closes it has not lost it"


async def test_a_peer_that_does_not_read(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_channel, "OUTBOX_BYTES_MAX", 1_000_000)
    asyncio.get_running_loop().remove_reader(pair.rank.socket)
    for _ in range(20):
        pair.leader.channel.send(encode(Step(bytes(100_000))))
    [said] = pair.leader.lost
    assert "wait to be read" in said


async def test_a_channel_that_is_closed_from_within_a_message(pair: Pair) -> None:
    """Nothing that has arrived with it is heard any more."""
    pair.rank.on_message = lambda message: pair.rank.channel.close()
    pair.leader.socket.send(encode(Check(1)) + encode(Check(2)))
    await until(lambda: pair.rank.heard)
    await until(lambda: pair.leader.lost)
    assert (pair.rank.heard, pair.rank.lost) == ([Check(1)], [])
