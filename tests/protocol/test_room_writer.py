"""One room on one rank: writes out, writes settled, one report, last."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdrt.ids import RoomId
from pdrt.protocol.messages import Outcome, Reason
from pdrt.protocol.room_writer import (
    RankEnd,
    ReportEnd,
    RoomWriter,
    Write,
    WriteOutcome,
    WriterState,
)
from tests.protocol.traces import DECODE

ROOM = RoomId(DECODE, 1)
SOURCES = [10, 11, 12, 13]
TARGETS = (20, 21, 22, 23)
PAGE_BYTES = 100


@pytest.fixture
def writers() -> Iterator[list[RoomWriter]]:
    made: list[RoomWriter] = []
    yield made
    for writer in made:
        writer.check()


def make(
    writers: list[RoomWriter],
    page_bytes: dict[int, int] | None = None,
    targets: tuple[int, ...] = TARGETS,
    first_page: int = 0,
) -> RoomWriter:
    sizes = {0: PAGE_BYTES} if page_bytes is None else page_bytes
    writer = RoomWriter(ROOM, sizes, targets, first_page)
    writers.append(writer)
    return writer


def report(outcome: Outcome, reason: Reason | None, pages: int, detail: str = "") -> ReportEnd:
    return ReportEnd(RankEnd(outcome, reason, pages * PAGE_BYTES, detail))


def test_chunks_are_written_as_they_finish_and_the_end_is_reported_once(
    writers: list[RoomWriter],
) -> None:
    writer = make(writers)
    assert writer.forward_started() == []
    assert writer.pages_finished(SOURCES, 2) == [Write(1, 0, (10, 11), (20, 21))]
    assert writer.forward_ended() == []
    assert writer.settled(1, WriteOutcome.COMPLETED) == []
    assert writer.pages_finished(SOURCES, 4) == [Write(2, 0, (12, 13), (22, 23))]
    assert writer.finished() == []
    assert writer.outstanding == 1
    assert writer.settled(2, WriteOutcome.COMPLETED) == [report(Outcome.COMPLETE, None, 4)]
    assert writer.state is WriterState.GONE


def test_the_report_waits_for_the_forward(writers: list[RoomWriter]) -> None:
    writer = make(writers)
    writer.forward_started()
    writer.pages_finished(SOURCES, 4)
    writer.settled(1, WriteOutcome.COMPLETED)
    assert writer.finished() == []
    assert writer.forward_ended() == [report(Outcome.COMPLETE, None, 4)]


def test_pages_that_decode_holds_already_are_not_written(writers: list[RoomWriter]) -> None:
    writer = make(writers, targets=(22, 23), first_page=2)
    assert writer.pages_finished(SOURCES, 1) == []
    assert writer.pages_finished(SOURCES, 3) == [Write(1, 0, (12,), (22,))]
    assert writer.pages_finished(SOURCES, 3) == [], "finished pages are named again"
    assert writer.pages_finished(SOURCES, 2) == [], "an older count"
    assert writer.pages_finished(SOURCES, 4) == [Write(2, 0, (13,), (23,))]


def test_finished_with_pages_left_to_write_is_our_own_bug(writers: list[RoomWriter]) -> None:
    writer = make(writers)
    writer.pages_finished(SOURCES, 3)
    with pytest.raises(AssertionError):
        writer.finished()
    assert writer.outstanding == 1


def test_each_decode_rank_has_its_own_write(writers: list[RoomWriter]) -> None:
    writer = make(writers, page_bytes={1: 30, 3: 70})
    assert [x.decode_rank for x in writer.pages_finished(SOURCES, 4) if isinstance(x, Write)] == [
        1,
        3,
    ]
    assert writer.finished() == []
    assert writer.settled(2, WriteOutcome.COMPLETED) == []
    assert writer.settled(1, WriteOutcome.COMPLETED) == [report(Outcome.COMPLETE, None, 4)]


@pytest.mark.parametrize(("page_bytes", "targets"), [({}, TARGETS), (None, ())])
def test_rank_with_nothing_to_send_still_reports(
    writers: list[RoomWriter], page_bytes: dict[int, int] | None, targets: tuple[int, ...]
) -> None:
    writer = make(writers, page_bytes=page_bytes, targets=targets)
    assert writer.pages_finished(SOURCES, 4) == []
    assert writer.finished() == [report(Outcome.COMPLETE, None, 0)]


def test_close_with_nothing_out_ends_at_once(writers: list[RoomWriter]) -> None:
    writer = make(writers)
    assert writer.close(Reason.CLIENT_GONE, "left") == [
        report(Outcome.ENDED, Reason.CLIENT_GONE, 0, "left")
    ]


def test_close_waits_for_what_is_outstanding_and_submits_nothing_more(
    writers: list[RoomWriter],
) -> None:
    writer = make(writers)
    writer.forward_started()
    writer.pages_finished(SOURCES, 2)
    assert writer.close(Reason.CLIENT_GONE) == []
    assert writer.state is WriterState.CLOSING
    assert writer.pages_finished(SOURCES, 4) == []
    assert writer.finished() == []
    assert writer.settled(1, WriteOutcome.COMPLETED) == []
    assert writer.forward_ended() == [report(Outcome.ENDED, Reason.CLIENT_GONE, 2)]


def test_forward_planned_before_the_close_was_heard_is_waited_for_and_writes_nothing(
    writers: list[RoomWriter],
) -> None:
    writer = make(writers)
    writer.pages_finished(SOURCES, 1)
    writer.close(Reason.CLIENT_GONE)
    assert writer.forward_started() == []
    assert writer.pages_finished(SOURCES, 2) == []
    assert writer.settled(1, WriteOutcome.COMPLETED) == []
    assert writer.forward_ended() == [report(Outcome.ENDED, Reason.CLIENT_GONE, 1)]


def test_the_first_reason_stays(writers: list[RoomWriter]) -> None:
    writer = make(writers)
    writer.pages_finished(SOURCES, 2)
    writer.close(Reason.DEADLINE)
    writer.close(Reason.CLIENT_GONE)
    assert writer.settled(1, WriteOutcome.FAILED) == [report(Outcome.ENDED, Reason.DEADLINE, 0)]


def test_failed_write_closes_the_room_and_waits_for_the_others(writers: list[RoomWriter]) -> None:
    writer = make(writers)
    writer.pages_finished(SOURCES, 1)
    writer.pages_finished(SOURCES, 2)
    assert writer.settled(1, WriteOutcome.FAILED, "reset") == []
    assert writer.state is WriterState.CLOSING
    assert writer.settled(2, WriteOutcome.COMPLETED) == [
        report(Outcome.ENDED, Reason.WRITE_FAILED, 1, "reset")
    ]


@pytest.mark.parametrize("later", list(WriteOutcome))
def test_unsettled_is_never_hidden_by_what_comes_later(
    writers: list[RoomWriter], later: WriteOutcome
) -> None:
    writer = make(writers)
    writer.pages_finished(SOURCES, 2)
    writer.pages_finished(SOURCES, 4)
    assert writer.settled(1, WriteOutcome.UNSETTLED, "no answer") == []
    [end] = writer.settled(2, later)
    assert isinstance(end, ReportEnd)
    assert end.end.outcome is Outcome.UNSETTLED
    assert end.end.reason is Reason.WRITE_UNSETTLED


def test_unsettled_after_a_close_is_unsettled(writers: list[RoomWriter]) -> None:
    writer = make(writers)
    writer.pages_finished(SOURCES, 2)
    writer.close(Reason.CLIENT_GONE)
    assert writer.settled(1, WriteOutcome.UNSETTLED) == [
        report(Outcome.UNSETTLED, Reason.CLIENT_GONE, 0)
    ]


def test_write_settles_once_and_only_if_it_was_accepted(writers: list[RoomWriter]) -> None:
    writer = make(writers)
    writer.pages_finished(SOURCES, 1)
    writer.pages_finished(SOURCES, 2)
    writer.settled(1, WriteOutcome.COMPLETED)
    for write_id in (0, 1, 3):
        with pytest.raises(AssertionError):
            writer.settled(write_id, WriteOutcome.COMPLETED)
    assert writer.outstanding == 1


def test_forward_that_was_not_started_does_not_end(writers: list[RoomWriter]) -> None:
    writer = make(writers)
    with pytest.raises(AssertionError):
        writer.forward_ended()


class RoomWriterMachine(RuleBasedStateMachine):
    """Random forwards, chunks, settlements and closes."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = RoomWriter(ROOM, {0: 1, 2: 1}, TARGETS[1:], 1)
        self.outstanding: dict[int, Write] = {}
        self.written: set[tuple[int, int]] = set()
        self.forwards = 0
        self.page = 0
        self.ended = 0
        self.finished = False
        self.closed = False
        self.outcomes: list[WriteOutcome] = []

    def apply(self, effects: list[Write | ReportEnd]) -> None:
        for effect in effects:
            assert not self.ended, "an effect after the end"
            match effect:
                case Write():
                    assert not self.closed, "a write in a closing room"
                    self.outstanding[effect.write_id] = effect
                    for target, source in zip(
                        effect.target_pages, effect.source_pages, strict=True
                    ):
                        assert (effect.decode_rank, target) not in self.written
                        assert target - source == 10
                        self.written.add((effect.decode_rank, target))
                case ReportEnd(end):
                    self.ended += 1
                    self.judge(end)

    def judge(self, end: RankEnd) -> None:
        assert not self.outstanding, "reported with a write outstanding"
        assert not self.forwards, "reported with a forward running"
        assert end.bytes_written == self.outcomes.count(WriteOutcome.COMPLETED)
        if WriteOutcome.UNSETTLED in self.outcomes:
            assert end.outcome is Outcome.UNSETTLED
        elif self.closed:
            assert end.outcome is Outcome.ENDED
        else:
            assert end.outcome is Outcome.COMPLETE
            assert self.finished
            assert self.written == {(rank, page) for rank in (0, 2) for page in TARGETS[1:]}
        assert (end.reason is None) == (end.outcome is Outcome.COMPLETE)

    def is_alive(self) -> bool:
        return not self.ended

    @precondition(lambda self: self.is_alive() and not self.finished)
    @rule()
    def forward(self) -> None:
        self.forwards += 1
        self.apply(self.writer.forward_started())

    @precondition(lambda self: self.forwards)
    @rule()
    def forward_ends(self) -> None:
        self.forwards -= 1
        self.apply(self.writer.forward_ended())

    @precondition(lambda self: self.is_alive() and self.page < len(SOURCES))
    @rule(pages=st.integers(0, 2))
    def chunk(self, pages: int) -> None:
        self.page = min(len(SOURCES), self.page + pages)
        before = set(self.outstanding)
        self.apply(self.writer.pages_finished(SOURCES, self.page))
        # One write per decode rank; each is a unit of one byte per page.
        assert len(set(self.outstanding) - before) in (0, 2)

    @precondition(lambda self: self.is_alive() and self.page == len(SOURCES))
    @rule()
    def finish(self) -> None:
        self.finished = True
        self.apply(self.writer.finished())

    @precondition(lambda self: self.outstanding)
    @rule(outcome=st.sampled_from(WriteOutcome), data=st.data())
    def settle(self, outcome: WriteOutcome, data: st.DataObject) -> None:
        write = self.outstanding.pop(data.draw(st.sampled_from(sorted(self.outstanding))))
        self.outcomes += [outcome] * len(write.source_pages)
        self.closed |= outcome is not WriteOutcome.COMPLETED
        self.apply(self.writer.settled(write.write_id, outcome))

    @precondition(lambda self: self.is_alive())
    @rule(reason=st.sampled_from(Reason))
    def close(self, reason: Reason) -> None:
        self.closed = True
        self.apply(self.writer.close(reason))

    @precondition(lambda self: self.ended)
    @rule()
    def every_event_is_refused_now(self) -> None:
        with pytest.raises(AssertionError):
            self.writer.close(Reason.SHUTDOWN)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.writer.check()
        assert self.writer.outstanding == len(self.outstanding)
        assert (self.writer.state is WriterState.GONE) == bool(self.ended)

    def teardown(self) -> None:
        if self.is_alive():
            self.close(Reason.SHUTDOWN)
        while self.forwards:
            self.forward_ends()
        for write_id in list(self.outstanding):
            write = self.outstanding.pop(write_id)
            self.outcomes += [WriteOutcome.COMPLETED] * len(write.source_pages)
            self.apply(self.writer.settled(write_id, WriteOutcome.COMPLETED))
        assert self.ended == 1, "a room ends exactly once"


TestRoomWriterMachine = RoomWriterMachine.TestCase
TestRoomWriterMachine.settings = settings(max_examples=200, stateful_step_count=30)
