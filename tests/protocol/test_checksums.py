"""`--kv-checksum` in the pure halves: what is sent along, what must be compared, and what a
difference means for request and pages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdrt.ids import RoomId
from pdrt.kv.layout import slice_plan
from pdrt.protocol.checksums import cover, differing, merged
from pdrt.protocol.effects import (
    ChecksumPages,
    CloseSegment,
    DecodeEffect,
    EndLease,
    FailRoom,
    KillWriter,
    LeaseReady,
    PagesDiffer,
    TakeFirstToken,
)
from pdrt.protocol.leases import LeaseState
from pdrt.protocol.messages import Outcome, Reason, Revoke, SliceChecksums
from pdrt.protocol.room_writer import RankEnd, ReportEnd, RoomWriter, WriteOutcome
from pdrt.protocol.writers import FenceKind
from tests.protocol import traces
from tests.protocol.traces import FIRST, LOCAL, RETIRE, WRITER, Decode, Prefill, one, only, sent

LAYOUT = traces.LAYOUT
CHECKED = msgspec.structs.replace(traces.FINGERPRINT, kv_checksum=True)


def sums(pages: tuple[int, ...], ranks: int = 1) -> tuple[SliceChecksums, ...]:
    """Of one prefill rank's slices for `ranks` decode ranks."""
    copies = slice_plan(LAYOUT, 1, ranks)[0]
    return tuple(SliceChecksums(x.decode_rank, x.target_offset, x.length, pages) for x in copies)


class CheckedDecode(Decode):
    """A decode worker that compares checksums."""

    def answer_checksums(self, asked: ChecksumPages, **wrong: int) -> list[DecodeEffect]:
        """Every rank answers in turn; `rank_N=I`: page I of rank N holds something else."""
        effects: list[DecodeEffect] = []
        for rank in range(self.ranks):
            effects += self.checksummed(asked, rank, wrong.get(f"rank_{rank}"))
        return effects

    def checksummed(
        self, asked: ChecksumPages, rank: int, wrong: int | None = None
    ) -> list[DecodeEffect]:
        landed = [x for x in asked.slices if x.decode_rank == rank]
        if wrong is not None:
            pages = [x + (index == wrong) for index, x in enumerate(landed[0].pages)]
            landed[0] = msgspec.structs.replace(landed[0], pages=tuple(pages))
        return self.note(self.table.checksummed(asked.room, rank, tuple(landed), self.now))

    def complete(self, room: RoomId, pages: tuple[int, ...]) -> list[DecodeEffect]:
        return self.drained(room, Outcome.COMPLETE, checksums=sums(pages, self.ranks))


def make(
    monkeypatch: pytest.MonkeyPatch, fence: FenceKind = RETIRE, ranks: int = 1
) -> CheckedDecode:
    monkeypatch.setattr(traces, "FINGERPRINT", CHECKED)
    decode = CheckedDecode(fence, ranks)
    decode.pair()
    return decode


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> CheckedDecode:
    return make(monkeypatch)


# What counts as compared


@pytest.mark.parametrize("prefill_ranks", [1, 2, 4])
@pytest.mark.parametrize("decode_ranks", [1, 2, 4, 8])
def test_slices_of_every_plan_cover_every_rank(prefill_ranks: int, decode_ranks: int) -> None:
    plan = slice_plan(LAYOUT, prefill_ranks, decode_ranks)
    slices = [
        SliceChecksums(x.decode_rank, x.target_offset, x.length, (1, 2))
        for rank in plan
        for x in rank
    ]
    assert cover(slices, LAYOUT, decode_ranks, 2)
    for missing in range(len(slices)):
        assert not cover(slices[:missing] + slices[missing + 1 :], LAYOUT, decode_ranks, 2)
        assert not cover([*slices, slices[missing]], LAYOUT, decode_ranks, 2), "twice"
    assert not cover(slices, LAYOUT, decode_ranks, 3), "a page too few"


@pytest.mark.parametrize(
    "change", [{"decode_rank": 1}, {"offset": 1}, {"length": 1}, {"length": 2**63}]
)
def test_slices_beside_what_was_granted_cover_nothing(change: dict[str, int]) -> None:
    """Nothing outside of a page is ever read for them."""
    (whole,) = sums((1, 2))
    assert cover([whole], LAYOUT, 1, 2)
    assert not cover([msgspec.structs.replace(whole, **change)], LAYOUT, 1, 2)


def test_differing_pages_are_named_once() -> None:
    ours = [SliceChecksums(0, 0, 4, (1, 2, 3)), SliceChecksums(0, 4, 4, (4, 5, 6))]
    theirs = [SliceChecksums(0, 0, 4, (1, 9, 3)), SliceChecksums(0, 4, 4, (4, 9, 9))]
    assert differing(ours, ours) == ()
    assert differing(theirs, ours) == (1, 2)


def test_parts_of_a_slice_are_joined_in_order() -> None:
    parts = [SliceChecksums(rank, 0, 8, (page,)) for page in (5, 6) for rank in (0, 1)]
    joined = (SliceChecksums(0, 0, 8, (5, 6)), SliceChecksums(1, 0, 8, (5, 6)))
    assert merged(parts) == joined


# Prefill


def test_a_writer_reports_its_checksums_in_the_order_of_its_pages() -> None:
    """Whatever the order in which its writes settle; of failed ones nothing is reported."""
    grant = Prefill().make_grant()
    for outcome in WriteOutcome:
        writer = RoomWriter(grant.room, {0: 64}, grant.pages, grant.first_page)
        writes = [one(writer.pages_finished([4, 5, 6], n)) for n in (1, 2, 3)]
        assert writer.finished() == []
        for write in reversed(writes[1:]):
            done = (SliceChecksums(0, 0, 64, (10 * write.write_id,)),)
            assert writer.settled(write.write_id, WriteOutcome.COMPLETED, checksums=done) == []
        done = (SliceChecksums(0, 0, 64, (10,)),)
        end = one(only(writer.settled(1, outcome, checksums=done), ReportEnd)).end
        is_complete = outcome is WriteOutcome.COMPLETED
        assert end.checksums == ((SliceChecksums(0, 0, 64, (10, 20, 30)),) if is_complete else ())


@pytest.mark.parametrize("outcome", [Outcome.COMPLETE, Outcome.ENDED])
def test_only_complete_carries_what_every_rank_sent(outcome: Outcome) -> None:
    prefill = Prefill(ranks=2)
    prefill.pair()
    room = prefill.grant()
    for rank, how in ((1, Outcome.COMPLETE), (0, outcome)):
        end = RankEnd(how, None, 1, checksums=(SliceChecksums(0, rank, 1, (rank,)),))
        prefill.note(prefill.table.rank_ended(room, rank, end, prefill.now))
    (drained,) = prefill.drained
    assert [x.offset for x in drained.checksums] == ([0, 1] if outcome is Outcome.COMPLETE else [])


# Decode


def test_complete_counts_once_its_checksums_have_been_compared(decode: CheckedDecode) -> None:
    room = decode.grant([7, 8, 9], written=2)
    decode.first(room)
    (asked,) = decode.complete(room, (50, 51))
    assert asked == ChecksumPages(room, (7, 8), sums((50, 51)))
    assert decode.table.leases[room].state is LeaseState.GRANTED
    assert decode.answer_checksums(asked) == [LeaseReady(room, 0)]
    assert decode.table.leases == {}
    assert decode.freed == [], "pages pass to the sequence"


def test_every_rank_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = make(monkeypatch, ranks=2)
    room = decode.grant([7])
    decode.first(room)
    (asked,) = decode.complete(room, (50,))
    assert decode.checksummed(asked, 1) == []
    assert decode.checksummed(asked, 1) == [], "the same rank does not stand for the other"
    assert decode.checksummed(asked, 0) == [LeaseReady(room, 0)]
    assert decode.table.stale["checksummed"] == 1


def test_a_first_token_that_was_lost_is_taken_once_it_is_proved(decode: CheckedDecode) -> None:
    room = decode.grant([7])
    (asked,) = decode.drained(room, Outcome.COMPLETE, first=FIRST, checksums=sums((50,)))
    assert decode.answer_checksums(asked) == [TakeFirstToken(room, FIRST), LeaseReady(room, 0)]


def test_nothing_is_compared_where_nothing_was_to_be_written(decode: CheckedDecode) -> None:
    for room in (decode.grant([], max_tokens=0), decode.grant([5], written=0, max_tokens=0)):
        assert decode.drained(room, Outcome.COMPLETE) == [LeaseReady(room, 0)]


def test_checksums_that_nobody_asked_for_are_not_compared() -> None:
    decode = Decode()
    decode.pair()
    room = decode.grant([7])
    decode.first(room)
    assert decode.drained(room, Outcome.COMPLETE, checksums=sums((1,))) == [LeaseReady(room, 0)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_difference_on_any_rank_fails_the_room_and_is_fenced(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    decode = make(monkeypatch, ranks=2)
    room = decode.grant([7, 8])
    decode.first(room)
    (asked,) = decode.complete(room, (50, 51))
    effects = decode.answer_checksums(asked, **{f"rank_{rank}": 1})
    assert one(only(effects, PagesDiffer)) == PagesDiffer(room, WRITER, (1,), (8,))
    failure = one(only(effects, FailRoom))
    assert (failure.reason, failure.retryable) == (Reason.CHECKSUM_MISMATCH, True)
    assert one(only(effects, CloseSegment)).generation == 1
    assert decode.freed == [] and decode.table.usable_endpoints() == []
    decode.wait(100)
    assert decode.freed == [], "time frees nothing"
    decode.close_segments()
    assert decode.freed == [room]


def test_a_writer_that_wrote_something_else_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = make(monkeypatch, LOCAL)
    room, other = decode.grant([7]), decode.grant([8])
    decode.first(room)
    (asked,) = decode.complete(room, (50,))
    effects = decode.answer_checksums(asked, rank_0=0)
    assert one(only(effects, KillWriter)).writer == WRITER
    assert decode.freed == []
    effects = decode.note(decode.table.writer_dead(traces.ENDPOINT, WRITER, decode.now))
    assert sorted(decode.freed) == [room, other]
    assert one(only(effects, FailRoom)).room == other, "the first one has failed already"


@pytest.mark.parametrize("missing", [(), sums((50,)), sums((50, 51))[:0], sums((50, 51, 52))])
def test_complete_without_the_checksums_of_every_page_is_no_proof(
    decode: CheckedDecode, missing: tuple[SliceChecksums, ...]
) -> None:
    room = decode.grant([7, 8])
    decode.first(room)
    effects = decode.drained(room, Outcome.COMPLETE, checksums=missing)
    assert one(only(effects, PagesDiffer)).indices == (0, 1)
    assert only(effects, ChecksumPages) == []
    assert decode.table.leases[room].state is LeaseState.REVOKING


@pytest.mark.parametrize("outcome", [Outcome.ENDED, Outcome.UNSETTLED])
def test_other_outcomes_need_no_checksums(decode: CheckedDecode, outcome: Outcome) -> None:
    room = decode.grant([7])
    effects = decode.drained(room, outcome, reason=Reason.WRITE_FAILED)
    assert only(effects, ChecksumPages) == []
    assert (room in decode.freed) == (outcome is Outcome.ENDED)


# Meanwhile


def compared(decode: CheckedDecode) -> tuple[RoomId, ChecksumPages]:
    """A room that has drained, COMPLETE, and whose checksums are being compared."""
    room = decode.grant([7, 8])
    decode.first(room)
    (asked,) = decode.complete(room, (50, 51))
    assert isinstance(asked, ChecksumPages)
    return room, asked


@pytest.mark.parametrize("wrong", [{}, {"rank_0": 0}])
def test_the_client_leaves_meanwhile(decode: CheckedDecode, wrong: dict[str, int]) -> None:
    """It is answered at once; nobody is asked to drain again; the pages wait for the comparison."""
    room, asked = compared(decode)
    effects = decode.revoke(room)
    assert one(only(effects, FailRoom)).reason is Reason.CLIENT_GONE
    assert sent(effects) == []
    assert [x for x in sent(decode.wait(5)) if isinstance(x, Revoke)] == []
    assert decode.freed == []
    effects = decode.answer_checksums(asked, **wrong)
    assert only(effects, LeaseReady) == [] and only(effects, FailRoom) == []
    assert decode.freed == ([] if wrong else [room])
    assert bool(only(effects, CloseSegment)) == bool(wrong)


def test_complete_of_a_room_that_is_being_revoked_is_compared_too(decode: CheckedDecode) -> None:
    room = decode.grant([7])
    decode.revoke(room)
    (asked,) = decode.complete(room, (50,))
    assert decode.freed == []
    assert decode.answer_checksums(asked) == [EndLease(room)]


def test_what_is_said_of_the_room_meanwhile_changes_nothing(decode: CheckedDecode) -> None:
    room, asked = compared(decode)
    for outcome in Outcome:
        assert decode.drained(room, outcome) == []
    assert decode.table.stale["drained_again"] == len(Outcome)
    assert decode.answer_checksums(asked) == [LeaseReady(room, 0)]


def test_a_room_that_has_drained_is_not_a_lost_grant(decode: CheckedDecode) -> None:
    room, asked = compared(decode)
    for _ in range(4):
        decode.tick(1.0)
        decode.welcome(rooms=())
    assert decode.answer_checksums(asked) == [LeaseReady(room, 0)]


def test_its_generation_is_retired_meanwhile(decode: CheckedDecode) -> None:
    room, asked = compared(decode)
    other = decode.grant([9])
    decode.drained(other, Outcome.UNSETTLED)
    effects = decode.close_segments()
    assert one([x for x in only(effects, FailRoom) if x.room == room]).retryable
    assert room in decode.freed
    assert decode.answer_checksums(asked) == []
    assert decode.table.stale["checksummed"] == 1


def test_its_writer_dies_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = make(monkeypatch, LOCAL)
    room, asked = compared(decode)
    effects = decode.note(decode.table.writer_dead(traces.ENDPOINT, WRITER, decode.now))
    assert one(only(effects, FailRoom)).reason is Reason.WRITER_LOST
    assert decode.freed == [room]
    assert decode.answer_checksums(asked, rank_0=0) == []


# Handshake


@pytest.mark.parametrize("ours", [True, False])
def test_both_or_neither(monkeypatch: pytest.MonkeyPatch, ours: bool) -> None:
    plain = traces.FINGERPRINT
    own, other = (CHECKED, plain) if ours else (plain, CHECKED)
    assert own.differences(other) == [f"kv_checksum: {ours} != {not ours}"]
    monkeypatch.setattr(traces, "FINGERPRINT", own)
    decode, prefill = Decode(), Prefill()
    decode.want()
    decode.open_segments()
    decode.welcome(fingerprint=other)
    decode.fence_opened()
    assert decode.table.usable_endpoints() == []
    assert decode.pairing.peers[traces.ENDPOINT].refusal == f"kv_checksum: {ours} != {not ours}"
    welcome: Any = one(sent(prefill.hello(fingerprint=other)))
    assert f"kv_checksum: {ours} != {not ours}" in welcome.refusal
