"""A client that goes away, at every point of a request's life: both pools are whole again."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from pdrt.kv.pages import OwnerKind
from pdrt.protocol.gateway_messages import FinishReason
from pdrt.protocol.messages import Reason
from tests.decode.deployment import SCHEDULER, Pair, Stream, deployed, in_use, prompt_of, until
from tests.prefill.executor import output_of
from tests.transfer.copies import CopyGate


async def cancelled(pair: Pair, stream: Stream) -> None:
    """Cancel, and see that the client is told at once, whatever is still to be drained."""
    pair.cancel(stream)
    assert (await stream.end()).reason is FinishReason.CANCELLED


async def test_while_queued() -> None:
    scheduler = msgspec.structs.replace(SCHEDULER, max_num_seqs=1)
    async with deployed(scheduler=scheduler) as pair:
        pair.prefill_executor.gate.clear()
        first, second = pair.submit(prompt_of(5), 2), pair.submit(prompt_of(6), 2)
        await until(lambda: pair.prefill_executor.is_running, "prefill")
        await cancelled(pair, second)
        pair.prefill_executor.gate.set()
        assert (await first.end()).reason is FinishReason.LENGTH
    assert second.tokens == []


async def test_while_prefilling(pair: Pair) -> None:
    pair.prefill_executor.gate.clear()
    stream = pair.submit(prompt_of(40), 8)
    await until(lambda: pair.prefill_executor.is_running, "prefill")
    await cancelled(pair, stream)
    # The forward still fills source pages, and the writer has not drained.
    await until(lambda: any(r.reason for r in pair.prefill.table.rooms.values()), "the Revoke")
    assert in_use(pair.prefill.pages, OwnerKind.ROOM) == 10
    assert in_use(pair.decode.pages, OwnerKind.LEASE) == 11
    pair.prefill_executor.gate.set()
    await pair.deployment.quiet()
    assert len(pair.prefill_executor.steps) == 1, "chunks are computed for nobody"
    await pair.serves()


async def test_while_waiting_for_source_pages() -> None:
    async with deployed(prefill_pages=12) as pair:
        pair.prefill_executor.gate.clear()
        first, second = pair.submit(prompt_of(40), 2), pair.submit(prompt_of(40, 1), 2)
        await until(lambda: pair.prefill.scheduler.queued == 1, "a room without pages")
        await cancelled(pair, second)
        await until(lambda: len(pair.prefill.table.rooms) == 1, "the end of its room")
        pair.prefill_executor.gate.set()
        await first.end()


async def test_between_first_token_and_drain(pair: Pair, copies: CopyGate) -> None:
    copies.close()
    stream = pair.submit(prompt_of(10), 8)
    await stream.reach(1)
    await cancelled(pair, stream)
    await until(lambda: any(r.reason for r in pair.prefill.table.rooms.values()), "the Revoke")
    # The copy is outstanding: it reads the source and may write into the target.
    assert in_use(pair.prefill.pages, OwnerKind.ROOM) == 3
    assert in_use(pair.decode.pages, OwnerKind.LEASE) == 3
    copies.open()
    await pair.deployment.quiet()
    await pair.serves()


async def test_while_running(pair: Pair) -> None:
    pair.decode_executor.gate.clear()
    stream = pair.submit(prompt_of(10), 8)
    await until(lambda: pair.decode_executor.is_running, "a step")
    pair.cancel(stream)
    await pair.gateway.inspect(pair.decode.incarnation)
    # During a step its pages are read and written to: they stay its own, or held by it.
    assert pair.decode.pages.count(OwnerKind.SEQUENCE) == 1
    assert list(map(len, pair.decode.pages.held_by(OwnerKind.SEQUENCE).values())) == [2]
    assert stream.finished is None
    pair.decode_executor.gate.set()
    assert (await stream.end()).reason is FinishReason.CANCELLED
    assert len(stream.tokens) == 1, "a step that was cancelled yields no token"
    await pair.serves()


async def test_while_paused() -> None:
    scheduler = msgspec.structs.replace(SCHEDULER, stream_tokens_max=2)
    async with deployed(scheduler=scheduler) as pair:
        stream = pair.submit(prompt_of(10), 8)
        await stream.reach(2)
        await cancelled(pair, stream)


async def test_twice_and_after_the_end(pair: Pair) -> None:
    """The gateway asks until it is answered; each asking has an answer."""
    stream = pair.submit(prompt_of(10), 2)
    await stream.end()
    pair.cancel(stream)
    pair.cancel(stream)
    await until(lambda: stream.finishes == 3, "an answer to each")


async def test_while_a_one_token_request_is_prefilled(pair: Pair) -> None:
    """It holds no pages, and is revoked all the same: nobody waits for its token."""
    pair.prefill_executor.gate.clear()
    stream = pair.submit(prompt_of(40), 1)
    await until(lambda: pair.prefill_executor.is_running, "prefill")
    await cancelled(pair, stream)
    await until(lambda: any(r.reason for r in pair.prefill.table.rooms.values()), "the Revoke")
    pair.prefill_executor.gate.set()
    await pair.deployment.quiet()
    assert len(pair.prefill_executor.steps) == 1


async def test_a_first_token_that_stops_revokes_the_rest(pair: Pair, copies: CopyGate) -> None:
    """What is left of the transfer is for nobody."""
    copies.close()
    wanted = output_of(prompt_of(10), 1)
    stream = pair.submit(prompt_of(10), 8, stop_token_ids=tuple(wanted))
    assert (await stream.end()).reason is FinishReason.STOP
    assert [x.reason for x in pair.decode.table.leases.values()] == [Reason.FINISHED]
    assert in_use(pair.decode.pages, OwnerKind.LEASE) == 3
    copies.open()


class Storm:
    """Clients that leave at random points, with pools too small for all of them."""

    def __init__(self, pair: Pair, dice: random.Random) -> None:
        self.pair = pair
        self.dice = dice

    async def run(self, waves: int, clients: int, ends: set[FinishReason]) -> list[FinishReason]:
        """So many waves, and on until somebody has ended in each of `ends`. How each of them ended,
        one of these; what it had been told until then was right."""
        found: list[FinishReason] = []
        async with asyncio.timeout(300):
            wave = 0
            while wave < waves or not ends.issubset(found):
                numbers = range(clients * wave, clients * wave + clients)
                found += await asyncio.gather(*map(self._client, numbers))
                wave += 1
        assert set(found) == ends
        await self.pair.deployment.quiet()
        return found

    async def _client(self, number: int) -> FinishReason:
        prompt = prompt_of(self.dice.randint(1, 40), number)
        count = self.dice.choice([1, 2, 3, 8, 20])
        patience = self.dice.choice([0, 0, 1, 2, 5, 100])
        stream = self.pair.submit(prompt, count)
        for _ in range(patience):
            await self._read(stream, 0.002 * self.dice.random())
        if stream.finished is None and patience < 100:
            self.pair.cancel(stream)
        while stream.finished is None:
            await self._read(stream, 0.005)
        assert stream.tokens == output_of(prompt, len(stream.tokens))
        reason = stream.finished.reason
        assert reason is not FinishReason.LENGTH or len(stream.tokens) == count
        return reason

    async def _read(self, stream: Stream, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.pair.gateway.credit(self.pair.decode.incarnation, stream, len(stream.tokens))


STORM = msgspec.structs.replace(SCHEDULER, max_num_seqs=6, stream_tokens_max=12)


@pytest.mark.parametrize("seed", range(3))
async def test_storm(seed: int) -> None:
    async with deployed(prefill_pages=30, decode_pages=26, scheduler=STORM) as pair:
        storm = Storm(pair, random.Random(seed))
        await storm.run(4, 25, {FinishReason.LENGTH, FinishReason.CANCELLED})
        await pair.serves()


@pytest.mark.parametrize("seed", range(2))
async def test_storm_while_everything_fails_now_and_then(seed: int, copies: CopyGate) -> None:
    """Forwards and copies on both sides; nothing wrong is ever said, and nothing is kept."""
    async with deployed(prefill_pages=30, decode_pages=26, scheduler=STORM) as pair:
        dice = random.Random(100 + seed)

        async def trouble() -> None:
            while True:
                await asyncio.sleep(0.02 * dice.random())
                match dice.randrange(4):
                    case 0 | 1:
                        pair.prefill_executor.failures = 1
                    case 2:
                        copies.failures = 1
                    case 3:
                        pair.decode_executor.failures = 1

        troubling = asyncio.create_task(trouble())
        ends = {FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.FAILED}
        await Storm(pair, random.Random(seed)).run(4, 25, ends)
        troubling.cancel()
        pair.prefill_executor.failures = pair.decode_executor.failures = copies.failures = 0
        await pair.serves()
