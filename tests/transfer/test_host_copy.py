"""Copies of many ranges: what both ways of making them have in common, and how they are cut."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.transfer.engine import ByteRange
from pdrt.transfer.host_copy import LIBRARY, CopyRanges, copy_one_by_one, load_copy
from pdrt.transfer.sending import batches, cut

SIZE = 4096
SOURCE = bytes(n % 251 for n in range(SIZE))


@pytest.fixture(params=["compiled", "one by one"], scope="module")
def copy_ranges(request: pytest.FixtureRequest) -> CopyRanges:
    if request.param == "one by one":
        return copy_one_by_one
    if not LIBRARY.exists():
        pytest.skip("there was no compiler when pdrt was installed")
    return load_copy()


ONE = st.tuples(st.integers(0, SIZE - 1), st.integers(0, SIZE - 1), st.integers(0, 300)).map(
    lambda each: ByteRange(each[0], each[1], min(each[2], SIZE - max(each[0], each[1])))
)


@given(st.lists(ONE, max_size=20))
def test_every_range_and_nothing_else(copy_ranges: CopyRanges, ranges: list[ByteRange]) -> None:
    """In order, as what is copied later may lie over what was copied before."""
    source = ctypes.create_string_buffer(SOURCE, SIZE)
    target = ctypes.create_string_buffer(SIZE)
    copy_ranges(ctypes.addressof(target), ctypes.addressof(source), ranges)
    expected = bytearray(SIZE)
    for piece in ranges:
        copied = SOURCE[piece.source_offset : piece.source_offset + piece.length]
        expected[piece.target_offset : piece.target_offset + piece.length] = copied
    assert target.raw == expected
    assert source.raw == SOURCE


@pytest.mark.parametrize("content", [None, b"", b"not a library"])
def test_without_a_library_that_loads(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "libpdrt_copy.so"
    if content is not None:
        path.write_bytes(content)
    assert load_copy(path) is copy_one_by_one


def test_a_library_of_another_version(tmp_path: Path) -> None:
    """It loads and lacks what is looked for."""
    libc = next(
        Path(line.split()[-1])
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libc.so" in line or "libc-" in line
    )
    assert load_copy(libc) is copy_one_by_one


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 20))
def test_batches_are_bounded_and_lose_nothing(lengths: list[int], bytes_max: int) -> None:
    ranges, offset = [], 0
    for length in lengths:
        ranges.append(ByteRange(offset, 7 * offset, length))
        offset += length
    found = list(batches(ranges, bytes_max))
    assert all(0 < sum(piece.length for piece in batch) <= bytes_max for batch in found)
    # As many bytes as fit: no two neighbours would have.
    for one, other in itertools.pairwise(found):
        assert sum(piece.length for piece in one) + other[0].length > bytes_max
    pieces = [piece for batch in found for piece in batch]
    assert pieces == list(cut(ranges, bytes_max))
