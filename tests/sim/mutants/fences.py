"""Mutants of fences and of what they tear down."""

from __future__ import annotations

from typing import Any

from pdrt.protocol.effects import CloseSegment
from pdrt.protocol.leases import LeaseTable
from pdrt.protocol.pairing import GenerationRetired, Pairing
from pdrt.protocol.writers import FenceKind, Generation, WriterPeer
from tests.sim import schedules
from tests.sim.core import Kind
from tests.sim.decode import DecodeRank
from tests.sim.mutants.decode_side import free
from tests.sim.mutants.registry import Patch, mutant
from tests.sim.plan import EngineKind


@mutant(Kind.DESTINATION)
def lost_taken_for_fenced() -> list[Patch]:
    """I2: silence frees nothing."""
    original = LeaseTable._writer_lost

    def writer_lost(self: LeaseTable, notice: Any, now: float) -> list[Any]:
        effects = original(self, notice, now)
        for lease in self._of(notice.endpoint, notice.writer):
            effects += free(self, lease, now)
        return effects

    return [(LeaseTable, "_writer_lost", writer_lost)]


@mutant(Kind.DESTINATION)
def new_incarnation_taken_for_a_fence() -> list[Patch]:
    """I2: a new process on the same address frees nothing."""
    original = LeaseTable._writer_lost

    def writer_lost(self: LeaseTable, notice: Any, now: float) -> list[Any]:
        effects = original(self, notice, now)
        if self.pairing.peers[notice.endpoint].writer != notice.writer:
            for lease in self._of(notice.endpoint, notice.writer):
                effects += free(self, lease, now)
        return effects

    return [(LeaseTable, "_writer_lost", writer_lost)]


@mutant(Kind.DESTINATION)
def fence_on_one_rank() -> list[Patch]:
    """Fence: a teardown is confirmed by every decode rank."""

    def closed(self: Generation, rank: int) -> bool:
        return True

    return [(Generation, "closed", closed)]


@mutant(Kind.DESTINATION)
def freed_at_the_request_to_tear_down() -> list[Patch]:
    """Fence: leases end when the teardown is confirmed, not when it is asked for."""
    original = Pairing.retire

    def retire(self: Pairing, endpoint: str, now: float) -> list[Any]:
        number = self.peers[endpoint].newest_generation
        effects = original(self, endpoint, now)
        return [*effects, GenerationRetired(endpoint, number)] if effects else []

    return [(Pairing, "retire", retire)]


@mutant(Kind.DESTINATION)
def fence_that_ignores_the_generation() -> list[Patch]:
    """Fence: only leases on the retired generation end."""
    original = LeaseTable._generation_retired

    def retired(self: LeaseTable, notice: Any, now: float) -> list[Any]:
        effects = original(self, notice, now)
        for lease in self._at(notice.endpoint):
            effects += free(self, lease, now)
        return effects

    return [(LeaseTable, "_generation_retired", retired)]


@mutant(Kind.LIVENESS)
def fence_that_waits_for_the_dead_writers_welcome() -> list[Patch]:
    """Fence: nothing but new grants waits for the `Welcome` that echoes the next generation."""
    retire, welcome = Pairing.retire, Pairing.welcome
    held: dict[tuple[int, str], CloseSegment] = {}

    def hold(self: Pairing, endpoint: str, now: float) -> list[Any]:
        effects = retire(self, endpoint, now)
        for effect in effects:
            if isinstance(effect, CloseSegment):
                held[id(self), endpoint] = effect
                self.peers[endpoint].generations[effect.generation].deadline = float("inf")
        return [e for e in effects if not isinstance(e, CloseSegment)]

    def let_go(self: Pairing, endpoint: str, message: Any, now: float) -> list[Any]:
        effects = welcome(self, endpoint, message, now)
        close = held.get((id(self), endpoint))
        if close and message.generation > close.generation:
            effects.append(held.pop((id(self), endpoint)))
        return effects

    return [(Pairing, "retire", hold), (Pairing, "welcome", let_go)]


@mutant(Kind.DESTINATION, schedule=schedules.decode_restarts_under_a_write)
def segments_not_named_by_the_decode_incarnation() -> list[Patch]:
    """Words: a segment's name is never reused, by a new life either."""

    def name(self: DecodeRank, endpoint: str, generation: int) -> str:
        return f"{self.worker.slot}/{self.index}/{endpoint}/{generation}"

    return [(DecodeRank, "segment_name", name)]


@mutant(Kind.DESTINATION, schedule=schedules.fence_beside_another_pair)
def segments_not_named_by_the_prefill_worker() -> list[Patch]:
    """Words: each prefill worker has segments of its own."""

    def name(self: DecodeRank, endpoint: str, generation: int) -> str:
        return f"{self.worker.incarnation:x}/{self.index}/{generation}"

    return [(DecodeRank, "segment_name", name)]


@mutant(Kind.DESTINATION)
def tcp_fence_by_connection_only() -> list[Patch]:
    """Fence: a receiver drops frames of generations below the floor, on new connections too."""
    original = DecodeRank.tear_down

    def tear_down(self: DecodeRank, endpoint: str, generation: int, kind: EngineKind) -> None:
        if kind is not EngineKind.TCP:
            original(self, endpoint, generation, kind)

    return [(DecodeRank, "tear_down", tear_down)]


@mutant(Kind.DESTINATION, schedule=schedules.retired_under_mapped_memory)
def retirement_fences_every_engine() -> list[Patch]:
    """Fence: mapped memory cannot be taken back from a living process."""
    original = LeaseTable._generation_retired

    def retired(self: LeaseTable, notice: Any, now: float) -> list[Any]:
        effects = original(self, notice, now)
        for lease in self._at(notice.endpoint):
            if lease.generation == notice.generation:
                effects += free(self, lease, now)
        return effects

    return [(LeaseTable, "_generation_retired", retired)]


@mutant(Kind.DESTINATION)
def death_fences_every_engine() -> list[Patch]:
    """Fence: what a dead process has left in the network still lands."""
    original = Pairing._take_engine

    def take(self: Pairing, peer: WriterPeer, message: Any, engine: str) -> list[Any]:
        engines, self.engines = self.engines, dict.fromkeys(self.engines, FenceKind.PROCESS_DEATH)
        effects = original(self, peer, message, engine)
        self.engines = engines
        return effects

    return [(Pairing, "_take_engine", take)]


@mutant(Kind.LIVENESS)
def closed_offers_are_not_shown_again() -> list[Patch]:
    """Engines: a writer that cannot take what the one before it took gets a new generation."""

    def offer_anew(self: Pairing, peer: WriterPeer, writer: Any, now: float) -> list[Any]:
        return []

    return [(Pairing, "_offer_anew", offer_anew)]
