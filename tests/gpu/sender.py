"""A pool here and, in a process of its own, a prefill rank that sends to it through `local`."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from pdrt.errors import EngineError
from pdrt.ids import Incarnation, RoomId
from pdrt.kv.layout import KvLayout
from pdrt.kv.pool import KvPool
from pdrt.protocol.messages import Segment
from pdrt.protocol.room_writer import WriteOutcome
from pdrt.transfer.engine import ByteRange, WriteRequest
from pdrt.transfer.local import LocalReceiver, LocalSender

LAYOUT = KvLayout(page_size=16, kv_heads=8, layers=32, head_dim=128, dtype="bfloat16")
"""Of Llama-3.1-8B: 2 MiB a page."""
PAGES = 256
GPU = torch.device("cuda", 0)
DECODE = Incarnation(0xD0)
WRITE_SECONDS_MAX = 30.0
START_SECONDS = 120.0
ENDLESS = "write for ever"
"""Instead of ranges: copy the whole pool, again and again, each time other pages."""


def content() -> torch.Tensor:
    """What the sender's pool holds, on the CPU."""
    generator = torch.Generator().manual_seed(5)
    shape = (PAGES, LAYOUT.page_bytes // 8)
    return torch.randint(-(2**62), 2**62, shape, generator=generator)


class Sending:
    """This side's pool, and the other process."""

    def __init__(self) -> None:
        self.pool = KvPool(LAYOUT, PAGES, GPU)
        segment = asyncio.run(LocalReceiver(self.pool).open_segment(0, "tcp://127.0.0.1:1", 1))
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_main, args=(theirs, segment.descriptor))
        self.process.start()
        theirs.close()
        assert self.connection.poll(START_SECONDS), "it does not start"
        assert self.connection.recv() == "open"

    def words(self) -> torch.Tensor:
        """The pool as (pages, 8-byte words), on the GPU."""
        return self.pool.tensor.view(-1).view(torch.int64).view(PAGES, -1)

    def write(self, ranges: Sequence[ByteRange]) -> tuple[WriteOutcome, str]:
        self.connection.send(tuple(ranges))
        outcome, detail, _ = self.connection.recv()
        return outcome, detail

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _main(connection: Connection, descriptor: bytes) -> None:
    asyncio.run(_send(connection, descriptor))


async def _send(connection: Connection, descriptor: bytes) -> None:
    pool = KvPool(LAYOUT, PAGES, GPU)
    pool.tensor.view(-1).view(torch.int64).view(PAGES, -1).copy_(content())
    torch.cuda.synchronize()
    sender = LocalSender(pool, WRITE_SECONDS_MAX)
    await sender.open(DECODE, 1, [Segment(0, "local", descriptor)])
    connection.send("open")
    while (asked := await asyncio.to_thread(connection.recv)) is not None:
        if asked == ENDLESS:
            await _write_for_ever(sender, connection)
        began = asyncio.get_running_loop().time()
        outcome, detail = await write(sender, asked)
        seconds = asyncio.get_running_loop().time() - began
        connection.send((outcome, detail, seconds))
    await sender.close_instance(DECODE, 1)
    connection.send("closed")


async def _write_for_ever(sender: LocalSender, connection: Connection) -> None:
    size, shift = LAYOUT.page_bytes, 0
    while True:
        shift += 1
        pages = [ByteRange((n + shift) % PAGES * size, n * size, size) for n in range(PAGES)]
        outcome, detail = await write(sender, pages)
        assert outcome is WriteOutcome.COMPLETED, detail
        if shift == 1:
            connection.send("writing")


async def write(sender: LocalSender, ranges: Sequence[ByteRange]) -> tuple[WriteOutcome, str]:
    """One write, and its answer; FAILED where it is not accepted."""
    answer: asyncio.Future[tuple[WriteOutcome, str]] = asyncio.get_running_loop().create_future()
    request = WriteRequest(RoomId(DECODE, 1), 1, 0, tuple(ranges))
    try:
        sender.write(request, lambda outcome, detail: answer.set_result((outcome, detail)))
    except EngineError as error:
        return WriteOutcome.FAILED, str(error)
    return await answer
