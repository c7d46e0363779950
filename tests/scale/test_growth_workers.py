"""Two real workers after thousands of requests that ended in every way: what carries out the
tables' decisions (rooms' tasks, channels, engines, copies, pages) has kept nothing either."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter

import msgspec
import pytest

from pdrt.decode.early_cancels import EARLY_MAX
from pdrt.decode.worker import DecodeWorker
from pdrt.ids import RequestId
from pdrt.prefill.worker import PrefillWorker
from pdrt.protocol.gateway_messages import FinishReason
from pdrt.sampling import Sampling
from tests.decode.deployment import Deployment, GatewayPeer, Stream, prompt_of, until
from tests.scale.executor import TimedExecutor, output_of
from tests.scale.growth import BLOCKS_MAX, allocated

PAGES = 128
AT_ONCE = 60
OUTPUT_TOKENS = 6
METRIC_LINES_MAX = AT_ONCE
"""Words that are said for the first time, such as why a message came too late."""


class Lives:
    """Requests to one decode worker, each answered in its own way."""

    def __init__(self, gateway: GatewayPeer, decode: DecodeWorker, prefill: PrefillWorker) -> None:
        self.ends: Counter[FinishReason] = Counter()
        self._gateway = gateway
        self._decode = decode
        self._prefill = prefill

    async def batch(self, first: int) -> None:
        await asyncio.gather(*(self._live(first + each) for each in range(AT_ONCE)))
        # What it still had to say has been said before its report.
        await self._gateway.inspect(self._decode.incarnation)
        self._gateway.streams.clear()
        self._gateway.reports.clear()

    async def _live(self, number: int) -> None:
        prompt = prompt_of(20 + number % 50, number)
        wanted = 1 if number % 6 == 0 else OUTPUT_TOKENS
        sampling = Sampling(max_tokens=wanted, temperature=0.0, ignore_eos=True)
        stream = self._gateway.submit(self._decode.incarnation, prompt, sampling)
        match number % 6:
            case 1:
                self._cancel(stream)
            case 2:
                await stream.reach(1)
                self._cancel(stream)
            case 3:
                await stream.reach(3)
                self._cancel(stream)
            case 4:
                self._gateway.submit(self._decode.incarnation, (), sampling)
        finished = await stream.end()
        self.ends[finished.reason] += 1
        if finished.reason is FinishReason.LENGTH:
            assert stream.tokens == output_of(prompt, wanted)

    def _cancel(self, stream: Stream) -> None:
        self._gateway.cancel(self._decode.incarnation, stream)

    def fill_early_cancels(self) -> None:
        """Whoever is cancelled after its end is remembered, as far as there is place."""
        for serial in range(EARLY_MAX):
            named = msgspec.msgpack.encode(RequestId(self._gateway.incarnation, -serial, 1))
            self._decode._early_cancels.note(msgspec.msgpack.decode(named, type=RequestId))

    def sizes(self) -> dict[str, int]:
        """Of everything that rooms and requests are kept in, and of what the process has open."""
        decode, prefill = self._decode, self._prefill
        return {
            "requests": len(decode.scheduler.requests),
            "leases": len(decode.table.leases),
            "decode rooms": len(decode.rooms._rooms),
            "matchers": len(decode.grammars._matchers),
            "prefill rooms": len(prefill.table.rooms),
            "room tasks": len(prefill.rank.tasks),
            "jobs": len(prefill.scheduler.jobs),
            "tasks": len(asyncio.all_tasks()),
            "threads": threading.active_count(),
            "files": len(os.listdir("/proc/self/fd")),
        }

    def metric_lines(self) -> int:
        return sum(w.view.render().count(b"\n") for w in (self._decode, self._prefill))

    async def shrink_to(self, sizes: dict[str, int]) -> None:
        """Tasks and threads that have done their work take a moment to be gone."""
        grown: dict[str, tuple[int, int]] = {}

        def is_no_more() -> bool:
            now = self.sizes()
            grown.clear()
            grown.update({key: (sizes[key], now[key]) for key in now if now[key] > sizes[key]})
            return not grown

        try:
            await until(is_no_more, "sizes of before")
        except AssertionError:
            raise AssertionError(f"before and now: {grown}") from None


@pytest.mark.usefixtures("unlogged")
@pytest.mark.parametrize("batches", [20, pytest.param(1000, marks=pytest.mark.slow)])
async def test_requests_that_end_in_every_way(batches: int) -> None:
    deployment = Deployment(GatewayPeer())
    config = deployment.config()
    prefill = deployment.add_prefill(TimedExecutor(PAGES, 0.0), config)  # type: ignore[arg-type]
    decode = deployment.add_decode(TimedExecutor(PAGES, 0.0), config)  # type: ignore[arg-type]
    await deployment.paired()
    lives = Lives(deployment.gateway, decode, prefill)
    lives.fill_early_cancels()
    for each in range(10):  # both prefix caches are full from then on
        await lives.batch(each * AT_ONCE)
    await deployment.quiet()
    before, sizes, lines = allocated(), lives.sizes(), lives.metric_lines()
    for each in range(10, 10 + batches):
        await lives.batch(each * AT_ONCE)
    await deployment.quiet()
    await lives.shrink_to(sizes)
    assert allocated() - before < BLOCKS_MAX
    assert lives.metric_lines() - lines < METRIC_LINES_MAX
    assert {FinishReason.LENGTH, FinishReason.CANCELLED} <= lives.ends.keys()
    assert lives.ends.total() == (10 + batches) * AT_ONCE
    await deployment.close()
