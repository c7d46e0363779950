"""The one thread that submits to the library and asks it what has become of everything.

It alone calls engines once they are open, and it owns the `InstanceWrites`. Others put commands
into its inbox; answers go back to the loop. The library tells of no end by itself, so it asks.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum

import msgspec

from pdrt.transfer.engine import ByteRange
from pdrt.transfer.mooncake.instance import Instance
from pdrt.transfer.mooncake.library import DONE_CODE, NOT_SUBMITTED, RUNNING_CODES
from pdrt.transfer.mooncake.writes import (
    RUN_BYTES_MAX,
    TCP_RUN_BYTES_MAX,
    Answer,
    InstanceWrites,
    TransferState,
)

POLL_SECONDS = 0.0002
"""Between two looks while something moves: a transfer of some hundred KB takes as long."""
TRANSFER_SECONDS_MIN = 0.00003
"""What the smallest transfer takes, each after the other. While half of those that are out must
still be so, a look would only keep the library's threads from a core."""
SLOW_POLL_SECONDS = 0.002
"""While nothing has moved for `STILL_SECONDS`."""
STILL_SECONDS = 0.02
ASLEEP_SECONDS = 1.0
"""A look this late was itself asleep: it accuses nobody."""
SETTLE_SECONDS_MAX = 1.0
"""What an instance has out when it is closed gets this long; destroying it ends the rest."""


class Target(msgspec.Struct, frozen=True):
    """One decode rank, as an engine reaches it."""

    peer: str
    """`host:port`, the library's name for it."""
    address: int
    """Of the first byte of its pool, in its process."""
    size_bytes: int


class Flight:
    """An open instance with its writes. Once it is open, the poller's thread alone touches it, but
    for `targets`, which stay, and `takes_writes`."""

    def __init__(self, instance: Instance, targets: dict[int, Target]) -> None:
        self.instance = instance
        self.targets = targets
        self.takes_writes = True
        """The loop's: it has not heard that nothing more is submitted."""
        self.writes = InstanceWrites(TCP_RUN_BYTES_MAX if instance.is_tcp else RUN_BYTES_MAX)
        self.moved_at = 0.0
        """When a transfer last ended, or one began while none was out."""
        self.close_by: float | None = None
        self.on_closed: Callable[[], None] | None = None
        """Called, in the thread, when it has been destroyed."""


class Accept(msgspec.Struct, frozen=True):
    """Command: one more write."""

    flight: Flight
    write: int
    decode_rank: int
    ranges: tuple[ByteRange, ...]


class Finish(msgspec.Struct, frozen=True):
    """Command: submit nothing more, destroy the instance, then call `on_closed`."""

    flight: Flight
    on_closed: Callable[[], None]


class Quit(Enum):
    """Command: return."""

    NOW = "now"


class Poller:
    """The thread and its inbox."""

    def __init__(
        self,
        source: int,
        write_seconds_max: float,
        on_answers: Callable[[Flight, list[Answer]], None],
        on_end: Callable[[Future[None]], None],
    ) -> None:
        """`source`: address of the first byte of the pool here. `on_answers` and `on_end`, the
        end of the thread itself, are called in the thread."""
        self._source = source
        self._write_seconds_max = write_seconds_max
        self._on_answers = on_answers
        # Bounded by what rooms have accepted, and instances.
        self._inbox: queue.SimpleQueue[Accept | Finish | Quit] = queue.SimpleQueue()
        # Those with something to submit, to ask for, or to destroy.
        self._busy: dict[Flight, None] = {}
        self._looked_at = 0.0
        self._executor = ThreadPoolExecutor(1, "pdrt-mooncake")
        self._executor.submit(self._run).add_done_callback(on_end)

    def post(self, command: Accept | Finish) -> None:
        """Never blocks."""
        self._inbox.put(command)

    def quit(self) -> None:
        """Have the thread return; nothing is submitted or answered any more."""
        self._inbox.put(Quit.NOW)
        self._executor.shutdown(wait=False)

    def _run(self) -> None:
        while self._take():
            self._look(time.monotonic())

    def _take(self) -> bool:
        """Do what the inbox says, after a pause if something is out; False when told to quit."""
        was_idle = not self._busy
        try:
            command = self._inbox.get(timeout=None if was_idle else self._pause())
            if was_idle:
                self._looked_at = time.monotonic()
            while command is not Quit.NOW:
                self._do(command)
                command = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def _pause(self) -> float:
        moved_at = max(flight.moved_at for flight in self._busy)
        if time.monotonic() - moved_at > STILL_SECONDS:
            return SLOW_POLL_SECONDS
        out = max(flight.writes.out_count for flight in self._busy)
        return max(POLL_SECONDS, out / 2 * TRANSFER_SECONDS_MIN)

    def _do(self, command: Accept | Finish | Quit) -> None:
        now = time.monotonic()
        match command:
            case Accept(flight, write, decode_rank, ranges):
                if not flight.writes.out_count:
                    flight.moved_at = now
                self._answer(flight, flight.writes.accept(write, decode_rank, ranges))
                self._busy[flight] = None
            case Finish(flight, on_closed):
                flight.close_by = now + SETTLE_SECONDS_MAX
                flight.on_closed = on_closed
                self._answer(flight, flight.writes.stop("the instance is closed"))
                self._busy[flight] = None

    def _look(self, now: float) -> None:
        late = now - self._looked_at
        self._looked_at = now
        for flight in list(self._busy):
            if late > ASLEEP_SECONDS:
                flight.moved_at += late
            self._submit(flight)
            self._ask(flight, now)
            if flight.close_by is not None:
                self._close_if_due(flight, now)
            elif not flight.writes.is_busy:
                del self._busy[flight]

    def _submit(self, flight: Flight) -> None:
        engine = flight.instance.engine
        assert engine is not None
        for run in flight.writes.next_runs():
            target = flight.targets[run.decode_rank]
            transfer = engine.transfer_submit_write(
                target.peer,
                self._source + run.piece.source_offset,
                target.address + run.piece.target_offset,
                run.piece.length,
            )
            if transfer in NOT_SUBMITTED:
                self._answer(flight, flight.writes.not_submitted(run))
                return
            flight.writes.submitted(run, transfer)

    def _ask(self, flight: Flight, now: float) -> None:
        engine = flight.instance.engine
        assert engine is not None
        answers: list[Answer] = []
        for transfer in flight.writes.out:
            code = engine.transfer_check_status(transfer)
            if code not in RUNNING_CODES:
                state = TransferState.DONE if code == DONE_CODE else TransferState.FAILED
                flight.moved_at = now
                answers += flight.writes.ended(transfer, state)
        if flight.writes.out_count and now - flight.moved_at > self._write_seconds_max:
            answers += flight.writes.give_up(f"no progress for {self._write_seconds_max:.0f} s")
        self._answer(flight, answers)

    def _answer(self, flight: Flight, answers: list[Answer]) -> None:
        if answers:
            self._on_answers(flight, answers)

    def _close_if_due(self, flight: Flight, now: float) -> None:
        assert flight.close_by is not None and flight.on_closed is not None
        if flight.writes.out_count and now < flight.close_by:
            return
        flight.instance.close()
        self._answer(flight, flight.writes.give_up("the instance is closed"))
        del self._busy[flight]
        flight.on_closed()
