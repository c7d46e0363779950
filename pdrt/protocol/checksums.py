"""Checksums of what a hand-over sends and of what has landed, compared page by page. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from pdrt.kv.layout import KvLayout, rank_heads
from pdrt.protocol.messages import SliceChecksums


def merged(parts: Iterable[SliceChecksums]) -> tuple[SliceChecksums, ...]:
    """One entry for each slice, its pages in the order of `parts`."""
    slices: dict[tuple[int, int, int], SliceChecksums] = {}
    for part in parts:
        key = part.decode_rank, part.offset, part.length
        before = slices.get(key)
        pages = part.pages if before is None else before.pages + part.pages
        slices[key] = msgspec.structs.replace(part, pages=pages)
    return tuple(slices.values())


def cover(slices: Sequence[SliceChecksums], layout: KvLayout, ranks: int, pages: int) -> bool:
    """Of `pages` pages, every byte on every one of `ranks` decode ranks lies in exactly one slice,
    and no slice reaches beyond."""
    covered = dict.fromkeys(range(ranks), 0)
    for piece in sorted(slices, key=lambda x: (x.decode_rank, x.offset)):
        if covered.get(piece.decode_rank) != piece.offset or len(piece.pages) != pages:
            return False
        covered[piece.decode_rank] += piece.length
    heads = rank_heads(layout.kv_heads, ranks)
    return all(covered[rank] == held.count * layout.head_bytes for rank, held in enumerate(heads))


def differing(sent: Sequence[SliceChecksums], landed: Sequence[SliceChecksums]) -> tuple[int, ...]:
    """Which pages hold something else than what was sent, counted from the first one written. Both
    are of the same slices in the same order."""
    assert len(sent) == len(landed), (len(sent), len(landed))
    found: set[int] = set()
    for ours, theirs in zip(landed, sent, strict=True):
        pairs = zip(ours.pages, theirs.pages, strict=True)
        found.update(index for index, (is_, was) in enumerate(pairs) if is_ != was)
    return tuple(sorted(found))
