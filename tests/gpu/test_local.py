"""The local engine between two processes that share a GPU."""

from __future__ import annotations

import random

import torch

from pdrt.kv.pool import KvPool
from pdrt.protocol.room_writer import WriteOutcome
from pdrt.transfer.engine import ByteRange
from tests.gpu.sender import LAYOUT, PAGES, Sending, content

SIZE, HEAD = LAYOUT.page_bytes, LAYOUT.head_bytes
COMPLETED = (WriteOutcome.COMPLETED, "")


def test_the_pool_is_an_allocation_of_its_own(gpu: torch.device) -> None:
    """And gives its memory back with its last tensor."""
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info(gpu)
    pool = KvPool(LAYOUT, PAGES, gpu)
    assert pool.tensor.device == gpu
    assert pool.tensor.dtype is torch.bfloat16
    assert not pool.tensor.any()
    assert torch.cuda.mem_get_info(gpu)[0] <= before - pool.size_bytes
    pool.tensor[3] = 1.5
    assert pool.tensor[3].eq(1.5).all()
    page = pool.tensor[3]
    pool.close()
    del pool
    assert page.eq(1.5).all()
    del page
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info(gpu)[0] >= before - 2**26, "but for torch's own"


def test_pages_land_where_they_are_sent(sending: Sending) -> None:
    expected = torch.zeros_like(content())
    dice = random.Random(3)
    for _ in range(4):
        sources = [dice.randrange(PAGES) for _ in range(40)]
        targets = dice.sample(range(PAGES), 40)
        pairs = list(zip(sources, targets, strict=True))
        assert sending.write([ByteRange(s * SIZE, t * SIZE, SIZE) for s, t in pairs]) == COMPLETED
        for source, target in pairs:
            expected[target] = content()[source]
        assert torch.equal(sending.words().cpu(), expected)


def test_slices_of_every_page(sending: Sending) -> None:
    """More ranges than are queued at once: one KV head of each page, and another's neighbour."""
    sending.pool.tensor.zero_()
    torch.cuda.synchronize()
    ranges = [ByteRange(n * SIZE + h * HEAD, n * SIZE + (7 - h) * HEAD, HEAD)
              for n in range(PAGES) for h in range(0, 8, 2)]  # fmt: skip
    assert sending.write(ranges) == COMPLETED
    mine, theirs = (x.view(PAGES, LAYOUT.kv_heads, -1) for x in (sending.words().cpu(), content()))
    assert torch.equal(mine[:, 1::2].flip(1), theirs[:, 0::2])
    assert not mine[:, 0::2].any()


def test_a_write_behind_the_pools_end_is_no_write(sending: Sending) -> None:
    """Nothing that CUDA would have to notice."""
    outcome, detail = sending.write([ByteRange(0, PAGES * SIZE - SIZE + 8, SIZE)])
    assert outcome is WriteOutcome.FAILED
    assert "outside" in detail
    assert sending.write([ByteRange(0, 0, SIZE)]) == COMPLETED
