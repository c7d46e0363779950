"""The frame that every rank other than the leader runs in: its channel, its steps, its heartbeat.

What the leader says is done in order, except that a forward takes time: what follows a forward here
(the pages that it has finished) waits for it, and so does the next forward; everything else, above
all the closing of rooms, does not.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Awaitable
from typing import Any, Protocol, TypeVar

import msgspec

from pdrt.transfer.rank_channel import RankChannel, encode
from pdrt.transfer.rank_messages import (
    Alive,
    Check,
    Checked,
    Held,
    RankReport,
    Step,
    StepFailed,
)
from pdrt.transfer.worker_loop import ExitCode, WorkerLoop

log = logging.getLogger(__name__)

WAITING_MAX = 65_536
"""Messages behind a forward. The leader is at most a step ahead, which says four things of each of
its rows."""

ToRank_contra = TypeVar("ToRank_contra", contravariant=True)


class Rank(Protocol[ToRank_contra]):
    """One rank of a worker, in whatever process: the same handler serves rank 0 in the leader's."""

    def handle(self, message: ToRank_contra) -> None:
        """Do what the leader says, or begin to; answers come later."""

    def follows_step(self, message: ToRank_contra) -> bool:
        """Whether `message` speaks of the forward that was begun before it."""

    def check(self) -> tuple[Held, ...]:
        """Raise AssertionError where an invariant is broken. Returns everything that is open."""

    def report(self) -> RankReport:
        """What is to be seen of it."""

    def close(self) -> None:
        """At exit."""


class TakesPart(Protocol):
    """The executor of a rank that is not the leader."""

    def step(self, body: bytes) -> Awaitable[object]:
        """Take part in a forward, as the leader's executor has described it."""


class RankLoop:
    """Event loop and channel of one rank's process."""

    def __init__(self, end: socket.socket, messages: Any, alive_seconds: float) -> None:
        """`end`: the rank's end of the channel. `messages`: the union that its handler takes.
        `alive_seconds`: between two signs of life."""
        self.loop = WorkerLoop(self._tick, None)
        self._end = end
        self._messages = messages
        self._alive_seconds = alive_seconds
        self._alive_due = 0.0
        self._waiting: deque[Any] = deque()
        self._wake = asyncio.Event()
        self._is_computing = False

    def answer(self, message: msgspec.Struct) -> None:
        """Say something to the leader."""
        self._channel.send(encode(message))

    async def run(self, rank: Rank[Any], executor: TakesPart) -> ExitCode:
        """Serve until the leader is gone."""
        self._rank, self._executor = rank, executor
        self._channel: RankChannel[Any] = RankChannel(
            self._end, self._messages | Step | Check, self._receive, self._lost
        )
        try:
            return await self.loop.run(compute=self._compute())
        finally:
            self._channel.close()
            rank.close()

    def _tick(self, now: float) -> None:
        if now >= self._alive_due:
            self._alive_due = now + self._alive_seconds
            self.answer(Alive(self._rank.report()))

    def _lost(self, why: str) -> None:
        self.loop.end(ExitCode.CANNOT_GO_ON, f"the leader cannot be heard: {why}")

    def _receive(self, message: Any) -> None:
        match message:
            case Check(serial):
                self._check(serial)
            case Step():
                self._wait(message)
            case _ if self._is_behind() and self._rank.follows_step(message):
                self._wait(message)
            case _:
                self._rank.handle(message)

    def _is_behind(self) -> bool:
        return self._is_computing or bool(self._waiting)

    def _wait(self, message: Any) -> None:
        assert len(self._waiting) < WAITING_MAX, "the leader does not wait for its steps"
        self._waiting.append(message)
        self._wake.set()

    def _check(self, serial: int) -> None:
        try:
            answer = Checked(serial, self._rank.check())
        except AssertionError as error:
            answer = Checked(serial, broken=str(error) or repr(error))
        self.answer(answer)

    async def _compute(self) -> None:
        while True:
            while not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            message = self._waiting.popleft()
            if isinstance(message, Step):
                await self._take_part(message)
            else:
                self._rank.handle(message)

    async def _take_part(self, step: Step) -> None:
        self._is_computing = True
        try:
            await self._executor.step(step.body)
        except AssertionError:
            raise  # our own bug: this rank ends, and its worker with it
        except Exception as error:
            log.exception("step failed")
            self.answer(StepFailed(repr(error)))
        self._is_computing = False
