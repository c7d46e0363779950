"""xxh3 over slices of pages: of real memory, off the loop, held until it is done."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import msgspec
import pytest
import torch
import xxhash

from pdrt.kv.layout import KvLayout, slice_plan
from pdrt.kv.pool import KvPool
from pdrt.protocol.messages import Outcome, Reason, SliceChecksums
from pdrt.protocol.room_writer import WriteOutcome
from pdrt.transfer.checksums import PageChecksums
from pdrt.transfer.room_task import (
    Close,
    PagesFinished,
    RoomTask,
    SlicePlan,
    Transfer,
    rank_room,
)
from tests.decode.deployment import HANG_SECONDS
from tests.protocol.traces import Prefill
from tests.transfer.test_room_task import ManualSender

LAYOUT = KvLayout(page_size=4, kv_heads=4, layers=2, head_dim=8, dtype="bfloat16")
PAGES = 8


class Pool:
    """A pool of noise with its checksums."""

    def __init__(self) -> None:
        self.pool = KvPool(LAYOUT, PAGES, torch.device("cpu"))
        generator = torch.Generator().manual_seed(5)
        self.pool.tensor.copy_(torch.randn(self.pool.tensor.shape, generator=generator))
        self.checksums = PageChecksums(self.pool)

    def expected(self, page: int, first_head: int, heads: int) -> int:
        """By way of torch, whose view of the pool is that of the model."""
        part = self.pool.tensor[page, first_head : first_head + heads].contiguous()
        return xxhash.xxh3_64_intdigest(part.view(torch.uint8).numpy().tobytes())

    def close(self) -> None:
        self.checksums.close()
        self.pool.close()


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.mark.parametrize("decode_ranks", [1, 2, 4, 8])
async def test_of_what_is_sent(pool: Pool, decode_ranks: int) -> None:
    copies = slice_plan(LAYOUT, 1, decode_ranks)[0]
    found = await pool.checksums.of_source([6, 0, 3], copies)
    assert len(found) == len(copies) == decode_ranks
    for piece, copy in zip(found, copies, strict=True):
        first, count = copy.source_offset // LAYOUT.head_bytes, copy.length // LAYOUT.head_bytes
        assert (piece.decode_rank, piece.offset, piece.length) == (
            copy.decode_rank,
            copy.target_offset,
            copy.length,
        )
        assert piece.pages == tuple(pool.expected(page, first, count) for page in (6, 0, 3))


async def test_what_has_landed_is_known_again_and_a_flipped_bit_is_not(pool: Pool) -> None:
    (copy,) = slice_plan(LAYOUT, 1, 1)[0]
    sent = await pool.checksums.of_source([1, 2], [copy])
    pool.pool.tensor[5] = pool.pool.tensor[1]
    pool.pool.tensor[4] = pool.pool.tensor[2]
    assert await pool.checksums.of_target([5, 4], sent) == sent
    assert await pool.checksums.of_target([4, 5], sent) != sent, "each in its place"
    pool.pool.tensor.view(torch.uint8).view(PAGES, -1)[4, -1] ^= 1
    (landed,) = await pool.checksums.of_target([5, 4], sent)
    assert landed.pages[0] == sent[0].pages[0]
    assert landed.pages[1] != sent[0].pages[1]


async def test_slices_are_taken_where_they_are_in_each_pool(pool: Pool) -> None:
    """One head of four here is all that the receiver's rank holds."""
    copy = slice_plan(LAYOUT, 1, 4)[0][2]
    assert copy.source_offset and not copy.target_offset
    (sent,) = await pool.checksums.of_source([1], [copy])
    assert sent.pages == (pool.expected(1, 2, 1),)
    named = msgspec.structs.replace(sent, offset=copy.source_offset)
    assert await pool.checksums.of_target([1], [named]) == (named,)


async def test_nothing_outside_of_a_page_is_read(pool: Pool) -> None:
    beyond = SliceChecksums(0, LAYOUT.page_bytes, 8, ())
    with pytest.raises(AssertionError):
        await pool.checksums.of_target([0], [beyond])


class HeldDigest:
    """Each digest waits until it may go on."""

    def __init__(self, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go_on = threading.Event()
        self.threads: set[str] = set()
        digest = pool.checksums._digest

        def held(data: memoryview) -> int:
            self.threads.add(threading.current_thread().name)
            assert self.may_go_on.wait(HANG_SECONDS)
            return digest(data)

        monkeypatch.setattr(pool.checksums, "_digest", held)


async def quiet() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("is_first", ["write", "checksums"])
async def test_a_write_is_outstanding_until_its_checksums_are_there_too(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, is_first: str
) -> None:
    """They are read from its source pages: until then these are the room's."""
    held = HeldDigest(pool, monkeypatch)
    task, sender, ends = _room(pool)
    running = asyncio.create_task(task.run())
    task.post(PagesFinished([4, 5, 6], 3, True))
    await quiet()
    if is_first == "write":
        sender.settle[0](WriteOutcome.COMPLETED, "")
        await quiet()
        assert (ends, task.writer.outstanding) == ([], 1)
        held.may_go_on.set()
    else:
        held.may_go_on.set()
        await pool.checksums.of_source([], [])  # in turn: the one before has been done
        await quiet()
        assert (ends, task.writer.outstanding) == ([], 1)
        sender.settle[0](WriteOutcome.COMPLETED, "")
    await running
    (end,) = ends
    assert end.outcome is Outcome.COMPLETE
    (piece,) = end.checksums
    assert piece.pages == tuple(pool.expected(page, 0, 4) for page in (4, 5, 6))
    assert held.threads == {"pdrt-checksum_0"}


@pytest.mark.parametrize("outcome", [WriteOutcome.FAILED, WriteOutcome.UNSETTLED])
async def test_however_a_write_ends_its_checksums_are_waited_for(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, outcome: WriteOutcome
) -> None:
    held = HeldDigest(pool, monkeypatch)
    task, sender, ends = _room(pool)
    running = asyncio.create_task(task.run())
    task.post(PagesFinished([4, 5, 6], 3, True))
    await quiet()
    task.post(Close(Reason.CLIENT_GONE))
    sender.settle[0](outcome, "")
    await quiet()
    assert ends == []
    held.may_go_on.set()
    await running
    assert (len(ends), ends[0].checksums) == (1, ())


def _room(pool: Pool) -> tuple[RoomTask, ManualSender, list]:
    sender, ends = ManualSender(), []
    size = LAYOUT.page_bytes
    plan = SlicePlan(tuple(slice_plan(LAYOUT, 1, 1)[0]), size, {0: size})
    transfer = Transfer(sender, plan, pool.checksums)
    room = rank_room(Prefill().make_grant())
    task = RoomTask(room, transfer, 64, lambda room, end: ends.append(end))
    return task, sender, ends


async def test_of_a_pool_on_a_gpu(pool: Pool) -> None:
    """Read piece by piece, as nobody can look at it where it is."""
    (slices,) = slice_plan(LAYOUT, 1, 2)
    expected = await pool.checksums.of_source([6, 0, 3], slices)
    pool.pool.cuda = object()  # type: ignore[assignment]
    checksums = PageChecksums(pool.pool)
    assert await checksums.of_source([6, 0, 3], slices) == expected
    checksums.close()
