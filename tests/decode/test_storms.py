"""Aborts in every state of a request, many of each: both pools stay whole, nothing grows, and who
stays is answered."""

from __future__ import annotations

import random

import msgspec
import pytest

from pdrt.scheduling import local_prefill
from tests.decode.deployment import Deployment, GatewayPeer, deployed
from tests.decode.local_storms import LocalStorm
from tests.decode.storms import PAGES, STORM, Moment, Storm, holdings
from tests.prefill.executor import StandInExecutor
from tests.transfer.copies import CopyGate

BLOCKS_PER_ABORT_MAX = 2
"""Counters and caches that are not quite full may grow; a request that is kept has dozens."""


COUNTS = pytest.mark.parametrize("count", (100, pytest.param(1000, marks=pytest.mark.slow)))


@COUNTS
async def test_aborts_in_every_state(copies: CopyGate, count: int) -> None:
    """`count` in each."""
    async with deployed(prefill_pages=PAGES, decode_pages=PAGES, scheduler=STORM) as pair:
        storm = Storm(pair, copies, random.Random(7))
        for moment in Moment:
            await storm.batch(moment)
            assert storm.hits[moment], moment
        storm.hits.clear()
        before = holdings()
        await storm.until_hit(lambda: [m for m in Moment if storm.hits[m] < count])
        after = holdings()
        await pair.serves()
    assert min(storm.hits[moment] for moment in Moment) >= count
    assert len(storm.chunks) > 2, storm.chunks
    assert storm.probes > len(Moment)
    assert after.fds <= before.fds and after.threads <= before.threads, (before, after)
    assert after.blocks - before.blocks < BLOCKS_PER_ABORT_MAX * storm.hits.total(), (before, after)


@COUNTS
async def test_aborts_while_decode_computes_prompts_itself(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """As no prefill worker is there: `count` of those whose prompt it was in the middle of."""
    monkeypatch.setattr(local_prefill, "UNPAIRED_SECONDS", 0.0)
    scheduler = msgspec.structs.replace(STORM, local_prefill="fallback")
    deployment, executor = Deployment(GatewayPeer()), StandInExecutor(PAGES)
    decode = deployment.add_decode(executor, deployment.config(scheduler=scheduler))
    await deployment.paired()
    storm = LocalStorm(deployment, random.Random(8))
    await storm.batch()
    before, first = holdings(), storm.chunks.total()
    while storm.chunks.total() < first + count:
        await storm.batch()
    after = holdings()
    await deployment.close()
    assert len(storm.chunks) > 2, storm.chunks
    assert not decode.table.next_room().serial > 1, "a room was opened"
    assert after.fds <= before.fds and after.threads <= before.threads, (before, after)
    assert after.blocks - before.blocks < BLOCKS_PER_ABORT_MAX * count, (before, after)
