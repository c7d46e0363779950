"""A prefill worker, and a decode leader whose lines are written by the test."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from pdrt.ids import Incarnation
from pdrt.kv.pages import OwnerKind
from pdrt.protocol.messages import Drained, FirstToken, Outcome, Reason, Segment
from pdrt.sampling import Sampling
from tests.decode.deployment import NEVER, Deployment, GatewayPeer, until
from tests.prefill.executor import LAYOUT, StandInExecutor, next_token, position_value
from tests.prefill.peer import PAGES, DecodePeer, Prefill


@pytest.mark.parametrize("length", [1, 4, 5, 31, 64])
async def test_a_room(peer: DecodePeer, length: int) -> None:
    grant = peer.make_grant(1, length)
    await peer.say(grant)
    drained = await peer.drained(1)
    assert drained.outcome is Outcome.COMPLETE
    assert drained.bytes_written == LAYOUT.pages_for(length) * LAYOUT.page_bytes
    first, last = peer.heard
    assert isinstance(first, FirstToken)
    assert first.first.token == next_token(grant.token_ids)
    assert last is drained
    assert drained.first == first.first
    peer.landed(grant)


async def test_only_granted_pages_are_written(peer: DecodePeer) -> None:
    peer.pool.tensor.fill_(-7.0)
    grant = peer.make_grant(1, 10, pages=(30, 2, 17))
    await peer.say(grant)
    await peer.drained(1)
    peer.landed(grant)
    untouched = [page for page in range(PAGES) if page not in grant.pages]
    assert torch.all(peer.pool.tensor[untouched] == -7.0)


async def test_two_decode_workers_at_once(prefill: Prefill) -> None:
    peers = [prefill.peer(0xD0), prefill.peer(0xD1)]
    grants = {}
    for each in peers:
        await each.hello()
        for serial in range(1, 6):
            grants[each, serial] = each.make_grant(serial, 7, (2 * serial, 2 * serial + 1))
            await each.say(grants[each, serial])
    for (each, serial), grant in grants.items():
        assert (await each.drained(serial)).outcome is Outcome.COMPLETE
        each.landed(grant)


async def test_a_grant_is_taken_once(prefill: Prefill, peer: DecodePeer) -> None:
    """Again with the same seq, and again with a new one: the room is not opened twice."""
    prefill.executor.gate.clear()
    grant = peer.make_grant(1, 7)
    await peer.say(grant)
    await peer.say(grant)
    await peer.say(msgspec.structs.replace(grant, seq=next(peer._seqs)))
    await until(lambda: prefill.worker.table.stale.total() == 2, "both")
    assert prefill.worker.table.stale == {"old_seq": 1, "room_again": 1}
    prefill.executor.gate.set()
    await peer.drained(1)


async def test_a_late_grant_after_its_revoke(prefill: Prefill, peer: DecodePeer) -> None:
    late = peer.make_grant(1, 7)
    await peer.revoke(1)
    drained = await peer.drained(1)
    assert (drained.outcome, drained.reason) == (Outcome.ENDED, Reason.UNKNOWN_ROOM)
    await peer.say(late)
    await until(lambda: prefill.worker.table.stale["old_seq"], "the late Grant")
    assert not prefill.worker.table.rooms


async def test_another_life_is_not_meant(prefill: Prefill, peer: DecodePeer) -> None:
    grant = msgspec.structs.replace(peer.make_grant(1, 7), writer=Incarnation(0xA7))
    await peer.say(grant)
    await until(lambda: prefill.worker.table.stale["other_incarnation"], "the Grant")
    assert not prefill.worker.table.rooms


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"token_ids": ()}, "0 tokens"),
        ({"token_ids": tuple([1] * 97)}, "97 tokens"),
        ({"token_ids": (1, 2000, 3, 4, 5)}, "below 1000"),
        ({"pages": (1, 2, 3, 4)}, "4 pages"),
        ({"pages": (1, 2), "first_page": 1}, "2 pages"),
    ],
)
async def test_what_cannot_be_served_is_rejected(
    peer: DecodePeer, change: dict[str, Any], why: str
) -> None:
    await peer.say(msgspec.structs.replace(peer.make_grant(1, 7), **change))
    drained = await peer.drained(1)
    assert (drained.outcome, drained.reason) == (Outcome.ENDED, Reason.REJECTED)
    assert not drained.retryable
    assert why in drained.detail


async def test_pages_that_decode_holds_are_not_written(peer: DecodePeer) -> None:
    grant = msgspec.structs.replace(peer.make_grant(1, 10), pages=(8, 9), first_page=1)
    await peer.say(grant)
    drained = await peer.drained(1)
    assert drained.outcome is Outcome.COMPLETE
    assert drained.bytes_written == 2 * LAYOUT.page_bytes
    for place in range(4, 10):
        value = peer.executor.read((0, *grant.pages), place)
        assert value == position_value(grant.token_ids[place], place)


async def test_pages_outside_of_the_segment_fail_the_room_only(peer: DecodePeer) -> None:
    await peer.say(peer.make_grant(1, 7, (PAGES - 1, PAGES)))
    await peer.say(peer.make_grant(2, 7))
    drained = await peer.drained(1)
    assert (drained.outcome, drained.reason) == (Outcome.ENDED, Reason.WRITE_FAILED)
    assert (await peer.drained(2)).outcome is Outcome.COMPLETE


async def test_a_generation_that_is_not_open(peer: DecodePeer) -> None:
    await peer.say(msgspec.structs.replace(peer.make_grant(1, 7), generation=2))
    assert (await peer.drained(1)).reason is Reason.BELOW_FLOOR


async def test_a_room_past_its_deadline(prefill: Prefill, peer: DecodePeer) -> None:
    prefill.executor.gate.clear()
    await peer.say(msgspec.structs.replace(peer.make_grant(1, 40), seconds_max=0.02))
    await until(lambda: any(r.reason for r in prefill.worker.table.rooms.values()), "the deadline")
    assert not peer.heard, "the forward is still filling its pages"
    prefill.executor.gate.set()
    assert (await peer.drained(1)).reason is Reason.DEADLINE


async def test_the_sampler_is_not_asked_where_no_token_is_wanted(peer: DecodePeer) -> None:
    sampling = Sampling(max_tokens=0)
    grant = msgspec.structs.replace(peer.make_grant(1, 7), sampling=sampling, pages=())
    await peer.say(grant)
    drained = await peer.drained(1)
    assert (drained.outcome, drained.first, drained.bytes_written) == (Outcome.COMPLETE, None, 0)


async def test_rooms_wait_for_source_pages_in_order(prefill: Prefill, peer: DecodePeer) -> None:
    """Each takes the whole prefill pool."""
    grants = [peer.make_grant(serial, 96) for serial in (1, 2, 3)]
    for grant in grants:
        await peer.say(grant)
    for serial in (1, 2, 3):
        assert (await peer.drained(serial)).outcome is Outcome.COMPLETE
    ends = [m.room.serial for m in peer.heard if isinstance(m, Drained)]
    assert ends == [1, 2, 3]


async def test_a_segment_that_cannot_be_reached_is_refused_in_words(prefill: Prefill) -> None:
    peer = prefill.peer()
    welcome = await peer.hello(segment=Segment(0, "local", b"nonsense"))
    assert welcome.refusal is not None
    assert "malformed" in welcome.refusal
    await peer.say(peer.make_grant(1, 7))
    assert (await peer.drained(1)).outcome is Outcome.ENDED
    assert prefill.worker.pages.count(OwnerKind.ROOM) == 0


async def test_another_model_leaves_no_trace(prefill: Prefill) -> None:
    peer = prefill.peer()
    peer.fingerprint = msgspec.structs.replace(peer.fingerprint, digest="d2")
    welcome = await peer.hello()
    assert welcome.refusal is not None
    assert "model digest: d1 != d2" in welcome.refusal
    assert not prefill.worker.table.peers.known


async def test_the_word_of_a_decode_worker_that_is_lost(prefill: Prefill) -> None:
    """Its rooms end; its source pages wait for the forward."""
    deployment = Deployment(GatewayPeer())
    executor = StandInExecutor(PAGES)
    worker = deployment.add_prefill(executor, deployment.config())
    clock = worker.table.peers._silence
    peer = DecodePeer(worker, 0xD0)
    await peer.hello()
    executor.gate.clear()
    await peer.say(peer.make_grant(1, 40))
    await until(lambda: executor.is_running, "prefill")
    clock._silence_seconds = 0.05
    await until(lambda: any(r.reason for r in worker.table.rooms.values()), "its loss")
    clock._silence_seconds = NEVER
    assert worker.pages.count(OwnerKind.ROOM) == 10
    executor.gate.set()
    await deployment.quiet()
    # It comes back as the same one, and is served.
    assert (await peer.hello()).refusal is None
    await peer.say(peer.make_grant(2, 7))
    assert (await peer.drained(2)).outcome is Outcome.COMPLETE
    await deployment.quiet()
    await deployment.close()
    peer.close()
