"""Prefill workers of m ranks hand over to decode workers of n: every rank a process of its own,
real channels and real copies. Each decode rank compares, position by position, what has landed with
what its leader has read (`stand_in.RankPart`): a slice that went elsewhere fails its first step."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdrt.config import TransferConfig
from pdrt.decode.worker import DecodeWorker
from pdrt.ids import RoomId, short
from pdrt.kv.layout import KvLayout
from pdrt.kv.pages import OwnerKind
from pdrt.prefill.worker import PrefillWorker
from pdrt.protocol.effects import CloseEngine, CloseSegment, OpenEngine, OpenSegment
from pdrt.protocol.gateway_messages import FinishReason
from pdrt.sampling import Sampling
from pdrt.transfer.rank_channel import encode
from pdrt.transfer.rank_messages import HeldRoom
from pdrt.transfer.tcp.descriptor import TcpDescriptor
from pdrt.transfer.tcp.wire import Greeted, pack_head
from pdrt.transfer.writable import AdmitRoom, DismissRoom, Verdict
from tests.decode.deployment import (
    HANG_SECONDS,
    Deployment,
    GatewayPeer,
    Stream,
    prompt_of,
    until,
)
from tests.prefill.executor import output_of
from tests.ranks.group import Ranks
from tests.ranks.stand_in import LAYOUT, ONE_HEAD
from tests.transfer.tcp_pair import Raw

pytestmark = pytest.mark.e2e

Transfer = Literal["auto", "tcp"]


class Pair:
    """One worker of each role, of several ranks."""

    def __init__(
        self, m: int, n: int, layout: KvLayout, kv_checksum: bool, transfer: Transfer
    ) -> None:
        self.deployment = Deployment(GatewayPeer())
        self.gateway = self.deployment.gateway
        self.deployment.kv_checksum = kv_checksum
        engines = TransferConfig(transfer=transfer)
        self.config = msgspec.structs.replace(self.deployment.config(), engines=engines)
        self.prefill_ranks = Ranks("prefill", self.config, layout, m)
        self.decode_ranks = Ranks("decode", self.config, layout, n)
        self.prefill: PrefillWorker
        self.decode: DecodeWorker

    async def start(self, **changes: object) -> None:
        """`changes`: to the other prefill ranks."""
        executor = await self.prefill_ranks.start(**changes)
        other = await self.decode_ranks.start()
        children = self.prefill_ranks.children
        self.prefill = self.deployment.add_prefill(executor, self.config, children)
        self.decode = self.deployment.add_decode(other, self.config, self.decode_ranks.children)
        await self.deployment.paired()

    def submit(self, prompt: list[int]) -> Stream:
        sampling = Sampling(max_tokens=6, temperature=0.0)
        return self.gateway.submit(self.decode.incarnation, prompt, sampling)

    async def serve(self, prompts: list[list[int]]) -> None:
        """All at once."""
        for stream, prompt in [(self.submit(prompt), prompt) for prompt in prompts]:
            finished = await stream.end()
            assert finished.reason is FinishReason.LENGTH, finished
            assert stream.tokens == output_of(prompt, 6)


@asynccontextmanager
async def paired(
    m: int,
    n: int,
    layout: KvLayout = LAYOUT,
    kv_checksum: bool = False,
    transfer: Transfer = "auto",
    **changes: object,
) -> AsyncIterator[Pair]:
    """At the end, both workers must be whole and unbroken, on every rank."""
    pair = Pair(m, n, layout, kv_checksum, transfer)
    try:
        await pair.start(**changes)
        yield pair
        await pair.deployment.quiet()
        for worker in (pair.prefill, pair.decode):
            report = await pair.gateway.inspect(worker.incarnation)
            assert report.broken == ()
        await pair.deployment.close()
    finally:
        pair.prefill_ranks.end()
        pair.decode_ranks.end()


def bytes_by_rank(worker: PrefillWorker) -> dict[int, int]:
    families = text_string_to_metric_families(worker.view.render().decode())
    return {
        int(sample.labels["rank"]): int(sample.value)
        for family in families
        for sample in family.samples
        if sample.name == "pdrt_transfer_bytes_total"
    }


@pytest.mark.parametrize(("m", "n"), [(1, 2), (2, 1), (2, 3), (3, 1), (3, 3)])
async def test_every_slice_lands_where_it_belongs(m: int, n: int) -> None:
    """Prompts that end within a page, at its end, and after several chunks; some begin alike, so
    that pages are cached on both sides."""
    prompts = [prompt_of(length, length) for length in (1, 4, 5, 31, 64)]
    prompts += [[*prompt_of(31, 31), 7, 8, 9], prompt_of(64, 64)[:40]]
    async with paired(m, n) as pair:
        await pair.serve(prompts[:5])
        await pair.serve(prompts[5:])
        sent = bytes_by_rank(pair.prefill)
        assert sent.keys() == set(range(m))
        assert len(set(sent.values())) == 1, "every rank has sent its share"


async def test_pages_are_sent_once_their_own_rank_has_computed_them() -> None:
    """Rank 1 is behind: its leader has ended the step, and sent its own part of the pages."""
    async with paired(2, 1, lag_seconds=0.3) as pair:
        await pair.serve([prompt_of(31)])


async def test_ranks_with_nothing_to_send() -> None:
    """One KV head on 2 → 3 ranks: replicas on both sides. Those that do not send are waited for all
    the same; with checksums, what landed on every rank is compared with what was sent."""
    async with paired(2, 3, ONE_HEAD, kv_checksum=True) as pair:
        await pair.serve([prompt_of(length, length) for length in (3, 20)])
        sent = bytes_by_rank(pair.prefill)
        assert sent[0] > 0
        assert sent[1] == 0


async def test_an_abort_in_mid_transfer_waits_for_every_rank_by_name() -> None:
    """Rank 0 ends at once, then 2, then 1, whose copies are held. Neither side's pages are free
    before that."""
    async with paired(3, 1, holds_copies=True) as pair:
        prefill, decode = pair.prefill, pair.decode
        stream = pair.submit(prompt_of(30))
        (_, first), (_, second) = enumerate(pair.prefill_ranks.forked)
        for forked in (first, second):
            await until(lambda forked=forked: "copy" in forked.said, "a copy that waits")
        pair.gateway.cancel(decode.incarnation, stream)
        (room,) = prefill.table.rooms.values()
        await until(lambda: room.waiting == {1, 2}, "the end of rank 0")
        assert (await stream.end()).reason is FinishReason.CANCELLED
        second.connection.send("open")
        await until(lambda: room.waiting == {1}, "the end of rank 2")
        prefill.check()
        decode.check()
        assert prefill.pages.count(OwnerKind.ROOM) and decode.pages.count(OwnerKind.LEASE)
        first.connection.send("open")
        await until(lambda: not prefill.table.rooms, "the end of rank 1")
        await until(lambda: not decode.table.leases, "the end of the lease")
        assert not prefill.pages.count(OwnerKind.ROOM)
        await pair.serve([prompt_of(9, 1)])


async def test_what_a_rank_finds_broken_is_told_to_whoever_asks() -> None:
    """A room that the leader believes to be open there, and is not."""
    async with paired(2, 1) as pair:
        await pair.serve([prompt_of(9)])
        known = pair.prefill.ranks.believed
        room = HeldRoom(pair.decode.table.next_room(), 1, (3,))
        pair.prefill.ranks.believed = lambda rank: known(rank) | {room}
        report = await pair.gateway.inspect(pair.prefill.incarnation)
        lacks = f"the rank lacks {room.words}"
        assert report.broken == (f"rank 1 and its leader disagree: {lacks}",)
        pair.prefill.ranks.believed = known
        status = pair.prefill.ranks.seen(asyncio.get_running_loop().time(), 1.0, {})
        pids = [forked.pid for forked in pair.prefill_ranks.forked]
        assert [entry["pid"] for entry in status][1:] == pids


def samples(worker: PrefillWorker | DecodeWorker, name: str, *labels: str) -> dict[Any, int]:
    """Values of one metric, by some of its labels."""
    families = text_string_to_metric_families(worker.view.render().decode())
    found = [sample for family in families for sample in family.samples if sample.name == name]
    return {tuple(x.labels[label] for label in labels): int(x.value) for x in found}


def tell_rank_1(worker: PrefillWorker | DecodeWorker, message: msgspec.Struct) -> None:
    """Nobody else, so that it holds what its leader knows nothing of, or lacks what that believes
    it to have."""
    worker.ranks._channels[1].send(encode(message))


async def finds(pair: Pair, worker: PrefillWorker | DecodeWorker, words: str) -> None:
    """`/debug/check` says this of rank 1 sooner or later, and nothing of the others."""
    worker._checked_at = math.inf  # what it found by itself would end it
    broken: tuple[str, ...] = ()
    async with asyncio.timeout(HANG_SECONDS):
        while broken != (f"rank 1 and its leader disagree: {words}",):
            broken = (await pair.gateway.inspect(worker.incarnation)).broken


async def test_a_check_names_the_decode_rank_and_what_it_has_or_lacks() -> None:
    async with paired(1, 3) as pair:
        await pair.serve([prompt_of(9)])
        decode, endpoint = pair.decode, pair.prefill.handover.endpoint
        room = RoomId(decode.incarnation, 1_000_000)
        tell_rank_1(decode, AdmitRoom(room, endpoint, 1, (7,)))
        await finds(pair, decode, f"the leader does not know of {HeldRoom(room, 1, (7,)).words}")
        tell_rank_1(decode, DismissRoom(room))
        tell_rank_1(decode, OpenSegment(endpoint, 99))
        segment = f"the segment of generation 99 for {endpoint}"
        await finds(pair, decode, f"the leader does not know of {segment}")
        tell_rank_1(decode, CloseSegment(endpoint, 99))
        tell_rank_1(decode, CloseSegment(endpoint, 1))
        segment = f"the segment of generation 1 for {endpoint}"
        await finds(pair, decode, f"the rank lacks {segment}")
        tell_rank_1(decode, OpenSegment(endpoint, 1))


async def test_a_check_names_the_prefill_rank_and_the_engine_that_it_lacks() -> None:
    async with paired(2, 1) as pair:
        await pair.serve([prompt_of(9)])
        prefill, decode = pair.prefill, pair.decode.incarnation
        (engine,) = prefill.table.peers.known[decode].engines.values()
        tell_rank_1(prefill, CloseEngine(decode, 1))
        whose = f"the local engine of generation 1 of decode worker {short(decode)}"
        await finds(pair, prefill, f"the rank lacks {whose}")
        segments = tuple(x for x in engine.segments if x.engine == "local")
        tell_rank_1(prefill, OpenEngine(decode, 1, segments))


def greeted(shown: TcpDescriptor, **changes: Any) -> tuple[Greeted, Raw]:
    """What a process of another rank replies to a connection; ours need not turn for that."""
    raw = Raw(shown.port)
    return raw.greet(shown, **changes), raw


async def test_what_a_second_rank_turns_away_reaches_its_worker() -> None:
    """A wrong token, a stale one, and a write of a room that is over."""
    async with paired(1, 2, transfer="tcp") as pair:
        await pair.serve([prompt_of(9)])
        peer = pair.decode.table.pairing.peers[pair.prefill.handover.endpoint]
        assert peer.newest is not None
        (segment,) = peer.newest.segments[1]
        shown = msgspec.msgpack.decode(segment.descriptor, type=TcpDescriptor)
        changes: dict[str, Any] = {"decode": pair.decode.incarnation, "rank": 1}
        assert greeted(shown, **changes, token=bytes(16))[0] is Greeted.WRONG_TOKEN
        assert greeted(shown, **changes, generation=2)[0] is Greeted.STALE
        reply, raw = greeted(shown, **changes)
        assert reply is Greeted.ACCEPTED
        raw.socket.sendall(pack_head(1, [(0, 8)], is_last=True) + bytes(8))
        assert raw.answer() is Verdict.NO_ROOM
        raw.close()
        await until(lambda: pair.decode.ranks.reports()[1].refused_writes, "what rank 1 says")
        peers = samples(pair.decode, "pdrt_refused_peers_total", "reason")
        assert peers == {("wrong_token",): 1, ("stale",): 1}
        writes = samples(pair.decode, "pdrt_refused_writes_total", "rank", "reason")
        assert writes == {("1", "no_room"): 1}
        rows = msgspec.json.decode(pair.decode.view.status())["ranks"]
        assert [row["refused_writes"] for row in rows] == [{}, {"no_room": 1}]
        assert [row["refused_peers"] for row in rows] == [{}, {"wrong_token": 1, "stale": 1}]
        assert [row["device"] for row in rows] == ["any core", "any core"]
        landed = [row["engine_bytes"]["tcp"] for row in rows]
        assert landed[0] == landed[1] > 0, "half of the heads each"
        (sent,) = msgspec.json.decode(pair.prefill.view.status())["ranks"]
        assert sent["engine_bytes"] == {"tcp": sum(landed)}
