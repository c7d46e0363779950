"""A decode worker: the product's `LeaseTable`, and adapters made of chance."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from pdrt.ids import Incarnation, RoomId
from pdrt.kv.pages import PageTable
from pdrt.kv.prefix import PrefixCache
from pdrt.protocol.effects import (
    ChecksumPages,
    CloseFence,
    CloseOffers,
    CloseSegment,
    Connect,
    Disconnect,
    EndLease,
    EndWorker,
    FailRoom,
    KillWriter,
    LeaseReady,
    OpenFence,
    OpenSegment,
    PagesDiffer,
    SendToPrefill,
    TakeFirstToken,
)
from pdrt.protocol.invariants import check_decode
from pdrt.protocol.leases import LeaseState, LeaseTable
from pdrt.protocol.messages import PrefillToDecode, Reason, Segment, SliceChecksums
from pdrt.protocol.pairing import DecodeWorkerInfo
from tests.sim.core import Kind, Violation
from tests.sim.fabric import WRONG
from tests.sim.jobs import Job, Scheduler
from tests.sim.network import Connection
from tests.sim.plan import CONFIG, EngineKind
from tests.sim.process import Process, Rank
from tests.sim.requests import Request

if TYPE_CHECKING:
    from tests.sim.world import DecodeSlot, World


CHECKSUM_SECONDS = 0.02
FENCES_MAX = 4
"""Per endpoint: the current writer's, and those of writers that still have leases."""


class DecodeRank(Rank):
    """One rank: the segments through which its pool can be reached."""

    worker: DecodeWorker

    def __init__(self, worker: DecodeWorker, index: int) -> None:
        super().__init__(worker, index)
        self.shown: dict[tuple[str, int], tuple[EngineKind, ...]] = {}
        """Through which engines, by endpoint and generation."""

    def segment_name(self, endpoint: str, generation: int) -> str:
        return f"{self.worker.incarnation:x}/{self.index}/{endpoint}/{generation}"

    def open_segment(self, endpoint: str, generation: int) -> None:
        world = self.worker.world
        segments = []
        self.shown[endpoint, generation] = world.plan.offered
        for kind in world.plan.offered:
            name = f"{self.segment_name(endpoint, generation)}/{kind.value}"
            world.fabric.register(name, self)
            segments.append(Segment(self.index, kind.value, name.encode()))
        if not world.chance(world.plan.rates.segment_hangs):
            world.sim.after(
                world.some_seconds(),
                self.answer,
                self.worker.segment_opened,
                endpoint,
                generation,
                self.index,
                tuple(segments),
            )

    def close_segment(self, endpoint: str, generation: int) -> None:
        """Tear down: what is in the network may land until it is done."""
        world = self.worker.world
        if world.chance(world.plan.rates.segment_hangs):
            return
        slowest = 0.0
        for kind in self.shown.pop((endpoint, generation)):
            is_tcp = kind is EngineKind.TCP
            seconds = 0.001 if is_tcp else world.some_seconds() + world.sim.rng.random() * 0.3
            slowest = max(slowest, seconds)
            world.sim.after(seconds, self.post, self.tear_down, endpoint, generation, kind)
        world.sim.after(slowest, self.post, self.confirm, endpoint, generation)

    def close_offers(self, endpoint: str, generation: int, engine: str) -> None:
        """Those beside what was taken, some time; nobody waits for it."""
        world, taken = self.worker.world, EngineKind(engine)
        for kind in self.shown[endpoint, generation]:
            if kind is not taken:
                seconds = world.some_seconds()
                world.sim.after(seconds, self.post, self.tear_down, endpoint, generation, kind)
        self.shown[endpoint, generation] = (taken,)

    def tear_down(self, endpoint: str, generation: int, kind: EngineKind) -> None:
        """Mapped memory cannot be taken back from a living process."""
        if kind is not EngineKind.LOCAL:
            name = f"{self.segment_name(endpoint, generation)}/{kind.value}"
            self.worker.world.fabric.tear_down(name)

    def checksum(
        self, room: RoomId, pages: tuple[int, ...], slices: tuple[SliceChecksums, ...]
    ) -> None:
        """What a page holds is its own checksum; of what it holds a while from now."""
        own = [x for x in slices if x.decode_rank == self.index]
        self.worker.world.sim.after(CHECKSUM_SECONDS, self.post, self.compute, room, pages, own)

    def compute(self, room: RoomId, pages: tuple[int, ...], slices: list[SliceChecksums]) -> None:
        head_bytes = self.worker.world.plan.layout.head_bytes
        landed = []
        for piece in slices:
            first, end = piece.offset // head_bytes, (piece.offset + piece.length) // head_bytes
            held = [set(self.worker.content[self.index][page][first:end]) for page in pages]
            sums = tuple(found.pop() if len(found) == 1 else WRONG for found in held)
            landed.append(msgspec.structs.replace(piece, pages=sums))
        self.answer(self.worker.checksummed, room, self.index, tuple(landed))

    def confirm(self, endpoint: str, generation: int) -> None:
        self.answer(self.worker.segment_closed, endpoint, generation, self.index)


class DecodeWorker(Process):
    """The leader."""

    def __init__(self, world: World, slot: DecodeSlot, incarnation: Incarnation) -> None:
        plan = world.plan
        self.slot = slot.name
        super().__init__(world, f"{slot.name}.{slot.lives}", incarnation, plan.decode_ranks)
        info = DecodeWorkerInfo(
            incarnation,
            world.fingerprint,
            plan.decode_ranks,
            {kind.value: kind.fence for kind in plan.offered},
            max(plan.decode_pages // 2, 1),
        )
        self.table = LeaseTable(info, CONFIG, world.sim.now)
        self.pages = PageTable(plan.decode_pages)
        heads = max(plan.kv_heads // plan.decode_ranks, 1)
        self.content = [
            [[0] * heads for _ in range(plan.decode_pages)] for _ in range(plan.decode_ranks)
        ]
        self.cache = PrefixCache(self.pages)
        self.connections: dict[str, Connection] = {}
        self.scheduler = Scheduler(self)
        self.failures = self.mismatches = 0
        self.last_seq: dict[str, int] = {}
        self.fences_open: dict[Incarnation, str] = {}

    def make_rank(self, index: int) -> Rank:
        return DecodeRank(self, index)

    # Events

    def receive(self, endpoint: str, message: PrefillToDecode) -> Iterable[Any]:
        if endpoint not in self.connections:
            return []
        self.world.sim.say(self.name, "<- %s", message)
        return self.table.receive(endpoint, message, self.world.sim.now)

    def look_up(self) -> Iterable[Any]:
        """Gateways repeat which prefill endpoints there are."""
        effects: list[Any] = []
        for endpoint in self.world.prefill_slots:
            if self.world.listed(endpoint):
                effects += self.table.want(endpoint, self.world.sim.now)
            else:
                self.table.unwant(endpoint)
        return effects

    def segment_opened(
        self, endpoint: str, generation: int, rank: int, segments: tuple[Segment, ...]
    ) -> Iterable[Any]:
        now = self.world.sim.now
        return self.table.segment_opened(endpoint, generation, rank, segments, now)

    def segment_closed(self, endpoint: str, generation: int, rank: int) -> Iterable[Any]:
        return self.table.segment_closed(endpoint, generation, rank, self.world.sim.now)

    def checksummed(
        self, room: RoomId, rank: int, landed: tuple[SliceChecksums, ...]
    ) -> Iterable[Any]:
        return self.table.checksummed(room, rank, landed, self.world.sim.now)

    def writer_dead(self, endpoint: str, writer: Incarnation) -> Iterable[Any]:
        if self.fences_open.get(writer) != endpoint:
            return []
        return self.table.writer_dead(endpoint, writer, self.world.sim.now)

    def make_job(self, request: Request) -> Job:
        return Job(request, self)

    def submit(self, job: Job) -> None:
        self.scheduler.submit(job)

    def cancel(self, job: Job) -> Iterable[Any]:
        return self.scheduler.cancel(job, Reason.CLIENT_GONE)

    def revoke(self, room: RoomId, reason: Reason) -> Iterable[Any]:
        if room not in self.table.leases:
            return []
        return self.table.revoke(room, reason, self.world.sim.now)

    def handle_timer(self, now: float) -> Iterable[Any]:
        for rank in self.ranks[1:]:
            if not rank.is_hung:
                self.table.rank_heard(rank.index, now)
        effects = [*self.look_up(), *self.table.handle_timer(now), *self.scheduler.expire(now)]
        return [*effects, *self.scheduler.admit()]

    # Effects

    def apply(self, effect: Any) -> None:
        sim, scheduler = self.world.sim, self.scheduler
        match effect:
            case SendToPrefill(endpoint, message):
                sim.say(self.name, "-> %s: %s", endpoint, message)
                if self.world.checks_seq and message.seq <= self.last_seq.get(endpoint, 0):
                    raise Violation(Kind.INVARIANT, f"{self.name}: seq {message.seq} sent late")
                self.last_seq[endpoint] = message.seq
                self.world.network.to_prefill(self, endpoint, message)
            case TakeFirstToken(room, first):
                scheduler.first_token(room, first.token)
            case ChecksumPages(room, pages, slices):
                for rank in self.ranks:
                    rank.send(rank.checksum, room, pages, slices)
            case PagesDiffer(room, _, indices):
                sim.say(self.name, "pages %s of %s are not what was sent", indices, room)
                self.mismatches += 1
            case LeaseReady(room):
                scheduler.ready(room)
            case FailRoom(room, reason, retryable):
                sim.say(self.name, "room %s fails: %s", room, reason)
                self.failures += 1
                scheduler.room_failed(room, reason, retryable)
            case EndLease(room):
                sim.say(self.name, "lease %s ends", room)
                scheduler.free_lease(room)
            case _:
                self.apply_pairing(effect)

    def apply_pairing(self, effect: Any) -> None:
        match effect:
            case Connect(endpoint):
                self.connections[endpoint] = Connection()
            case Disconnect(endpoint):
                self.world.sim.say(self.name, "disconnects from %s", endpoint)
                del self.connections[endpoint]
            case OpenSegment(endpoint, generation):
                self.world.sim.say(self.name, "opens %s generation %s", endpoint, generation)
                for rank in self.ranks:
                    rank.send(rank.open_segment, endpoint, generation)
            case CloseOffers(endpoint, generation, engine):
                for rank in self.ranks:
                    rank.send(rank.close_offers, endpoint, generation, engine)
            case CloseSegment(endpoint, generation):
                self.world.sim.say(self.name, "closes %s generation %s", endpoint, generation)
                for rank in self.ranks:
                    rank.send(rank.close_segment, endpoint, generation)
            case OpenFence(endpoint, writer):
                self.open_fence(endpoint, writer)
            case CloseFence(_, writer):
                self.fences_open.pop(writer, None)
            case KillWriter(_, writer, why):
                self.world.kill(writer, why)
            case EndWorker(why):
                self.die(why)
            case _:
                raise AssertionError(effect)

    def open_fence(self, endpoint: str, writer: Incarnation) -> None:
        """pidfds. The answer belongs to this effect: one that was overtaken by `CloseFence` is
        never given."""
        if not self.world.is_alive(writer):
            self.post(self.table.fence_refused, endpoint, writer, "its processes are gone")
            return
        self.fences_open[writer] = endpoint
        self.post(self.table.fence_opened, endpoint, writer)

    def check(self) -> None:
        self.table.check()
        self.pages.check()
        self.cache.check()
        check_decode(self.table, self.pages)
        for peer in self.table.pairing.peers.values():
            if len(peer.fences) > FENCES_MAX:
                raise Violation(Kind.BOUNDS, f"{self.name}: {peer.fences}")
        for room, lease in self.table.leases.items():
            job = self.scheduler.jobs.get(room)
            if lease.state is LeaseState.REVOKING and job is not None and job.room == room:
                raise Violation(Kind.LIVENESS, f"{self.name}: a client waits for {room} to drain")
