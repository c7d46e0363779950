"""Both sides of the tcp engine on one loop, and a sender of its own that keeps no rules."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import msgspec
import torch

from pdrt.ids import Incarnation, RoomId
from pdrt.kv.layout import KvLayout
from pdrt.kv.pool import KvPool
from pdrt.protocol.messages import Segment
from pdrt.protocol.room_writer import WriteOutcome
from pdrt.transfer.engine import ByteRange, WriteRequest, coalesce
from pdrt.transfer.tcp.descriptor import TcpDescriptor
from pdrt.transfer.tcp.receiver import Place, TcpReceiver
from pdrt.transfer.tcp.sender import TcpSender
from pdrt.transfer.tcp.sockets import receive_exactly
from pdrt.transfer.tcp.wire import (
    ANSWER_BYTES,
    REPLY_BYTES,
    Greeted,
    Greeting,
    pack_greeting,
    unpack_answer,
    unpack_reply,
)
from pdrt.transfer.writable import AdmitRoom, Verdict, WritableRooms
from tests.decode.deployment import HANG_SECONDS, NEVER

DECODE = Incarnation(0xD0)
ENDPOINT = "tcp://127.0.0.1:7001"
OTHER_ENDPOINT = "tcp://127.0.0.1:7002"
LAYOUT = KvLayout(page_size=16, kv_heads=4, layers=4, head_dim=32, dtype="float32")
SIZE = LAYOUT.page_bytes
PAGES = 256
HOST = "127.0.0.1"
Answer = tuple[WriteOutcome, str]


def make_pool(pages: int = PAGES) -> KvPool:
    return KvPool(LAYOUT, pages, torch.device("cpu"))


class TcpPair:
    """A receiver and a sender, with a pool each; the sender's is full of random numbers."""

    def __init__(self, connections: int = 3, write_seconds_max: float = NEVER) -> None:
        self.source, self.target = make_pool(), make_pool()
        generator = torch.Generator().manual_seed(7)
        self.source.tensor.copy_(torch.rand(self.source.tensor.shape, generator=generator))
        self.rooms = WritableRooms(SIZE)
        self.receiver = TcpReceiver(self.target, self.rooms, Place(0, HOST, HOST))
        self.sender = TcpSender(self.source, connections, write_seconds_max)
        self.serial = 0

    async def open(self, generation: int = 1, endpoint: str = ENDPOINT) -> Segment:
        segment = await self.receiver.open_segment(0, endpoint, generation)
        await self.sender.open(DECODE, generation, [segment])
        return segment

    def admit(self, pages: Sequence[int], generation: int = 1, endpoint: str = ENDPOINT) -> RoomId:
        """A room that may write `pages`."""
        self.serial += 1
        room = RoomId(DECODE, self.serial)
        self.rooms.admit(AdmitRoom(room, endpoint, generation, tuple(pages)))
        return room

    def write(
        self, room: RoomId, pages: Sequence[tuple[int, int]], generation: int = 1
    ) -> asyncio.Future[Answer]:
        """Whole pages, each (source, target)."""
        ranges = [ByteRange(source * SIZE, target * SIZE, SIZE) for source, target in pages]
        return self.write_ranges(room, coalesce(ranges), generation)

    def write_ranges(
        self, room: RoomId, ranges: tuple[ByteRange, ...], generation: int = 1
    ) -> asyncio.Future[Answer]:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def settled(outcome: WriteOutcome, detail: str) -> None:
            answer.set_result((outcome, detail))

        self.sender.write(WriteRequest(room, generation, 0, ranges), settled)
        return answer

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


async def outcome_of(answer: asyncio.Future[Answer]) -> WriteOutcome:
    outcome, _ = await asyncio.wait_for(answer, HANG_SECONDS)
    return outcome


def descriptor_of(segment: Segment) -> TcpDescriptor:
    return msgspec.msgpack.decode(segment.descriptor, type=TcpDescriptor)


class Raw:
    """A connection by hand. Blocking: calls belong on threads while the loop is to turn."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection((HOST, port), HANG_SECONDS)

    def greet(self, shown: TcpDescriptor, generation: int = 1, **changes: object) -> Greeted:
        greeting = Greeting(shown.token, shown.segment, DECODE, 0, generation)
        self.socket.sendall(pack_greeting(greeting._replace(**changes)))
        return unpack_reply(receive_exactly(self.socket, REPLY_BYTES))

    def answer(self) -> Verdict:
        return unpack_answer(receive_exactly(self.socket, ANSWER_BYTES))

    def is_hung_up_on(self) -> bool:
        """Waits until the other side has."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self.socket.close()
