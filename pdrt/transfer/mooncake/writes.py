"""The accepted writes of one instance: what is to be submitted, what is out, how each ended. Pure.

A write is cut into runs, each one transfer of the library. It is

    COMPLETED  when every run of it has been acknowledged,
    FAILED     when the instance stopped before any run of it was submitted,
    UNSETTLED  when anything else became of it: the library's word that a transfer failed proves
               nothing, as its bytes were seen to land afterwards.

The first that does not complete stops the instance: it submits nothing more. What is out is asked
for until the library has said how it ended, whatever has been answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum

import msgspec

from pdrt.protocol.room_writer import WriteOutcome
from pdrt.transfer.engine import ByteRange
from pdrt.transfer.sending import cut

RUN_BYTES_MAX = 2 * 1024 * 1024
"""Over anything but TCP, where nothing has been measured."""
TCP_RUN_BYTES_MAX = 192 * 1024
"""Over TCP a transfer costs as much as 100 KB whatever its size. Larger ones have more bytes on
their way at a time: between processes of one host, each on cores of its own, the kernel's pages for
them outgrow the caches, and everything takes twice as long for a while (measured: 384 KB moved 3.0
or 1.3 GB/s, by turns; 192 KB always 2.5 to 2.9)."""
WINDOW = 64
"""Transfers out at once per decode rank. The library fails what is queued beyond some 2,000, and
what waits too long there delays later calls too."""


class TransferState(Enum):
    """What the library says of a transfer."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class Run(msgspec.Struct, frozen=True):
    """One transfer: a part of one write."""

    write: int
    decode_rank: int
    piece: ByteRange


class Answer(msgspec.Struct, frozen=True):
    """How a write ended: exactly one per accepted write."""

    write: int
    outcome: WriteOutcome
    detail: str


class _Write:
    """One that has not been answered."""

    def __init__(self, waiting: int) -> None:
        self.waiting = waiting
        """Runs to be submitted."""
        self.out = 0
        """Runs submitted that have not ended."""
        self.is_begun = False
        """Some run has been submitted."""


class InstanceWrites:
    """Events in, answers out. Knows no library, thread or clock."""

    def __init__(self, run_bytes_max: int) -> None:
        """`run_bytes_max`: of one transfer."""
        self._run_bytes_max = run_bytes_max
        self.stopped: str | None = None
        """Why nothing more is submitted, in words."""
        # Runs to be submitted, by decode rank, in order of acceptance. Empty once stopped.
        self._waiting: dict[int, deque[Run]] = {}
        # Runs submitted whose end the library has not told, by transfer.
        self._out: dict[int, Run] = {}
        # How many of them there are for each decode rank.
        self._out_of_rank: dict[int, int] = {}
        self._writes: dict[int, _Write] = {}

    @property
    def out(self) -> list[int]:
        """Transfers to ask for, oldest first. One that has ended must never be asked for again."""
        return list(self._out)

    @property
    def out_count(self) -> int:
        """How many there are of them."""
        return len(self._out)

    @property
    def is_busy(self) -> bool:
        """Something is to be submitted or asked for."""
        return bool(self._out) or any(self._waiting.values())

    def accept(self, write: int, decode_rank: int, ranges: Sequence[ByteRange]) -> list[Answer]:
        """A write of at least one byte."""
        assert write not in self._writes, write
        if self.stopped is not None:
            return [Answer(write, WriteOutcome.FAILED, self.stopped)]
        runs = list(cut(ranges, self._run_bytes_max))
        assert runs, write
        self._writes[write] = _Write(len(runs))
        queue = self._waiting.setdefault(decode_rank, deque())
        queue.extend(Run(write, decode_rank, piece) for piece in runs)
        return []

    def next_runs(self) -> list[Run]:
        """What the windows have room for. Each must go to `submitted` or `not_submitted`."""
        return [
            queue[position]
            for rank, queue in self._waiting.items()
            for position in range(min(len(queue), WINDOW - self._out_of_rank.get(rank, 0)))
        ]

    def submitted(self, run: Run, transfer: int) -> None:
        """The oldest waiting run of its rank is out."""
        assert transfer not in self._out, transfer
        self._begin(run)
        self._out[transfer] = run
        self._out_of_rank[run.decode_rank] = self._out_of_rank.get(run.decode_rank, 0) + 1
        self._writes[run.write].out += 1

    def not_submitted(self, run: Run) -> list[Answer]:
        """The library has refused it. It counts as begun: that is no proof either."""
        self._begin(run)
        return self._unsettled(run.write, "mooncake took no more of it") + self.stop(
            "mooncake refused a transfer"
        )

    def _begin(self, run: Run) -> None:
        first = self._waiting[run.decode_rank].popleft()
        assert first == run, (first, run)
        self._writes[run.write].waiting -= 1
        self._writes[run.write].is_begun = True

    def ended(self, transfer: int, state: TransferState) -> list[Answer]:
        """The library has said how a transfer ended."""
        assert state is not TransferState.RUNNING, transfer
        run = self._out.pop(transfer)
        self._out_of_rank[run.decode_rank] -= 1
        write = self._writes.get(run.write)
        if write is not None:
            write.out -= 1
        if state is TransferState.FAILED:
            detail = "mooncake failed a transfer, of which something may still land"
            return self._unsettled(run.write, detail) + self.stop("a transfer has failed")
        if write is None or write.out or write.waiting:
            return []
        del self._writes[run.write]
        return [Answer(run.write, WriteOutcome.COMPLETED, "")]

    def stop(self, why: str) -> list[Answer]:
        """Submit nothing more. Writes that are wholly out may still complete."""
        if self.stopped is not None:
            return []
        self.stopped = why
        self._waiting.clear()
        answers: list[Answer] = []
        for number, write in list(self._writes.items()):
            if not write.is_begun:
                del self._writes[number]
                answers.append(Answer(number, WriteOutcome.FAILED, why))
            elif write.waiting:
                answers += self._unsettled(number, why)
        return answers

    def give_up(self, why: str) -> list[Answer]:
        """Stop, and answer for everything: what is out has taken too long."""
        answers = self.stop(why)
        for number in list(self._writes):
            answers += self._unsettled(number, why)
        return answers

    def _unsettled(self, write: int, detail: str) -> list[Answer]:
        if self._writes.pop(write, None) is None:
            return []
        return [Answer(write, WriteOutcome.UNSETTLED, detail)]

    def check(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        assert self.stopped is None or not self._waiting
        waiting = [run for queue in self._waiting.values() for run in queue]
        for number, write in self._writes.items():
            assert write.waiting == sum(run.write == number for run in waiting), number
            assert write.out == sum(run.write == number for run in self._out.values()), number
            assert write.out or write.waiting, number
        for rank, count in self._out_of_rank.items():
            assert count == sum(run.decode_rank == rank for run in self._out.values()), rank
            assert count <= WINDOW, rank
