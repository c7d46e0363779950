"""Mutants of the prefill half."""

from __future__ import annotations

from typing import Any

from pdrt.protocol import decode_peers
from pdrt.protocol.effects import CloseRoom, OpenRoom
from pdrt.protocol.leases import LeaseTable
from pdrt.protocol.messages import Grant, Outcome, Reason, Revoke
from pdrt.protocol.room_writer import RankEnd
from pdrt.protocol.rooms import Room, RoomTable
from tests.sim import schedules
from tests.sim.core import Kind
from tests.sim.fabric import EngineInstance, InFlight, Raw
from tests.sim.mutants.registry import Patch, mutant
from tests.sim.prefill import PrefillRank, PrefillWorker
from tests.sim.process import Process, Rank


@mutant(Kind.DESTINATION)
def ack_at_revoke() -> list[Patch]:
    """I2: `Drained` is said when every accepted write has settled, not when a room closes."""
    original = RoomTable._revoke

    def revoke(self: RoomTable, message: Revoke, now: float) -> list[Any]:
        effects = original(self, message, now)
        if message.room in self.rooms:
            effects.append(self._drained(message.room, Outcome.ENDED, message.reason, ""))
        return effects

    return [(RoomTable, "_revoke", revoke)]


@mutant(Kind.DESTINATION)
def ignore_seq() -> list[Patch]:
    """Channel: what is not newer than the last accepted is dropped."""

    def accept(self: RoomTable, message: Grant | Revoke, now: float) -> Any:
        peer = self.peers.known.get(message.room.decode)
        if message.writer != self.worker.incarnation or peer is None:
            return None
        self.peers.heard(peer, max(message.seq, peer.last_seq), now)
        return peer

    return [(RoomTable, "_accept", accept)]


@mutant(Kind.DESTINATION, schedule=schedules.revoke_before_the_open)
def room_created_late() -> list[Patch]:
    """I4: accepting a grant and creating the room are one synchronous step."""
    original = PrefillWorker.receive

    def receive(self: PrefillWorker, message: Any) -> Any:
        if not isinstance(message, Grant):
            return original(self, message)
        if self.table._accept(message, self.world.sim.now) is not None:
            self.world.sim.after(0.1, self.post, create, self, message)
        return []

    def create(self: PrefillWorker, grant: Grant) -> Any:
        now = self.world.sim.now
        self.table.rooms[grant.room] = Room(grant, len(self.ranks), now)
        self.table.peers.known[grant.room.decode].rooms[grant.room] = grant.generation
        return [OpenRoom(grant)]

    return [(PrefillWorker, "receive", receive)]


@mutant(Kind.DESTINATION, schedule=schedules.successor_answers_for_a_living_writer)
def ignore_writer_incarnation() -> list[Patch]:
    """I5: a message for another incarnation changes nothing."""

    def accept(self: RoomTable, message: Grant | Revoke, now: float) -> Any:
        peer = self.peers.known.get(message.room.decode)
        if peer is None or message.seq <= peer.last_seq:
            return None
        self.peers.heard(peer, message.seq, now)
        return peer

    def addressed(self: LeaseTable, message: Any) -> Any:
        return self.leases.get(message.room)

    return [(RoomTable, "_accept", accept), (LeaseTable, "_addressed", addressed)]


@mutant(Kind.DESTINATION, schedule=schedules.dirty_end_lost)
def unknown_room_answered_clean() -> list[Patch]:
    """Channel: an unknown room of a generation with an unsettled write is answered UNSETTLED."""
    original = RoomTable._revoke

    def revoke(self: RoomTable, message: Revoke, now: float) -> list[Any]:
        if message.room in self.rooms:
            return original(self, message, now)
        if self._accept(message, now) is None:
            return []
        return [self._drained(message.room, Outcome.ENDED, Reason.UNKNOWN_ROOM, "")]

    return [(RoomTable, "_revoke", revoke)]


def give_up_source(worker: PrefillWorker, room: Any) -> None:
    """Let go of a room's source pages, and forget which they were."""
    job = worker.scheduler.jobs.get(room)
    is_running = worker.forward and room in [part.room for part in worker.forward.parts]
    if job is not None and not is_running:
        worker.scheduler.stop(room)
        worker.cache.release(job.pages + job.spare, job.owner)
        job.pages, job.spare, job.computed, job.cached = [], [], 0, 0


@mutant(Kind.SOURCE, Kind.CONTENT)
def source_released_at_revoke() -> list[Patch]:
    """I3: source pages leave their room only once it has drained."""
    original = PrefillWorker.apply

    def apply(self: PrefillWorker, effect: Any) -> None:
        original(self, effect)
        if isinstance(effect, CloseRoom):
            give_up_source(self, effect.room)

    return [(PrefillWorker, "apply", apply)]


@mutant(Kind.SOURCE, Kind.CONTENT)
def source_released_when_one_rank_drained() -> list[Patch]:
    """I3: … on every rank."""
    original = PrefillWorker.rank_ended

    def rank_ended(self: PrefillWorker, room: Any, rank: int, end: RankEnd) -> Any:
        give_up_source(self, room)
        return original(self, room, rank, end)

    return [(PrefillWorker, "rank_ended", rank_ended)]


@mutant(Kind.SOURCE, Kind.CONTENT)
def source_released_under_unsettled_writes() -> list[Patch]:
    """Fence: after UNSETTLED, source pages stay until the engine instance is destroyed."""
    original = PrefillWorker.rank_ended

    def rank_ended(self: PrefillWorker, room: Any, rank: int, end: RankEnd) -> Any:
        effects = original(self, room, rank, end)
        if room not in self.table.rooms:
            give_up_source(self, room)
        return effects

    return [(PrefillWorker, "rank_ended", rank_ended)]


@mutant(Kind.SOURCE, Kind.CONTENT)
def engine_destroyed_by_word_only() -> list[Patch]:
    """Fence: an instance is closed when it can touch nothing, not when it takes no new writes."""

    def close_engine(self: PrefillRank, decode: Any, generation: int) -> None:
        self.engines.pop((decode, generation), None)
        self.answer(self.worker.engine_closed, decode, generation, self.index)

    return [(PrefillRank, "close_engine", close_engine)]


@mutant(Kind.DESTINATION, schedule=schedules.two_ranks_report_twice)
def count_acks() -> list[Patch]:
    """Acknowledgements are named, never counted."""
    original = RoomTable.rank_ended

    def rank_ended(self: RoomTable, room: Any, rank: int, end: RankEnd, now: float) -> Any:
        record = self.rooms.get(room)
        if record is not None and rank not in record.waiting:
            rank = next(iter(record.waiting))
        return original(self, room, rank, end, now)

    return [(RoomTable, "rank_ended", rank_ended)]


@mutant(Kind.DESTINATION, Kind.CONTENT, Kind.SOURCE)
def one_rank_fewer() -> list[Patch]:
    """Every rank of the writer is waited for."""
    original = Room.__init__

    def init(self: Room, grant: Grant, ranks: int, now: float) -> None:
        original(self, grant, max(ranks - 1, 1), now)

    return [(Room, "__init__", init)]


@mutant(Kind.DESTINATION, schedule=schedules.rank_dies_under_a_write)
def rank_restarted_alone() -> list[Patch]:
    """Words: no rank outlives its leader, none is replaced alone."""

    def rank_died(self: Process, rank: Rank) -> None:
        assert isinstance(self, PrefillWorker) and isinstance(rank, PrefillRank)
        fresh = self.ranks[rank.index] = PrefillRank(self, rank.index)
        for (decode, generation), old in rank.engines.items():
            fresh.engines[decode, generation] = EngineInstance(fresh, generation, old.shown)
        for room in list(rank.writers):
            fresh.report(room, RankEnd(Outcome.ENDED, Reason.UNKNOWN_ROOM, 0))

    return [(Process, "rank_died", rank_died)]


@mutant(Kind.FENCES, schedule=schedules.one_unsettled_write)
def one_engine_instance_for_all_peers() -> list[Patch]:
    """Fence: one engine instance per (peer worker, generation), so that one pair is disturbed."""

    def answer(self: Any, raw: Any) -> None:
        if not self.is_answered and raw is Raw.ERROR:
            for instance in self.instance.rank.engines.values():
                for write in list(instance.writes):
                    original_answer(write, raw)
        else:
            original_answer(self, raw)

    original_answer = InFlight.answer
    return [(InFlight, "answer", answer)]


@mutant(Kind.LIVENESS)
def engine_opening_without_a_bound() -> list[Patch]:
    """I7: an engine instance that never opens counts as refused, and is opened anew."""
    original = decode_peers.EngineInstance.__init__

    def init(self: decode_peers.EngineInstance, name: str, hello: Any, *bounds: Any) -> None:
        ranks, _ = bounds
        original(self, name, hello, ranks, float("inf"))

    return [(decode_peers.EngineInstance, "__init__", init)]


@mutant(Kind.BOUNDS, schedule=schedules.fences_faster_than_writes_end)
def engines_without_a_bound() -> list[Patch]:
    """I8: the next generation waits while too many engines of its decode worker are there."""
    return [(decode_peers, "ENGINES_MAX", 1000)]


@mutant(Kind.DESTINATION, schedule=schedules.one_worker_under_two_names)
def second_pairing_accepted() -> list[Patch]:
    """I5: an engine instance writes into the segments that its `Hello` showed, no others."""

    def accepts(peer: Any, hello: Any) -> bool:
        return False

    return [(decode_peers.DecodePeers, "_is_of_another_pairing", staticmethod(accepts))]
