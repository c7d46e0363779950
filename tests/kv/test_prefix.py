"""The prefix cache: what is found, what stays, what goes first, and what is counted."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdrt.errors import PoolExhausted
from pdrt.kv.pages import CACHE, Owner, OwnerKind, PageTable
from pdrt.kv.prefix import PageKey, PrefixCache, extend_keys, page_keys

TOTAL = 10
PAGE_SIZE = 2
TOKENS = st.integers(0, 2**32 - 1)


def owner(name: object) -> Owner:
    return Owner(OwnerKind.ROOM, name)


A, B, C = owner("a"), owner("b"), owner("c")


@pytest.fixture
def cache() -> Iterator[PrefixCache]:
    cache = PrefixCache(PageTable(TOTAL))
    yield cache
    cache.check()
    cache.pages.check()
    assert sum(cache.pages.counts().values()) == TOTAL


def keys(text: str) -> list[PageKey]:
    """One page per letter."""
    return page_keys([ord(letter) for letter in text for _ in range(PAGE_SIZE)], PAGE_SIZE)


def compute(cache: PrefixCache, text: str, name: Owner) -> list[int]:
    """`name` computes `text` from what is known on, and caches it."""
    found = cache.match(keys(text))
    cache.hold(found, name)
    pages = found + cache.take(len(text) - len(found), name)
    cache.insert(keys(text), pages, name)
    return pages


# Keys


@given(tokens=st.lists(TOKENS, max_size=40), size=st.integers(1, 8), data=st.data())
def test_keys_are_of_full_pages_and_can_be_extended(
    tokens: list[int], size: int, data: st.DataObject
) -> None:
    whole = page_keys(tokens, size, "salt")
    assert len(whole) == len(tokens) // size
    cut = data.draw(st.integers(0, len(tokens)))
    grown = page_keys(tokens[:cut], size, "salt")
    assert grown == whole[: cut // size]
    extend_keys(grown, tokens, size, "salt")
    assert grown == whole


@given(one=st.lists(TOKENS, min_size=8, max_size=8), other=st.lists(TOKENS, min_size=8, max_size=8))
def test_a_key_stands_for_the_whole_prefix(one: list[int], other: list[int]) -> None:
    common = next((i for i in range(8) if one[i] != other[i]), 8)
    for index, (mine, theirs) in enumerate(
        zip(page_keys(one, 2), page_keys(other, 2), strict=True)
    ):
        assert (mine == theirs) == ((index + 1) * 2 <= common)


def test_salts_part_prefixes() -> None:
    tokens = [1, 2, 3, 4]
    found = [page_keys(tokens, 2, salt) for salt in ("", "a", "b", "\N{SNOWMAN}")]
    assert len({key for each in found for key in each}) == 8
    assert page_keys(tokens, 2, "a") == found[1]


def test_no_salt_reads_as_a_page_of_somebody_elses_prompt() -> None:
    """Or else a client could put its own KV behind a prefix that others use."""
    for first in itertools.count():
        prefix = [first, 2, 3, 4]
        hashed = page_keys(prefix[:2], 2)[0] + array("I", prefix[2:]).tobytes()
        try:
            salt = hashed.decode()
        except UnicodeDecodeError:
            continue
        break
    assert page_keys([5, 6], 2, salt) != page_keys([*prefix, 5, 6], 2)[2:]


def test_token_ids_have_32_bits() -> None:
    assert page_keys([2**32 - 1], 1) != page_keys([0], 1)
    for token in (2**32, -1):
        with pytest.raises(OverflowError):
            page_keys([token], 1)


# Finding and holding


def test_what_is_computed_is_found_up_to_where_it_differs(cache: PrefixCache) -> None:
    pages = compute(cache, "abc", A)
    assert cache.match(keys("abcd")) == pages
    assert cache.match(keys("abx")) == pages[:2]
    assert cache.match(keys("xbc")) == []
    assert cache.knows(keys("abc")[2])
    assert not cache.knows(keys("xbc")[2])
    cache.release(pages, A)
    assert cache.match(keys("abc")) == pages
    assert len(cache) == 3


def test_a_held_page_is_never_evicted(cache: PrefixCache) -> None:
    pages = compute(cache, "abcd", A)
    held = cache.match(keys("ab"))
    cache.hold(held, B)
    cache.release(pages, A)
    assert cache.available == TOTAL - 2
    cache.make_room(TOTAL)
    assert cache.match(keys("abcd")) == held
    with pytest.raises(PoolExhausted):
        cache.take(TOTAL - 1, C)
    cache.release(cache.take(TOTAL - 2, C), C)
    cache.release(held, B)


def test_the_end_of_a_prefix_goes_before_its_beginning(cache: PrefixCache) -> None:
    cache.release(compute(cache, "abc", A), A)
    for left in ("ab", "a", ""):
        cache.make_room(cache.pages.free_count + 1)
        assert len(cache.match(keys("abc"))) == len(left)


def test_what_was_read_last_goes_last(cache: PrefixCache) -> None:
    for text in ("ab", "xy"):
        cache.release(compute(cache, text, A), A)
    read = cache.match(keys("ab"))
    cache.hold(read, B)
    cache.release(read, B)
    cache.make_room(TOTAL - 2)
    assert cache.match(keys("ab")) == read
    assert cache.match(keys("xy")) == []


def test_taking_is_all_or_nothing(cache: PrefixCache) -> None:
    pages = compute(cache, "abcd", A)
    cache.release(pages, A)
    cache.hold(pages[:1], B)
    with pytest.raises(PoolExhausted, match="10 pages wanted, 9 of 10 free or evictable"):
        cache.take(TOTAL, C)
    assert len(cache) == 4
    assert cache.counts["evicted"] == 0
    cache.release(pages[:1], B)


def test_a_hold_passes_on_without_a_gap(cache: PrefixCache) -> None:
    pages = compute(cache, "ab", A)
    cache.pass_hold(pages, A, B)
    cache.make_room(TOTAL)
    assert cache.match(keys("ab")) == pages
    cache.release(pages, B)


def test_own_pages_become_free_and_cached_ones_stay(cache: PrefixCache) -> None:
    pages = cache.take(3, A)
    cache.insert(keys("ab"), pages[:2], A)
    cache.release(pages, A)
    assert cache.pages.owner(pages[2]) is None
    assert [cache.pages.owner(page) for page in pages[:2]] == [CACHE, CACHE]
    assert cache.available == TOTAL


# Copies


def test_two_that_compute_the_same_hold_a_copy_each(cache: PrefixCache) -> None:
    one, other = cache.take(2, A), cache.take(3, B)
    assert cache.insert(keys("ab"), one, A) == one
    assert cache.insert(keys("abc"), other, B) == other
    assert cache.counts == {"inserted": 5, "duplicate": 2}
    # Its own prefix is whole whatever becomes of the other's.
    cache.release(one, A)
    assert cache.counts["evicted"] == 2, "nobody needs them: the other's are read"
    assert cache.match(keys("abc")) == other
    cache.release(other, B)
    assert cache.match(keys("abc")) == other
    assert len(cache) == 3


def test_a_copy_that_somebody_reads_replaces_one_that_nobody_does(cache: PrefixCache) -> None:
    old = compute(cache, "abc", A)
    cache.release(old, A)
    new = cache.take(2, B)
    cache.insert(keys("ab"), new, B)
    assert cache.match(keys("abc")) == [*new, old[2]]
    assert cache.counts["evicted"] == 2
    cache.release(new, B)
    cache.make_room(TOTAL - 2)
    assert cache.match(keys("abc")) == new, "the end goes first"


# Refusals


def test_inserting_what_is_not_a_prefix_of_ones_own_is_refused(cache: PrefixCache) -> None:
    pages = compute(cache, "ab", A)
    own = cache.take(2, B)
    for wrong in (
        lambda: cache.insert(keys("a"), pages[:1], B),  # held by another
        lambda: cache.insert(keys("ab"), [own[0], pages[1]], B),
        lambda: cache.insert(keys("xy"), pages, A),  # another content
        lambda: cache.insert(keys("xyz"), own, B),
        lambda: cache.insert(keys("x"), own[:1], A),  # not its own
        lambda: cache.insert(keys("xy"), [own[0], own[0]], B),
        lambda: cache.release(own, A),
        lambda: cache.release(pages, B),
    ):
        with pytest.raises(AssertionError):
            wrong()
        cache.check()
        cache.pages.check()
    cache.release(pages, A)
    cache.release(own, B)


def test_a_disabled_cache_finds_nothing() -> None:
    cache = PrefixCache(PageTable(TOTAL), is_enabled=False)
    pages = cache.take(3, A)
    assert cache.insert(keys("abc"), pages, A) == []
    assert cache.match(keys("abc")) == []
    assert cache.pages.count(OwnerKind.CACHE) == 0
    cache.release(pages, A)
    assert cache.pages.free_count == cache.available == TOTAL
    cache.check()


def test_tokens_are_counted() -> None:
    cache = PrefixCache(PageTable(TOTAL))
    cache.count_lookup(5, 7)
    cache.count_lookup(0, 3)
    cache.count_bypass(11)
    assert cache.tokens == {"hit": 5, "missed": 5, "bypassed": 11}


# All of it


class Reader:
    """One room or sequence: a text, and pages for it; of the first `cached` it has let the cache
    know."""

    def __init__(self, text: str, pages: list[int], cached: int) -> None:
        self.text = text
        self.pages = pages
        self.cached = cached


class PrefixCacheMachine(RuleBasedStateMachine):
    """Readers that come, compute in parts, pass their pages on and go, against a dumb model: which
    page holds which prefix, who reads it, and when it was read last."""

    texts = st.text("ab", min_size=1, max_size=5)

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(PageTable(TOTAL))
        self.readers: dict[Owner, Reader] = {}
        self.content: dict[int, str] = {}
        """Of each cached page, the prefix that ends with it."""
        self.unread: list[int] = []
        """Cached pages without readers, the one to go first in front."""
        self.counts: Counter[str] = Counter()
        self.serial = 0

    def readers_of(self, page: int) -> set[Owner]:
        return {
            name for name, reader in self.readers.items() if page in reader.pages[: reader.cached]
        }

    def evict(self, page: int) -> None:
        self.unread.remove(page)
        del self.content[page]
        self.counts["evicted"] += 1

    def copies(self, page: int) -> list[int]:
        return [p for p, text in self.content.items() if text == self.content[page] and p != page]

    def let_go(self, pages: Sequence[int]) -> None:
        """Of pages in the order of a prefix, whose reader has gone already."""
        for page in reversed(pages):
            if not self.readers_of(page):
                self.unread.append(page)
                if self.copies(page):
                    self.evict(page)

    @rule(text=texts)
    def come(self, text: str) -> None:
        found = self.cache.match(keys(text))
        known = {self.content[page] for page in self.content}
        assert len(found) == next(
            (i for i in range(len(text)) if text[: i + 1] not in known), len(text)
        )
        assert [self.content[page] for page in found] == [text[: i + 1] for i in range(len(found))]
        self.serial += 1
        name = owner(self.serial)
        self.cache.hold(found, name)
        self.unread = [page for page in self.unread if page not in found]
        wanted = len(text) - len(found)
        free = (
            TOTAL - len(self.content) - sum(len(r.pages) - r.cached for r in self.readers.values())
        )
        if wanted > free + len(self.unread):
            with pytest.raises(PoolExhausted):
                self.cache.take(wanted, name)
            self.cache.release(found, name)
            self.let_go(found)
            return
        evicted = self.unread[: max(0, wanted - free)]
        own = self.cache.take(wanted, name)
        for page in evicted:
            self.evict(page)
        assert set(own).isdisjoint(self.content), "a cached page was taken"
        self.readers[name] = Reader(text, found + own, len(found))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def cache_some(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.readers)))
        reader = self.readers[name]
        count = data.draw(st.integers(reader.cached, len(reader.pages)))
        inserted = self.cache.insert(keys(reader.text)[:count], reader.pages[:count], name)
        assert inserted == reader.pages[reader.cached : count]
        for index in range(reader.cached, count):
            page = reader.pages[index]
            self.content[page] = reader.text[: index + 1]
            copies = self.copies(page)
            self.counts["inserted"] += 1
            self.counts["duplicate"] += bool(copies)
            for copy in copies:
                if copy in self.unread:
                    self.evict(copy)
        reader.cached = count

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def pass_on(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.readers)))
        reader = self.readers.pop(name)
        self.serial += 1
        taker = owner(self.serial)
        self.cache.pass_hold(reader.pages[: reader.cached], name, taker)
        self.cache.pages.pass_on(reader.pages[reader.cached :], name, taker)
        self.readers[taker] = reader

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.readers)))
        reader = self.readers.pop(name)
        self.cache.release(reader.pages, name)
        self.let_go(reader.pages[: reader.cached])

    @rule(count=st.integers(0, TOTAL))
    def make_room(self, count: int) -> None:
        free = self.cache.pages.free_count
        self.cache.make_room(count)
        for page in self.unread[: max(0, count - free)]:
            self.evict(page)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.cache.check()
        pages = self.cache.pages
        pages.check()
        assert {p for p in range(TOTAL) if pages.owner(p) is CACHE} == self.content.keys()
        assert {p: set(pages.holders(p)) for p in self.content} == {
            p: self.readers_of(p) for p in self.content
        }
        assert self.cache.available == pages.free_count + len(self.unread)
        assert +self.cache.counts == +self.counts
        owned = {name: set(r.pages[r.cached :]) for name, r in self.readers.items()}
        found = pages.pages_of(OwnerKind.ROOM)
        assert found == {name: own for name, own in owned.items() if own}
        assert sum(pages.counts().values()) == TOTAL


TestPrefixCacheMachine = PrefixCacheMachine.TestCase
TestPrefixCacheMachine.settings = settings(max_examples=200, stateful_step_count=40)
