"""The prefix cache of one pool: full pages by content, shared by whoever reads them. Pure.

A page's key is the hash of its tokens and of the key of the page before it, so a key stands for
the whole prefix. What nobody reads stays until its page is wanted for something else; then the
page that has been unread for longest goes first, and of one prefix the end before the beginning.

Whoever holds a page holds the pages of the whole prefix before it, and whoever lets go lets go of
the end first. So no page is ever cached behind a gap: where one is held, the prefix before it is
held too, and where one is unread, the prefix before it was read as lately as itself.

Two that compute the same prefix at once cache a copy each under one key, as each must hold a whole
prefix of its own. A copy stays only as long as it is read; one that nobody reads has no copies.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import NewType

from pdrt.errors import PoolExhausted
from pdrt.kv.pages import CACHE, Owner, OwnerKind, PageTable

PageKey = NewType("PageKey", bytes)
KEY_BYTES = 16
"""A collision would be another prompt's answer: 2**-64 after 2**32 pages."""


def extend_keys(keys: list[PageKey], tokens: Sequence[int], page_size: int, salt: str) -> None:
    """Append the keys of the full pages of `tokens` that `keys`, those of the first ones, lacks.

    `tokens`: ids, each in [0, 2**32). `salt`: prefixes are shared between equal salts only.

    Raises:
        OverflowError: an id is out of range.
    """
    first, end = len(keys), len(tokens) // page_size
    if first >= end:
        return
    before = keys[-1] if keys else _root(salt)
    hashed = array("I", tokens[first * page_size : end * page_size]).tobytes()
    page_bytes = len(hashed) // (end - first)
    for start in range(0, len(hashed), page_bytes):
        page = hashed[start : start + page_bytes]
        before = hashlib.blake2b(before + page, digest_size=KEY_BYTES).digest()
        keys.append(PageKey(before))


def page_keys(tokens: Sequence[int], page_size: int, salt: str = "") -> list[PageKey]:
    """The keys of all full pages of `tokens`."""
    keys: list[PageKey] = []
    extend_keys(keys, tokens, page_size, salt)
    return keys


def _root(salt: str) -> bytes:
    """Hashed apart from pages: otherwise a client could choose a salt that reads as somebody's
    page, and put its own KV behind that prefix."""
    return hashlib.blake2b(salt.encode(), digest_size=KEY_BYTES, person=b"salt").digest()


class PrefixCache:
    """Which cached page holds which prefix. All taking and giving back of a pool's pages goes
    through here where there is a cache, as a page that nobody reads counts as good as free.

    Attributes:
        counts: pages by what happened to them: `inserted`, `duplicate` (of these, with content that
            was cached already), `evicted`.
        tokens: prompt tokens by what a look-up gave: `hit`, `missed`, and `bypassed` where there
            was none on purpose.
    """

    def __init__(self, pages: PageTable, is_enabled: bool = True) -> None:
        """Without `is_enabled` nothing is ever found, inserted or counted."""
        self.pages = pages
        self.counts: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.is_enabled = is_enabled
        # Of every cached page; the same key several times while several hold copies.
        self._key_of: dict[int, PageKey] = {}
        # The inverse; never empty for a key that is here.
        self._pages_of: dict[PageKey, list[int]] = {}
        # Of every key in `_pages_of`, the one before it in its prefix.
        self._before: dict[PageKey, PageKey | None] = {}
        # Exactly the cached pages that nobody holds, the one to go first in front.
        self._idle: dict[int, None] = {}

    def __len__(self) -> int:
        """Cached pages."""
        return len(self._key_of)

    @property
    def available(self) -> int:
        """Pages that `take` could give now: free ones and those cached and not held."""
        return self.pages.free_count + len(self._idle)

    def match(self, keys: Sequence[PageKey]) -> list[int]:
        """Cached pages of the longest known prefix. Changes nothing: `hold` what is used."""
        found: list[int] = []
        for key in keys:
            pages = self._pages_of.get(key)
            if pages is None:
                break
            found.append(pages[0])
        return found

    def knows(self, key: PageKey) -> bool:
        return key in self._pages_of

    def count_lookup(self, hits: int, looked_up: int) -> None:
        """Of `looked_up` prompt tokens, `hits` were found and used."""
        if not self.is_enabled:
            return
        self.tokens["hit"] += hits
        self.tokens["missed"] += looked_up - hits

    def count_bypass(self, tokens: int) -> None:
        """So many prompt tokens were not looked up."""
        if self.is_enabled:
            self.tokens["bypassed"] += tokens

    def hold(self, pages: Sequence[int], holder: Owner) -> None:
        """`holder` reads these cached pages: they cannot be evicted until it lets go. They follow
        those it holds already; together they are a prefix from its beginning on."""
        self.pages.hold(pages, holder)
        for page in pages:
            self._idle.pop(page, None)

    def pass_hold(self, pages: Sequence[int], giver: Owner, taker: Owner) -> None:
        """`taker` reads these cached pages, all that `giver` holds, in `giver`'s place."""
        self.pages.pass_hold(pages, giver, taker)

    def take(self, count: int, owner: Owner) -> list[int]:
        """Give `count` pages to `owner`, evicting what nobody reads as far as is needed.

        Raises:
            PoolExhausted: fewer can be had; none was taken or evicted.
        """
        if count > self.available:
            raise PoolExhausted(
                f"{count} pages wanted, {self.available} of {self.pages.total} free or evictable"
            )
        self.make_room(count)
        return self.pages.take(count, owner)

    def make_room(self, count: int) -> None:
        """Evict until `count` pages are free, or nothing more can be evicted."""
        missing = count - self.pages.free_count
        if missing > 0:
            self._evict(list(islice(self._idle, missing)))

    def insert(self, keys: Sequence[PageKey], pages: Sequence[int], owner: Owner) -> list[int]:
        """`pages`, `owner`'s own or held by it, hold the prefix that `keys` name, from its
        beginning on, and are complete: nobody writes into them any more. Its own become cached
        ones that it holds.

        Returns:
            The pages that have become cached ones just now.
        """
        assert len(keys) == len(pages), (len(keys), len(pages))
        if not self.is_enabled:
            return []
        first = self._held_prefix(keys, pages, owner)
        inserted = list(pages[first:])
        self.pages.cache(inserted, owner)
        for index in range(first, len(keys)):
            self._add(keys[index], keys[index - 1] if index else None, pages[index])
        self.counts["inserted"] += len(inserted)
        return inserted

    def _held_prefix(self, keys: Sequence[PageKey], pages: Sequence[int], owner: Owner) -> int:
        """How many of `pages`, from the first on, are cached already."""
        found = list(map(self._key_of.get, pages))
        count = found.index(None) if None in found else len(pages)
        assert found[:count] == list(keys[:count]), (pages, owner)
        assert self.pages.are_held_by(pages[:count], owner), (pages, owner)
        return count

    def _add(self, key: PageKey, before: PageKey | None, page: int) -> None:
        """A page that its owner holds becomes one of those under `key`."""
        if copies := self._pages_of.get(key):
            self.counts["duplicate"] += 1
            if copies[0] in self._idle:
                self._evict(copies[:1])
        self._pages_of.setdefault(key, []).append(page)
        self._before[key] = before
        self._key_of[page] = key

    def release(self, pages: Sequence[int], owner: Owner) -> None:
        """`owner` needs these pages no longer, its own or held by it, in the order of a prefix,
        all of them from some index on: its own become free, cached ones stay, to be evicted from
        the end of the prefix on."""
        cached = [page for page in pages if self.pages.owner(page) is CACHE]
        own = [page for page in pages if self.pages.owner(page) is not CACHE]
        self.pages.free(own, owner)
        self.pages.drop(cached, owner)
        for page in reversed(cached):
            if not self.pages.is_held(page):
                self._idle[page] = None
                if len(self._pages_of[self._key_of[page]]) > 1:
                    self._evict([page])

    def _evict(self, pages: Sequence[int]) -> None:
        """Idle pages become free."""
        for page in pages:
            del self._idle[page]
            key = self._key_of.pop(page)
            copies = self._pages_of[key]
            copies.remove(page)
            if not copies:
                del self._pages_of[key], self._before[key]
        self.pages.evict(pages)
        self.counts["evicted"] += len(pages)

    def check(self) -> None:
        """Raise AssertionError where the cache contradicts itself or the page table."""
        listed = [(page, key) for key, pages in self._pages_of.items() for page in pages]
        assert len(listed) == len(self._key_of) and dict(listed) == self._key_of
        assert all(self._pages_of.values()), "a key without a page"
        cached = {page for page in range(self.pages.total) if self.pages.owner(page) is CACHE}
        assert cached == set(self._key_of), cached ^ set(self._key_of)
        idle = {page for page in cached if not self.pages.is_held(page)}
        assert idle == set(self._idle), idle ^ set(self._idle)
        assert all(len(self._pages_of[self._key_of[page]]) == 1 for page in idle), "an idle copy"
        assert self._before.keys() == self._pages_of.keys()
        self._check_prefixes()

    def _check_prefixes(self) -> None:
        """Nothing is cached behind a gap, nor held or kept longer than what comes before it."""
        age = {page: place for place, page in enumerate(self._idle)}
        for page, key in self._key_of.items():
            before = self._before[key]
            if before is None:
                continue
            earlier = self._pages_of.get(before)
            assert earlier is not None, (page, "cached behind a gap")
            is_kept = earlier[0] not in age or age.get(page, -1) < age[earlier[0]]
            assert is_kept, (page, "is evicted after the page before it")
        for kind in OwnerKind:
            for holder, held in self.pages.held_by(kind).items():
                self._check_held(holder, held)

    def _check_held(self, holder: Owner, held: set[int]) -> None:
        for page in held:
            before = self._before[self._key_of[page]]
            is_whole = before is None or not held.isdisjoint(self._pages_of[before])
            assert is_whole, (page, holder, "is held without the page before it")
