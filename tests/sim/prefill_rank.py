"""One prefill rank: its engine instances, and one `RoomWriter` per room."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdrt.ids import Incarnation, RoomId
from pdrt.protocol.messages import (
    Grant,
    Outcome,
    Reason,
    Segment,
    SliceChecksums,
)
from pdrt.protocol.room_writer import (
    RankEnd,
    ReportEnd,
    RoomWriter,
    Write,
    WriteOutcome,
    WriterState,
)
from pdrt.scheduling.prefill_job import Chunk, PrefillJob
from tests.sim.fabric import EngineInstance, Heads, InFlight
from tests.sim.plan import PAGE_SIZE
from tests.sim.process import Process, Rank

if TYPE_CHECKING:
    from tests.sim.prefill import PrefillWorker


class PrefillRank(Rank):
    """One rank: its engines, and one writer per room."""

    worker: PrefillWorker

    def __init__(self, worker: Process, index: int) -> None:
        super().__init__(worker, index)
        self.writers: dict[RoomId, RoomWriter] = {}
        self.lost: set[RoomId] = set()
        """Rooms whose task has failed under a forward."""
        self.grants: dict[RoomId, Grant] = {}
        self.engines: dict[tuple[Incarnation, int], EngineInstance] = {}

    # Engines

    def open_engine(
        self, decode: Incarnation, generation: int, segments: tuple[Segment, ...]
    ) -> None:
        world = self.worker.world
        instance = EngineInstance(self, generation, segments)
        refuses = world.chance(world.plan.rates.engine_refuses)
        if refuses or instance.kind in world.out_of_reach:
            self.answer(self.worker.engine_refused, decode, generation)
            return
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
        """A forward begins once every rank has it. Cached pages are sent at once."""
        for part in forward.parts:
            if writer := self.writers.get(part.room):
                self.carry_out(writer, writer.forward_started())
                forward.started.add((self.index, part.room))
                self.carry_out(writer, writer.pages_finished(part.pages, part.complete_before))
        forward.ranks_missing.discard(self.index)
        if not forward.ranks_missing:
            sim = self.worker.world.sim
            sim.after(0.01 + sim.rng.random() * 0.05, self.worker.compute, forward)

    def forward_done(self, forward: Forward) -> None:
        for part in forward.parts:
            if part.room in self.lost:
                self.report_lost(part.room)
            writer = self.writers.get(part.room)
            if writer is None or (self.index, part.room) not in forward.started:
                continue
            self.carry_out(writer, writer.forward_ended())
            if forward.has_failed or writer.state is WriterState.GONE:
                continue
            self.carry_out(writer, writer.pages_finished(part.pages, part.complete_after))
            if part.chunk.is_last and writer.state is not WriterState.GONE:
                if self.index == 0:
                    self.worker.sample(part.job)
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

    def settled(self, write: InFlight, outcome: WriteOutcome) -> None:
        writer = write.writer
        if self.writers.get(writer.room) is writer:
            sums = self.checksums(write)
            self.carry_out(writer, writer.settled(write.write_id, outcome, checksums=sums))

    def checksums(self, write: InFlight) -> tuple[SliceChecksums, ...]:
        """What a page holds is its own checksum."""
        plan, heads = self.worker.world.plan, write.heads
        if not plan.kv_checksum:
            return ()
        offset, length = (n * plan.layout.head_bytes for n in (heads.target, heads.count))
        held = tuple(held for _, held, _ in write.pages)
        return (SliceChecksums(heads.decode_rank, offset, length, held),)

    def lose_task(self, room: RoomId) -> None:
        """The room's task fails with an unexpected exception. It hears nothing more, and says so
        once no forward fills the room's pages."""
        writer = self.writers.pop(room, None)
        if writer is not None and writer._forwards:
            self.lost.add(room)
        elif writer is not None:
            self.report_lost(room)

    def report_lost(self, room: RoomId) -> None:
        self.lost.discard(room)
        self.report(room, RankEnd(Outcome.UNSETTLED, Reason.TASK_FAILED, 0))


class Part:
    """One room's chunk of a forward."""

    def __init__(self, job: PrefillJob, chunk: Chunk) -> None:
        self.job = job
        self.room = chunk.room
        self.chunk = chunk
        self.tokens = job.grant.token_ids
        self.pages = tuple(job.pages)
        """By index in the prompt, as they are while it runs."""
        self.complete_before = chunk.start // PAGE_SIZE
        self.complete_after = job.page_count if chunk.is_last else chunk.end // PAGE_SIZE


class Forward:
    """One batch of chunks."""

    def __init__(self, planned: list[tuple[PrefillJob, Chunk]], ranks: int) -> None:
        self.parts = [Part(job, chunk) for job, chunk in planned]
        self.ranks_missing = set(range(ranks))
        self.started: set[tuple[int, RoomId]] = set()
        self.has_failed = False
