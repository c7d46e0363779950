"""What becomes of writes that an instance of mooncake carries: every end, and no bound exceeded."""

from __future__ import annotations

import random

import pytest

from pdrt.protocol.room_writer import WriteOutcome
from pdrt.transfer.engine import ByteRange
from pdrt.transfer.mooncake.writes import (
    RUN_BYTES_MAX,
    WINDOW,
    Answer,
    InstanceWrites,
    Run,
    TransferState,
)
from pdrt.transfer.sending import cut

DONE, BAD = TransferState.DONE, TransferState.FAILED
COMPLETED, FAILED, UNSETTLED = WriteOutcome


class Trace:
    """Drives one instance as the poller does; transfers are numbered from 100 on."""

    def __init__(self) -> None:
        self.writes = InstanceWrites(RUN_BYTES_MAX)
        self.answers: list[Answer] = []
        self.next_transfer = 100

    def add(self, answers: list[Answer]) -> None:
        self.answers += answers
        self.writes.check()

    def accept(self, write: int, runs: int, rank: int = 0) -> None:
        pieces = tuple(ByteRange(9000 * run, 7000 * run, 10) for run in range(runs))
        self.add(self.writes.accept(write, rank, pieces))

    def submit(self, runs: int = 10**6) -> list[int]:
        """The first `runs` that there is room for."""
        transfers = []
        for run in self.writes.next_runs()[:runs]:
            self.writes.submitted(run, self.next_transfer)
            transfers.append(self.next_transfer)
            self.next_transfer += 1
            self.writes.check()
        return transfers

    def end(self, transfer: int, state: TransferState = DONE) -> None:
        self.add(self.writes.ended(transfer, state))

    @property
    def outcomes(self) -> dict[int, WriteOutcome]:
        assert len({answer.write for answer in self.answers}) == len(self.answers)
        return {answer.write: answer.outcome for answer in self.answers}


@pytest.fixture
def trace() -> Trace:
    return Trace()


def test_complete_when_every_run_is(trace: Trace) -> None:
    trace.accept(1, runs=3)
    first, second, third = trace.submit()
    trace.end(second)
    trace.end(first)
    assert trace.answers == []
    trace.end(third)
    assert trace.outcomes == {1: COMPLETED}
    assert not trace.writes.is_busy


def test_one_failed_transfer_stops_the_instance(trace: Trace) -> None:
    """It proves nothing; what is wholly out may complete; what has not begun is clean."""
    trace.accept(1, runs=2)
    trace.accept(2, runs=1)
    trace.accept(3, runs=2)
    trace.accept(4, runs=1)
    one, other, two, three = trace.submit(4)
    trace.end(one, BAD)
    assert trace.outcomes == {1: UNSETTLED, 3: UNSETTLED, 4: FAILED}
    assert trace.writes.next_runs() == []
    assert trace.writes.out == [other, two, three], "all are asked for until they have ended"
    trace.end(two)
    trace.end(other)
    trace.end(three)
    assert trace.outcomes == {1: UNSETTLED, 2: COMPLETED, 3: UNSETTLED, 4: FAILED}
    assert not trace.writes.is_busy


def test_a_second_failure_settles_another_write(trace: Trace) -> None:
    trace.accept(1, runs=1)
    trace.accept(2, runs=1)
    one, two = trace.submit()
    trace.end(one, BAD)
    trace.end(two, BAD)
    assert trace.outcomes == {1: UNSETTLED, 2: UNSETTLED}


def test_a_refused_transfer_is_no_proof(trace: Trace) -> None:
    trace.accept(1, runs=1)
    trace.accept(2, runs=1)
    trace.add(trace.writes.not_submitted(trace.writes.next_runs()[0]))
    assert trace.outcomes == {1: UNSETTLED, 2: FAILED}


def test_what_comes_after_the_stop_is_clean(trace: Trace) -> None:
    trace.add(trace.writes.stop("closed"))
    trace.accept(1, runs=2)
    assert trace.answers == [Answer(1, FAILED, "closed")]
    assert not trace.writes.is_busy


def test_what_is_out_too_long_is_unsettled_and_still_asked_for(trace: Trace) -> None:
    trace.accept(1, runs=1)
    (transfer,) = trace.submit()
    trace.accept(2, runs=1)
    trace.add(trace.writes.give_up("no progress"))
    assert trace.outcomes == {1: UNSETTLED, 2: FAILED}
    assert trace.writes.out == [transfer]
    trace.end(transfer)
    assert trace.outcomes == {1: UNSETTLED, 2: FAILED}, "what completes later changes nothing"
    assert not trace.writes.is_busy
    trace.add(trace.writes.give_up("again"))
    assert len(trace.answers) == 2


def test_windows_are_per_rank(trace: Trace) -> None:
    trace.accept(1, runs=3 * WINDOW, rank=0)
    trace.accept(2, runs=2, rank=1)
    out = trace.submit()
    assert len(out) == WINDOW + 2
    assert trace.submit() == []
    trace.end(out[0])
    assert len(trace.submit()) == 1


def test_runs_go_out_in_order(trace: Trace) -> None:
    trace.accept(1, runs=2)
    trace.accept(2, runs=1)
    runs = trace.writes.next_runs()
    assert [(run.write, run.piece.source_offset) for run in runs] == [(1, 0), (1, 9000), (2, 0)]
    with pytest.raises(AssertionError):
        trace.writes.submitted(runs[1], 5)


def test_what_is_not_out_has_no_end(trace: Trace) -> None:
    trace.accept(1, runs=1)
    (transfer,) = trace.submit()
    with pytest.raises(AssertionError):
        trace.writes.ended(transfer, TransferState.RUNNING)
    trace.end(transfer)
    with pytest.raises(KeyError):
        trace.writes.ended(transfer, DONE)
    assert trace.outcomes == {1: COMPLETED}


def test_long_ranges_are_cut() -> None:
    whole = ByteRange(100, 200, 2 * RUN_BYTES_MAX + 5)
    assert list(cut([whole, ByteRange(0, 0, 7)], RUN_BYTES_MAX)) == [
        ByteRange(100, 200, RUN_BYTES_MAX),
        ByteRange(100 + RUN_BYTES_MAX, 200 + RUN_BYTES_MAX, RUN_BYTES_MAX),
        ByteRange(100 + 2 * RUN_BYTES_MAX, 200 + 2 * RUN_BYTES_MAX, 5),
        ByteRange(0, 0, 7),
    ]


@pytest.mark.parametrize("seed", range(40))
def test_every_write_has_one_true_answer(seed: int) -> None:
    """Whatever happens: COMPLETED only if all its runs were, FAILED only if none was submitted."""
    dice = random.Random(seed)
    trace = Trace()
    begun: dict[int, list[int]] = {}
    ended: dict[int, TransferState] = {}
    runs_of: dict[int, int] = {}

    def submit(run: Run) -> None:
        begun.setdefault(run.write, [])
        if dice.random() < 0.003:
            trace.add(trace.writes.not_submitted(run))
            return
        trace.writes.submitted(run, trace.next_transfer)
        begun[run.write].append(trace.next_transfer)
        trace.next_transfer += 1

    for write in range(60):
        runs_of[write] = dice.choice([1, 2, 40])
        trace.accept(write, runs_of[write], rank=dice.randrange(2))
        for run in trace.writes.next_runs()[: dice.randrange(20)]:
            if trace.writes.stopped is None:
                submit(run)
        for transfer in trace.writes.out:
            if dice.random() < 0.6:
                ended[transfer] = BAD if dice.random() < 0.004 else DONE
                trace.end(transfer, ended[transfer])
    if seed % 2:
        trace.add(trace.writes.give_up("too long"))
    while trace.writes.is_busy:
        for run in trace.writes.next_runs():
            submit(run)
            if trace.writes.stopped is not None:
                break
        for transfer in trace.writes.out:
            ended[transfer] = DONE
            trace.end(transfer)
    assert trace.outcomes.keys() == runs_of.keys()
    for write, outcome in trace.outcomes.items():
        transfers = begun.get(write)
        all_done = (
            transfers is not None and [ended[t] for t in transfers] == [DONE] * runs_of[write]
        )
        assert outcome is not COMPLETED or all_done, write
        assert (outcome is FAILED) == (transfers is None), write
