"""Asking every worker for its metrics and state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from pdrt.ids import Incarnation
from pdrt.protocol.gateway_messages import Inspect, Report


class _Round:
    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.waiting: set[Incarnation] = set()
        self.reports: dict[Incarnation, Report] = {}
        self.done = asyncio.Event()


class Inspector:
    """Rounds of `Inspect` and `Report`. At most one of each kind is under way, however many
    clients ask: they share it."""

    def __init__(self, gateway: Incarnation, send: Callable[[Inspect], bool]) -> None:
        self._gateway = gateway
        self._send = send
        self._serial = 0
        self._rounds: dict[bool, _Round] = {}
        """By `check`."""

    async def ask(
        self, workers: Iterable[Incarnation], check: bool, seconds_max: float
    ) -> dict[Incarnation, Report]:
        """The reports that came in time."""
        round = self._rounds.get(check) or self._start(workers, check)
        try:
            async with asyncio.timeout(seconds_max):
                await round.done.wait()
        except TimeoutError:
            pass
        finally:
            if self._rounds.get(check) is round:
                del self._rounds[check]
        return round.reports

    def _start(self, workers: Iterable[Incarnation], check: bool) -> _Round:
        self._serial += 1
        round = self._rounds[check] = _Round(self._serial)
        for worker in workers:
            if self._send(Inspect(worker, self._serial, self._gateway, check)):
                round.waiting.add(worker)
        if not round.waiting:
            round.done.set()
        return round

    def on_report(self, report: Report) -> bool:
        """False for one that nobody waits for."""
        for round in self._rounds.values():
            if round.serial == report.serial and report.worker in round.waiting:
                round.waiting.remove(report.worker)
                round.reports[report.worker] = report
                if not round.waiting:
                    round.done.set()
                return True
        return False
