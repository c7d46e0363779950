"""Clients: those that want an answer and come back until they have it, and those that go away."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import httpx2

from tests.chaos.client import Broken, Lost, Reading, Refusal, ask, new_http
from tests.chaos.shapes import Answer, Shape, Shapes

ANSWER_SECONDS_MAX = 300.0
"""From the first try to the answer, whatever happens to the processes meanwhile."""
PAUSE_SECONDS = 0.1
"""Between two requests at most, and between two tries at least."""
REDIAL_SECONDS = 0.5
"""After a connection that broke, or could not be had."""
LEAVE_SECONDS_MAX = 0.6
"""Somebody who goes away does so within this: before the first token, or in mid-stream."""
SLOW_PAUSE_SECONDS = 2.0

Loop = Callable[[random.Random], Awaitable[None]]


class Tally:
    """What became of every request."""

    def __init__(self) -> None:
        self.answered = 0
        """At the first try."""
        self.retried = 0
        """Answered after errors or broken connections."""
        self.left = 0
        """By clients that went away."""
        self.lost: list[str] = []
        """How each was let down. Empty, whatever happened."""
        self.errors: Counter[str] = Counter()
        """Errors that named a reason, by status and reason."""
        self.broken: Counter[str] = Counter()
        """Broken connections, as clients saw them."""
        self.longest_seconds = 0.0
        """To an answer, over all tries."""

    def add(self, other: Tally) -> None:
        self.answered += other.answered
        self.retried += other.retried
        self.left += other.left
        self.lost += other.lost
        self.errors += other.errors
        self.broken += other.broken
        self.longest_seconds = max(self.longest_seconds, other.longest_seconds)


class Load:
    """Clients of one round, from `begin` to `end`."""

    def __init__(self, url: str, shapes: Shapes, expected: dict[str, Answer], seed: int) -> None:
        """`expected`: by name of the shape."""
        self.tally = Tally()
        self._url = url
        self._shapes = shapes
        self._expected = expected
        self._dice = random.Random(seed)
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []
        self._stack = contextlib.AsyncExitStack()

    async def begin(self, clients: int) -> None:
        """`clients` that want answers, a quarter as many that go away, and a slow one."""
        self._http = await self._stack.enter_async_context(new_http())
        self._slow = await self._stack.enter_async_context(new_http(is_slow=True))
        loops = [self._ask] * clients + [self._leave] * max(1, clients // 4) + [self._read_slowly]
        for loop in loops:
            dice = random.Random(self._dice.random())
            self._tasks.append(asyncio.create_task(self._repeat(loop, dice)))

    async def end(self) -> None:
        """Once every client has what it was waiting for."""
        self._is_over = True
        await asyncio.gather(*self._tasks)
        await self._stack.aclose()

    async def _repeat(self, loop: Loop, dice: random.Random) -> None:
        while not self._is_over:
            await asyncio.sleep(PAUSE_SECONDS * dice.random())
            await loop(dice)

    async def _ask(self, dice: random.Random) -> None:
        reading = Reading(is_streamed=dice.random() < 0.6)
        await self._until_answered(self._http, dice.choice(self._shapes.all), reading, dice)

    async def _read_slowly(self, dice: random.Random) -> None:
        """Stops reading in the middle; what it gets in the end is complete all the same."""
        reading = Reading(is_streamed=True, pause_seconds=SLOW_PAUSE_SECONDS * dice.random())
        await self._until_answered(self._slow, self._shapes.long, reading, dice)

    async def _leave(self, dice: random.Random) -> None:
        shape = dice.choice((*self._shapes.all, self._shapes.long))
        reading = Reading(is_streamed=dice.random() < 0.7)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS_MAX * dice.random()):
                try:
                    result = await ask(self._http, self._url, shape, reading, dice)
                    if isinstance(result, Broken):
                        await asyncio.sleep(REDIAL_SECONDS)
                except Lost as lost:
                    self.tally.lost.append(str(lost))
        self.tally.left += 1

    async def _until_answered(
        self, http: httpx2.AsyncClient, shape: Shape, reading: Reading, dice: random.Random
    ) -> None:
        try:
            tries, seconds = await self._tries(http, shape, reading, dice)
        except Lost as lost:
            self.tally.lost.append(str(lost))
            return
        self.tally.answered += tries == 1
        self.tally.retried += tries > 1
        self.tally.longest_seconds = max(self.tally.longest_seconds, seconds)

    async def _tries(
        self, http: httpx2.AsyncClient, shape: Shape, reading: Reading, dice: random.Random
    ) -> tuple[int, float]:
        """How many it took, and how long."""
        began, tries = time.monotonic(), 0
        while True:
            tries += 1
            result = await ask(http, self._url, shape, reading, dice)
            seconds = time.monotonic() - began
            if isinstance(result, Answer):
                self._compare(shape, result)
                return tries, seconds
            if seconds > ANSWER_SECONDS_MAX:
                raise Lost(f"{shape.name}: {tries} tries in {seconds:.0f} s, at last {result}")
            await asyncio.sleep(self._note(result))

    def _note(self, result: Refusal | Broken) -> float:
        """Count it; how long to wait before the next try."""
        if isinstance(result, Broken):
            self.tally.broken[result.how] += 1
            return REDIAL_SECONDS
        self.tally.errors[f"{result.status} {result.message}"] += 1
        return max(PAUSE_SECONDS, result.retry_after_seconds)

    def _compare(self, shape: Shape, answer: Answer) -> None:
        expected = self._expected[shape.name]
        if answer != expected:
            raise Lost(f"{shape.name}: {answer} instead of {expected}")
