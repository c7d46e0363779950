"""Rounds of questions to all workers, shared by the clients that ask at the same time."""

from __future__ import annotations

import asyncio

from pdrt.gateway import inspection
from pdrt.gateway.inspection import Inspector
from pdrt.ids import Incarnation
from pdrt.protocol.gateway_messages import Inspect, Report
from tests.gateway.workers import GATEWAY

ONE, TWO = Incarnation(1), Incarnation(2)
LONG_SECONDS = 60.0


class Stage:
    def __init__(self) -> None:
        self.sent: list[Inspect] = []
        self.inspector = Inspector(GATEWAY, self._send)

    def _send(self, message: Inspect) -> bool:
        self.sent.append(message)
        return True

    def ask(
        self, *workers: Incarnation, seconds_max: float = LONG_SECONDS
    ) -> asyncio.Task[dict[Incarnation, Report]]:
        return asyncio.create_task(self.inspector.ask(workers, False, seconds_max))

    def answer(self, message: Inspect) -> bool:
        return self.inspector.on_report(Report(message.worker, message.serial))


async def test_clients_that_ask_at_the_same_time_share_a_round() -> None:
    stage = Stage()
    first, second = stage.ask(ONE, TWO), stage.ask(TWO, ONE)
    await asyncio.sleep(0)
    assert [message.worker for message in stage.sent] == [ONE, TWO]
    assert all(stage.answer(message) for message in stage.sent)
    assert set(await first) == set(await second) == {ONE, TWO}
    assert not stage.answer(stage.sent[0]), "the round is over"


async def test_a_client_that_runs_out_of_time_takes_nothing_from_the_next() -> None:
    stage = Stage()
    first, second = stage.ask(ONE, seconds_max=0.0), stage.ask(ONE)
    assert await first == {}
    assert len(stage.sent) == 1 and stage.answer(stage.sent[0])
    assert set(await second) == {ONE}


async def test_a_worker_that_came_after_the_round_began_is_asked() -> None:
    stage = Stage()
    first, second = stage.ask(ONE), stage.ask(ONE, TWO)
    await asyncio.sleep(0)
    for message in list(stage.sent):
        stage.answer(message)
    assert set(await first) == {ONE}
    assert set(await second) == {ONE, TWO}


async def test_a_round_that_a_silent_worker_keeps_open_is_not_joined_for_ever() -> None:
    stage = Stage()
    first = stage.ask(ONE, TWO)
    await asyncio.sleep(0)
    stage.answer(stage.sent[0])
    (round,) = stage.inspector._rounds.values()
    round.began -= inspection.JOIN_SECONDS_MAX
    second = stage.ask(ONE, TWO)
    await asyncio.sleep(0)
    assert len(stage.sent) == 4, "its reports would be old ones"
    for message in stage.sent[1:]:
        stage.answer(message)
    assert set(await first) == set(await second) == {ONE, TWO}
    assert not stage.inspector._rounds
