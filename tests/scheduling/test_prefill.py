"""Chunks of prompts: who gets how much of a step, source pages, and what others have computed."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdrt.kv.pages import OwnerKind, PageTable
from pdrt.kv.prefix import PrefixCache
from pdrt.protocol.messages import Grant
from pdrt.sampling import Sampling
from pdrt.scheduling.prefill import OVERTAKEN_MAX, SCORED_TOKENS_MAX, PrefillScheduler
from pdrt.scheduling.prefill_job import Chunk, PrefillJob
from tests.scheduling.grants import LAYOUT, grant, room

SIZE = LAYOUT.page_size
Steps = list[tuple[int, int, int]]


def make_grant(
    serial: int, length: int, common: int = 0, sampling: Sampling | None = None
) -> Grant:
    """Its first `common` tokens are those of every other one, the rest are its own."""
    own = range(serial * 10_000, serial * 10_000 + length - common)
    return msgspec.structs.replace(
        grant(serial, length),
        token_ids=(*range(common), *own),
        sampling=sampling or Sampling(max_tokens=4),
    )


class Prefill:
    """A scheduler over a real page table and cache."""

    def __init__(
        self,
        pages: int = 20,
        tokens: int = 8,
        rows: int = 4,
        *,
        efficient: int | None = None,
        caching: bool = True,
    ) -> None:
        self.pages = PageTable(pages)
        self.cache = PrefixCache(self.pages, caching)
        self.scheduler = PrefillScheduler(
            LAYOUT, self.cache, tokens, rows, tokens_efficient=efficient
        )
        self.now = 0.0
        self.serial = 0
        self.chunks: list[Chunk] = []

    def add(self, *lengths: int, common: int = 0, sampling: Sampling | None = None) -> None:
        for length in lengths:
            self.serial += 1
            self.scheduler.add(make_grant(self.serial, length, common, sampling), self.now)

    def job(self, serial: int) -> PrefillJob:
        return self.scheduler.jobs[room(serial)]

    def plan(self) -> Steps:
        """(room, start, end) of each chunk."""
        self.now += 1
        self.chunks = self.scheduler.plan(self.now)
        self.check()
        return [(c.room.serial, c.start, c.end) for c in self.chunks]

    def finish(self) -> list[int]:
        finished = [self.scheduler.finish(chunk, self.now) for chunk in self.chunks]
        self.check()
        return finished

    def step(self) -> Steps:
        chunks = self.plan()
        self.finish()
        return chunks

    def forget(self, serial: int) -> None:
        owner = self.job(serial).owner
        self.cache.release(self.scheduler.forget(room(serial)), owner)
        self.check()

    def check(self) -> None:
        self.scheduler.check()
        self.pages.check()
        self.cache.check()
        owned = self.pages.pages_of(OwnerKind.ROOM)
        held = self.pages.held_by(OwnerKind.ROOM)
        for job in self.scheduler.jobs.values():
            mine = owned.pop(job.owner, set()) | held.pop(job.owner, set())
            assert mine == {*job.pages, *job.spare}
        assert not owned and not held


def test_nothing_to_do() -> None:
    prefill = Prefill()
    assert prefill.plan() == []
    assert not prefill.scheduler.has_work


# Who gets how much


def test_half_for_the_oldest_and_the_rest_for_the_shortest() -> None:
    prefill = Prefill(pages=100, tokens=8)
    prefill.add(20, 30, 6)
    assert prefill.step() == [(1, 0, 4), (3, 0, 4)]
    assert prefill.step() == [(1, 4, 10), (3, 4, 6)], "then the oldest has the fewest left"
    prefill.scheduler.stop(room(2))
    prefill.add(1)
    assert prefill.step() == [(1, 10, 17), (4, 0, 1)]
    prefill.add(30, 20)
    assert prefill.step() == [(1, 17, 20), (6, 0, 5)]
    assert prefill.step() == [(5, 0, 4), (6, 5, 9)], "the oldest now"


def test_equally_long_prompts_are_computed_one_after_another() -> None:
    prefill = Prefill(pages=100, tokens=8)
    prefill.add(20, 20, 20)
    ends = []
    for _ in range(8):
        prefill.plan()
        ends += [(c.room.serial, int(prefill.now)) for c in prefill.chunks if c.is_last]
        prefill.finish()
    assert ends == [(1, 3), (2, 5), (3, 8)]


def test_a_step_that_completes_a_prompt_ends_with_it_once_it_is_large_enough() -> None:
    prefill = Prefill(pages=100, tokens=16, rows=9, efficient=4)
    prefill.add(8, 8, 8)
    assert prefill.step() == [(1, 0, 8)]
    assert prefill.step() == [(2, 0, 8)]
    prefill.add(2, 2, 2, 40)
    assert prefill.step() == [(3, 0, 8)], "the oldest has its half, and that completes it"
    assert prefill.step() == [(4, 0, 2), (5, 0, 2)], "two make a step that is large enough"
    prefill.add(40)
    assert prefill.step() == [(6, 0, 2), (7, 0, 14)], "one does not"


def test_a_step_that_completes_nothing_is_filled() -> None:
    prefill = Prefill(pages=100, tokens=16, efficient=4)
    prefill.add(40, 41)
    assert prefill.step() == [(1, 0, 16)]
    prefill.add(30)
    assert prefill.step() == [(1, 16, 32)]
    prefill.add(6)
    assert prefill.step() == [(1, 32, 40)], "its half completes it"
    assert prefill.step() == [(2, 0, 8), (4, 0, 6)]


def test_the_oldest_alone_gets_everything() -> None:
    prefill = Prefill(tokens=8)
    prefill.add(17)
    assert (prefill.plan(), prefill.chunks[0].is_last) == ([(1, 0, 8)], False)
    assert prefill.finish() == [2]
    assert (prefill.plan(), prefill.chunks[0].is_last) == ([(1, 8, 16)], False)
    assert prefill.finish() == [4]
    assert (prefill.plan(), prefill.chunks[0].is_last) == ([(1, 16, 17)], True)
    assert prefill.finish() == [5]


@pytest.mark.parametrize(("tokens", "rows"), [(1, 4), (8, 1)])
def test_with_a_limit_of_one_it_is_first_come_first_served(tokens: int, rows: int) -> None:
    prefill = Prefill(pages=100, tokens=tokens, rows=rows)
    prefill.add(9, 2, 3)
    served = [chunk[0] for _ in range(30) for chunk in prefill.step()]
    assert served == sorted(served)
    assert set(served) == {1, 2, 3}


def test_rows_are_bounded() -> None:
    prefill = Prefill(tokens=100, rows=2)
    prefill.add(1, 1, 1)
    assert prefill.step() == [(1, 0, 1), (2, 0, 1)]
    assert prefill.step() == [(3, 0, 1)]


def test_equally_short_ones_come_in_order() -> None:
    prefill = Prefill(pages=100, tokens=8)
    prefill.add(40, 6, 6, 6)
    ends = []
    for _ in range(6):
        prefill.plan()
        ends += [c.room.serial for c in prefill.chunks if c.is_last]
        prefill.finish()
    assert ends == [2, 3, 4]


@pytest.mark.parametrize(("tokens", "complete"), [(3, [0, 1, 2, 3]), (5, [1, 2, 3]), (6, [1, 3])])
def test_pages_are_complete_only_when_full_or_last(tokens: int, complete: list[int]) -> None:
    prefill = Prefill(tokens=tokens)
    prefill.add(12)
    found = []
    while prefill.plan():
        found += prefill.finish()
    assert found == complete


def test_stopped_during_a_step() -> None:
    """The chunk is finished as planned, none follows, and the pages stay its own."""
    prefill = Prefill(tokens=8)
    prefill.add(20)
    prefill.plan()
    prefill.scheduler.stop(room(1))
    prefill.scheduler.stop(room(1))
    assert prefill.finish() == [2]
    assert prefill.plan() == []
    assert len(prefill.job(1).pages) == 5
    prefill.forget(1)
    assert prefill.cache.available == 20


def test_times() -> None:
    prefill = Prefill(tokens=4)
    prefill.add(8)
    prefill.step()
    job = prefill.job(1)
    assert (job.queued_at, job.started_at, job.computed_at) == (0.0, 1.0, None)
    prefill.step()
    assert (job.started_at, job.computed_at) == (1.0, 2.0)


@settings(max_examples=150)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    tokens=st.integers(1, 20),
    rows=st.integers(1, 5),
    efficient=st.integers(1, 20),
)
def test_nobody_is_starved(lengths: list[int], tokens: int, rows: int, efficient: int) -> None:
    """The bound in the module's docstring, while short prompts keep coming."""
    prefill = Prefill(pages=4000, tokens=tokens, rows=rows, efficient=efficient)
    prefill.check = lambda: None  # type: ignore[method-assign]  # too slow for so many pages
    prefill.add(*lengths)
    half = -(-tokens // 2)
    bounds = [sum(-(-length // half) for length in lengths[: i + 1]) for i in range(len(lengths))]
    for step in range(1, bounds[-1] + 1):
        prefill.add(1, 2)
        chunks = prefill.step()
        assert sum(end - start for _, start, end in chunks) <= tokens
        assert len(chunks) <= rows
        for index, bound in enumerate(bounds):
            assert step < bound or prefill.job(index + 1).computed_at is not None


class Traffic(NamedTuple):
    """What a short prompt meets."""

    long: list[int]
    waiting: list[int]
    arrivals: list[int]
    """One after each step."""
    warm_up: int
    """Steps before it comes."""


TRAFFIC = st.builds(
    Traffic,
    long=st.lists(st.integers(40, 200), max_size=4),
    waiting=st.lists(st.integers(1, 39), max_size=6),
    arrivals=st.lists(st.integers(1, 60), max_size=20),
    warm_up=st.integers(0, 12),
)


@settings(max_examples=150)
@given(
    traffic=TRAFFIC,
    length=st.integers(1, 39),
    tokens=st.integers(2, 20),
    rows=st.integers(2, 5),
    efficient=st.integers(1, 20),
)
def test_a_short_prompt_waits_for_shorter_ones_only(
    traffic: Traffic, length: int, tokens: int, rows: int, efficient: int
) -> None:
    """The bound in the module's docstring, whatever long prompts run or arrive."""
    prefill = Prefill(pages=1000, tokens=tokens, rows=rows, efficient=efficient)
    prefill.check = lambda: None  # type: ignore[method-assign]  # too slow for so many pages
    prefill.add(*traffic.long, *traffic.waiting)
    for _ in range(traffic.warm_up):
        prefill.step()
    prefill.add(length)
    mine = prefill.job(prefill.serial)
    ahead: dict[PrefillJob, int] = {}
    """Tokens that others had left when they first had no more than it had."""
    steps = ended = 0
    while mine.computed_at is None:
        pending = [j for j in prefill.scheduler.jobs.values() if j.computed_at is None]
        for job in pending:
            if job is not mine and job.remaining <= mine.remaining:
                ahead.setdefault(job, job.remaining)
        prefill.step()
        ended += sum(job is not mine and job.computed_at is not None for job in pending)
        prefill.add(*traffic.arrivals[steps : steps + 1])
        steps += 1
    work = -(-(length + sum(ahead.values())) // (tokens // 2))
    assert steps <= work + -(-(len(ahead) + 1) // (rows - 1)) + ended


@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.sampled_from([0, 8, 13])), max_size=8),
    tokens=st.integers(1, 20),
    rows=st.integers(1, 5),
    pages=st.integers(8, 40),
    caching=st.booleans(),
)
def test_everything_is_computed_once_and_in_order(
    lengths: list[tuple[int, int]], tokens: int, rows: int, pages: int, caching: bool
) -> None:
    """And each page holds what it should: cached or computed, it is the same prefix."""
    prefill = Prefill(pages=pages, tokens=tokens, rows=rows, caching=caching)
    for length, common in lengths:
        prefill.add(length, common=min(common, length))
    content: dict[int, list[int]] = {}
    """Tokens in each page, as forwards wrote them."""
    while chunks := prefill.plan():
        for serial, start, end in chunks:
            job = prefill.job(serial)
            assert job.computed == start < end
            for place in range(start, end):
                page = job.pages[place // SIZE]
                kept = content.get(page, [])[: place % SIZE]
                content[page] = [*kept, job.grant.token_ids[place]]
        for chunk in prefill.chunks:
            job = prefill.job(chunk.room.serial)
            written = [token for page in job.pages for token in content.get(page, [])]
            assert written[: chunk.end] == list(job.grant.token_ids[: chunk.end])
        prefill.finish()
        for name, job in list(prefill.scheduler.jobs.items()):
            if job.computed_at is not None:
                prefill.forget(name.serial)
    assert not prefill.scheduler.jobs
    assert prefill.cache.available == pages
    total = sum(length for length, _ in lengths)
    assert sum(prefill.cache.tokens.values()) == (total if caching else 0)


# Source pages


def test_pages_for_the_whole_prompt_before_its_first_chunk() -> None:
    prefill = Prefill(pages=20, tokens=4)
    prefill.add(33)
    prefill.plan()
    assert prefill.pages.count(OwnerKind.ROOM) == 9
    assert len(prefill.job(1).pages) == 9


def test_who_is_not_chosen_takes_no_pages() -> None:
    """Pages of long prompts that are far from their turn would keep short ones out."""
    prefill = Prefill(pages=100, tokens=8)
    prefill.add(40, 30, 40, 40)
    prefill.step()
    assert [job.has_started for job in prefill.scheduler.jobs.values()] == [
        True,
        True,
        False,
        False,
    ]
    assert (prefill.scheduler.running, prefill.scheduler.queued) == (2, 2)


def test_short_ones_run_on_while_a_long_one_waits_for_pages_but_not_for_ever() -> None:
    prefill = Prefill(pages=10, tokens=100)
    prefill.add(8)  # 2 pages, which it goes on holding: a slow transfer
    prefill.step()
    prefill.add(36)  # 9 pages
    for serial in range(3, 3 + OVERTAKEN_MAX):
        prefill.add(4)
        assert prefill.step() == [(serial, 0, 4)]
        prefill.forget(serial)
    prefill.add(4)
    assert prefill.step() == [], "it has been overtaken often enough"
    prefill.forget(1)
    assert prefill.step() == [(2, 0, 36), (prefill.serial, 0, 4)]


def test_rooms_that_have_started_run_on_while_the_oldest_waits_for_pages() -> None:
    prefill = Prefill(pages=10, tokens=4)
    prefill.add(4)
    prefill.step()
    prefill.add(40, 20)
    for start in range(0, 20, 4):
        assert prefill.step() == [(3, start, start + 4)]
    prefill.forget(1)
    assert prefill.step() == []
    prefill.forget(3)
    assert prefill.step() == [(2, 0, 4)]


def test_who_waits_ahead_is_stopped() -> None:
    prefill = Prefill(pages=10, tokens=100)
    prefill.add(24)
    prefill.step()
    prefill.add(20)
    assert prefill.step() == []
    prefill.scheduler.stop(room(2))
    prefill.add(1)
    assert prefill.step() == [(3, 0, 1)]
    prefill.forget(2)


@settings(max_examples=60)
@given(data=st.data())
def test_bounded_overtaking(data: st.DataObject) -> None:
    """Rooms come and go at random; whoever is the oldest waits for no more than so many others."""
    prefill = Prefill(pages=12, tokens=8)
    overtakers: dict[int, set[int]] = {}
    for _ in range(data.draw(st.integers(1, 50))):
        if data.draw(st.booleans()):
            prefill.add(data.draw(st.sampled_from([1, 4, 12, 40])))
        waiting = [s for s in range(1, prefill.serial + 1) if room(s) in prefill.scheduler.jobs]
        waiting = [s for s in waiting if not prefill.job(s).has_started]
        oldest = next(iter(prefill.scheduler._pending.values()), None)
        prefill.plan()
        started = {s for s in waiting if prefill.job(s).has_started}
        if oldest is not None and not oldest.has_started:
            overtakers.setdefault(oldest.room.serial, set()).update(started)
        prefill.finish()
        for serial in range(1, prefill.serial + 1):
            job = prefill.scheduler.jobs.get(room(serial))
            if job is not None and job.computed_at is not None and data.draw(st.booleans()):
                prefill.forget(serial)
    assert all(len(found) <= OVERTAKEN_MAX for found in overtakers.values())


# Cached prefixes


def test_a_cached_prefix_is_not_computed() -> None:
    prefill = Prefill(tokens=100)
    prefill.add(13, common=9)
    prefill.step()
    prefill.add(20, common=9)
    assert prefill.step() == [(2, 8, 20)]
    assert prefill.job(2).pages[:2] == prefill.job(1).pages[:2]
    assert prefill.job(2).cached == 8
    prefill.forget(1)
    prefill.forget(2)
    assert prefill.cache.tokens == {"hit": 8, "missed": 25}


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_the_last_token_is_always_computed(length: int, cached: int) -> None:
    prefill = Prefill(tokens=100)
    prefill.add(length, common=length)
    prefill.step()
    prefill.add(length, common=length)
    assert prefill.step() == [(2, cached, length)]
    assert prefill.job(2).cached == cached


@pytest.mark.parametrize("rows", [1, 2])
def test_who_has_nothing_to_compute_but_a_blocked_token_takes_no_turn(rows: int) -> None:
    prefill = Prefill(tokens=100, rows=rows)
    prefill.add(9)
    prefill.plan()
    same = make_grant(1, 9)
    for serial in range(2, 2 + rows):
        blocked = msgspec.structs.replace(same, room=room(serial))
        prefill.scheduler.add(blocked, prefill.now, is_blocked=True)
    prefill.serial = 1 + rows
    prefill.add(12)
    prefill.finish()
    assert prefill.step() == [(prefill.serial, 0, 12)]
    prefill.scheduler.unblock(room(2))
    assert prefill.step() == [(2, 8, 9)]


def test_a_forward_that_failed_is_not_found() -> None:
    prefill = Prefill(tokens=8)
    prefill.add(20, common=20)
    prefill.plan()
    prefill.scheduler.stop(room(1))
    prefill.forget(1)
    prefill.add(20, common=20)
    assert prefill.step() == [(2, 0, 8)]


def test_without_a_cache_everything_is_computed() -> None:
    prefill = Prefill(tokens=100, caching=False)
    prefill.add(12, 12, common=12)
    assert prefill.step() == [(1, 0, 12), (2, 0, 12)]
    prefill.forget(1)
    assert len(prefill.cache) == 0
    assert prefill.cache.available == 20 - 3
    assert not prefill.cache.tokens


def test_salts_part_prefixes() -> None:
    prefill = Prefill(tokens=100)
    prefill.add(12, common=12)
    prefill.step()
    for salt, start in (("a", 0), ("a", 8), ("", 8)):
        prefill.serial += 1
        salted = msgspec.structs.replace(make_grant(prefill.serial, 12, common=12), cache_salt=salt)
        prefill.scheduler.add(salted, 0.0)
        assert prefill.step() == [(prefill.serial, start, 12)]


def test_the_same_prompt_many_times_at_once_is_computed_once() -> None:
    prefill = Prefill(pages=100, tokens=16, rows=8)
    prefill.add(*[41] * 5, common=41)
    computed = 0
    while chunks := prefill.step():
        computed += sum(end - start for _, start, end in chunks)
    assert computed == 41 + 4, "and the last token of each"
    assert all(job.cached == 40 for job in list(prefill.scheduler.jobs.values())[1:])


def test_who_sat_out_computes_it_alone_when_the_other_fails() -> None:
    prefill = Prefill(pages=100, tokens=16)
    prefill.add(40, 40, common=40)
    assert prefill.plan() == [(1, 0, 16)]
    prefill.scheduler.stop(room(1))
    assert prefill.step() == [(2, 0, 16)]


def test_what_another_room_has_computed_in_the_meantime_is_adopted() -> None:
    """Its own pages for that stay its own until it is over."""
    prefill = Prefill(pages=100, tokens=8)
    prefill.add(60)
    prefill.add(40, common=40)
    assert prefill.step() == [(1, 0, 4), (2, 0, 4)]
    own = prefill.job(2).pages[1:3]
    prefill.add(13, common=13)
    assert prefill.step() == [(1, 4, 8), (3, 4, 8)]
    assert prefill.step() == [(1, 8, 12), (3, 8, 12)]
    assert prefill.step() == [(1, 12, 16), (3, 12, 13), (2, 12, 15)]
    assert (prefill.job(2).cached, prefill.job(2).spare) == (8, own)
    assert prefill.job(2).pages[1:3] == prefill.job(3).pages[1:3]
    assert [prefill.pages.owner(page) for page in own] == [prefill.job(2).owner] * 2


def test_what_is_scored_adopts_nothing() -> None:
    prefill = Prefill(pages=100, tokens=8)
    prefill.add(60)
    prefill.add(40, common=40, sampling=scored())
    prefill.step()
    prefill.add(13, common=13)
    prefill.step()
    prefill.step()
    assert prefill.step() == [(1, 12, 16), (3, 12, 13), (2, 4, 7)]
    assert (prefill.job(2).cached, prefill.job(3).cached) == (0, 4)


def test_nobody_sits_out_for_less_than_its_turn_would_give_it() -> None:
    prefill = Prefill(pages=100, tokens=16)
    prefill.add(40, 17, common=4)
    assert prefill.step() == [(1, 0, 8), (2, 0, 8)]


def test_a_partly_computed_page_is_given_up_for_a_whole_one() -> None:
    prefill = Prefill(pages=100, tokens=6)
    prefill.add(24, common=24)
    assert prefill.step() == [(1, 0, 6)]
    # Another worker's room, say, brings the same pages in.
    other = prefill.cache.take(5, prefill.job(1).owner._replace(key="other"))
    owner = prefill.job(1).owner._replace(key="other")
    prefill.cache.insert(prefill.job(1).keys[:5], other, owner)
    own = prefill.job(1).pages[1:5]
    chunks = prefill.scheduler.plan(0.0)
    assert [(c.start, c.end) for c in chunks] == [(20, 24)]
    job = prefill.job(1)
    assert (job.cached, job.spare, job.pages[1:5]) == (20 - 6, own, other[1:5])
    prefill.cache.release(other, owner)
    prefill.chunks = chunks
    prefill.finish()
    prefill.forget(1)
    assert prefill.cache.available == 100


# Prompts that are scored, and last tokens that wait


def scored(max_tokens: int = 0) -> Sampling:
    return Sampling(max_tokens=max_tokens, prompt_logprobs=0)


def test_what_is_scored_is_computed_whole_and_can_be_found_by_others() -> None:
    prefill = Prefill(tokens=100)
    prefill.add(12, common=12)
    prefill.step()
    prefill.add(20, common=20, sampling=scored())
    assert prefill.step() == [(2, 0, 20)]
    prefill.add(30, common=20)
    assert prefill.step() == [(3, 20, 30)]
    for serial in (1, 2, 3):
        prefill.forget(serial)
    assert prefill.cache.tokens == {"hit": 20, "missed": 22, "bypassed": 20}


def test_scored_tokens_are_bounded_and_shared_like_the_rest() -> None:
    half = SCORED_TOKENS_MAX // 2
    prefill = Prefill(pages=1000, tokens=1000)
    prefill.add(400, 300, sampling=scored())
    prefill.add(500)
    assert sorted(prefill.step()) == [(1, 0, half), (2, 0, half), (3, 0, 500)]
    prefill.scheduler.stop(room(2))
    assert prefill.step() == [(1, half, 3 * half)], "all of it, when nobody else wants any"


def test_the_last_token_and_output_are_not_scored() -> None:
    """So a chunk that holds the last scored position may be as long as it likes."""
    prefill = Prefill(pages=1000, tokens=1000)
    length = SCORED_TOKENS_MAX + 1
    resumed = msgspec.structs.replace(
        make_grant(1, length + 300, sampling=scored(400)), output_tokens=300
    )
    prefill.scheduler.add(resumed, 0.0)
    assert prefill.step() == [(1, 0, length + 300)]


def test_a_blocked_room_computes_all_but_its_last_token() -> None:
    prefill = Prefill(tokens=8)
    prefill.scheduler.add(make_grant(1, 12), 0.0, is_blocked=True)
    prefill.serial = 1
    assert prefill.step() == [(1, 0, 8)]
    assert prefill.step() == [(1, 8, 11)]
    assert prefill.step() == []
    assert prefill.scheduler.has_work
    prefill.add(3)
    assert prefill.step() == [(2, 0, 3)], "it blocks nobody else"
    prefill.scheduler.unblock(room(1))
    assert prefill.plan() == [(1, 11, 12)]
    assert prefill.chunks[0].is_last


def test_a_blocked_room_of_one_token_waits_without_pages() -> None:
    prefill = Prefill()
    prefill.scheduler.add(make_grant(1, 1), 0.0, is_blocked=True)
    assert prefill.step() == []
    prefill.scheduler.unblock(room(1))
    assert prefill.step() == [(1, 0, 1)]


# Any order of events


class PrefillMachine(RuleBasedStateMachine):
    """Rooms that come, are computed, fail, are closed and forgotten in any order, during steps
    too."""

    @initialize(tokens=st.integers(1, 12), rows=st.integers(1, 4), caching=st.booleans())
    def start(self, tokens: int, rows: int, caching: bool) -> None:
        self.prefill = Prefill(pages=12, tokens=tokens, rows=rows, caching=caching)
        self.chunks: list[Chunk] = []
        self.alive: dict[int, bool] = {}
        """By serial: it has been stopped."""

    @rule(
        length=st.integers(1, 40),
        common=st.sampled_from([0, 4, 10, 40]),
        is_scored=st.booleans(),
        is_blocked=st.booleans(),
    )
    def add(self, length: int, common: int, is_scored: bool, is_blocked: bool) -> None:
        self.prefill.serial += 1
        serial = self.prefill.serial
        self.alive[serial] = False
        made = make_grant(serial, length, min(common, length), scored(4) if is_scored else None)
        self.prefill.scheduler.add(made, 0.0, is_blocked=is_blocked)

    @rule()
    def plan_or_finish(self) -> None:
        if not self.chunks:
            self.prefill.plan()
            self.chunks = self.prefill.chunks
            assert all(not self.alive[c.room.serial] for c in self.chunks)
        else:
            self.prefill.chunks, self.chunks = self.chunks, []
            self.prefill.finish()

    @precondition(lambda self: self.chunks)
    @rule()
    def fail(self) -> None:
        for chunk in self.chunks:
            self.stop_one(chunk.room.serial)
        self.chunks = []

    def stop_one(self, serial: int) -> None:
        self.alive[serial] = True
        self.prefill.scheduler.stop(room(serial))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        self.stop_one(data.draw(st.sampled_from(sorted(self.alive))))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def unblock(self, data: st.DataObject) -> None:
        self.prefill.scheduler.unblock(room(data.draw(st.sampled_from(sorted(self.alive)))))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        serial = data.draw(st.sampled_from(sorted(self.alive)))
        if serial in {c.room.serial for c in self.chunks}:
            return  # it drains after its forward
        del self.alive[serial]
        self.prefill.forget(serial)

    @invariant()
    def whole(self) -> None:
        self.prefill.check()
        assert {name.serial for name in self.prefill.scheduler.jobs} == self.alive.keys()

    def teardown(self) -> None:
        if not hasattr(self, "prefill"):
            return
        if self.chunks:
            self.plan_or_finish()
        self.drain()
        for serial in list(self.alive):
            self.prefill.forget(serial)
        assert self.prefill.cache.available == self.prefill.pages.total

    def drain(self) -> None:
        """Whoever is over lets go; whatever is left is computed."""
        scheduler = self.prefill.scheduler
        for serial in self.alive:
            scheduler.unblock(room(serial))
        while scheduler.has_work:
            for serial, is_stopped in list(self.alive.items()):
                if is_stopped or self.prefill.job(serial).computed_at is not None:
                    del self.alive[serial]
                    self.prefill.forget(serial)
            assert self.prefill.step(), "nothing runs though there is work and nobody holds pages"


TestPrefillMachine = PrefillMachine.TestCase
TestPrefillMachine.settings = settings(max_examples=100, stateful_step_count=40)
