"""Many clients that go away at random moments, and where their requests were then, as the decode
workers' log tells it. State by state, with each state held: tests/decode/test_storms.py."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections import Counter

import httpx2

from tests.chaos.client import Reading, ask, new_http
from tests.chaos.cluster import Cluster
from tests.chaos.shapes import Shapes

AT_ONCE = 40
"""More than there are places in the batches: some wait."""
LEAVE_SECONDS_MAX = 1.5
UNREAD_SECONDS = 180.0
"""Longer than anybody stays: it stops reading, and leaves without having read on."""
PHASES = ("queued", "prefill", "transfer", "decode")
"""Of a request, in this order; the last one in its line is the one that it ended in."""
CANCELLED = re.compile(r"request ended .*outcome=cancelled .*")


async def storm(cluster: Cluster, shapes: Shapes, count: int, seed: int) -> Counter[str]:
    """`count` aborts; how many requests ended in each phase. The pools are whole again then."""
    before = _phases(cluster)
    dice = random.Random(seed)
    gate = asyncio.Semaphore(AT_ONCE)
    async with new_http(is_slow=True) as http, asyncio.TaskGroup() as group:
        for _ in range(count):
            own = random.Random(dice.random())
            group.create_task(_come_and_go(http, cluster.url, shapes, own, gate))
    await cluster.whole()
    return _phases(cluster) - before


async def _come_and_go(
    http: httpx2.AsyncClient,
    url: str,
    shapes: Shapes,
    dice: random.Random,
    gate: asyncio.Semaphore,
) -> None:
    shape = dice.choice((*shapes.all, *[shapes.long] * 4))
    stops_reading = dice.random() < 0.2
    reading = Reading(
        is_streamed=dice.random() < 0.7,
        pause_seconds=UNREAD_SECONDS if stops_reading else 0.0,
        pause_after_events=dice.randint(1, 8),
    )
    async with gate:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS_MAX * dice.random() ** 2):
                await ask(http, url, shape, reading, dice)


def _phases(cluster: Cluster) -> Counter[str]:
    """Of all requests that were cancelled, the phase that each ended in."""
    found: Counter[str] = Counter()
    for name in cluster.names["decode"]:
        for line in CANCELLED.findall(cluster.processes[name].text()):
            found[[phase for phase in PHASES if f"{phase}_seconds=" in line][-1]] += 1
    return found
