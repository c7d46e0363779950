"""Fences: what proves, without its word, that a writer can write no more; and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdrt.config import ProtocolConfig
from pdrt.ids import Incarnation
from pdrt.protocol.effects import (
    CloseFence,
    CloseSegment,
    EndLease,
    EndWorker,
    FailRoom,
    KillWriter,
    OpenFence,
    OpenSegment,
    SendToPrefill,
)
from pdrt.protocol.leases import LeaseState
from pdrt.protocol.messages import Grant, Hello, Outcome, Reason, Revoke
from pdrt.protocol.writers import FenceState
from tests.protocol.traces import (
    CONFIG,
    ENDPOINT,
    LOCAL,
    NEXT_WRITER,
    OTHER_ENDPOINT,
    WRITER,
    Decode,
    ends_worker,
    one,
    only,
    sent,
)

THIRD_WRITER = Incarnation(0xA2)


@pytest.fixture
def decode() -> Iterator[Decode]:
    """Two ranks, an engine that retires generations."""
    decode = Decode(ranks=2)
    decode.pair()
    yield decode
    decode.table.check()


@pytest.fixture
def local() -> Iterator[Decode]:
    decode = Decode(LOCAL)
    decode.pair()
    yield decode
    decode.table.check()


def silence(decode: Decode) -> list[object]:
    """Nobody answers until the writer is lost."""
    return list(decode.wait(5.6, answering=False))


# Retire: order of steps


def test_unsettled_end_retires_the_generation_at_once(decode: Decode) -> None:
    room = decode.grant([1])
    effects = decode.drained(room, Outcome.UNSETTLED, reason=Reason.WRITE_UNSETTLED)
    assert effects == [
        FailRoom(room, Reason.WRITE_UNSETTLED, True, ""),
        OpenSegment(ENDPOINT, 2),
        CloseSegment(ENDPOINT, 1),
    ]
    assert decode.table.usable_endpoints() == [], "no new grants on it"
    assert decode.freed == []
    assert decode.table.fences == 1


def test_pages_are_freed_when_every_rank_has_torn_down_and_then_the_floor_rises(
    decode: Decode,
) -> None:
    room = decode.grant([1])
    decode.drained(room, Outcome.UNSETTLED)
    [hello] = sent(decode.open_segments(2))
    assert (hello.generation, hello.floor) == (2, 1)
    assert decode.close_segment(1) == []
    assert decode.close_segment(1) == [], "the same rank again is not the other one"
    assert decode.freed == []
    effects = decode.close_segment(0)
    assert only(effects, EndLease) == [EndLease(room)]
    assert one(sent(effects)).floor == 2
    assert decode.close_segments() == [], "late answers change nothing"
    assert decode.freed == [room]


def test_granted_leases_of_the_generation_end_too_and_their_requests_go_on(decode: Decode) -> None:
    dirty, granted, revoking = decode.grant([1]), decode.grant([2]), decode.grant([3])
    decode.revoke(revoking)
    decode.drained(dirty, Outcome.UNSETTLED)
    effects = decode.close_segments()
    assert only(effects, FailRoom) == [
        FailRoom(granted, Reason.FENCED, True, "its generation was retired")
    ]
    assert {x.room for x in only(effects, EndLease)} == {dirty, granted, revoking}
    assert decode.table.leases == {}


def test_lease_that_ends_cleanly_while_the_teardown_is_under_way_ends_once(decode: Decode) -> None:
    dirty, clean = decode.grant([1]), decode.grant([2])
    decode.drained(dirty, Outcome.UNSETTLED)
    decode.drained(clean, Outcome.ENDED)
    assert decode.freed == [clean]
    decode.close_segments()
    assert decode.freed == [clean, dirty]


def test_leases_of_the_next_generation_survive(decode: Decode) -> None:
    old = decode.grant([1])
    decode.drained(old, Outcome.UNSETTLED)
    decode.open_segments(2)
    decode.welcome()
    new = decode.grant([2])
    decode.close_segments()
    assert decode.freed == [old]
    assert decode.table.leases[new].state is LeaseState.GRANTED
    assert decode.table.leases[new].generation == 2


def test_the_teardown_does_not_wait_for_the_welcome(decode: Decode) -> None:
    """The fence of a writer that is dead cannot depend on its word."""
    room = decode.grant([1])
    decode.drained(room, Outcome.UNSETTLED)
    decode.close_segments()
    assert decode.freed == [room]


def test_grants_wait_for_the_welcome_that_echoes_the_new_generation(decode: Decode) -> None:
    hello = decode.last_hello()
    decode.tick(1.0)
    decode.drained(decode.grant([1]), Outcome.UNSETTLED)
    decode.open_segments(2)
    decode.receive(decode.answer(hello=hello, seq=decode.last_hello().seq - 1, generation=1))
    assert decode.table.usable_endpoints() == []
    decode.welcome()
    assert decode.table.usable_endpoints() == [ENDPOINT]


def test_further_fence_waits_for_the_one_under_way(decode: Decode) -> None:
    first = decode.grant([1])
    decode.drained(first, Outcome.UNSETTLED)
    decode.open_segments(2)
    decode.welcome()
    second = decode.grant([2])
    effects = decode.drained(second, Outcome.UNSETTLED)
    assert only(effects, CloseSegment) == only(effects, OpenSegment) == []
    assert len(decode.pairing.peers[ENDPOINT].generations) == 2, "two alive at most"
    effects = decode.close_segments(1)
    assert only(effects, EndLease) == [EndLease(first)]
    assert only(effects, OpenSegment) == [OpenSegment(ENDPOINT, 3)]
    assert only(effects, CloseSegment) == [CloseSegment(ENDPOINT, 2)]
    decode.close_segments(2)
    assert decode.freed == [first, second]
    assert decode.pairing.peers[ENDPOINT].floor == 3


def test_one_unsettled_write_causes_one_fence(decode: Decode) -> None:
    rooms = [decode.grant([page]) for page in range(3)]
    for room in rooms:
        decode.drained(room, Outcome.UNSETTLED)
    decode.wait(5)
    decode.close_segments()
    decode.open_segments(2)
    decode.welcome()
    decode.wait(60)
    assert decode.table.fences == 1
    assert set(decode.freed) == set(rooms)


def test_fence_disturbs_one_pair_only(decode: Decode) -> None:
    decode.pair(NEXT_WRITER, OTHER_ENDPOINT)
    other = decode.grant([2], OTHER_ENDPOINT)
    room = decode.grant([1])
    decode.drained(room, Outcome.UNSETTLED)
    assert OTHER_ENDPOINT in decode.table.usable_endpoints()
    decode.close_segments()
    assert decode.freed == [room]
    assert decode.table.leases[other].state is LeaseState.GRANTED


def test_generation_that_is_retired_before_it_opened(decode: Decode) -> None:
    decode.drained(decode.grant([1]), Outcome.UNSETTLED)
    decode.table.segment_closed(ENDPOINT, 1, 0, decode.now)
    decode.pairing.peers[ENDPOINT].generations[2].close(2, decode.now + 1)
    assert decode.open_segments(2) == [], "too late: it is being torn down"


def test_rank_that_does_not_confirm_ends_the_worker_and_frees_nothing(decode: Decode) -> None:
    room = decode.grant([1])
    decode.drained(room, Outcome.UNSETTLED)
    decode.open_segments(2)
    decode.welcome()
    decode.close_segment(0)
    why = ""
    for _ in range(50):
        for rank in range(decode.ranks):
            decode.table.rank_heard(rank, decode.now)
        effects = decode.wait(0.5)
        if ended := [x for x in effects if type(x).__name__ == "EndWorker"]:
            why = ends_worker(ended)
            break
    assert why == f"ranks [1] did not confirm closing generation 1 of {ENDPOINT} in time"
    assert decode.freed == []


def test_leader_that_was_asleep_in_a_teardown_waits_for_the_answers(decode: Decode) -> None:
    room = decode.grant([1])
    decode.drained(room, Outcome.UNSETTLED)
    decode.open_segments(2)
    assert only(decode.tick(3600.0), EndWorker) == []
    assert only(decode.tick(0.5), EndWorker) == []
    decode.close_segments()
    assert decode.freed == [room]


# Retire: what sets it off


def test_sleep_does_not_age_a_revoked_lease(local: Decode) -> None:
    room = local.grant([1])
    local.revoke(room)
    local.wait(2)
    assert only(local.tick(3600.0), KillWriter) == []
    assert local.table.quarantined_pages(local.now) == 0
    local.welcome()
    assert only(local.wait(CONFIG.fence_after_seconds - 4), KillWriter) == []
    assert one(only(local.wait(3), KillWriter)).writer == WRITER


def test_fence_that_was_due_before_the_sleep_is_due_after_it(local: Decode) -> None:
    room = local.grant([1])
    local.revoke(room)
    lease = local.table.leases[room]
    lease.fence_at = local.now
    assert one(only(local.tick(3600.0), KillWriter)).writer == WRITER


def test_lease_revoked_long_ago_is_fenced(decode: Decode) -> None:
    room = decode.grant([1])
    decode.revoke(room)
    ranks_alive = [decode.table.rank_heard(1, decode.now)]
    for _ in range(int(CONFIG.fence_after_seconds) - 1):
        decode.table.rank_heard(1, decode.now)
        ranks_alive += only(decode.wait(1.0), CloseSegment)
    assert not any(ranks_alive)
    decode.table.rank_heard(1, decode.now)
    assert only(decode.wait(2.0), CloseSegment) == [CloseSegment(ENDPOINT, 1)]
    decode.close_segments()
    assert decode.freed == [room]


def test_lost_writer_is_fenced_at_once_and_lost_proves_nothing(decode: Decode) -> None:
    room = decode.grant([1])
    effects = silence(decode)
    assert only(effects, FailRoom) == [FailRoom(room, Reason.WRITER_LOST, True, "")]
    assert [x for x in sent(effects) if isinstance(x, Revoke)] != []
    assert only(effects, CloseSegment) == [CloseSegment(ENDPOINT, 1)]
    assert decode.freed == []


def test_new_incarnation_is_no_fence_of_the_old_one(decode: Decode) -> None:
    room = decode.grant([1])
    decode.tick(1.0)
    effects = decode.welcome(NEXT_WRITER, rooms=[])
    assert only(effects, FailRoom) == [FailRoom(room, Reason.WRITER_LOST, True, "")]
    assert only(effects, CloseSegment) == [CloseSegment(ENDPOINT, 1)]
    assert decode.freed == []
    assert decode.drained(room, Outcome.ENDED, writer=NEXT_WRITER) == []
    decode.drained(room, Outcome.ENDED)
    assert decode.freed == [room], "the old one's own word still counts"


def test_death_of_the_writer_is_no_fence_for_one_sided_engines(decode: Decode) -> None:
    """Nobody holds its processes, which may be on another host: it is missed by its silence."""
    room = decode.grant([1])
    assert decode.note(decode.table.writer_dead(ENDPOINT, WRITER, decode.now)) == []
    effects = decode.wait(CONFIG.silence_seconds + 0.5, answering=False)
    assert only(effects, EndLease) == []
    assert only(effects, CloseSegment) == [CloseSegment(ENDPOINT, 1)]
    decode.close_segments()
    assert decode.freed == [room]


def test_resending_stops_when_nothing_but_a_fence_can_help(decode: Decode) -> None:
    room = decode.grant([1])
    decode.drained(room, Outcome.UNSETTLED)
    effects = decode.wait(4)
    assert [x for x in sent(effects) if isinstance(x, Revoke)] == []
    assert decode.drained(room, Outcome.ENDED) == [], "UNSETTLED is final"
    assert decode.table.stale["drained_again"] == 1
    assert decode.table.leases[room].state is LeaseState.REVOKING


def test_room_without_pages_needs_no_fence_unless_it_tainted_its_generation(
    decode: Decode,
) -> None:
    lost, dirty = decode.grant([], max_tokens=1), decode.grant([], max_tokens=1)
    effects = decode.drained(dirty, Outcome.UNSETTLED)
    assert only(effects, CloseSegment) == [CloseSegment(ENDPOINT, 1)], "or nobody may write again"
    assert only(effects, EndLease) == []
    effects = decode.welcome(NEXT_WRITER, rooms=[], seq=decode.sent[-1].message.seq)
    decode.open_segments(2)
    decode.tick(1.0)
    effects = decode.welcome(NEXT_WRITER, rooms=[])
    assert decode.freed == [lost]
    decode.close_segments()
    assert decode.freed == [lost, dirty]


def test_lost_writer_without_leases_costs_no_fence(decode: Decode) -> None:
    effects = silence(decode)
    assert only(effects, CloseSegment) == []
    assert decode.table.fences == 0
    decode.welcome()
    assert decode.table.usable_endpoints() == [ENDPOINT], "the same incarnation goes on"


def test_healthy_network_has_no_fence(decode: Decode) -> None:
    for page in range(40):
        room = decode.grant([page])
        decode.table.rank_heard(1, decode.now)
        decode.wait(1.5)
        decode.drained(room, Outcome.ENDED if page % 3 else Outcome.COMPLETE, first=None)
    assert decode.table.fences == 0
    assert only([x for x in decode.sent], KillWriter) == decode.closing == []


# Local: process death


def test_local_unsettled_end_kills_the_writer_once_and_its_death_frees(local: Decode) -> None:
    rooms = [local.grant([1]), local.grant([2])]
    effects = local.drained(rooms[0], Outcome.UNSETTLED)
    kill = one(only(effects, KillWriter))
    assert (kill.endpoint, kill.writer) == (ENDPOINT, WRITER)
    assert only(local.drained(rooms[1], Outcome.UNSETTLED), KillWriter) == []
    assert only(local.wait(30), KillWriter) == []
    assert local.freed == [], "killed is not dead"
    assert local.table.usable_endpoints() == []
    local.note(local.table.writer_dead(ENDPOINT, WRITER, local.now))
    assert set(local.freed) == set(rooms)
    local.note(local.table.writer_dead(ENDPOINT, WRITER, local.now))
    assert len(local.freed) == 2
    assert local.table.fences == 1


def test_local_death_frees_granted_leases_of_that_writer_only(local: Decode) -> None:
    local.pair(NEXT_WRITER, OTHER_ENDPOINT)
    mine, other = local.grant([1]), local.grant([2], OTHER_ENDPOINT)
    effects = local.note(local.table.writer_dead(ENDPOINT, WRITER, local.now))
    assert only(effects, FailRoom) == [FailRoom(mine, Reason.WRITER_LOST, True, "")]
    assert local.freed == [mine]
    assert local.table.leases[other].state is LeaseState.GRANTED


def test_local_death_of_an_older_writer_frees_its_leases_only(local: Decode) -> None:
    old = local.grant([1])
    local.tick(1.0)
    local.welcome(NEXT_WRITER, rooms=[])
    local.fence_opened(NEXT_WRITER)
    new = local.grant([2])
    local.note(local.table.writer_dead(ENDPOINT, WRITER, local.now))
    assert local.freed == [old]
    assert local.table.leases[new].state is LeaseState.GRANTED
    assert local.table.usable_endpoints() == [ENDPOINT]
    assert only(local.tick(), CloseFence) in ([], [CloseFence(ENDPOINT, WRITER)])
    assert WRITER not in local.pairing.peers[ENDPOINT].fences


def test_local_lost_but_living_writer_is_killed_after_patience(local: Decode) -> None:
    room = local.grant([1])
    effects = silence(local)
    assert only(effects, KillWriter) == []
    assert local.table.leases[room].reason is Reason.WRITER_LOST
    patience = CONFIG.kill_lost_after_seconds
    assert only(local.wait(patience - 2, answering=False), KillWriter) == []
    assert one(only(local.wait(3, answering=False), KillWriter)).writer == WRITER
    assert local.freed == []


def test_local_lost_writer_that_returns_and_drains_is_not_killed(local: Decode) -> None:
    room = local.grant([1])
    silence(local)
    local.welcome(rooms=[room])
    local.drained(room, Outcome.ENDED, reason=Reason.DECODE_LOST)
    assert local.freed == [room]
    assert only(local.wait(60), KillWriter) == []
    assert local.table.usable_endpoints() == [ENDPOINT]


def test_local_writer_without_leases_is_never_killed(local: Decode) -> None:
    local.drained(local.grant([1]), Outcome.COMPLETE, first=None)
    silence(local)
    assert only(local.wait(120, answering=False), KillWriter) == []


def test_local_retired_generation_is_no_fence(local: Decode) -> None:
    room = local.grant([1])
    local.note(local.table._resolve(local.pairing.retire(ENDPOINT, local.now), local.now))
    local.close_segments()
    assert local.freed == []
    assert room in local.table.leases


def test_local_dead_writer_gets_no_grant_and_its_late_welcome_is_dropped(local: Decode) -> None:
    local.tick(1.0)
    late = local.answer()
    local.note(local.table.writer_dead(ENDPOINT, WRITER, local.now))
    assert local.table.usable_endpoints() == []
    assert local.receive(late) == []
    assert local.table.stale["dead_writer"] == 1
    local.tick(1.0)
    effects = local.welcome(NEXT_WRITER)
    assert only(effects, OpenFence) != []
    local.fence_opened(NEXT_WRITER)
    assert local.table.usable_endpoints() == [ENDPOINT]


def test_no_grant_before_the_means_to_fence_are_in_hand() -> None:
    decode = Decode(LOCAL)
    decode.want()
    decode.open_segments()
    effects = decode.welcome()
    fence = one(only(effects, OpenFence))
    assert (fence.writer, len(fence.ranks)) == (WRITER, 1)
    assert decode.table.usable_endpoints() == []
    decode.fence_opened(NEXT_WRITER)
    assert decode.table.usable_endpoints() == [], "of another writer"
    decode.fence_opened()
    assert decode.table.usable_endpoints() == [ENDPOINT]


def test_fence_that_is_refused_refuses_the_writer_until_another_one_answers() -> None:
    decode = Decode(LOCAL)
    decode.want()
    decode.open_segments()
    decode.welcome()
    why = "pid 11 is of another PID namespace"
    decode.note(decode.table.fence_refused(ENDPOINT, WRITER, why))
    for _ in range(3):
        decode.wait(1.0)
        assert decode.pairing.peers[ENDPOINT].refusal == why
        assert decode.table.usable_endpoints() == []
    decode.fence_opened()
    assert decode.pairing.peers[ENDPOINT].fences[WRITER] is FenceState.REFUSED
    decode.tick(1.0)
    decode.welcome(NEXT_WRITER)
    decode.fence_opened(NEXT_WRITER)
    assert decode.table.usable_endpoints() == [ENDPOINT]


def test_means_to_fence_are_kept_while_a_lease_needs_them(local: Decode) -> None:
    old = local.grant([1])
    for writer in (NEXT_WRITER, THIRD_WRITER):
        local.tick(1.0)
        local.welcome(writer, rooms=[])
        local.fence_opened(writer)
    local.tick()
    fences = local.pairing.peers[ENDPOINT].fences
    assert set(fences) == {WRITER, THIRD_WRITER}, "the one between has no lease"
    effects = local.drained(old, Outcome.ENDED)
    assert effects == [EndLease(old), CloseFence(ENDPOINT, WRITER)]


def test_defaults_leave_a_writer_time_to_find_out_by_itself() -> None:
    assert CONFIG.fence_after_seconds > CONFIG.write_seconds_max + CONFIG.retire_seconds_max
    assert ProtocolConfig().quarantine_after_seconds < CONFIG.fence_after_seconds


def test_messages_of_a_fence_are_only_hellos_and_revokes(decode: Decode) -> None:
    decode.drained(decode.grant([1]), Outcome.UNSETTLED)
    decode.open_segments(2)
    decode.close_segments()
    kinds = {type(x.message) for x in decode.sent if isinstance(x, SendToPrefill)}
    assert kinds == {Hello, Grant}
