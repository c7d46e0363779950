"""Pool memory: in a memfd on CPU, seen by whoever maps it, and hidden from forked children."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pdrt.errors import ConfigError
from pdrt.kv.layout import KvLayout
from pdrt.kv.pool import KvPool
from tests.descriptors import open_descriptors

LAYOUT = KvLayout(page_size=4, kv_heads=2, layers=3, head_dim=8, dtype="float32")
PAGES = 5
CPU = torch.device("cpu")


@pytest.fixture
def pool() -> Iterator[KvPool]:
    pool = KvPool(LAYOUT, PAGES, CPU)
    yield pool
    pool.close()


def test_shape_size_and_address(pool: KvPool) -> None:
    assert pool.tensor.shape == (PAGES, 2, 3, 2, 4, 8)
    assert pool.tensor.is_contiguous()
    assert pool.tensor.dtype is torch.float32
    assert pool.size_bytes == PAGES * LAYOUT.page_bytes == pool.tensor.nbytes
    assert pool.address == pool.tensor.data_ptr()
    assert pool.fd is not None
    assert os.fstat(pool.fd).st_size == pool.size_bytes


def test_starts_zeroed(pool: KvPool) -> None:
    assert not pool.tensor.any()


def test_bytes_are_seen_through_the_memfd_both_ways(pool: KvPool) -> None:
    assert pool.fd is not None
    pool.tensor[1] = 1.5
    with mmap.mmap(pool.fd, pool.size_bytes, mmap.MAP_SHARED) as view:
        page = view[LAYOUT.page_bytes : 2 * LAYOUT.page_bytes]
        assert torch.frombuffer(bytearray(page), dtype=torch.float32).eq(1.5).all()
        view[: LAYOUT.page_bytes] = torch.full((LAYOUT.page_bytes // 4,), 2.0).numpy().tobytes()
    assert pool.tensor[0].eq(2.0).all()
    assert not pool.tensor[2:].any()


def test_one_page_is_one_block_and_one_head_one_range_of_it(pool: KvPool) -> None:
    assert pool.tensor[1].data_ptr() == pool.address + LAYOUT.page_bytes
    assert pool.tensor[1, 1].data_ptr() == pool.address + LAYOUT.page_bytes + LAYOUT.head_bytes
    assert pool.tensor[1, 1].is_contiguous()


def flags_of(address: int) -> list[str]:
    """`VmFlags` of the mapping that holds `address`."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name and not name.endswith(":"):
            first, end = (int(part, 16) for part in name.split("-"))
            is_inside = first <= address < end
        elif is_inside and name == "VmFlags:":
            return rest.split()
    raise AssertionError("not mapped")


def test_a_forked_child_does_not_map_the_pool(pool: KvPool) -> None:
    assert "dc" in flags_of(pool.address), "MADV_DONTFORK"


def test_descriptor_is_not_inherited_across_exec(pool: KvPool) -> None:
    assert pool.fd is not None
    assert not os.get_inheritable(pool.fd)


def test_close_gives_the_descriptor_back_and_is_idempotent() -> None:
    before = open_descriptors()
    pool = KvPool(LAYOUT, PAGES, CPU)
    assert open_descriptors() - before
    pool.close()
    pool.close()
    assert pool.fd is None
    assert pool.tensor[0].eq(0).all(), "the mapping goes with the tensor, not with the descriptor"
    del pool
    assert open_descriptors() <= before


@pytest.mark.parametrize("size_bytes", [2**50, 2**70])
def test_too_large_names_the_size_and_leaks_nothing(size_bytes: int) -> None:
    before = open_descriptors()
    with pytest.raises(ConfigError, match=r"KV pool of \d+ pages \(\d+ MiB\).*smaller"):
        KvPool(LAYOUT, size_bytes // LAYOUT.page_bytes, CPU)
    assert open_descriptors() <= before
