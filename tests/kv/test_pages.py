"""Page ownership: every page has exactly one owner, and what is refused changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdrt.errors import PoolExhausted
from pdrt.kv.pages import CACHE, Owner, OwnerKind, PageTable

TOTAL = 8
SEQUENCE = Owner(OwnerKind.SEQUENCE, "s")
LEASE = Owner(OwnerKind.LEASE, "l")
ROOM = Owner(OwnerKind.ROOM, "r")
OTHER_ROOM = Owner(OwnerKind.ROOM, "other")


@pytest.fixture
def table() -> Iterator[PageTable]:
    table = PageTable(TOTAL)
    yield table
    table.check()
    assert sum(table.counts().values()) == TOTAL


def snapshot(table: PageTable) -> object:
    held = {
        page: {owner for owner in OWNERS if owner in table.holders(page)} for page in table._readers
    }
    return [table.owner(page) for page in range(TOTAL)], list(table._free), held, table.counts()


OWNERS = (SEQUENCE, LEASE, ROOM, OTHER_ROOM)


def refused(table: PageTable, call: Callable[[], object]) -> None:
    """`call` raises AssertionError and changes nothing."""
    before = snapshot(table)
    with pytest.raises(AssertionError):
        call()
    assert snapshot(table) == before


def test_take_pass_on_free(table: PageTable) -> None:
    pages = table.take(3, LEASE)
    assert table.count(OwnerKind.LEASE) == 3
    assert table.free_count == TOTAL - 3
    table.pass_on(pages, LEASE, SEQUENCE)
    assert table.count(OwnerKind.LEASE) == 0
    assert table.pages_of(OwnerKind.SEQUENCE) == {SEQUENCE: set(pages)}
    table.free(pages, SEQUENCE)
    assert table.free_count == TOTAL


def test_what_was_freed_last_is_taken_first(table: PageTable) -> None:
    first = table.take(2, ROOM)
    second = table.take(2, SEQUENCE)
    table.free(second, SEQUENCE)
    table.free(first, ROOM)
    assert table.take(4, ROOM) == [*first, *second]


def test_exhausted_pool_takes_nothing(table: PageTable) -> None:
    table.take(TOTAL - 1, SEQUENCE)
    before = snapshot(table)
    with pytest.raises(PoolExhausted, match="2 pages wanted, 1 of 8 free"):
        table.take(2, LEASE)
    assert snapshot(table) == before


def test_double_foreign_and_repeated_free_are_refused(table: PageTable) -> None:
    pages = table.take(2, ROOM)
    others = table.take(1, OTHER_ROOM)
    refused(table, lambda: table.free(pages, OTHER_ROOM))
    refused(table, lambda: table.free([*pages, *others], ROOM))
    refused(table, lambda: table.free([pages[0], pages[0]], ROOM))
    refused(table, lambda: table.free([TOTAL], ROOM))
    table.free(pages, ROOM)
    refused(table, lambda: table.free(pages, ROOM))
    refused(table, lambda: table.pass_on(pages, ROOM, SEQUENCE))


def test_negative_page_does_not_alias_the_last_one(table: PageTable) -> None:
    table.take(TOTAL, ROOM)
    refused(table, lambda: table.free([-1], ROOM))
    refused(table, lambda: table.pass_on([-1], ROOM, SEQUENCE))


def test_negative_count_is_refused(table: PageTable) -> None:
    refused(table, lambda: table.take(-1, ROOM))


@pytest.mark.parametrize("kind", [OwnerKind.FREE, OwnerKind.CACHE])
def test_free_and_cache_are_not_owners_to_take_or_to_pass_on_to(
    table: PageTable, kind: OwnerKind
) -> None:
    pages = table.take(1, ROOM)
    refused(table, lambda: table.take(1, Owner(kind, None)))
    refused(table, lambda: table.pass_on(pages, ROOM, Owner(kind, None)))


def test_cached_pages_leave_through_evict_only(table: PageTable) -> None:
    pages = table.take(2, ROOM)
    table.cache(pages, ROOM)
    assert table.counts()[OwnerKind.CACHE] == 2
    refused(table, lambda: table.free(pages, ROOM))
    refused(table, lambda: table.free(pages, CACHE))
    refused(table, lambda: table.pass_on(pages, CACHE, SEQUENCE))
    refused(table, lambda: table.evict([pages[0]]))
    table.drop(pages, ROOM)
    table.evict([pages[0]])
    table.evict([pages[1]])
    refused(table, lambda: table.evict([pages[0]]))


def test_page_with_two_readers_stays_until_both_have_dropped_it(table: PageTable) -> None:
    pages = table.take(1, ROOM)
    table.cache(pages, ROOM)
    table.hold(pages, OTHER_ROOM)
    table.drop(pages, ROOM)
    assert table.is_held(pages[0])
    refused(table, lambda: table.evict([pages[0]]))
    table.drop(pages, OTHER_ROOM)
    assert not table.is_held(pages[0])
    table.evict([pages[0]])


def test_holds_are_named_and_single(table: PageTable) -> None:
    pages = table.take(2, ROOM)
    loose = table.take(1, SEQUENCE)
    table.cache(pages, ROOM)
    refused(table, lambda: table.hold(pages, ROOM))
    refused(table, lambda: table.hold([pages[0], pages[0]], LEASE))
    refused(table, lambda: table.hold(loose, LEASE))
    refused(table, lambda: table.drop(pages, LEASE))
    refused(table, lambda: table.drop([pages[0], pages[0]], ROOM))
    refused(table, lambda: table.drop(loose, SEQUENCE))
    refused(table, lambda: table.is_held(loose[0]))


def test_hold_passes_on_without_a_gap(table: PageTable) -> None:
    pages = table.take(2, ROOM)
    table.cache(pages, ROOM)
    table.pass_hold(iter(pages), ROOM, LEASE)
    assert all(table.is_held(page) for page in pages)
    refused(table, lambda: table.pass_hold(pages, ROOM, SEQUENCE))
    table.hold(pages, SEQUENCE)
    refused(table, lambda: table.pass_hold(pages, LEASE, SEQUENCE))
    table.drop(pages, LEASE)
    table.drop(pages, SEQUENCE)


class PageTableMachine(RuleBasedStateMachine):
    """The table against a dumb model: page → owner, page → readers."""

    owners = st.sampled_from(OWNERS)

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable(TOTAL)
        self.owner: dict[int, Owner] = {}
        self.readers: dict[int, set[Owner]] = {}

    def pages_of(self, owner: Owner) -> list[int]:
        return sorted(page for page, other in self.owner.items() if other == owner)

    @rule(owner=owners, count=st.integers(0, TOTAL))
    def take(self, owner: Owner, count: int) -> None:
        if count > TOTAL - len(self.owner):
            with pytest.raises(PoolExhausted):
                self.table.take(count, owner)
            return
        pages = self.table.take(count, owner)
        assert len(set(pages)) == count
        assert self.owner.keys().isdisjoint(pages), "a page that somebody owns was taken"
        self.owner.update(dict.fromkeys(pages, owner))

    @rule(pages=st.lists(st.integers(-1, TOTAL)), owner=owners)
    def free_anything(self, pages: list[int], owner: Owner) -> None:
        is_right = len(set(pages)) == len(pages) and set(pages) <= set(self.pages_of(owner))
        if not is_right:
            with pytest.raises(AssertionError):
                self.table.free(pages, owner)
            return
        self.table.free(pages, owner)
        for page in pages:
            del self.owner[page]

    @rule(owner=owners, data=st.data())
    def free_some(self, owner: Owner, data: st.DataObject) -> None:
        pages = data.draw(st.permutations(self.pages_of(owner)))
        self.free_anything(pages[: data.draw(st.integers(0, len(pages)))], owner)

    @rule(giver=owners, taker=owners)
    def pass_on(self, giver: Owner, taker: Owner) -> None:
        pages = self.pages_of(giver)
        self.table.pass_on(pages, giver, taker)
        self.owner.update(dict.fromkeys(pages, taker))

    @rule(owner=owners)
    def cache(self, owner: Owner) -> None:
        pages = self.pages_of(owner)
        self.table.cache(pages, owner)
        for page in pages:
            self.owner[page] = CACHE
            self.readers[page] = {owner}

    @rule(pages=st.sets(st.integers(0, TOTAL - 1)), holder=owners)
    def hold(self, pages: set[int], holder: Owner) -> None:
        if all(page in self.readers and holder not in self.readers[page] for page in pages):
            self.table.hold(pages, holder)
            for page in pages:
                self.readers[page].add(holder)
        else:
            with pytest.raises(AssertionError):
                self.table.hold(pages, holder)

    @rule(pages=st.sets(st.integers(0, TOTAL - 1)), holder=owners)
    def drop(self, pages: set[int], holder: Owner) -> None:
        if all(holder in self.readers.get(page, ()) for page in pages):
            self.table.drop(pages, holder)
            for page in pages:
                self.readers[page].remove(holder)
        else:
            with pytest.raises(AssertionError):
                self.table.drop(pages, holder)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def drop_held(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.readers)))
        for holder in sorted(self.readers[page], key=str):
            self.drop({page}, holder)

    @rule(page=st.integers(0, TOTAL - 1))
    def evict(self, page: int) -> None:
        if self.readers.get(page, True):
            with pytest.raises(AssertionError):
                self.table.evict([page])
            return
        self.table.evict([page])
        del self.owner[page], self.readers[page]

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.table.check()
        assert {p: o for p in range(TOTAL) if (o := self.table.owner(p))} == self.owner
        assert self.table.free_count == TOTAL - len(self.owner)
        assert all(self.table.is_held(p) == bool(readers) for p, readers in self.readers.items())
        for kind in OwnerKind:
            if kind is not OwnerKind.FREE:
                owned = [page for page, owner in self.owner.items() if owner.kind is kind]
                assert self.table.count(kind) == len(owned)


TestPageTableMachine = PageTableMachine.TestCase
TestPageTableMachine.settings = settings(max_examples=150, stateful_step_count=40)
