"""The decode pool's pages on their way: leased to a room, passed to a sequence, kept as cached
prefixes, free. All taking and giving back on the decode side happens here."""

from __future__ import annotations

import msgspec

from pdrt.ids import RequestId, RoomId
from pdrt.kv.layout import KvLayout
from pdrt.kv.pages import CACHE, Owner, OwnerKind, PageTable
from pdrt.kv.prefix import PageKey, PrefixCache, extend_keys
from pdrt.scheduling.decode_request import DecodeRequest
from pdrt.scheduling.step_plan import PagesWanted


class RoomPages(msgspec.Struct, frozen=True):
    """What one room gives its request: a prefix that is cached here already, and pages behind it.

    All empty for a request that decodes nothing.
    """

    held: tuple[int, ...]
    """Cached pages that the room holds; nobody writes into them."""
    own: tuple[int, ...]
    """Leased to the room, behind `held`."""
    written: int
    """How many of `own` the writer fills."""
    keys: tuple[PageKey, ...]
    """Of the pages that are full once the KV has landed; none before `DecodePages.keyed`."""

    @property
    def all(self) -> tuple[int, ...]:
        """In the order of the tokens."""
        return self.held + self.own


class PromptPages(msgspec.Struct, frozen=True):
    """What a sequence begins with whose prompt is computed here."""

    pages: tuple[int, ...]
    """In the order of the tokens: cached ones, which it holds, then its own."""
    cached_tokens: int


class DecodePages:
    """The page table of the decode pool and its prefix cache."""

    def __init__(self, table: PageTable, layout: KvLayout, is_caching: bool) -> None:
        self.table = table
        self.cache = PrefixCache(table, is_caching)
        self._page_size = layout.page_size
        self._is_caching = is_caching

    @property
    def available(self) -> int:
        """Pages that can be had now: free ones, and cached ones that nobody reads."""
        return self.cache.available

    def _keys(self, request: DecodeRequest) -> list[PageKey]:
        """Keys of all full pages of its tokens; kept with the request, whose tokens only grow."""
        if self._is_caching:
            extend_keys(request.keys, request.tokens, self._page_size, request.cache_salt)
        return request.keys

    # Rooms

    def lease(
        self, request: DecodeRequest, room: RoomId, wanted: PagesWanted, spare: int
    ) -> RoomPages | None:
        """Pages for a new room; None when fewer than `spare` would stay available."""
        if not wanted.leased:
            self.cache.count_bypass(len(request.tokens))
            return RoomPages(held=(), own=(), written=0, keys=())
        owner, held = _lease(room), self._known_prefix(request)
        # Before anything is taken, which may evict what is not held.
        self.cache.hold(held, owner)
        missing = wanted.leased - len(held)
        if self.available - missing < spare:
            self.cache.release(held, owner)
            return None
        own = self.cache.take(missing, owner)
        self.cache.count_lookup(len(held) * self._page_size, len(request.tokens))
        return RoomPages(tuple(held), tuple(own), wanted.written - len(held), keys=())

    def _known_prefix(self, request: DecodeRequest) -> list[int]:
        """Cached pages that its tokens begin with. A prompt whose first page nobody knows shares
        nothing: the rest of it is hashed when its writer has something to do (`keyed`)."""
        if not self._is_caching:
            return []
        size = self._page_size
        extend_keys(request.keys, request.tokens[:size], size, request.cache_salt)
        if not self.cache.match(request.keys[:1]):
            return []
        return self.cache.match(self._keys(request))

    def keyed(self, pages: RoomPages, request: DecodeRequest) -> RoomPages:
        """With the keys of the tokens that `pages` were leased for."""
        keys = tuple(self._keys(request)) if pages.all else ()
        return msgspec.structs.replace(pages, keys=keys)

    def landed(self, room: RoomId, pages: RoomPages) -> None:
        """The writer has drained, COMPLETE: from now on others may read the full pages."""
        self.cache.insert(pages.keys, pages.all[: len(pages.keys)], _lease(room))

    def pass_on(self, room: RoomId, pages: RoomPages, request: RequestId) -> None:
        """The room is over and its request goes on with all of its pages."""
        giver, taker = _lease(room), _sequence(request)
        cached = [page for page in pages.all if self.table.owner(page) is CACHE]
        self.cache.pass_hold(cached, giver, taker)
        self.table.pass_on([p for p in pages.all if self.table.owner(p) == giver], giver, taker)

    def end_lease(self, room: RoomId, pages: RoomPages) -> None:
        """The one place where leased pages become free: the lease is gone, its pages quiet."""
        self.cache.release(pages.all, _lease(room))

    # Sequences

    def _cached(self, request: DecodeRequest) -> list[int]:
        """Cached pages that its prompt could begin with, were it computed here. Its last token is
        computed in any case, and all of it where it is scored."""
        if request.awaits_scores:
            return []
        return self.cache.match(self._keys(request)[: (len(request.tokens) - 1) // self._page_size])

    def uncached_tokens(self, request: DecodeRequest) -> int:
        """Of its prompt, those that would have to be computed here."""
        return len(request.tokens) - len(self._cached(request)) * self._page_size

    def begin(self, request: DecodeRequest, count: int, spare: int) -> PromptPages | None:
        """`count` pages for a sequence whose prompt is computed here; None when fewer than `spare`
        would stay available."""
        owner, held = _sequence(request.request), self._cached(request)
        self.cache.hold(held, owner)
        missing = count - len(held)
        if self.available - missing < spare:
            self.cache.release(held, owner)
            return None
        cached_tokens = len(held) * self._page_size
        if request.awaits_scores:
            self.cache.count_bypass(len(request.tokens))
        else:
            self.cache.count_lookup(cached_tokens, len(request.tokens))
        return PromptPages((*held, *self.cache.take(missing, owner)), cached_tokens)

    def take(self, request: DecodeRequest, count: int) -> list[int]:
        """Pages for a sequence to grow into.

        Raises:
            PoolExhausted: fewer can be had; none was taken.
        """
        pages = self.cache.take(count, _sequence(request.request))
        # Hashed as they fill, which is while a step runs, rather than all at the end.
        self._keys(request)
        return pages

    def is_writable(self, request: DecodeRequest) -> bool:
        """Nobody else may read the pages that the KV of its next tokens goes into: not the first
        of them, and cached ones come before a sequence's own."""
        page = request.pages[request.computed // self._page_size]
        return self.table.owner(page) is not CACHE

    def keep(self, request: DecodeRequest) -> None:
        """What a sequence has computed may serve others, and itself when it comes back."""
        keys = self._keys(request)[: request.computed // self._page_size]
        self.cache.insert(keys, request.pages[: len(keys)], _sequence(request.request))

    def release(self, request: DecodeRequest) -> None:
        """The one place where a sequence's pages leave it. No step uses them."""
        assert not request.is_in_step, request.request
        self.cache.release(request.pages, _sequence(request.request))
        request.pages = ()

    def give_back(self, request: DecodeRequest) -> None:
        """A sequence is over, or preempted, and all that it has computed is sound."""
        self.keep(request)
        self.release(request)

    # Checks

    def check_sequences(self, pages: dict[RequestId, tuple[int, ...]]) -> None:
        """Raise AssertionError unless each of these owns or holds its pages, and nobody else."""
        self._check({_sequence(name): each for name, each in pages.items()}, OwnerKind.SEQUENCE)

    def check_rooms(self, rooms: dict[RoomId, RoomPages]) -> None:
        """The same for rooms."""
        self._check({_lease(name): each.all for name, each in rooms.items()}, OwnerKind.LEASE)

    def _check(self, listed: dict[Owner, tuple[int, ...]], kind: OwnerKind) -> None:
        owned, held = self.table.pages_of(kind), self.table.held_by(kind)
        found = {o: owned.get(o, set()) | held.get(o, set()) for o in owned.keys() | held.keys()}
        wanted = {owner: set(pages) for owner, pages in listed.items() if pages}
        assert found == wanted, (found, wanted)


def _lease(room: RoomId) -> Owner:
    return Owner(OwnerKind.LEASE, room)


def _sequence(request: RequestId) -> Owner:
    return Owner(OwnerKind.SEQUENCE, request)
