"""Geometry of one KV page and the byte ranges that a hand-over copies. Pure.

A rank's pool is `[page, kv_head, layer, k/v, token, head_dim]`, contiguous: a page is one block,
and the KV heads that a tensor-parallel slice needs are one contiguous range of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

Size = Annotated[int, Meta(ge=1, le=2**20)]
"""No layout that a peer names makes anybody divide by zero."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KvLayout(msgspec.Struct, frozen=True, array_like=True):
    """Shape of the KV of a whole model (all ranks together)."""

    page_size: Size
    """Tokens per page."""
    kv_heads: Size
    layers: Size
    head_dim: Size
    dtype: str
    """Key of `DTYPE_BYTES`."""

    @property
    def head_bytes(self) -> int:
        """Bytes of one KV head of one page: all layers, keys and values."""
        return self.layers * 2 * self.page_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page with all KV heads."""
        return self.kv_heads * self.head_bytes

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)


class HeadRange(msgspec.Struct, frozen=True, array_like=True):
    """KV heads `[first, first + count)` of the whole model, as held by one rank."""

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


def rank_heads(kv_heads: int, ranks: int) -> list[HeadRange]:
    """The KV heads that each rank of a worker holds.

    With more ranks than heads, heads are replicated (consecutive ranks share one); otherwise the
    heads must divide evenly.

    Raises:
        ValueError: `kv_heads` and `ranks` do not divide either way.
    """
    if ranks <= kv_heads:
        if kv_heads % ranks:
            raise ValueError(f"{kv_heads} KV heads do not divide over {ranks} ranks")
        count = kv_heads // ranks
        return [HeadRange(rank * count, count) for rank in range(ranks)]
    if ranks % kv_heads:
        raise ValueError(f"{ranks} ranks do not divide over {kv_heads} KV heads")
    replicas = ranks // kv_heads
    return [HeadRange(rank // replicas, 1) for rank in range(ranks)]


def rank_layout(layout: KvLayout, rank: int, ranks: int) -> KvLayout:
    """Geometry of one rank's pages: those of the whole model with the heads that the rank holds.

    Raises:
        ValueError: the heads do not divide over the ranks.
    """
    held = rank_heads(layout.kv_heads, ranks)[rank]
    return msgspec.structs.replace(layout, kv_heads=held.count)


class SliceCopy(msgspec.Struct, frozen=True):
    """What one prefill rank sends to one decode rank, per page."""

    decode_rank: int
    source_offset: int
    """Bytes from the start of the page in the sender's pool."""
    target_offset: int
    """Bytes from the start of the page in the receiver's pool."""
    length: int
    """Bytes."""


def slice_plan(layout: KvLayout, prefill_ranks: int, decode_ranks: int) -> list[list[SliceCopy]]:
    """For each prefill rank, the ranges of a page it sends, and to whom.

    Every head of every decode rank is sent exactly once: of replicas, the first sends. A rank
    with nothing to send has an empty list and is still a named writer.

    Raises:
        ValueError: the heads do not divide over the ranks of one side.
    """
    sources = rank_heads(layout.kv_heads, prefill_ranks)
    targets = rank_heads(layout.kv_heads, decode_ranks)
    plan: list[list[SliceCopy]] = []
    for rank, source in enumerate(sources):
        is_replica = rank > 0 and sources[rank - 1] == source
        plan.append([] if is_replica else list(_overlaps(layout, source, targets)))
    return plan


def _overlaps(
    layout: KvLayout, source: HeadRange, targets: Sequence[HeadRange]
) -> Iterator[SliceCopy]:
    for rank, target in enumerate(targets):
        first, end = max(source.first, target.first), min(source.end, target.end)
        if first < end:
            yield SliceCopy(
                decode_rank=rank,
                source_offset=(first - source.first) * layout.head_bytes,
                target_offset=(first - target.first) * layout.head_bytes,
                length=(end - first) * layout.head_bytes,
            )
