"""Chunks of prompts: first come, first served, under a budget, with pages for the whole prompt."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdrt.ids import RoomId
from pdrt.kv.pages import Owner, OwnerKind, PageTable
from pdrt.scheduling.prefill import Chunk, PrefillScheduler
from tests.scheduling.grants import LAYOUT, grant, room


class Prefill:
    """A scheduler over a real page table."""

    def __init__(self, pages: int = 20, tokens: int = 8, rows: int = 4) -> None:
        self.pages = PageTable(pages)
        self.scheduler = PrefillScheduler(LAYOUT, tokens, rows)
        self.now = 0.0

    def take(self, name: RoomId, count: int) -> list[int]:
        return self.pages.take(count, Owner(OwnerKind.ROOM, name))

    def add(self, *lengths: int) -> None:
        for length in lengths:
            self.scheduler.add(grant(len(self.scheduler.jobs) + 1, length), self.now)

    def plan(self) -> list[tuple[int, int, int]]:
        """(room, start, end) of each chunk."""
        self.now += 1
        self.chunks = self.scheduler.plan(self.take, self.now)
        self.check()
        return [(c.room.serial, c.start, c.end) for c in self.chunks]

    def finish(self) -> list[int]:
        finished = [self.scheduler.finish(chunk, self.now) for chunk in self.chunks]
        self.check()
        return finished

    def step(self) -> list[tuple[int, int, int]]:
        chunks = self.plan()
        self.finish()
        return chunks

    def forget(self, serial: int) -> None:
        pages = self.scheduler.forget(room(serial))
        self.pages.free(pages, Owner(OwnerKind.ROOM, room(serial)))
        self.check()

    def check(self) -> None:
        self.scheduler.check()
        self.pages.check()


def test_nothing_to_do() -> None:
    prefill = Prefill()
    assert prefill.plan() == []
    assert not prefill.scheduler.has_work


def test_the_budget_goes_to_the_oldest_first() -> None:
    prefill = Prefill(tokens=8)
    prefill.add(5, 5, 5)
    assert prefill.step() == [(1, 0, 5), (2, 0, 3)]
    assert prefill.step() == [(2, 3, 5), (3, 0, 5)]
    assert prefill.step() == []
    assert not prefill.scheduler.has_work


def test_a_prompt_is_cut_at_the_budget_and_its_last_chunk_is_marked() -> None:
    prefill = Prefill(tokens=8)
    prefill.add(17)
    assert (prefill.plan(), prefill.chunks[0].is_last) == ([(1, 0, 8)], False)
    assert prefill.finish() == [2]
    assert (prefill.plan(), prefill.chunks[0].is_last) == ([(1, 8, 16)], False)
    assert prefill.finish() == [4]
    assert (prefill.plan(), prefill.chunks[0].is_last) == ([(1, 16, 17)], True)
    assert prefill.finish() == [5]


@pytest.mark.parametrize(("tokens", "complete"), [(3, [0, 1, 2, 3]), (5, [1, 2, 3]), (6, [1, 3])])
def test_pages_are_complete_only_when_full_or_last(tokens: int, complete: list[int]) -> None:
    prefill = Prefill(tokens=tokens)
    prefill.add(12)
    found = []
    while prefill.plan():
        found += prefill.finish()
    assert found == complete


def test_rows_are_bounded() -> None:
    prefill = Prefill(tokens=100, rows=2)
    prefill.add(1, 1, 1)
    assert prefill.step() == [(1, 0, 1), (2, 0, 1)]
    assert prefill.step() == [(3, 0, 1)]


def test_pages_for_the_whole_prompt_before_its_first_chunk() -> None:
    prefill = Prefill(pages=20, tokens=4)
    prefill.add(33)
    prefill.plan()
    assert prefill.pages.count(OwnerKind.ROOM) == 9
    assert len(prefill.scheduler.jobs[room(1)].pages) == 9


def test_nobody_overtakes_who_waits_for_pages() -> None:
    prefill = Prefill(pages=10, tokens=100)
    prefill.add(24, 20, 1)  # 6, 5 and 1 pages
    assert prefill.step() == [(1, 0, 24)]
    assert prefill.step() == []
    assert prefill.scheduler.queued == 2
    prefill.forget(1)
    assert prefill.step() == [(2, 0, 20), (3, 0, 1)]


def test_who_waits_ahead_is_stopped() -> None:
    prefill = Prefill(pages=10, tokens=100)
    prefill.add(24, 20, 1)
    prefill.step()
    prefill.scheduler.stop(room(2))
    assert prefill.step() == [(3, 0, 1)]
    prefill.forget(2)


def test_stopped_during_a_step() -> None:
    """The chunk is finished as planned, none follows, and the pages stay its own."""
    prefill = Prefill(tokens=8)
    prefill.add(20)
    prefill.plan()
    prefill.scheduler.stop(room(1))
    prefill.scheduler.stop(room(1))
    assert prefill.finish() == [2]
    assert prefill.plan() == []
    assert prefill.pages.count(OwnerKind.ROOM) == 5
    prefill.forget(1)
    assert prefill.pages.count(OwnerKind.ROOM) == 0


def test_forgotten_once() -> None:
    prefill = Prefill()
    prefill.add(20)
    prefill.step()
    assert len(prefill.scheduler.forget(room(1))) == 5
    with pytest.raises(KeyError):
        prefill.scheduler.forget(room(1))


def test_forgotten_before_it_started() -> None:
    prefill = Prefill(pages=5)
    prefill.add(20, 20)
    prefill.step()
    assert prefill.scheduler.forget(room(2)) == []


def test_a_room_twice_is_our_bug() -> None:
    prefill = Prefill()
    prefill.add(5)
    with pytest.raises(AssertionError):
        prefill.scheduler.add(grant(1, 5), 0.0)


def test_a_chunk_out_of_turn_is_our_bug() -> None:
    prefill = Prefill()
    prefill.add(20)
    prefill.plan()
    (chunk,) = prefill.chunks
    prefill.finish()
    with pytest.raises(AssertionError):
        prefill.scheduler.finish(chunk, 0.0)


def test_times() -> None:
    prefill = Prefill(tokens=4)
    prefill.add(8)
    prefill.step()
    job = prefill.scheduler.jobs[room(1)]
    assert (job.queued_at, job.started_at, job.computed_at) == (0.0, 1.0, None)
    prefill.step()
    assert (job.started_at, job.computed_at) == (1.0, 2.0)


@given(
    lengths=st.lists(st.integers(1, 30), max_size=8),
    tokens=st.integers(1, 20),
    rows=st.integers(1, 5),
)
def test_everything_is_computed_once_and_in_order(
    lengths: list[int], tokens: int, rows: int
) -> None:
    prefill = Prefill(pages=100, tokens=tokens, rows=rows)
    prefill.add(*lengths)
    done = {serial: 0 for serial, _ in enumerate(lengths, 1)}
    ends: list[int] = []
    while chunks := prefill.plan():
        assert sum(end - start for _, start, end in chunks) <= tokens
        assert len(chunks) <= rows
        assert [c[0] for c in chunks] == sorted(c[0] for c in chunks)
        for serial, start, end in chunks:
            assert done[serial] == start < end
            done[serial] = end
        ends += [c.room.serial for c in prefill.chunks if c.is_last]
        prefill.finish()
    assert done == dict(enumerate(lengths, 1))
    assert ends == sorted(ends), "who came first is done first"


class PrefillMachine(RuleBasedStateMachine):
    """Rooms that come, are computed, closed and forgotten in any order, during steps too."""

    @initialize(tokens=st.integers(1, 12), rows=st.integers(1, 4))
    def start(self, tokens: int, rows: int) -> None:
        self.prefill = Prefill(pages=12, tokens=tokens, rows=rows)
        self.chunks: list[Chunk] = []
        self.serial = 0
        self.alive: dict[int, bool] = {}
        """By serial: it has been stopped."""

    @rule(length=st.integers(1, 40))
    def add(self, length: int) -> None:
        self.serial += 1
        self.alive[self.serial] = False
        self.prefill.scheduler.add(grant(self.serial, length), 0.0)

    @rule()
    def plan_or_finish(self) -> None:
        if not self.chunks:
            self.prefill.plan()
            self.chunks = self.prefill.chunks
            assert all(not self.alive[c.room.serial] for c in self.chunks)
        else:
            self.prefill.chunks, self.chunks = self.chunks, []
            self.prefill.finish()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        serial = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive[serial] = True
        self.prefill.scheduler.stop(room(serial))

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
        jobs = self.prefill.scheduler.jobs
        assert {name.serial for name in jobs} == self.alive.keys()
        owned = self.prefill.pages.pages_of(OwnerKind.ROOM)
        assert {o.key: p for o, p in owned.items()} == {
            name: set(job.pages) for name, job in jobs.items() if job.pages
        }

    def teardown(self) -> None:
        if not hasattr(self, "prefill"):
            return
        if self.chunks:
            self.plan_or_finish()
        for serial in list(self.alive):
            self.prefill.forget(serial)
        assert self.prefill.pages.free_count == self.prefill.pages.total


TestPrefillMachine = PrefillMachine.TestCase
TestPrefillMachine.settings = settings(max_examples=60, stateful_step_count=40)
