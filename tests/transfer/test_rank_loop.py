"""The frame of a rank: what waits for a forward and what does not, its heartbeat, and its end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from pdrt.ids import Incarnation, RoomId
from pdrt.protocol.effects import CloseEngine
from pdrt.protocol.messages import Reason
from pdrt.transfer import worker_loop
from pdrt.transfer.rank_channel import RankChannel, encode
from pdrt.transfer.rank_loop import RankLoop
from pdrt.transfer.rank_messages import (
    Alive,
    Check,
    Checked,
    Held,
    HeldEngine,
    HeldRoom,
    RankReport,
    Step,
    StepFailed,
)
from pdrt.transfer.room_task import Close, ForwardEnded, ForwardStarted, RankRoom, ToRoom
from pdrt.transfer.worker_loop import ExitCode
from tests.decode.deployment import HANG_SECONDS

Messages = RankRoom | ToRoom | CloseEngine
ROOM = RoomId(Incarnation(0xD0), 1)
HELD: tuple[Held, ...] = (HeldRoom(ROOM, 1, (4, 5)), HeldEngine(ROOM.decode, 1, "tcp"))
STARTED, ENDED = ToRoom(ROOM, ForwardStarted()), ToRoom(ROOM, ForwardEnded())
CLOSED = ToRoom(ROOM, Close(Reason.CLIENT_GONE))


class Scripted:
    """A rank that notes what it is told, and an executor whose steps end when the test says so."""

    def __init__(self) -> None:
        self.did: list[Any] = []
        self.broken: str | None = None
        self.steps: list[asyncio.Future[None]] = []
        self.is_closed = False

    def handle(self, message: Any) -> None:
        self.did.append(message)

    def follows_step(self, message: Any) -> bool:
        return isinstance(message, ToRoom) and not isinstance(message.event, Close)

    def check(self) -> tuple[Held, ...]:
        assert self.broken is None, self.broken
        return HELD

    def report(self) -> RankReport:
        return RankReport("core 3", {"stale": len(self.did)})

    def close(self) -> None:
        self.is_closed = True

    def step(self, body: bytes) -> asyncio.Future[None]:
        self.did.append(body)
        self.steps.append(asyncio.get_running_loop().create_future())
        return self.steps[-1]


class Running:
    """A rank's loop in this process, and the leader's end of its channel."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.said: list[Any] = []
        answers: Any = Alive | Checked | StepFailed
        self.leader: RankChannel[Any] = RankChannel(ours, answers, self._hear, lambda why: None)
        self.rank = Scripted()
        frame = RankLoop(theirs, Messages, alive_seconds=0.02)
        self.task = asyncio.create_task(frame.run(self.rank, self.rank))

    def _hear(self, message: Any) -> None:
        self.said.append(message)

    def answers(self, kind: type) -> list[Any]:
        return [message for message in self.said if isinstance(message, kind)]

    def tell(self, *messages: Any) -> None:
        for message in messages:
            self.leader.send(encode(message))

    async def until(self, is_true: Callable[[], object]) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            while not is_true():
                assert not self.task.done(), self.task
                await asyncio.sleep(0.001)

    async def did(self, *expected: Any) -> None:
        await self.until(lambda: len(self.rank.did) >= len(expected))
        assert self.rank.did == list(expected)


@pytest.fixture
async def running(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    monkeypatch.setattr(worker_loop, "TICK_SECONDS", 0.01)
    running = Running()
    yield running
    running.leader.close()
    async with asyncio.timeout(HANG_SECONDS):
        await running.task
    assert running.rank.is_closed


async def test_what_follows_a_forward_waits_for_it_and_nothing_else_does(
    running: Running,
) -> None:
    """The next forward waits too, and keeps its place."""
    other = CloseEngine(ROOM.decode, 1)
    running.tell(STARTED, Step(b"1"), ENDED, STARTED, Step(b"2"), ENDED, CLOSED, other)
    await running.did(STARTED, CLOSED, other, b"1")
    running.rank.steps[0].set_result(None)
    await running.did(STARTED, CLOSED, other, b"1", ENDED, STARTED, b"2")
    running.rank.steps[1].set_result(None)
    await running.did(STARTED, CLOSED, other, b"1", ENDED, STARTED, b"2", ENDED)


async def test_while_nothing_is_computed_all_is_done_at_once(running: Running) -> None:
    running.tell(STARTED, ENDED)
    await running.did(STARTED, ENDED)
    running.tell(Step(b"1"))
    await running.did(STARTED, ENDED, b"1")
    running.rank.steps[0].set_result(None)
    await asyncio.sleep(0)
    running.tell(ENDED)
    await running.did(STARTED, ENDED, b"1", ENDED)


async def test_a_forward_that_fails_is_told(running: Running) -> None:
    running.tell(Step(b"1"), ENDED)
    await running.did(b"1")
    running.rank.steps[0].set_exception(RuntimeError("no memory"))
    await running.until(lambda: running.answers(StepFailed))
    assert running.answers(StepFailed) == [StepFailed("RuntimeError('no memory')")]
    await running.did(b"1", ENDED)


async def test_checks_are_answered_also_during_a_forward(running: Running) -> None:
    running.tell(Step(b"1"), Check(4))
    await running.until(lambda: running.answers(Checked))
    running.rank.broken = "a page twice"
    running.tell(Check(5))
    await running.until(lambda: len(running.answers(Checked)) == 2)
    first, second = running.answers(Checked)
    assert first == Checked(4, HELD)
    assert second.broken.startswith("a page twice")
    running.rank.steps[0].set_result(None)


async def test_it_says_that_it_is_alive(running: Running) -> None:
    await running.until(lambda: len(running.answers(Alive)) >= 3)
    assert running.answers(Alive)[-1] == Alive(RankReport("core 3", {"stale": 0}))
    running.tell(CLOSED)
    await running.until(lambda: Alive(RankReport("core 3", {"stale": 1})) in running.said)


async def test_it_ends_with_its_leader(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    await running.until(lambda: running.answers(Alive))
    running.leader.close()
    async with asyncio.timeout(HANG_SECONDS):
        assert await running.task is ExitCode.CANNOT_GO_ON
    [ended] = [r for r in caplog.records if r.getMessage() == "worker ends"]
    assert vars(ended)["why"] == "the leader cannot be heard: it has closed its channel"
