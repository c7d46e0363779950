"""A prefill worker: the product's `RoomTable` and `RoomWriter`, and adapters made of chance."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pdrt.ids import Incarnation, RoomId
from pdrt.kv.pages import PageTable
from pdrt.kv.prefix import PrefixCache
from pdrt.protocol.effects import (
    CloseEngine,
    CloseRoom,
    EndWorker,
    OpenEngine,
    OpenRoom,
    ReleaseSource,
    SendToDecode,
)
from pdrt.protocol.invariants import check_prefill
from pdrt.protocol.messages import (
    DecodeToPrefill,
    FirstTokenData,
    Grant,
    RankProcess,
    Reason,
)
from pdrt.protocol.room_writer import RankEnd
from pdrt.protocol.rooms import PrefillWorkerInfo, RoomTable
from pdrt.scheduling.prefill import PrefillScheduler
from pdrt.scheduling.prefill_job import PrefillJob
from tests.sim.core import Kind, Violation
from tests.sim.plan import CONFIG, PAGE_SIZE
from tests.sim.prefill_rank import Forward, PrefillRank
from tests.sim.process import Process, Rank
from tests.sim.tokens import next_token, page_content, pages_for

if TYPE_CHECKING:
    from tests.sim.world import PrefillSlot, World

STEP_TOKENS = 18
STEP_ROOMS = 3
"""So that long prompts take several steps, and chunks end within pages."""
ENGINES_MAX = 4
"""Per decode worker: the newest generation's, and those being destroyed."""


class PrefillWorker(Process):
    """The leader."""

    def __init__(self, world: World, slot: PrefillSlot, incarnation: Incarnation) -> None:
        plan = world.plan
        self.endpoint = slot.endpoint
        self.slices = world.slices
        super().__init__(world, f"{slot.endpoint}.{slot.lives}", incarnation, plan.prefill_ranks)
        processes = tuple(RankProcess(rank, incarnation, 1) for rank in range(plan.prefill_ranks))
        engines = tuple(kind.value for kind in plan.have(slot.index))
        info = PrefillWorkerInfo(incarnation, world.fingerprint, processes, engines)
        self.table = RoomTable(info, CONFIG, world.sim.now)
        self.pages = PageTable(plan.prefill_pages)
        self.content: list[int] = [0] * plan.prefill_pages
        self.cache = PrefixCache(self.pages)
        self.scheduler = PrefillScheduler(plan.layout, self.cache, STEP_TOKENS, STEP_ROOMS)
        self.forward: Forward | None = None

    def make_rank(self, index: int) -> Rank:
        return PrefillRank(self, index)

    # Events

    def receive(self, message: DecodeToPrefill) -> Iterable[Any]:
        world = self.world
        world.sim.say(self.name, "<- %s", message)
        refusal = None
        if isinstance(message, Grant):
            if pages_for(len(message.token_ids)) > self.pages.total:
                refusal = "the prompt does not fit"
            elif world.chance(world.plan.rates.reject):
                refusal = "rejected by chance"
        return self.table.receive(message, world.sim.now, refusal)

    def engine_opened(self, decode: Incarnation, generation: int, rank: int) -> Iterable[Any]:
        return self.table.engine_opened(decode, generation, rank, self.world.sim.now)

    def engine_refused(self, decode: Incarnation, generation: int) -> Iterable[Any]:
        why = "cannot reach the segments"
        return self.table.engine_refused(decode, generation, why, self.world.sim.now)

    def engine_closed(self, decode: Incarnation, generation: int, rank: int) -> Iterable[Any]:
        return self.table.engine_closed(decode, generation, rank, self.world.sim.now)

    def rank_ended(self, room: RoomId, rank: int, end: RankEnd) -> Iterable[Any]:
        self.world.sim.say(self.name, "rank %s ended %s: %s", rank, room, end)
        return self.table.rank_ended(room, rank, end, self.world.sim.now)

    def end_room(self, room: RoomId, reason: Reason) -> Iterable[Any]:
        return self.table.end_room(room, reason)

    def handle_timer(self, now: float) -> Iterable[Any]:
        for rank in self.ranks[1:]:
            if not rank.is_hung:
                self.table.rank_heard(rank.index, now)
        effects = list(self.table.handle_timer(now))
        self.start_forward()
        if self.table.is_leaving:
            effects += self.leave_when_done()
        elif self.table.peers.is_full:
            effects += self.table.leave()
        return effects

    def leave_when_done(self) -> Iterable[Any]:
        return [] if self.scheduler.jobs else [EndWorker("has left")]

    # Effects

    def apply(self, effect: Any) -> None:
        sim = self.world.sim
        match effect:
            case SendToDecode(decode, message):
                sim.say(self.name, "-> %s", message)
                self.world.network.to_decode(self, decode, message)
            case OpenEngine(decode, generation, segments):
                for rank in self.ranks:
                    rank.send(rank.open_engine, decode, generation, segments)
            case CloseEngine(decode, generation):
                for rank in self.ranks:
                    rank.send(rank.close_engine, decode, generation)
            case OpenRoom(grant):
                for rank in self.ranks:
                    rank.send(rank.open_room, grant)
                self.scheduler.add(grant, sim.now)
                self.start_forward()
            case CloseRoom(room, reason):
                self.scheduler.stop(room)
                for rank in self.ranks:
                    rank.send(rank.close_room, room, reason)
            case ReleaseSource(room):
                self.release(room)
            case EndWorker(why):
                self.die(why)
            case _:
                raise AssertionError(effect)

    def release(self, room: RoomId) -> None:
        owner = self.scheduler.jobs[room].owner
        self.cache.release(self.scheduler.forget(room), owner)

    # Scheduler

    def start_forward(self) -> None:
        """Plan the next chunks, if nothing runs."""
        if self.forward is not None:
            return
        self.shed()
        chunks = self.scheduler.plan(self.world.sim.now)
        if not chunks:
            return
        self.forward = Forward([(self.scheduler.jobs[c.room], c) for c in chunks], len(self.ranks))
        for rank in self.ranks:
            rank.send(rank.plan, self.forward)

    def shed(self) -> None:
        """Somebody waits for pages: now and then the youngest that has some gives them up."""
        started = [job for job in self.scheduler.jobs.values() if job.has_started]
        if self.scheduler.queued and started and self.world.sim.chance(0.05):
            self.post(self.end_room, started[-1].room, Reason.OVERLOADED)

    def compute(self, forward: Forward) -> None:
        """The compute threads have finished: KV is in place on every rank."""
        if not self.is_alive:
            return
        forward.has_failed = self.world.chance(self.world.plan.rates.forward_fails)
        if not forward.has_failed:
            for part in forward.parts:
                tokens = part.tokens[: part.chunk.end]
                for index in range(part.chunk.start // PAGE_SIZE, pages_for(len(tokens))):
                    self.content[part.pages[index]] = page_content(tokens, index)
        for rank in self.ranks[1:]:
            rank.send(rank.forward_done, forward)
        self.post(self.forward_ended, forward)
        self.ranks[0].post(self.ranks[0].forward_done, forward)
        self.post(self.start_forward)

    def forward_ended(self, forward: Forward) -> Iterable[Any]:
        """The leader hears of it, and then its own rank."""
        self.forward = None
        effects: list[Any] = []
        for part in forward.parts:
            if forward.has_failed:
                effects += self.table.end_room(part.room, Reason.FORWARD_FAILED)
            elif part.room in self.scheduler.jobs:
                self.scheduler.finish(part.chunk, self.world.sim.now)
        return effects

    def sample(self, job: PrefillJob) -> None:
        tokens = job.grant.token_ids
        first = FirstTokenData(next_token(tokens), len(tokens), job.found)
        self.post(self.table.first_token, job.room, first)

    def check(self) -> None:
        self.table.check()
        self.pages.check()
        self.cache.check()
        self.scheduler.check()
        jobs = self.scheduler.jobs
        room_pages = {room: [*job.pages, *job.spare] for room, job in jobs.items()}
        check_prefill(self.table, room_pages, self.pages)
        for peer in self.table.peers.known.values():
            if len(peer.engines) > ENGINES_MAX:
                raise Violation(Kind.BOUNDS, f"{self.name}: {list(peer.engines)}")
