"""Rounds: load, waves of faults, healing, and then all that must be true."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from tests.chaos.client import Lost, Reading, ask, new_http
from tests.chaos.cluster import Cluster
from tests.chaos.faults import Injury, draw_wave, strike
from tests.chaos.load import Load, Tally
from tests.chaos.proc import Use
from tests.chaos.report import Report
from tests.chaos.shapes import Answer, Shapes
from tests.chaos.storm import storm

CALM_SECONDS = 0.3
"""Between two waves."""
FDS_GROWTH_MAX = 16
"""Of a process, from its first idle moment to any later one: connections to peers that have died
since, and are about to be let go."""
THREADS_GROWTH_MAX = 8
"""The pools for blocking work fill up as they are needed."""
ANONYMOUS_GROWTH_MAX = 64 * 2**20
"""Bytes. Allocators keep what a peak needed."""
PROBE = Reading(is_streamed=True)


class Leak(AssertionError):
    """A process holds more than it may."""


class Chaos:
    """One cluster through any number of rounds."""

    def __init__(self, cluster: Cluster, shapes: Shapes, clients: int) -> None:
        self.report = Report()
        self._cluster = cluster
        self._shapes = shapes
        self._clients = clients
        self._expected: dict[str, Answer] = {}
        """By name of the shape."""
        self._first_uses: dict[int, Use] = {}
        """Of each process that lives, when it was first idle."""

    async def begin(self) -> None:
        """Start everything, and learn what answers and processes are like while nothing happens."""
        self._cluster.start_all()
        await self._cluster.complete()
        async with new_http() as http:
            for shape in self._shapes:
                answer = await ask(http, self._cluster.url, shape, PROBE, random.Random(0))
                assert isinstance(answer, Answer), (shape.name, answer)
                self._shapes.assert_right(shape, answer)
                self._expected[shape.name] = answer
        await self._cluster.whole()
        self._look_for_leaks()

    async def round(self, seed: int, waves: Sequence[Sequence[str]]) -> None:
        """Raises AssertionError when something that must be true is not."""
        dice = random.Random(seed)
        load = Load(self._cluster.url, self._shapes, self._expected, seed)
        await load.begin(self._clients)
        injuries: list[Injury] = []
        try:
            for wave in waves:
                await asyncio.sleep(CALM_SECONDS)
                injuries += await self._wave(wave, dice)
        finally:
            await load.end()
        self._judge(load.tally, injuries)
        self.report.whole(await self._cluster.whole())
        await self._probe(dice)
        await self._cluster.whole()
        self._look_for_leaks()
        self.report.rounds += 1

    async def storm(self, count: int, seed: int) -> None:
        """So many aborts, while nothing else happens."""
        self.report.aborts += await storm(self._cluster, self._shapes, count, seed)
        await self._probe(random.Random(seed))
        await self._cluster.whole()
        self._look_for_leaks()

    async def random_round(self, seed: int, waves: int, kinds: Sequence[str]) -> None:
        """Whatever chance wants."""
        dice = random.Random(seed)
        await self.round(seed, [draw_wave(dice, kinds) for _ in range(waves)])

    async def _wave(self, names: Sequence[str], dice: random.Random) -> list[Injury]:
        """Faults at the same time, each healed in its own time, then the wait until all are
        paired."""
        injuries = [injury for name in names for injury in strike(self._cluster, name, dice)]
        holds = [injury.kind.hold_seconds * (1 + dice.random()) for injury in injuries]
        await asyncio.gather(*map(_heal_later, injuries, holds))
        seconds = await self._cluster.complete()
        for name in names:
            self.report.fault(name, seconds)
        return injuries

    def _judge(self, tally: Tally, injuries: Sequence[Injury]) -> None:
        """No client was let down, and no connection broke but by a fault that breaks them."""
        if not any(injury.kind.breaks_connections for injury in injuries):
            tally.lost += [f"broken: {how}" for how in tally.broken.elements()]
        self.report.tally.add(tally)
        assert not tally.lost, f"{len(tally.lost)} requests were lost: {tally.lost[:8]}"

    async def _probe(self, dice: random.Random) -> None:
        """The next request of every shape is right, at the first try."""
        async with new_http() as http:
            for shape in self._shapes.all:
                try:
                    answer = await ask(http, self._cluster.url, shape, PROBE, dice)
                except Lost as lost:
                    raise AssertionError(str(lost)) from lost
                assert answer == self._expected[shape.name], (shape.name, answer)

    def _look_for_leaks(self) -> None:
        """Compares every process with itself."""
        uses = self._cluster.uses()
        for pid, use in uses.items():
            first = self._first_uses.setdefault(pid, use)
            growth = Use(
                use.fds - first.fds,
                use.threads - first.threads,
                use.anonymous_bytes - first.anonymous_bytes,
            )
            self.report.growth(growth)
            if (
                growth.fds > FDS_GROWTH_MAX
                or growth.threads > THREADS_GROWTH_MAX
                or growth.anonymous_bytes > ANONYMOUS_GROWTH_MAX
            ):
                raise Leak(f"{self._cluster.name_of(pid)}: {first} became {use}")
        self._first_uses = {pid: self._first_uses[pid] for pid in uses}


async def _heal_later(injury: Injury, hold_seconds: float) -> None:
    await asyncio.sleep(hold_seconds)
    await injury.heal()
