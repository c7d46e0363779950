"""The prefix cache of a prefill worker: what is not computed again, and how long it is kept."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from pdrt.context import RequestContext
from pdrt.ids import RoomId
from pdrt.kv.pages import CACHE, Owner, OwnerKind
from pdrt.protocol.messages import Grant, Outcome, Reason
from pdrt.sampling import Sampling
from pdrt.transfer.local import LocalSender
from tests.decode.deployment import SCHEDULER, Deployment, GatewayPeer, prompt_of, until
from tests.prefill.executor import LAYOUT, StandInExecutor, next_token, position_value
from tests.prefill.peer import PAGES, DecodePeer, Prefill

SIZE = LAYOUT.page_size


def with_tokens(grant: Grant, tokens: Sequence[int], **changes: Any) -> Grant:
    return msgspec.structs.replace(grant, token_ids=tuple(tokens), **changes)


def computed(prefill: Prefill) -> int:
    """Tokens that forwards were asked for, over all steps."""
    return sum(len(row.token_ids) for rows in prefill.executor.steps for row in rows)


async def complete(peer: DecodePeer, grant: Grant) -> int:
    """Serve it whole; returns its cached tokens."""
    await peer.say(grant)
    drained = await peer.drained(grant.room.serial)
    assert drained.outcome is Outcome.COMPLETE, drained
    assert drained.first is not None
    assert drained.first.token == next_token(grant.token_ids)
    if grant.pages:
        peer.landed(grant)
    return drained.first.cached_tokens


class HeldCopies:
    """Copies wait until they are let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_copy = threading.Event()
        self.begun = threading.Event()
        original = LocalSender._copy

        def copy(*arguments: Any) -> None:
            self.begun.set()
            self.may_copy.wait()
            original(*arguments)

        monkeypatch.setattr(LocalSender, "_copy", copy)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldCopies]:
    held = HeldCopies(monkeypatch)
    held.may_copy.set()
    yield held
    held.may_copy.set()


@pytest.mark.parametrize(("common", "cached"), [(3, 0), (4, 4), (13, 12), (24, 24)])
async def test_a_cached_prefix_is_sent_but_not_computed(
    prefill: Prefill, peer: DecodePeer, common: int, cached: int
) -> None:
    first = peer.make_grant(1, 24)
    assert await complete(peer, first) == 0
    before = computed(prefill)
    tokens = [*first.token_ids[:common], *prompt_of(30 - common, 7)]
    second = with_tokens(peer.make_grant(2, 30, tuple(range(10, 18))), tokens)
    assert await complete(peer, second) == cached
    assert computed(prefill) - before == 30 - cached


async def test_the_last_token_is_always_computed(prefill: Prefill, peer: DecodePeer) -> None:
    grant = peer.make_grant(1, 24)
    await complete(peer, grant)
    again = with_tokens(peer.make_grant(2, 24), grant.token_ids)
    assert await complete(peer, again) == 20
    assert [len(row.token_ids) for row in prefill.executor.steps[-1]] == [4]


async def test_cached_pages_are_sent_before_anything_is_computed(
    prefill: Prefill, peer: DecodePeer
) -> None:
    grant = peer.make_grant(1, 24)
    await complete(peer, grant)
    prefill.executor.gate.clear()
    tokens = [*grant.token_ids[:16], *prompt_of(8, 5)]
    second = with_tokens(peer.make_grant(2, 24, tuple(range(10, 16))), tokens)
    await peer.say(second)
    await until(lambda: bool(peer.pool.tensor[list(second.pages[:4])].all()), "the cached pages")
    for place in range(16):
        value = peer.executor.read(second.pages, place)
        assert value == position_value(tokens[place], place)
    assert not peer.pool.tensor[list(second.pages[4:])].any()
    assert prefill.executor.is_running
    prefill.executor.gate.set()
    assert (await peer.drained(2)).outcome is Outcome.COMPLETE


async def test_pages_before_the_first_wanted_one_are_not_sent(
    prefill: Prefill, peer: DecodePeer
) -> None:
    grant = peer.make_grant(1, 24)
    await complete(peer, grant)
    tokens = [*grant.token_ids[:16], *prompt_of(9, 5)]
    second = with_tokens(peer.make_grant(2, 25, tuple(range(10, 15))), tokens, first_page=2)
    await peer.say(second)
    drained = await peer.drained(2)
    assert (drained.outcome, drained.bytes_written) == (Outcome.COMPLETE, 5 * LAYOUT.page_bytes)
    for place in range(8, 25):
        value = peer.executor.read((0, 0, *second.pages), place)
        assert value == position_value(tokens[place], place)


@pytest.mark.parametrize("is_cached", [False, True])
async def test_a_prompt_that_the_decode_side_holds_whole(
    prefill: Prefill, peer: DecodePeer, is_cached: bool
) -> None:
    """All that is wanted is its next token."""
    grant = peer.make_grant(1, 24)
    if is_cached:
        await complete(peer, grant)
    held = with_tokens(peer.make_grant(2, 24, ()), grant.token_ids, first_page=6)
    await peer.say(held)
    drained = await peer.drained(2)
    assert (drained.outcome, drained.bytes_written) == (Outcome.COMPLETE, 0)
    assert drained.first is not None
    assert drained.first.token == next_token(grant.token_ids)
    assert drained.first.cached_tokens == (20 if is_cached else 0)


async def test_salts_part_prefixes(peer: DecodePeer) -> None:
    tokens = peer.make_grant(1, 24).token_ids
    for serial, salt, cached in ((1, "", 0), (2, "a", 0), (3, "a", 20), (4, "b", 0), (5, "", 20)):
        salted = with_tokens(peer.make_grant(serial, 24), tokens, cache_salt=salt)
        assert await complete(peer, salted) == cached


async def test_what_a_forward_failed_on_is_not_found(prefill: Prefill, peer: DecodePeer) -> None:
    """The chunk before it was done well, and is."""
    grant = peer.make_grant(1, 40)
    prefill.executor.gate.clear()
    await peer.say(grant)
    await until(lambda: prefill.executor.is_running, "prefill")
    prefill.executor.gate.step()
    await until(lambda: len(prefill.executor.steps) == 2, "the second chunk")
    prefill.executor.failures = 1
    prefill.executor.gate.set()
    drained = await peer.drained(1)
    assert (drained.outcome, drained.reason) == (Outcome.ENDED, Reason.FORWARD_FAILED)
    again = with_tokens(peer.make_grant(2, 40), grant.token_ids)
    assert await complete(peer, again) == 16


async def test_the_same_prompt_at_once_is_computed_once(prefill: Prefill) -> None:
    peers = [prefill.peer(0xD0 + index) for index in range(4)]
    for each in peers:
        await each.hello()
    prefill.executor.gate.clear()
    blocker = peers[0].make_grant(9, 16, ())
    await peers[0].say(blocker)
    await until(lambda: prefill.executor.is_running, "the other prompt")
    tokens = prompt_of(64, 3)
    grants = [with_tokens(each.make_grant(1, 64), tokens) for each in peers]
    for each, grant in zip(peers, grants, strict=True):
        await each.say(grant)
    await until(lambda: len(prefill.worker.table.rooms) == 5, "every room")
    prefill.executor.gate.set()
    cached = []
    for each, grant in zip(peers, grants, strict=True):
        drained = await each.drained(1)
        assert drained.first is not None
        assert drained.first.token == next_token(tokens)
        each.landed(grant)
        cached.append(drained.first.cached_tokens)
    assert sorted(cached) == [0, 60, 60, 60]
    assert computed(prefill) == 16 + 64 + 3 * 4


async def test_what_nobody_reads_makes_room(prefill: Prefill, peer: DecodePeer) -> None:
    for serial in range(1, 6):
        await complete(peer, peer.make_grant(serial, 96))
    assert prefill.worker.cache.counts["evicted"] > 0
    assert len(prefill.worker.cache) <= PAGES


async def test_cached_source_pages_stay_until_their_room_has_drained(
    prefill: Prefill, peer: DecodePeer, copies: HeldCopies
) -> None:
    """I3: a client that has gone frees nothing that is being read."""
    grant = peer.make_grant(1, 40)
    await complete(peer, grant)
    copies.may_copy.clear()
    copies.begun.clear()
    prefill.executor.gate.clear()
    tokens = [*grant.token_ids[:36], *prompt_of(4, 5)]
    await peer.say(with_tokens(peer.make_grant(2, 40, tuple(range(20, 30))), tokens))
    await until(copies.begun.is_set, "the copy of the cached pages")
    await peer.revoke(2)
    rooms = prefill.worker.table.rooms
    await until(lambda: all(room.reason for room in rooms.values()), "its Revoke")
    prefill.executor.gate.set()
    await until(lambda: not prefill.executor.is_running, "the forward")
    await peer.say(peer.make_grant(3, 96))  # 24 of 32 pages
    await until(lambda: prefill.worker.scheduler.queued, "somebody who wants pages")
    pages = prefill.worker.pages
    room = Owner(OwnerKind.ROOM, RoomId(peer.incarnation, 2))
    held = pages.held_by(OwnerKind.ROOM)[room]
    assert len(held) >= 9
    assert all(pages.owner(page) is CACHE for page in held)
    assert not peer.heard[2:], "it has not drained"
    prefill.worker.check()
    copies.may_copy.set()
    assert (await peer.drained(2)).outcome is Outcome.ENDED
    assert (await peer.drained(3)).outcome is Outcome.COMPLETE


async def test_cached_source_pages_stay_under_a_write_that_never_settled(
    prefill: Prefill, peer: DecodePeer, copies: HeldCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I3: until the engine instance that carried it is destroyed."""
    grant = peer.make_grant(1, 40)
    await complete(peer, grant)
    copies.may_copy.clear()
    monkeypatch.setattr(prefill.worker.rank.parts.senders["local"], "_write_seconds_max", 0.05)
    await peer.say(with_tokens(peer.make_grant(2, 40), grant.token_ids))
    assert (await peer.drained(2)).outcome is Outcome.UNSETTLED
    assert not prefill.worker.table.rooms
    room = Owner(OwnerKind.ROOM, RoomId(peer.incarnation, 2))
    assert len(prefill.worker.pages.held_by(OwnerKind.ROOM)[room]) >= 9
    prefill.worker.check()
    copies.may_copy.set()
    await until(lambda: not prefill.worker.scheduler.jobs, "the end of the engine instance")
    assert not prefill.worker.pages.held_by(OwnerKind.ROOM)


async def test_without_caching_everything_is_computed() -> None:
    scheduler = msgspec.structs.replace(SCHEDULER, enable_prefix_caching=False)
    deployment = Deployment(GatewayPeer())
    executor = StandInExecutor(PAGES)
    worker = deployment.add_prefill(executor, deployment.config(scheduler=scheduler))
    peer = DecodePeer(worker, 0xD0)
    await peer.hello()
    grant = peer.make_grant(1, 24)
    assert await complete(peer, grant) == 0
    assert await complete(peer, with_tokens(peer.make_grant(2, 24), grant.token_ids)) == 0
    await deployment.quiet()
    assert worker.pages.count(OwnerKind.FREE) == PAGES
    await deployment.close()
    peer.close()


async def test_what_others_see(
    prefill: Prefill, peer: DecodePeer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    grant = peer.make_grant(1, 24)
    await complete(peer, grant)
    context = RequestContext(request_id="mine")
    await complete(peer, with_tokens(peer.make_grant(2, 24), grant.token_ids, context=context))
    sampling = Sampling(max_tokens=1, prompt_logprobs=0)
    await complete(peer, with_tokens(peer.make_grant(3, 24), grant.token_ids, sampling=sampling))
    await prefill.deployment.quiet()
    *_, line, _ = [record for record in caplog.records if record.message == "room ended"]
    said = vars(line)
    assert (said["request_id"], said["cached_tokens"], said["computed_tokens"]) == ("mine", 20, 4)
    assert all(said[f"{phase}_seconds"] >= 0 for phase in ("queued", "compute", "drain"))
    text = prefill.worker.view.render().decode()
    for wanted in (
        'pdrt_prefix_cache_tokens_total{result="hit"} 20',
        'pdrt_prefix_cache_tokens_total{result="missed"} 28',
        'pdrt_prefix_cache_tokens_total{result="bypassed"} 24',
        'pdrt_prefix_cache_pages_total{event="inserted"} 13',
        'pdrt_pages{owner="cache"} 6',
    ):
        assert any(_matches(line, wanted) for line in text.splitlines()), wanted
    status = msgspec.json.decode(prefill.worker.view.status())
    assert status["prefix_cache"]["pages"] == 6
    assert prefill.worker.view.load().pages_free == PAGES, "as good as free"


def _matches(line: str, wanted: str) -> bool:
    """Same family, label and value, whatever other labels there are."""
    name, _, rest = wanted.partition("{")
    label, _, value = rest.partition("} ")
    parts = line.rpartition(" ")
    return line.startswith(name + "{") and label in line and float(parts[2] or -1) == float(value)
