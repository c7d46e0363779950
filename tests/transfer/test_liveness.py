"""Traces of a worker's view of itself: what stands still, for how long, and what is said of it."""

from __future__ import annotations

import pytest

from pdrt.transfer.liveness import (
    END_FACTOR,
    FORWARDS_FAILED_MAX,
    FORWARDS_FAILED_PAUSE_SECONDS,
    Ailment,
    Liveness,
)

STALL_SECONDS = 60.0
TICK_SECONDS = 0.5
LATE_SECONDS = 1.0


class Worker:
    """A liveness on a clock of its own, ticking punctually but for `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.began_at: float | None = None
        """Of the forward that runs."""
        self.waiting = 0
        self.liveness = Liveness(STALL_SECONDS, LATE_SECONDS, self.now)

    def tick(self) -> None:
        age = 0.0 if self.began_at is None else self.now - self.began_at
        self.liveness.tick(age, self.waiting, self.now)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += TICK_SECONDS
            self.tick()

    def sleep(self, seconds: float) -> None:
        """The process is stopped; then the loop turns again."""
        self.now += seconds
        self.tick()

    def ails(self) -> list[Ailment]:
        return [complaint.ailment for complaint in self.liveness.complaints(self.now)]

    def says(self) -> str:
        (complaint,) = self.liveness.complaints(self.now)
        return complaint.text


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_a_forward_that_hangs_is_said_and_then_ends_the_worker(worker: Worker) -> None:
    worker.began_at, worker.waiting = worker.now, 1
    worker.run(STALL_SECONDS)
    assert worker.ails() == []
    worker.run(1.0)
    assert worker.ails() == [Ailment.FORWARD_HANGS]
    assert worker.says() == (
        "a forward has been running for 61 s; the worker ends itself at 300 s "
        "(--stall-seconds-max times 5)"
    )
    worker.run((END_FACTOR - 1) * STALL_SECONDS - 1.0)
    assert worker.liveness.must_end() is None
    worker.run(1.0)
    assert worker.liveness.must_end() == "a forward has been running for 301 s"


def test_a_forward_that_comes_back_was_no_reason_to_end(worker: Worker) -> None:
    worker.began_at = worker.now
    worker.run(STALL_SECONDS + 10.0)
    assert worker.ails() == [Ailment.FORWARD_HANGS]
    worker.began_at = None
    worker.liveness.forward_ended()
    worker.run(TICK_SECONDS)
    assert worker.ails() == []


def test_one_forward_after_another_is_no_forward_that_hangs(worker: Worker) -> None:
    for _ in range(10):
        worker.began_at = worker.now
        worker.run(STALL_SECONDS / 2)
        worker.liveness.forward_ended()
        assert worker.ails() == []


def test_whoever_was_asleep_blames_nobody(worker: Worker) -> None:
    """SIGSTOP in the middle of a forward, for an hour, twice."""
    worker.began_at, worker.waiting = worker.now, 3
    for _ in range(2):
        worker.run(STALL_SECONDS / 2 - 1.0)
        worker.sleep(3600.0)
        assert worker.ails() == []
        assert worker.liveness.must_end() is None
    worker.run(3.0)
    assert worker.ails() == [Ailment.FORWARD_HANGS], "what it was awake for counts"
    # Of the next forward nothing has been slept through.
    worker.began_at = worker.now
    worker.liveness.forward_ended()
    worker.run(STALL_SECONDS + 1.0)
    assert worker.ails() == [Ailment.FORWARD_HANGS]


def test_a_loop_that_is_late_every_time_judges_itself_in_the_end(worker: Worker) -> None:
    """It is slow, not asleep: of each pause, as much counts as a tick may be late."""
    worker.began_at, worker.waiting = worker.now, 1
    for _ in range(int(STALL_SECONDS / LATE_SECONDS)):
        worker.sleep(10.0)
        assert worker.ails() == []
    worker.sleep(10.0)
    assert worker.ails() == [Ailment.FORWARD_HANGS]
    worker.began_at = None
    for _ in range(2):
        worker.sleep(10.0)
    assert worker.ails() == [Ailment.NO_PROGRESS]


def test_waiting_work_that_nothing_happens_to(worker: Worker) -> None:
    worker.waiting = 3
    worker.run(STALL_SECONDS)
    assert worker.ails() == []
    worker.run(1.0)
    assert worker.says() == (
        "nothing has moved for 61 s while 3 wait; if it stays so, drain it or restart it"
    )
    assert worker.liveness.must_end() is None, "others may be the cause: clients that do not read"
    worker.liveness.moved()
    worker.run(TICK_SECONDS)
    assert worker.ails() == []


def test_nothing_to_do_is_no_stall(worker: Worker) -> None:
    worker.run(10 * STALL_SECONDS)
    assert worker.ails() == []
    worker.waiting = 1
    worker.run(STALL_SECONDS)
    assert worker.ails() == [], "it counts from when there was work"


def test_forwards_that_fail_one_after_another(worker: Worker) -> None:
    for _ in range(FORWARDS_FAILED_MAX - 1):
        worker.liveness.forward_failed("RuntimeError('out of memory')", worker.now)
    assert worker.ails() == []
    worker.liveness.forward_failed("RuntimeError('out of memory')", worker.now)
    assert worker.says() == (
        "8 forwards in a row have failed, the last one with RuntimeError('out of memory'); "
        "if it stays so, restart it"
    )
    # Only work shows that it has recovered: after a while it is given some.
    worker.run(FORWARDS_FAILED_PAUSE_SECONDS)
    assert worker.ails() == []
    worker.liveness.forward_failed("again", worker.now)
    assert worker.ails() == [Ailment.FORWARDS_FAIL]
    worker.liveness.forward_ended()
    assert worker.ails() == []


def test_a_request_that_nobody_can_compute_makes_nobody_ill(worker: Worker) -> None:
    """Its three rooms fail, again and again, among others that do not."""
    for _ in range(100):
        for _ in range(3):
            worker.liveness.forward_failed("bad", worker.now)
            assert worker.ails() == []
        worker.liveness.forward_ended()


def test_what_a_forward_raised_is_cut(worker: Worker) -> None:
    for _ in range(FORWARDS_FAILED_MAX):
        worker.liveness.forward_failed("x" * 10_000, worker.now)
    assert len(worker.says()) < 400
