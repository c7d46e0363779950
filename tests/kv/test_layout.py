"""Slice plans as arithmetic: every byte of every decode page is written exactly once."""

from __future__ import annotations

import itertools

import pytest

from pdrt.kv.layout import DTYPE_BYTES, HeadRange, KvLayout, rank_heads, slice_plan

RANKS = (1, 2, 3, 4, 6, 8)
HEADS = (1, 2, 3, 4, 6, 8, 12)


def layout(kv_heads: int) -> KvLayout:
    return KvLayout(page_size=2, kv_heads=kv_heads, layers=1, head_dim=1, dtype="bfloat16")


def divides(kv_heads: int, ranks: int) -> bool:
    return max(kv_heads, ranks) % min(kv_heads, ranks) == 0


@pytest.mark.parametrize("kv_heads", HEADS)
@pytest.mark.parametrize(("prefill", "decode"), list(itertools.product(RANKS, RANKS)))
def test_every_decode_byte_is_written_once_from_the_right_head(
    kv_heads: int, prefill: int, decode: int
) -> None:
    if not (divides(kv_heads, prefill) and divides(kv_heads, decode)):
        with pytest.raises(ValueError, match="do not divide"):
            slice_plan(layout(kv_heads), prefill, decode)
        return
    shape = layout(kv_heads)
    sources, targets = rank_heads(kv_heads, prefill), rank_heads(kv_heads, decode)
    plan = slice_plan(shape, prefill, decode)
    assert len(plan) == prefill, "every prefill rank is named"
    written: dict[tuple[int, int], tuple[int, int]] = {}
    for source, copies in zip(sources, plan, strict=True):
        for copy in copies:
            assert copy.length > 0
            assert copy.source_offset + copy.length <= source.count * shape.head_bytes
            for byte in range(copy.length):
                head, within = divmod(copy.source_offset + byte, shape.head_bytes)
                key = copy.decode_rank, copy.target_offset + byte
                assert key not in written, "a byte is written twice"
                written[key] = source.first + head, within
    wanted = {
        (rank, head * shape.head_bytes + byte): (target.first + head, byte)
        for rank, target in enumerate(targets)
        for head in range(target.count)
        for byte in range(shape.head_bytes)
    }
    assert written == wanted


@pytest.mark.parametrize("kv_heads", HEADS)
@pytest.mark.parametrize("ranks", RANKS)
def test_rank_heads_cover_every_head(kv_heads: int, ranks: int) -> None:
    if not divides(kv_heads, ranks):
        with pytest.raises(ValueError, match=f"{kv_heads}.*{ranks}|{ranks}.*{kv_heads}"):
            rank_heads(kv_heads, ranks)
        return
    held = rank_heads(kv_heads, ranks)
    assert len(held) == ranks
    counts = [0] * kv_heads
    for part in held:
        assert part.end <= kv_heads
        for head in range(part.first, part.end):
            counts[head] += 1
    assert set(counts) == {max(1, ranks // kv_heads)}


def test_of_replicas_the_first_sends_and_the_others_are_idle() -> None:
    plan = slice_plan(layout(2), 4, 1)
    assert [len(copies) for copies in plan] == [1, 0, 1, 0]
    assert rank_heads(2, 4) == [HeadRange(0, 1), HeadRange(0, 1), HeadRange(1, 1), HeadRange(1, 1)]


def test_every_decode_replica_is_written() -> None:
    plan = slice_plan(layout(1), 1, 3)
    assert [copy.decode_rank for copy in plan[0]] == [0, 1, 2]
    assert {copy.source_offset for copy in plan[0]} == {0}


def test_one_rank_to_one_rank_is_one_range_of_a_whole_page() -> None:
    shape = layout(3)
    [[copy]] = slice_plan(shape, 1, 1)
    assert (copy.source_offset, copy.target_offset) == (0, 0)
    assert copy.length == shape.page_bytes


def test_page_bytes_of_smollm2_135m() -> None:
    shape = KvLayout(page_size=16, kv_heads=3, layers=30, head_dim=64, dtype="bfloat16")
    assert shape.page_bytes == 368_640
    assert shape.head_bytes * 3 == shape.page_bytes


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_pages_for(tokens: int, pages: int) -> None:
    shape = KvLayout(page_size=16, kv_heads=1, layers=1, head_dim=1, dtype="float32")
    assert shape.pages_for(tokens) == pages


def test_known_dtypes() -> None:
    assert DTYPE_BYTES == {"float32": 4, "bfloat16": 2, "float16": 2}
