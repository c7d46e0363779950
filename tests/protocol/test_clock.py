"""Silence, judged fairly; and ranks of one's own worker."""

from __future__ import annotations

import pytest

from pdrt.config import ProtocolConfig
from pdrt.protocol.clock import SilenceClock
from pdrt.protocol.effects import EndWorker
from pdrt.protocol.ranks import RankWatch


@pytest.fixture
def clock() -> SilenceClock[str]:
    return SilenceClock(silence_seconds=5.0, tick_late_seconds=1.0, now=0.0)


def ticks(clock: SilenceClock[str], start: float, end: float) -> list[tuple[float, str]]:
    """One tick every half second: when, and who was found silent."""
    found = []
    for half in range(int(2 * start) + 1, int(2 * end) + 1):
        found += [(half / 2, peer) for peer in clock.tick(half / 2)]
    return found


def test_peer_is_silent_past_the_bound_and_is_told_once(clock: SilenceClock[str]) -> None:
    clock.heard("a", 0.0)
    assert ticks(clock, 0.0, 20.0) == [(5.5, "a")], "at the bound is not past it"
    assert list(clock.watched()) == []


def test_each_peer_has_its_own_clock(clock: SilenceClock[str]) -> None:
    clock.heard("a", 0.0)
    clock.heard("b", 0.0)
    ticks(clock, 0.0, 3.0)
    clock.heard("b", 3.0)
    assert ticks(clock, 3.0, 20.0) == [(5.5, "a"), (8.5, "b")]


def test_forgotten_peer_is_not_accused(clock: SilenceClock[str]) -> None:
    clock.heard("a", 0.0)
    clock.forget("a")
    clock.forget("a")
    assert ticks(clock, 0.0, 20.0) == []


def test_late_tick_restarts_every_clock(clock: SilenceClock[str]) -> None:
    clock.heard("a", 0.0)
    clock.heard("b", 0.0)
    assert clock.tick(100.0) == []
    assert ticks(clock, 100.0, 105.0) == []
    assert ticks(clock, 105.0, 106.0) == [(105.5, "a"), (105.5, "b")]


def test_tick_that_is_just_in_time_judges(clock: SilenceClock[str]) -> None:
    clock.heard("a", -5.0)
    assert clock.tick(1.0) == ["a"]


def test_two_late_ticks_in_a_row_accuse_nobody(clock: SilenceClock[str]) -> None:
    clock.heard("a", 0.0)
    for now in (4.0, 8.0, 12.0, 16.0):
        assert clock.tick(now) == []
    assert list(clock.watched()) == ["a"]


def test_whoever_is_late_every_time_judges_in_the_end(clock: SilenceClock[str]) -> None:
    """Slow, not asleep: of each late tick but the first, as much counts as may be late."""
    clock.heard("dead", 0.0)
    found = []
    for now in range(10, 100, 10):
        clock.heard("alive", now - 9.0)
        found += [(now, peer) for peer in clock.tick(now)]
    assert found == [(70, "dead")]
    assert clock.slept_seconds == 9.0


def test_so_does_whoever_is_late_every_other_time(clock: SilenceClock[str]) -> None:
    clock.heard("dead", 0.0)
    found = []
    for now in range(0, 100, 10):
        found += [(now, peer) for peer in clock.tick(now)]
        found += [(now + 1, peer) for peer in clock.tick(now + 1.0)]
    assert found == [(40, "dead")]


def test_clocks_restart_again_once_who_was_silent_is_found(clock: SilenceClock[str]) -> None:
    clock.heard("a", 0.0)
    assert clock.tick(100.0) == []
    assert ticks(clock, 100.0, 106.0) == [(105.5, "a")]
    clock.heard("b", 106.0)
    assert clock.tick(200.0) == []
    assert ticks(clock, 200.0, 206.0) == [(205.5, "b")]


def test_how_long_it_slept_is_told_for_one_tick(clock: SilenceClock[str]) -> None:
    clock.tick(0.5)
    assert clock.slept_seconds == 0.0
    clock.tick(100.5)
    assert clock.slept_seconds == 100.0
    clock.tick(101.0)
    assert clock.slept_seconds == 0.0


def watch(ranks: int) -> RankWatch:
    return RankWatch(ranks, ProtocolConfig(), 0.0)


def test_silent_rank_ends_the_worker_and_living_ones_do_not() -> None:
    ranks = watch(3)
    effects: list[EndWorker] = []
    for half in range(1, 30):
        ranks.heard(1, half / 2)
        effects += ranks.handle_timer(half / 2)
    assert effects == [EndWorker("rank 2 has been silent for 5 s (--silence-seconds)")]


def test_worker_of_one_rank_watches_nobody() -> None:
    ranks = watch(1)
    assert [x for half in range(1, 60) for x in ranks.handle_timer(half / 2)] == []


def test_leader_that_was_asleep_accuses_no_rank() -> None:
    ranks = watch(2)
    assert ranks.handle_timer(600.0) == []
    assert ranks.handle_timer(600.5) == []
