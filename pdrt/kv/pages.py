"""Who owns each page of one pool. Pure.

Every page has exactly one owner at every instant: free, a sequence, a lease, a room, or the
prefix cache, whose pages are held by those who read them. `free + owned == total` always.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from pdrt.errors import PoolExhausted


class OwnerKind(Enum):
    FREE = "free"
    SEQUENCE = "sequence"
    CACHE = "cache"
    LEASE = "lease"
    ROOM = "room"

    # Of the member, as equality is: Enum's own is a Python function that hashes the name, and
    # owners are looked up for every page.
    __hash__ = object.__hash__


class Owner(NamedTuple):
    """One owner: its kind and what tells it from others of the kind (a room or request id)."""

    kind: OwnerKind
    key: Hashable


CACHE = Owner(OwnerKind.CACHE, None)
_NONE: frozenset[int] = frozenset()


class PageTable:
    """Owners of pages 0 … total - 1, and the free list: a stack, so that what was freed last,
    and is still warm, is taken first. Immediate reuse is safe here because nothing late can
    write (docs/protocol.md, I2 and I3).

    A foreign or double free is our own bug and raises AssertionError, changing nothing.
    """

    def __init__(self, total: int) -> None:
        assert total > 0, total
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        # None exactly for the pages in `_free`.
        self._owners: list[Owner | None] = [None] * total
        self._counts: Counter[OwnerKind] = Counter({OwnerKind.FREE: total})
        # How many read each cached page; an entry, perhaps 0, exactly for pages owned by CACHE.
        self._readers: dict[int, int] = {}
        # The cached pages that each holder reads; no empty entries. By holder, as holders take and
        # drop whole prefixes at once.
        self._held: dict[Owner, set[int]] = {}

    @property
    def free_count(self) -> int:
        return len(self._free)

    def count(self, kind: OwnerKind) -> int:
        """Pages owned by owners of `kind`."""
        return self._counts[kind]

    def owner(self, page: int) -> Owner | None:
        """None for a free page."""
        return self._owners[page]

    def take(self, count: int, owner: Owner) -> list[int]:
        """Give `count` free pages to `owner`. O(count).

        Raises:
            PoolExhausted: fewer are free; none was taken.
        """
        assert owner.kind not in (OwnerKind.FREE, OwnerKind.CACHE), owner
        assert count >= 0, count
        if count > len(self._free):
            raise PoolExhausted(f"{count} pages wanted, {len(self._free)} of {self.total} free")
        first = len(self._free) - count
        pages = self._free[first:]
        pages.reverse()
        del self._free[first:]
        for page in pages:
            self._owners[page] = owner
        self._count(OwnerKind.FREE, owner.kind, count)
        return pages

    def pass_on(self, pages: Sequence[int], giver: Owner, taker: Owner) -> None:
        """`giver`'s pages become `taker`'s, in one step."""
        assert giver.kind is not OwnerKind.CACHE, "cached pages leave through evict()"
        assert taker.kind not in (OwnerKind.FREE, OwnerKind.CACHE), taker
        self._pass(pages, giver, taker)

    def free(self, pages: Sequence[int], owner: Owner) -> None:
        """`owner` gives `pages` back. O(len(pages))."""
        assert owner.kind is not OwnerKind.CACHE, "cached pages leave through evict()"
        self._require(pages, owner)
        self._give_back(pages[::-1])
        self._count(owner.kind, OwnerKind.FREE, len(pages))

    def cache(self, pages: Sequence[int], owner: Owner) -> None:
        """`owner`'s pages become cached ones, which it goes on holding."""
        assert owner.kind not in (OwnerKind.FREE, OwnerKind.CACHE), owner
        self._pass(pages, owner, CACHE)
        self._readers.update(dict.fromkeys(pages, 1))
        self._note_held(pages, owner)

    def hold(self, pages: Iterable[int], holder: Owner) -> None:
        """`holder` reads these cached pages: they cannot be evicted until it drops them."""
        pages = list(pages)
        assert self._readable(pages), (pages, holder)
        assert self._held.get(holder, _NONE).isdisjoint(pages), (pages, holder)
        for page in pages:
            self._readers[page] += 1
        self._note_held(pages, holder)

    def drop(self, pages: Iterable[int], holder: Owner) -> None:
        """`holder` no longer reads these cached pages."""
        pages = list(pages)
        assert self._readable(pages), (pages, holder)
        assert self.are_held_by(pages, holder), (pages, holder)
        for page in pages:
            self._readers[page] -= 1
        self._note_dropped(pages, holder)

    def pass_hold(self, pages: Iterable[int], giver: Owner, taker: Owner) -> None:
        """`taker` reads these cached pages in `giver`'s place."""
        pages = list(pages)
        assert self._readable(pages), (pages, giver, taker)
        assert self.are_held_by(pages, giver), (pages, giver)
        assert self._held.get(taker, _NONE).isdisjoint(pages), (pages, taker)
        self._note_dropped(pages, giver)
        self._note_held(pages, taker)

    def is_held(self, page: int) -> bool:
        """Somebody reads this cached page."""
        assert page in self._readers, page
        return self._readers[page] > 0

    def are_held_by(self, pages: Sequence[int], holder: Owner) -> bool:
        """`holder` reads all of these cached pages."""
        return self._held.get(holder, _NONE).issuperset(pages)

    def holders(self, page: int) -> frozenset[Owner]:
        """Who reads this cached page. O(holders)."""
        assert page in self._readers, page
        return frozenset(holder for holder, held in self._held.items() if page in held)

    def held_by(self, kind: OwnerKind) -> dict[Owner, set[int]]:
        """Every reader of `kind` with the cached pages that it reads. O(cached pages)."""
        return {holder: set(held) for holder, held in self._held.items() if holder.kind is kind}

    def evict(self, pages: Sequence[int]) -> None:
        """Cached pages that nobody holds become free, the last of them to be taken first."""
        assert self._readable(pages), (pages, "not cached")
        assert not any(map(self._readers.__getitem__, pages)), (pages, "held")
        for page in pages:
            del self._readers[page]
        self._give_back(pages)
        self._count(OwnerKind.CACHE, OwnerKind.FREE, len(pages))

    def counts(self) -> dict[OwnerKind, int]:
        """Pages by kind of owner, every kind named."""
        return {kind: self._counts[kind] for kind in OwnerKind}

    def pages_of(self, kind: OwnerKind) -> dict[Owner, set[int]]:
        """Every owner of `kind` with its pages. O(total)."""
        found: dict[Owner, set[int]] = {}
        for page, owner in enumerate(self._owners):
            if owner is not None and owner.kind is kind:
                found.setdefault(owner, set()).add(page)
        return found

    def check(self) -> None:
        """Raise AssertionError where the table contradicts itself (I1). O(total)."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is on the free list twice"
        assert free == {p for p, owner in enumerate(self._owners) if owner is None}
        kinds = Counter(OwnerKind.FREE if owner is None else owner.kind for owner in self._owners)
        assert +kinds == +self._counts, (kinds, self._counts)
        cached = {p for p, owner in enumerate(self._owners) if owner is CACHE}
        assert cached == self._readers.keys(), "readers of a page that is not cached"
        readers = Counter(page for held in self._held.values() for page in held)
        assert all(self._held.values()), "a holder of nothing"
        assert +Counter(self._readers) == readers, "readers that hold nothing, or the reverse"

    def _require(self, pages: Sequence[int], owner: Owner) -> None:
        assert len(set(pages)) == len(pages), f"{owner} names a page twice: {pages}"
        assert not pages or min(pages) >= 0, (pages, owner)
        assert not pages or max(pages) < self.total, (pages, self.total)
        owners = [self._owners[page] for page in pages]
        assert owners.count(owner) == len(pages), (pages, owners, owner)

    def _give_back(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._owners[page] = None
        self._free.extend(pages)

    def _readable(self, pages: Sequence[int]) -> bool:
        """Cached pages, each named once."""
        return len(set(pages)) == len(pages) and self._readers.keys() >= set(pages)

    def _note_held(self, pages: Sequence[int], holder: Owner) -> None:
        if pages:
            self._held.setdefault(holder, set()).update(pages)

    def _note_dropped(self, pages: Sequence[int], holder: Owner) -> None:
        if pages:
            held = self._held[holder]
            held.difference_update(pages)
            if not held:
                del self._held[holder]

    def _pass(self, pages: Sequence[int], giver: Owner, taker: Owner) -> None:
        self._require(pages, giver)
        for page in pages:
            self._owners[page] = taker
        self._count(giver.kind, taker.kind, len(pages))

    def _count(self, giver: OwnerKind, taker: OwnerKind, pages: int) -> None:
        self._counts[giver] -= pages
        self._counts[taker] += pages
