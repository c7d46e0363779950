"""Touching a pool ahead of its use: all of it, nothing changed, and not at any price."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pdrt.kv.layout import KvLayout
from pdrt.kv.pool import KvPool
from pdrt.kv.populate import PIECE_BYTES, SPARE_BYTES, populate

LAYOUT = KvLayout(page_size=16, kv_heads=3, layers=5, head_dim=64, dtype="float32")
PAGES = 37
"""Not a whole number of pieces."""


@pytest.fixture
def pool() -> Iterator[KvPool]:
    pool = KvPool(LAYOUT, PAGES, torch.device("cpu"))
    assert pool.size_bytes > 2 * PIECE_BYTES and pool.size_bytes % PIECE_BYTES
    yield pool
    pool.close()


def resident_bytes(pool: KvPool) -> int:
    """Of the mapping that the pool lies in."""
    is_ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            start, end = (int(part, 16) for part in words[0].split("-"))
            is_ours = start <= pool.address < end
        elif is_ours and words[0] == "Rss:":
            return int(words[1]) * 1024
    raise AssertionError("the pool is mapped nowhere")


def test_all_of_it_and_nothing_changed(pool: KvPool) -> None:
    pool.tensor[3] = 7.0
    assert resident_bytes(pool) < pool.size_bytes / 2
    populate(pool.tensor, lambda: 2 * SPARE_BYTES).join()
    assert resident_bytes(pool) >= pool.size_bytes
    assert (pool.tensor[3] == 7.0).all()
    assert pool.tensor.count_nonzero() == pool.tensor[3].numel()


def test_nothing_where_memory_is_short(pool: KvPool) -> None:
    populate(pool.tensor, lambda: SPARE_BYTES - 1).join()
    assert resident_bytes(pool) == 0
