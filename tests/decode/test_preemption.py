"""Small pools: sequences are preempted, move to new rooms, and say the same as in a large one."""

from __future__ import annotations

import msgspec
import pytest

from pdrt.protocol.gateway_messages import FinishReason
from tests.decode.deployment import PROTOCOL, SCHEDULER, deployed, prompt_of, until
from tests.prefill.executor import output_of


def preemptions(metrics: bytes) -> float:
    for line in metrics.decode().splitlines():
        if line.startswith("pdrt_preemptions_total"):
            return float(line.split()[-1])
    return 0.0


@pytest.mark.parametrize("decode_pages", [24, 30, 40])
async def test_output_does_not_depend_on_the_pool(decode_pages: int) -> None:
    async with deployed(decode_pages=decode_pages, prefill_pages=40) as pair:
        prompts = [prompt_of(5 + 3 * salt, salt) for salt in range(8)]
        streams = [pair.submit(prompt, 50) for prompt in prompts]
        for prompt, stream in zip(prompts, streams, strict=True):
            finished = await stream.end()
            assert finished.reason is FinishReason.LENGTH
            assert stream.tokens == output_of(prompt, 50)
            assert finished.usage is not None
            assert finished.usage.prompt_tokens == len(prompt)
        assert preemptions(pair.decode.view.render()) > 0
        await pair.serves()


async def test_preemption_is_no_failed_room() -> None:
    """However often it is preempted, a request has all its rooms to fail in."""
    protocol = msgspec.structs.replace(PROTOCOL, rooms_per_request_max=1)
    async with deployed(decode_pages=24, prefill_pages=40, protocol=protocol) as pair:
        streams = [pair.submit(prompt_of(20, salt), 70) for salt in range(4)]
        for stream in streams:
            assert (await stream.end()).reason is FinishReason.LENGTH
        assert preemptions(pair.decode.view.render()) > 0


async def test_the_oldest_is_never_preempted() -> None:
    async with deployed(decode_pages=24, prefill_pages=40) as pair:
        streams = await pair.submit_together([prompt_of(16, salt) for salt in range(3)], 60)
        for stream in streams:
            await stream.end()
        rooms = [len(stream.prefills) for stream in streams]
        assert rooms[0] == 1 and max(rooms) > 1, rooms


async def test_a_preempted_request_is_cancelled_while_it_waits() -> None:
    scheduler = msgspec.structs.replace(SCHEDULER, stream_tokens_max=40)
    async with deployed(decode_pages=24, prefill_pages=40, scheduler=scheduler) as pair:
        old = pair.submit(prompt_of(40), 50)
        young = pair.submit(prompt_of(20, 1), 70)
        await until(
            lambda: (
                (r := pair.decode.scheduler.requests.get(young.request))
                and r.state.value == "queued"
                and young.tokens
            ),
            "its preemption",
        )
        pair.cancel(young)
        assert (await young.end()).reason is FinishReason.CANCELLED
        pair.gateway.credit(pair.decode.incarnation, old, 50)
        assert (await old.end()).reason is FinishReason.LENGTH
        assert old.tokens == output_of(prompt_of(40), 50)
        assert young.tokens == output_of(prompt_of(20, 1), len(young.tokens))
