"""What a prefill worker ends of its own accord is told at once: nobody waits for a timer. Here no
timer of either worker does anything."""

from __future__ import annotations

import pytest

from pdrt.protocol.gateway_messages import FinishReason
from pdrt.protocol.messages import Reason
from tests.decode.deployment import Pair, prompt_of, until
from tests.prefill.executor import output_of


@pytest.fixture
def timeless(pair: Pair) -> Pair:
    for worker in (pair.prefill, pair.decode):
        worker.loop._on_tick = lambda now: None
    return pair


async def test_a_forward_that_fails(timeless: Pair) -> None:
    """Its first room goes on in a second one."""
    timeless.prefill_executor.failures = 1
    stream = timeless.submit(prompt_of(20), 6)
    assert (await stream.end()).reason is FinishReason.LENGTH
    assert stream.tokens == output_of(prompt_of(20), 6)


async def test_a_forward_that_fails_in_every_room(timeless: Pair) -> None:
    timeless.prefill_executor.failures = 3
    finished = await timeless.submit(prompt_of(20), 6).end()
    assert finished.reason is FinishReason.FAILED
    assert "on purpose" in finished.detail


async def test_a_room_that_the_worker_gives_up(timeless: Pair) -> None:
    pair = timeless
    pair.prefill_executor.gate.clear()
    stream = pair.submit(prompt_of(20), 6)
    await until(lambda: pair.prefill_executor.is_running, "prefill")
    (room,) = pair.prefill.table.rooms
    pair.prefill.handover.apply(
        pair.prefill.table.end_room(room, Reason.REJECTED, "it cannot be computed")
    )
    pair.prefill_executor.gate.set()
    finished = await stream.end()
    assert (finished.reason, finished.detail) == (FinishReason.REJECTED, "it cannot be computed")


async def test_a_prompt_that_is_refused(timeless: Pair) -> None:
    """It is longer than the prefill pool; the first answer is the last word."""
    refuse = "no such prompt"
    timeless.prefill.handover.judge = lambda grant: refuse
    finished = await timeless.submit(prompt_of(20), 6).end()
    assert (finished.reason, finished.detail) == (FinishReason.REJECTED, refuse)
    timeless.prefill.handover.judge = lambda grant: None
