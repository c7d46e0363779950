"""What befalls one room, or one decode worker's segment, is that room's alone: the lane that all
share goes on. A prompt that nobody wants any more stops at its next chunk."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdrt.ids import RoomId
from pdrt.kv.pages import OwnerKind
from pdrt.protocol.messages import Drained, Outcome, Reason
from tests.decode.deployment import until
from tests.prefill.peer import DecodePeer, Prefill


async def both(prefill: Prefill) -> tuple[DecodePeer, DecodePeer]:
    """Two decode workers that are paired with the same prefill worker."""
    peers = prefill.peer(0xD0), prefill.peer(0xD1)
    for peer in peers:
        assert (await peer.hello()).refusal is None
    return peers


def rooms_ended(prefill: Prefill) -> dict[str, float]:
    """By reason, as its metrics show them."""
    families = text_string_to_metric_families(prefill.worker.view.render().decode())
    return {
        sample.labels["reason"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "pdrt_room_ends_total"
    }


async def test_a_room_whose_task_crashes_ends_alone(
    prefill: Prefill, caplog: pytest.LogCaptureFixture
) -> None:
    """Two rooms of each of two decode workers. The crashed one is UNSETTLED, as nothing is known of
    its writes any more; what shares its generation goes on elsewhere; nobody else notices."""
    crashing, other = await both(prefill)
    prefill.executor.gate.clear()
    for peer in (crashing, other):
        for serial in (1, 2):
            await peer.say(peer.make_grant(serial, 7, (2 * serial, 2 * serial + 1)))
    await until(lambda: len(prefill.worker.table.rooms) == 4, "four rooms")
    room = RoomId(crashing.incarnation, 1)
    prefill.worker.rank.tasks[room].post("nonsense")  # type: ignore[arg-type]
    await until(lambda: "room task failed" in caplog.text, "its crash")
    prefill.executor.gate.set()
    ends = [await crashing.drained(serial) for serial in (1, 2)]
    assert [(end.outcome, end.reason) for end in ends] == [
        (Outcome.UNSETTLED, Reason.TASK_FAILED),
        (Outcome.ENDED, Reason.WRITE_UNSETTLED),
    ]
    assert all(end.retryable for end in ends)
    for serial in (1, 2):
        assert (await other.drained(serial)).outcome is Outcome.COMPLETE
    (crash,) = [r for r in caplog.records if r.getMessage() == "room task failed"]
    assert (crash.levelno, vars(crash)["room"]) == (logging.ERROR, room)
    assert rooms_ended(prefill) == {"task_failed": 1, "write_unsettled": 1}
    await serves_again(prefill, crashing, generation=2)


async def serves_again(prefill: Prefill, peer: DecodePeer, generation: int) -> None:
    """In a new segment: the worker is as good as before."""
    assert (await peer.hello(generation)).refusal is None
    await until(lambda: peer.welcomes[-1].generation == generation, "its engine")
    grant = peer.make_grant(9, 10)
    await peer.say(msgspec.structs.replace(grant, generation=generation))
    assert (await peer.drained(9)).outcome is Outcome.COMPLETE
    peer.landed(grant)
    assert prefill.worker.pages.count(OwnerKind.ROOM) == 0


async def test_a_chunk_for_a_session_that_is_unknown_fails_its_room_alone(
    prefill: Prefill,
) -> None:
    """The engine has lost a segment in mid-prompt; the copying thread serves all others."""
    lost, other = await both(prefill)
    prefill.executor.gate.clear()
    for peer in (lost, other):
        await peer.say(peer.make_grant(1, 40))
    await until(lambda: len(prefill.worker.table.rooms) == 2, "both rooms")
    sender: Any = prefill.worker.rank.parts.senders["local"]
    del sender._instances[lost.incarnation, 1]
    prefill.executor.gate.set()
    end = await lost.drained(1)
    assert (end.outcome, end.reason) == (Outcome.ENDED, Reason.WRITE_FAILED)
    assert end.retryable
    assert "takes no new writes" in end.detail
    assert (await other.drained(1)).outcome is Outcome.COMPLETE
    grant = other.make_grant(2, 30)
    await other.say(grant)
    assert (await other.drained(2)).outcome is Outcome.COMPLETE
    other.landed(grant)


async def test_cancelled_long_prompts_stop_at_the_next_chunk(
    prefill: Prefill, peer: DecodePeer
) -> None:
    """Five prompts of six chunks each, cancelled during the second step: the very next one is of
    who came last, and nothing of them is computed any more."""
    executor, longs, short = prefill.executor, (1, 2, 3, 4, 5), 6
    executor.gate.clear()
    await peer.say(peer.make_grant(1, 96))
    await until(lambda: len(executor.steps) == 1, "the first chunk")
    executor.gate.step()
    await until(lambda: len(executor.steps) == 2, "the second chunk")
    for serial in longs[1:]:
        await peer.say(peer.make_grant(serial, 96))
    grant = peer.make_grant(short, 7)
    await peer.say(grant)
    for serial in longs:
        await peer.revoke(serial)
    rooms = prefill.worker.table.rooms
    await until(
        lambda: {room.serial for room in rooms} == {1, short}, "those that nothing is computed of"
    )
    executor.gate.step()
    await until(lambda: len(executor.steps) == 3, "the step after that")
    ((row,),) = executor.steps[2:]
    assert tuple(row.token_ids) == grant.token_ids
    executor.gate.set()
    assert (await peer.drained(short)).outcome is Outcome.COMPLETE
    for serial in longs:
        end = await peer.drained(serial)
        assert (end.outcome, end.reason) == (Outcome.ENDED, Reason.CLIENT_GONE)
    assert len(executor.steps) == 3
    order = [said.room.serial for said in peer.heard if isinstance(said, Drained)]
    assert order.index(1) < order.index(short), "its pages were back before the next step"
