"""Asking every worker for its metrics and state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from pdrt.ids import Incarnation
from pdrt.protocol.gateway_messages import Inspect, Report

JOIN_SECONDS_MAX = 0.25
"""A round may be joined while it is this young, so that reports are fresh even when one worker
never answers; so there are four a second at most, however many clients ask."""


class _Round:
    """One question to a set of workers, for any number of clients that ask it meanwhile."""

    def __init__(
        self, serial: int, workers: frozenset[Incarnation], check: bool, began: float
    ) -> None:
        self.serial = serial
        self.workers = workers
        self.check = check
        self.began = began
        self.waiting: set[Incarnation] = set()
        self.reports: dict[Incarnation, Report] = {}
        self.clients = 0
        """Who wait; the last one to leave ends the round."""
        self.done = asyncio.Event()


class Inspector:
    """Rounds of `Inspect` and `Report`. Clients that ask the same workers the same thing share a
    round; one of them running out of time takes nothing from the others."""

    def __init__(self, gateway: Incarnation, send: Callable[[Inspect], bool]) -> None:
        self._gateway = gateway
        self._send = send
        self._serial = 0
        self._rounds: dict[int, _Round] = {}
        """By serial: those that clients wait for."""

    async def ask(
        self, workers: Iterable[Incarnation], check: bool, seconds_max: float
    ) -> dict[Incarnation, Report]:
        """The reports that came in time."""
        round = self._join(frozenset(workers), check, asyncio.get_running_loop().time())
        round.clients += 1
        try:
            async with asyncio.timeout(seconds_max):
                await round.done.wait()
        except TimeoutError:
            pass
        finally:
            round.clients -= 1
            if round.clients == 0:
                del self._rounds[round.serial]
        return dict(round.reports)

    def _join(self, workers: frozenset[Incarnation], check: bool, now: float) -> _Round:
        for round in self._rounds.values():
            is_same = round.workers == workers and round.check is check
            if is_same and now - round.began < JOIN_SECONDS_MAX and not round.done.is_set():
                return round
        return self._start(workers, check, now)

    def _start(self, workers: frozenset[Incarnation], check: bool, now: float) -> _Round:
        self._serial += 1
        round = self._rounds[self._serial] = _Round(self._serial, workers, check, now)
        for worker in workers:
            if self._send(Inspect(worker, self._serial, self._gateway, check)):
                round.waiting.add(worker)
        if not round.waiting:
            round.done.set()
        return round

    def on_report(self, report: Report) -> bool:
        """False for one that nobody waits for."""
        round = self._rounds.get(report.serial)
        if round is None or report.worker not in round.waiting:
            return False
        round.waiting.remove(report.worker)
        round.reports[report.worker] = report
        if not round.waiting:
            round.done.set()
        return True
