"""The tcp engine's fence: once it has returned, nothing of that generation lands, whatever the
writer does; and what a broken connection means."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator

import msgspec
import pytest
import torch

from pdrt.errors import EngineError
from pdrt.protocol.messages import Segment
from pdrt.protocol.room_writer import WriteOutcome
from pdrt.transfer.tcp.sockets import receive_exactly
from pdrt.transfer.tcp.wire import (
    GREETING_BYTES,
    HEAD_BYTES,
    PIECE_BYTES_MAX,
    Greeted,
    pack_head,
    pack_reply,
)
from tests.decode.deployment import HANG_SECONDS, until
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
    outcome_of,
)

UNSETTLED = WriteOutcome.UNSETTLED
ONES = b"\x01"


@pytest.fixture
async def pair() -> AsyncIterator[TcpPair]:
    pair = TcpPair()
    yield pair
    pair.close()


class Flood:
    """A writer that goes on sending the same pages, until its connection breaks."""

    def __init__(self, raw: Raw, room: int, pages: int) -> None:
        self.sent = threading.Event()
        """It is in the middle of a write."""
        self._raw = raw
        length = min(pages * SIZE, PIECE_BYTES_MAX)
        self._piece = pack_head(room, [(0, length)], is_last=False) + ONES * length
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                self._raw.socket.sendall(self._piece)
                self.sent.set()
        except OSError:
            return

    async def ended(self) -> None:
        await asyncio.to_thread(self._thread.join, HANG_SECONDS)
        assert not self._thread.is_alive()


async def greeted(pair: TcpPair, segment: Segment) -> Raw:
    shown = descriptor_of(segment)
    raw = Raw(shown.port)
    assert await asyncio.to_thread(raw.greet, shown) is Greeted.ACCEPTED
    return raw


async def test_nothing_lands_after_the_fence_of_a_writer_that_goes_on(pair: TcpPair) -> None:
    segment = await pair.receiver.open_segment(0, ENDPOINT, 1)
    room = pair.admit(range(16))
    floods = []
    for _ in range(3):
        floods.append(Flood(await greeted(pair, segment), room.serial, 16))
    for flood in floods:
        assert await asyncio.to_thread(flood.sent.wait, HANG_SECONDS)
    await pair.receiver.close_segment(ENDPOINT, 1)
    pair.target.tensor.zero_()
    for flood in floods:
        await flood.ended()
    assert not pair.target.tensor.any()
    again = Raw(pair.receiver.port)
    assert await asyncio.to_thread(again.greet, descriptor_of(segment)) is Greeted.STALE
    again.close()


async def test_a_writer_that_stops_within_a_piece_is_fenced(pair: TcpPair) -> None:
    """Half of a piece is in place, and the rest may come at any time."""
    segment = await pair.receiver.open_segment(0, ENDPOINT, 1)
    room = pair.admit(range(4))
    raw = await greeted(pair, segment)
    raw.socket.sendall(pack_head(room.serial, [(0, 4 * SIZE)], is_last=True) + ONES * SIZE)
    await asyncio.wait_for(pair.receiver.close_segment(ENDPOINT, 1), HANG_SECONDS)
    pair.target.tensor.zero_()
    with contextlib.suppress(OSError):  # it may have noticed by now
        raw.socket.sendall(ONES * 3 * SIZE)
    assert await asyncio.to_thread(raw.is_hung_up_on)
    assert not pair.target.tensor.any()
    raw.close()


async def test_a_fence_disturbs_nobody_else(pair: TcpPair) -> None:
    """Neither other workers nor the next generation of the same one."""
    await pair.open(1)
    other = await pair.receiver.open_segment(0, OTHER_ENDPOINT, 1)
    await pair.receiver.open_segment(0, ENDPOINT, 2)
    neighbour = await greeted(pair, other)
    room = pair.admit([7], endpoint=OTHER_ENDPOINT)
    neighbour.socket.sendall(pack_head(room.serial, [(7 * SIZE, SIZE)], is_last=True))
    neighbour.socket.sendall(ONES * (SIZE // 2))
    await pair.receiver.close_segment(ENDPOINT, 1)
    neighbour.socket.sendall(ONES * (SIZE // 2))
    assert (await asyncio.to_thread(neighbour.answer)).name == "LANDED"
    assert {(x.endpoint, x.generation) for x in pair.receiver.segments.values()} == {
        (OTHER_ENDPOINT, 1),
        (ENDPOINT, 2),
    }
    neighbour.close()


async def test_the_engine_itself_is_fenced_and_says_so(pair: TcpPair) -> None:
    """What the fence cut off is UNSETTLED, as nobody answered for it; then nothing is taken."""
    await pair.open()
    room = pair.admit(range(PAGES))
    pair.rooms._newest = 0  # the receiver waits for the room, with the bytes behind it
    del pair.rooms._rooms[room.serial]
    answer = pair.write(room, [(n, n) for n in range(PAGES)])
    fence = asyncio.ensure_future(pair.receiver.close_segment(ENDPOINT, 1))
    assert await outcome_of(answer) is UNSETTLED
    await fence
    assert not pair.target.tensor.any()
    with pytest.raises(EngineError, match="takes no new writes"):
        pair.write(room, [(0, 0)])
    await pair.sender.close_instance(DECODE, 1)


# Broken connections


class Deaf:
    """A receiver that lets everybody in, reads `reads` bytes after that, and answers nothing."""

    def __init__(self, reads: int, *, hangs_up: bool) -> None:
        self._server = socket.create_server((HOST, 0))
        self.port: int = self._server.getsockname()[1]
        self._reads, self._hangs_up = reads, hangs_up
        self.kept: list[socket.socket] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                connection, _ = self._server.accept()
                receive_exactly(connection, GREETING_BYTES)
                connection.sendall(pack_reply(Greeted.ACCEPTED))
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
        except OSError:
            return

    def _serve(self, connection: socket.socket) -> None:
        left = self._reads
        with contextlib.suppress(OSError):
            while left and (got := len(connection.recv(min(left, SIZE)))):
                left -= got
        if self._hangs_up:
            connection.close()
        else:
            self.kept.append(connection)

    def close(self) -> None:
        self._server.close()
        for connection in self.kept:
            connection.close()


async def opened_to(pair: TcpPair, deaf: Deaf) -> None:
    shown = descriptor_of(await pair.receiver.open_segment(0, ENDPOINT, 1))
    there = msgspec.structs.replace(shown, port=deaf.port)
    await pair.sender.open(DECODE, 1, [Segment(0, "tcp", msgspec.msgpack.encode(there))])


async def test_a_lost_connection_is_unsettled(pair: TcpPair) -> None:
    deaf = Deaf(HEAD_BYTES, hangs_up=True)
    await opened_to(pair, deaf)
    answer = pair.write(pair.admit([1]), [(1, 1)])
    assert await outcome_of(answer) is UNSETTLED
    assert "broke" in answer.result()[1]
    await asyncio.wait_for(pair.sender.close_instance(DECODE, 1), HANG_SECONDS)
    deaf.close()


@pytest.mark.parametrize("reads", [0, 1 << 30], ids=["takes nothing", "takes all"])
async def test_silence_is_unsettled(reads: int) -> None:
    pair = TcpPair(write_seconds_max=0.2)
    deaf = Deaf(reads, hangs_up=False)
    await opened_to(pair, deaf)
    answer = pair.write(pair.admit(range(PAGES)), [(n, n) for n in range(PAGES)])
    assert await outcome_of(answer) is UNSETTLED
    assert "no progress" in answer.result()[1]
    await asyncio.wait_for(pair.sender.close_instance(DECODE, 1), HANG_SECONDS)
    deaf.close()
    pair.close()


async def test_what_waits_behind_an_unsettled_write_was_not_sent() -> None:
    pair = TcpPair(connections=1)
    deaf = Deaf(HEAD_BYTES, hangs_up=False)
    await opened_to(pair, deaf)
    room = pair.admit(range(PAGES))
    first = pair.write(room, [(n, n) for n in range(PAGES)])
    second = pair.write(pair.admit([PAGES]), [(0, 0)])
    await until(lambda: deaf.kept, "the first head")
    for connection in [*deaf.kept]:
        connection.close()
    deaf.close()
    await asyncio.wait_for(pair.sender.close_instance(DECODE, 1), HANG_SECONDS)
    assert await outcome_of(first) is UNSETTLED
    assert await outcome_of(second) is WriteOutcome.FAILED
    pair.close()


async def test_closing_does_not_wait_for_a_peer_that_is_silent(pair: TcpPair) -> None:
    """An instance is destroyed at once, though its writes would have years yet."""
    deaf = Deaf(0, hangs_up=False)
    await opened_to(pair, deaf)
    answer = pair.write(pair.admit(range(PAGES)), [(n, n) for n in range(PAGES)])
    await asyncio.wait_for(pair.sender.close_instance(DECODE, 1), HANG_SECONDS)
    assert await outcome_of(answer) is UNSETTLED
    deaf.close()


async def test_content_is_whole_under_many_writers(pair: TcpPair) -> None:
    """One generation after the other is fenced under their hands: what counts as landed has."""
    landed: dict[int, int] = {}
    for generation in range(1, 6):
        await pair.open(generation)
        answers = {}
        for page in range(0, PAGES, 4):
            room = pair.admit(range(page, page + 4), generation)
            sources = [((page + n + generation) % PAGES, page + n) for n in range(4)]
            answers[page] = pair.write(room, sources, generation)
        await asyncio.wait(answers.values(), return_when=asyncio.FIRST_COMPLETED)
        await pair.receiver.close_segment(ENDPOINT, generation)
        await pair.sender.close_instance(DECODE, generation)
        before = pair.target.tensor.clone()
        for page, answer in answers.items():
            if await outcome_of(answer) is WriteOutcome.COMPLETED:
                landed[page] = generation
                wanted = [(page + n + generation) % PAGES for n in range(4)]
                assert torch.equal(before[page : page + 4], pair.source.tensor[wanted])
        assert torch.equal(pair.target.tensor, before), "nothing moved any more"
    assert landed
