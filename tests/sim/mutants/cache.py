"""Mutants of the prefix caches of both sides. Comparing tables and pools notices most of them
before they do harm; that is switched off where the harm itself must be noticed."""

from __future__ import annotations

from typing import Any

from pdrt.ids import RoomId
from pdrt.kv import prefix
from pdrt.kv.pages import CACHE, Owner, OwnerKind, PageTable
from pdrt.kv.prefix import PageKey, PrefixCache
from pdrt.protocol.effects import CloseRoom
from pdrt.scheduling.prefill import PrefillScheduler
from tests.sim import decode, prefill, schedules
from tests.sim.core import Kind
from tests.sim.jobs import Scheduler
from tests.sim.mutants.registry import Patch, mutant
from tests.sim.prefill import PrefillWorker
from tests.sim.prefill_rank import Forward


def nothing(*_: Any) -> None:
    return


def unchecked() -> list[Patch]:
    """Pools and caches may contradict what they are said to hold."""

    def yes(self: PageTable, pages: Any, holder: Owner) -> bool:
        return True

    return [
        (PrefixCache, "check", nothing),
        (prefill, "check_prefill", nothing),
        (PageTable, "are_held_by", yes),
    ]


def unheld(kind: OwnerKind) -> list[Patch]:
    """Readers of `kind` find cached pages without holding them."""
    hold, release, pass_hold = PrefixCache.hold, PrefixCache.release, PrefixCache.pass_hold

    def is_had(self: PrefixCache, page: int, owner: Owner) -> bool:
        if self.pages.owner(page) is CACHE:
            return owner in self.pages.holders(page)
        return self.pages.owner(page) == owner

    def hold_not(self: PrefixCache, pages: Any, holder: Owner) -> None:
        if holder.kind is not kind:
            hold(self, pages, holder)

    def pass_held(self: PrefixCache, pages: Any, giver: Owner, taker: Owner) -> None:
        held = [page for page in pages if is_had(self, page, giver)]
        pass_hold(self, held, giver, taker)
        hold(self, [page for page in pages if page not in held], taker)

    def release_held(self: PrefixCache, pages: Any, owner: Owner) -> None:
        release(self, [page for page in pages if is_had(self, page, owner)], owner)

    return [
        (PrefixCache, "hold", hold_not),
        (PrefixCache, "pass_hold", pass_held),
        (PrefixCache, "release", release_held),
        *unchecked(),
    ]


@mutant(Kind.INVARIANT, Kind.CONTENT, schedule=schedules.evicted_while_leased)
def prefix_not_held_on_decode() -> list[Patch]:
    """I1: cached pages that a lease counts on are held by it."""
    return unheld(OwnerKind.LEASE)


@mutant(Kind.SOURCE, Kind.CONTENT, Kind.DESTINATION)
def prefix_not_held_on_prefill() -> list[Patch]:
    """I3: a cached page that is read stays until every rank has drained the room."""
    return unheld(OwnerKind.ROOM)


@mutant(Kind.SOURCE, Kind.CONTENT)
def held_page_evicted() -> list[Patch]:
    """I3: eviction never touches a page that somebody reads."""
    original = PrefixCache.take

    def take(self: PrefixCache, count: int, owner: Owner) -> list[int]:
        for page in list(self._key_of):
            if count <= self.available:
                break
            holders = self.pages.holders(page)
            if holders and all(holder.kind is OwnerKind.ROOM for holder in holders):
                for holder in holders:
                    self.pages.drop([page], holder)
                self._idle[page] = None
        return original(self, count, owner)

    return [(PrefixCache, "take", take), *unheld_release()]


def unheld_release() -> list[Patch]:
    """Whoever was robbed of a page does not miss it."""
    release = PrefixCache.release

    def release_held(self: PrefixCache, pages: Any, owner: Owner) -> None:
        mine = [
            page
            for page in pages
            if self.pages.owner(page) == owner
            or (self.pages.owner(page) is CACHE and owner in self.pages.holders(page))
        ]
        release(self, mine, owner)

    return [(PrefixCache, "release", release_held), *unchecked()]


@mutant(Kind.SOURCE, Kind.CONTENT)
def cached_source_let_go_at_close() -> list[Patch]:
    """I3: a cached page goes idle only when the rooms that send it have drained."""
    original = PrefillWorker.apply

    def apply(self: PrefillWorker, effect: Any) -> None:
        original(self, effect)
        if isinstance(effect, CloseRoom):
            job = self.scheduler.jobs[effect.room]
            cached = [page for page in job.pages if self.pages.owner(page) is CACHE]
            self.cache.release(cached, job.owner)

    return [(PrefillWorker, "apply", apply), *unheld_release()]


@mutant(Kind.SOURCE, Kind.CONTENT)
def page_found_before_its_forward_has_returned() -> list[Patch]:
    """I6: a page can be found once the forward that fills it has returned, well."""
    original = PrefillScheduler.plan

    def plan(self: PrefillScheduler, now: float) -> Any:
        chunks = original(self, now)
        for chunk in chunks:
            job = self.jobs[chunk.room]
            full = chunk.end // self._layout.page_size
            self._cache.insert(job.keys[:full], job.pages[:full], job.owner)
        return chunks

    return [(PrefillScheduler, "plan", plan)]


@mutant(Kind.CONTENT)
def page_of_a_failed_forward_found() -> list[Patch]:
    """I6: what a failed forward left is never found."""
    original = PrefillWorker.forward_ended

    def forward_ended(self: PrefillWorker, forward: Forward) -> Any:
        if forward.has_failed:
            for part in forward.parts:
                if part.room in self.scheduler.jobs:
                    self.scheduler.finish(part.chunk, self.world.sim.now)
        return original(self, forward)

    return [(PrefillWorker, "forward_ended", forward_ended)]


@mutant(Kind.DESTINATION)
def page_found_before_its_lease_is_ready() -> list[Patch]:
    """I6: on the decode side a page can be found once its writer has reported COMPLETE."""
    original = Scheduler.open_room

    def open_room(self: Scheduler, job: Any, endpoint: str) -> Any:
        effects = original(self, job, endpoint)
        if effects is not None and job.room is not None:
            leased = self.leased[job.room]
            self.keep(leased.tokens, leased.all_pages, leased.owner)
        return effects

    return [(Scheduler, "open_room", open_room), (decode, "check_decode", nothing)]


@mutant(Kind.CONTENT)
def pages_of_a_failed_room_found() -> list[Patch]:
    """I6: pages of a lease that ended otherwise prove nothing about their content."""
    original = Scheduler.free_lease

    def free_lease(self: Scheduler, room: RoomId) -> None:
        leased = self.leased[room]
        self.keep(leased.tokens, leased.all_pages, leased.owner)
        original(self, room)

    return [(Scheduler, "free_lease", free_lease)]


@mutant(Kind.CONTENT, schedule=schedules.same_page_behind_another_prefix)
def page_found_by_its_own_tokens() -> list[Patch]:
    """I6: a page's key stands for all that comes before it too."""

    def extend_keys(keys: list[PageKey], tokens: Any, page_size: int, salt: str) -> None:
        for index in range(len(keys), len(tokens) // page_size):
            page = tokens[index * page_size : (index + 1) * page_size]
            keys.append(PageKey(repr(page).encode()))

    return [(prefix, "extend_keys", extend_keys), *unchecked()]
