"""The prefix cache of one pool: full pages by content, shared by whoever reads them. Pure.

A page's key is the hash of its tokens and of the key of the page before it, so a key stands for
the whole prefix. What nobody reads stays until its page is wanted for something else; then the
page that has been unread for longest goes first, and of one prefix the end before the beginning.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import NewType

from pdrt.errors import PoolExhausted
from pdrt.kv.pages import CACHE, Owner, PageTable

PageKey = NewType("PageKey", bytes)
KEY_BYTES = 16
"""A collision would be another prompt's answer: 2**-64 after 2**32 pages."""


def extend_keys(keys: list[PageKey], tokens: Sequence[int], page_size: int, salt: str) -> None:
    """Append the keys of the full pages of `tokens` that `keys`, those of the first ones, lacks.

    `salt`: prefixes are shared between equal salts only.
    """
    for index in range(len(keys), len(tokens) // page_size):
        before = (
            keys[-1] if keys else hashlib.blake2b(salt.encode(), digest_size=KEY_BYTES).digest()
        )
        page = array("I", tokens[index * page_size : (index + 1) * page_size])
        digest = hashlib.blake2b(before + page.tobytes(), digest_size=KEY_BYTES).digest()
        keys.append(PageKey(digest))


def page_keys(tokens: Sequence[int], page_size: int, salt: str = "") -> list[PageKey]:
    """The keys of all full pages of `tokens`."""
    keys: list[PageKey] = []
    extend_keys(keys, tokens, page_size, salt)
    return keys


class PrefixCache:
    """Which cached page holds which prefix. All taking and giving back of a pool's pages goes
    through here where there is a cache, as a page that nobody reads counts as good as free.

    Attributes:
        counts: what happened, by reason: `hit` and `missed` (pages looked up and found or not),
            `inserted`, `duplicate` (content that was cached already: the page stays its owner's),
            `evicted`.
    """

    def __init__(self, pages: PageTable, is_enabled: bool = True) -> None:
        """Without `is_enabled` nothing is ever found or inserted."""
        self.pages = pages
        self.counts: Counter[str] = Counter()
        self._is_enabled = is_enabled
        # One to one.
        self._page_of: dict[PageKey, int] = {}
        self._key_of: dict[int, PageKey] = {}
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
            page = self._page_of.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def knows(self, key: PageKey) -> bool:
        return key in self._page_of

    def count_lookup(self, hits: int, looked_up: int) -> None:
        """Of `looked_up` full pages of a prompt, `hits` were found and used."""
        self.counts["hit"] += hits
        self.counts["missed"] += looked_up - hits

    def hold(self, pages: Sequence[int], holder: Owner) -> None:
        """`holder` reads these cached pages: they cannot be evicted until it drops them."""
        self.pages.hold(pages, holder)
        for page in pages:
            self._idle.pop(page, None)

    def pass_hold(self, pages: Sequence[int], giver: Owner, taker: Owner) -> None:
        """`taker` reads these cached pages in `giver`'s place."""
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
        while self.pages.free_count < count and self._idle:
            page = next(iter(self._idle))
            del self._idle[page]
            del self._page_of[self._key_of.pop(page)]
            self.pages.evict(page)
            self.counts["evicted"] += 1

    def insert(self, keys: Sequence[PageKey], pages: Sequence[int], owner: Owner) -> list[int]:
        """`pages`, `owner`'s own or held by it, hold the prefix that `keys` name, and are complete.

        Those it owns become cached ones that it holds, except where another page has the same
        content: that one stays its own.

        Returns:
            The pages that have become cached ones just now.
        """
        assert len(keys) == len(pages), (len(keys), len(pages))
        if not self._is_enabled:
            return []
        inserted: list[int] = []
        for key, page in zip(keys, pages, strict=True):
            if self.pages.owner(page) is CACHE:
                continue
            if key in self._page_of:
                self.counts["duplicate"] += 1
                continue
            self._page_of[key] = page
            self._key_of[page] = key
            inserted.append(page)
        self.pages.cache(inserted, owner)
        self.counts["inserted"] += len(inserted)
        return inserted

    def release(self, pages: Sequence[int], owner: Owner) -> None:
        """`owner` needs these pages no longer, its own or held by it, in the order of a prefix:
        its own become free, cached ones stay, to be evicted from the end of the prefix on."""
        cached = [page for page in pages if self.pages.owner(page) is CACHE]
        self.pages.drop(cached, owner)
        for page in reversed(cached):
            if not self.pages.is_held(page):
                self._idle[page] = None
        self.pages.free([page for page in pages if self.pages.owner(page) == owner], owner)

    def check(self) -> None:
        """Raise AssertionError where the cache contradicts itself or the page table."""
        assert len(self._page_of) == len(self._key_of)
        assert all(self._key_of[page] == key for key, page in self._page_of.items())
        cached = {page for page in range(self.pages.total) if self.pages.owner(page) is CACHE}
        assert cached == set(self._key_of), cached ^ set(self._key_of)
        idle = {page for page in cached if not self.pages.is_held(page)}
        assert idle == set(self._idle), idle ^ set(self._idle)
