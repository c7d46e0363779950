"""A prefill worker: the product's `RoomTable` and `RoomWriter`, and adapters made of chance."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pdrt.errors import PoolExhausted
from pdrt.ids import Incarnation, RoomId
from pdrt.kv.pages import Owner, OwnerKind, PageTable
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
    Outcome,
    RankProcess,
    Reason,
)
from pdrt.protocol.room_writer import RankEnd, ReportEnd, RoomWriter, Write, WriterState
from pdrt.protocol.rooms import PrefillWorkerInfo, RoomTable
from tests.sim.cache import PrefixCache
from tests.sim.core import Kind, Violation
from tests.sim.fabric import EngineInstance, Heads, InFlight
from tests.sim.plan import CONFIG, PAGE_SIZE
from tests.sim.process import Process, Rank
from tests.sim.tokens import next_token, page_content, pages_for

if TYPE_CHECKING:
    from tests.sim.world import PrefillSlot, World

CHUNK_PAGES = 2
BATCH_ROOMS = 2
ENGINES_MAX = 4
"""Per decode worker: the newest generation's, and those being destroyed."""


class SourceRoom:
    """What the leader's scheduler keeps of a room."""

    def __init__(self, grant: Grant) -> None:
        self.grant = grant
        self.room = grant.room
        self.owner = Owner(OwnerKind.ROOM, grant.room)
        self.held: list[int] = []
        """Cached pages, read by this room's writes."""
        self.own: list[int] = []
        """Pages owned by the room."""
        self.is_planned = False
        self.is_closed = False
        self.computed = 0
        """Pages whose KV exists."""
        self.pages: list[int] = []
        """By index in the prompt."""

    @property
    def pages_total(self) -> int:
        return pages_for(len(self.grant.token_ids))


class PrefillRank(Rank):
    """One rank: its engines, and one writer per room."""

    worker: PrefillWorker

    def __init__(self, worker: Process, index: int) -> None:
        super().__init__(worker, index)
        self.writers: dict[RoomId, RoomWriter] = {}
        self.grants: dict[RoomId, Grant] = {}
        self.engines: dict[tuple[Incarnation, int], EngineInstance] = {}

    # Engines

    def open_engine(self, decode: Incarnation, generation: int, segments: dict[int, str]) -> None:
        world = self.worker.world
        if world.chance(world.plan.rates.engine_refuses):
            self.answer(self.worker.engine_refused, decode, generation)
            return
        instance = EngineInstance(world.fabric, self, generation, segments)
        self.engines[decode, generation] = instance
        if not world.chance(world.plan.rates.engine_hangs):
            seconds = world.some_seconds()
            world.sim.after(
                seconds, self.answer, self.worker.engine_opened, decode, generation, self.index
            )

    def close_engine(self, decode: Incarnation, generation: int) -> None:
        world = self.worker.world
        if not world.chance(world.plan.rates.engine_hangs):
            seconds = world.sim.rng.random() * 0.3
            world.sim.after(seconds, self.post, self.engine_gone, decode, generation)

    def engine_gone(self, decode: Incarnation, generation: int) -> None:
        if instance := self.engines.pop((decode, generation), None):
            instance.destroy()
        self.answer(self.worker.engine_closed, decode, generation, self.index)

    # Rooms

    def open_room(self, grant: Grant) -> None:
        page_bytes = {copy.decode_rank: copy.length for copy in self.worker.slices[self.index]}
        self.grants[grant.room] = grant
        self.writers[grant.room] = self.worker.world.make_writer(
            grant.room, page_bytes, grant.pages, grant.first_page
        )

    def close_room(self, room: RoomId, reason: Reason) -> None:
        if writer := self.writers.get(room):
            self.carry_out(writer, writer.close(reason))

    def plan(self, forward: Forward) -> None:
        """A forward begins once every rank has it."""
        for source in forward.rooms:
            if writer := self.writers.get(source.room):
                self.carry_out(writer, writer.forward_started())
                forward.started.add((self.index, source.room))
        forward.ranks_missing.discard(self.index)
        if not forward.ranks_missing:
            sim = self.worker.world.sim
            sim.after(0.01 + sim.rng.random() * 0.05, self.worker.compute, forward)

    def forward_done(self, forward: Forward) -> None:
        for source in forward.rooms:
            writer = self.writers.get(source.room)
            if writer is None or (self.index, source.room) not in forward.started:
                continue
            self.carry_out(writer, writer.forward_ended())
            if forward.has_failed or writer.state is WriterState.GONE:
                continue
            finished = forward.finished[source.room]
            self.carry_out(writer, writer.pages_finished(source.pages, finished))
            if finished == source.pages_total and writer.state is not WriterState.GONE:
                if self.index == 0:
                    self.worker.sample(source)
                self.carry_out(writer, writer.finished())

    def carry_out(self, writer: RoomWriter, effects: list[Any]) -> None:
        """The effects of one room's writer, in order."""
        writer.check()
        for effect in effects:
            match effect:
                case Write():
                    self.submit(writer, effect)
                case ReportEnd(end):
                    del self.writers[writer.room]
                    self.report(writer.room, end)

    def report(self, room: RoomId, end: RankEnd) -> None:
        self.answer(self.worker.rank_ended, room, self.index, end)

    def submit(self, writer: RoomWriter, write: Write) -> None:
        room, worker = writer.room, self.worker
        worker.world.writes += 1
        instance = self.engines[room.decode, self.grants[room].generation]
        copy = next(c for c in worker.slices[self.index] if c.decode_rank == write.decode_rank)
        head_bytes = worker.world.plan.layout.head_bytes
        heads = Heads(copy.decode_rank, copy.target_offset // head_bytes, copy.length // head_bytes)
        held = [worker.content[page] for page in write.source_pages]
        pages = list(zip(write.source_pages, held, write.target_pages, strict=True))
        instance.submit(InFlight(instance, writer, write.write_id, heads, pages))

    def settled(self, writer: RoomWriter, write_id: int, outcome: Any) -> None:
        if self.writers.get(writer.room) is writer:
            self.carry_out(writer, writer.settled(write_id, outcome))

    def lose_task(self, room: RoomId) -> None:
        """The room's task fails with an unexpected exception."""
        if self.writers.pop(room, None) is not None:
            self.report(room, RankEnd(Outcome.UNSETTLED, Reason.TASK_FAILED, 0))


class Forward:
    """One batch of chunks."""

    def __init__(self, rooms: list[SourceRoom], ranks: int) -> None:
        self.rooms = rooms
        self.finished = {
            source.room: min(source.computed + CHUNK_PAGES, source.pages_total) for source in rooms
        }
        self.ranks_missing = set(range(ranks))
        self.started: set[tuple[int, RoomId]] = set()
        self.has_failed = False


class PrefillWorker(Process):
    """The leader."""

    def __init__(self, world: World, slot: PrefillSlot, incarnation: Incarnation) -> None:
        plan = world.plan
        self.endpoint = slot.endpoint
        self.slices = world.slices
        super().__init__(world, f"{slot.endpoint}.{slot.lives}", incarnation, plan.prefill_ranks)
        processes = tuple(RankProcess(rank, incarnation, 1) for rank in range(plan.prefill_ranks))
        info = PrefillWorkerInfo(incarnation, world.fingerprint, processes, (plan.engine.value,))
        self.table = RoomTable(info, CONFIG, world.sim.now)
        self.pages = PageTable(plan.prefill_pages)
        self.content: list[int] = [0] * plan.prefill_pages
        self.cache = PrefixCache(self.pages)
        self.sources: dict[RoomId, SourceRoom] = {}
        self.queue: list[SourceRoom] = []
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
        return [] if self.sources else [EndWorker("has left")]

    # Effects

    def apply(self, effect: Any) -> None:
        sim = self.world.sim
        match effect:
            case SendToDecode(decode, message):
                sim.say(self.name, "-> %s", message)
                self.world.network.to_decode(self, decode, message)
            case OpenEngine(decode, generation, segments):
                names = {s.rank: s.descriptor.decode() for s in segments}
                for rank in self.ranks:
                    rank.send(rank.open_engine, decode, generation, names)
            case CloseEngine(decode, generation):
                for rank in self.ranks:
                    rank.send(rank.close_engine, decode, generation)
            case OpenRoom(grant):
                source = self.sources[grant.room] = SourceRoom(grant)
                for rank in self.ranks:
                    rank.send(rank.open_room, grant)
                self.queue.append(source)
                self.start_forward()
            case CloseRoom(room, reason):
                self.sources[room].is_closed = True
                for rank in self.ranks:
                    rank.send(rank.close_room, room, reason)
            case ReleaseSource(room):
                self.release(room)
            case EndWorker(why):
                self.die(why)
            case _:
                raise AssertionError(effect)

    def release(self, room: RoomId) -> None:
        source = self.sources.pop(room)
        self.pages.free(source.own, source.owner)
        self.cache.drop(source.held, source.owner)

    # Scheduler

    def start_forward(self) -> None:
        """Plan the next chunks, if nothing runs."""
        self.queue = [s for s in self.queue if not s.is_closed and s.computed < s.pages_total]
        if self.forward is not None or not self.queue:
            return
        batch = [s for s in self.queue if s.is_planned or self.find_pages(s)][:BATCH_ROOMS]
        if not batch:
            return
        self.forward = Forward(batch, len(self.ranks))
        for rank in self.ranks:
            rank.send(rank.plan, self.forward)

    def find_pages(self, source: SourceRoom) -> bool:
        """Pages for the whole prompt: cached ones first. Preempts the youngest when full."""
        tokens = source.grant.token_ids
        held = self.cache.hold_prefix(tokens[:-1], source.owner)
        wanted = source.pages_total - len(held)
        self.cache.make_room(wanted)
        try:
            own = self.pages.take(wanted, source.owner)
        except PoolExhausted:
            self.cache.drop(held, source.owner)
            planned = [s for s in self.queue if s.is_planned and s is not source]
            if planned and self.world.sim.chance(0.05):
                victim = planned[-1]
                self.post(self.end_room, victim.room, Reason.OVERLOADED)
            return False
        source.held, source.own, source.pages = held, own, held + own
        source.computed = len(held)
        source.is_planned = True
        return True

    def compute(self, forward: Forward) -> None:
        """The compute threads have finished: KV is in place on every rank."""
        if not self.is_alive:
            return
        forward.has_failed = self.world.chance(self.world.plan.rates.forward_fails)
        if not forward.has_failed:
            for source in forward.rooms:
                for index in range(source.computed, forward.finished[source.room]):
                    page = source.pages[index]
                    self.content[page] = page_content(source.grant.token_ids, index)
        for rank in self.ranks[1:]:
            rank.send(rank.forward_done, forward)
        self.post(self.forward_ended, forward)
        self.ranks[0].post(self.ranks[0].forward_done, forward)
        self.post(self.start_forward)

    def forward_ended(self, forward: Forward) -> Iterable[Any]:
        """The leader hears of it, and then its own rank."""
        self.forward = None
        effects: list[Any] = []
        for source in forward.rooms:
            if forward.has_failed:
                effects += self.table.end_room(source.room, Reason.FORWARD_FAILED)
            elif source.room in self.sources:
                source.computed = forward.finished[source.room]
                self.cache_pages(source)
        return effects

    def cache_pages(self, source: SourceRoom) -> None:
        """Full pages become cached ones that the room holds."""
        tokens = source.grant.token_ids
        for index, page in enumerate(
            source.pages[: min(source.computed, len(tokens) // PAGE_SIZE)]
        ):
            if page in source.own and self.cache.insert(
                page, page_content(tokens, index), source.owner
            ):
                source.own.remove(page)
                source.held.append(page)

    def sample(self, source: SourceRoom) -> None:
        tokens = source.grant.token_ids
        first = FirstTokenData(next_token(tokens), len(tokens))
        self.post(self.table.first_token, source.room, first)

    def check(self) -> None:
        self.table.check()
        self.pages.check()
        room_pages = {room: source.own for room, source in self.sources.items()}
        check_prefill(self.table, room_pages, self.pages)
        for peer in self.table.peers.known.values():
            if len(peer.engines) > ENGINES_MAX:
                raise Violation(Kind.BOUNDS, f"{self.name}: {list(peer.engines)}")
