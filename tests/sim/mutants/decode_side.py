"""Mutants of the decode half."""

from __future__ import annotations

from typing import Any

import msgspec

from pdrt.ids import RoomId
from pdrt.protocol.clock import SilenceClock
from pdrt.protocol.effects import CloseSegment, LeaseReady, SendToPrefill, TakeFirstToken
from pdrt.protocol.leases import Lease, LeaseEvent, LeaseState, LeaseTable
from pdrt.protocol.messages import Drained, Outcome, Reason
from pdrt.protocol.pairing import GenerationRetired, Pairing
from pdrt.protocol.ranks import RankWatch
from pdrt.protocol.writers import Generation
from tests.sim import schedules
from tests.sim.core import Kind
from tests.sim.decode import DecodeRank
from tests.sim.mutants.registry import Patch, mutant
from tests.sim.plan import CONFIG, EngineKind


def free(table: LeaseTable, lease: Lease, now: float) -> list[Any]:
    """End a lease without proof."""
    effects = table._fail(lease, Reason.FENCED, True, "")
    return [*effects, *table._free(lease, LeaseEvent.FENCED, now)]


@mutant(Kind.DESTINATION)
def free_on_abort() -> list[Patch]:
    """I2: a client that goes away frees its pages."""
    original = LeaseTable._revoke

    def revoke(self: LeaseTable, lease: Lease, reason: Reason, now: float) -> list[Any]:
        if reason is not Reason.CLIENT_GONE:
            return original(self, lease, reason, now)
        return free(self, lease, now)

    return [(LeaseTable, "_revoke", revoke)]


@mutant(Kind.DESTINATION)
def free_on_timeout() -> list[Patch]:
    """I2: time frees pages."""
    original = LeaseTable.handle_timer

    def handle_timer(self: LeaseTable, now: float) -> list[Any]:
        effects = original(self, now)
        for lease in list(self._revoking.values()):
            if now - lease.revoking_at > CONFIG.quarantine_after_seconds:
                effects += free(self, lease, now)
        return effects

    return [(LeaseTable, "handle_timer", handle_timer)]


@mutant(Kind.FENCES, schedule=schedules.answer_to_revoke_lost)
def same_seq_resend() -> list[Patch]:
    """Channel: a resent `Revoke` takes a fresh seq."""
    original = LeaseTable._send_revoke
    seqs: dict[RoomId, int] = {}

    def send_revoke(self: LeaseTable, lease: Lease, now: float) -> list[Any]:
        (send,) = original(self, lease, now)
        seq = seqs.setdefault(lease.room, send.message.seq)
        return [SendToPrefill(send.endpoint, msgspec.structs.replace(send.message, seq=seq))]

    return [(LeaseTable, "_send_revoke", send_revoke)]


@mutant(Kind.DESTINATION, Kind.CONTENT)
def grant_resent() -> list[Patch]:
    """Channel: a `Grant` is sent at most once."""
    grant, handle_timer = LeaseTable.grant, LeaseTable.handle_timer
    sent: dict[RoomId, SendToPrefill] = {}

    def remember(self: LeaseTable, endpoint: str, request: Any, now: float) -> list[Any]:
        effects = grant(self, endpoint, request, now)
        sent.update((e.message.room, e) for e in effects)
        return effects

    def resend(self: LeaseTable, now: float) -> list[Any]:
        effects = handle_timer(self, now)
        for lease in self.leases.values():
            if lease.state is LeaseState.GRANTED:
                message = sent[lease.room].message
                again = msgspec.structs.replace(message, seq=self.pairing.next_seq())
                effects.append(SendToPrefill(lease.endpoint, again))
        return effects

    return [(LeaseTable, "grant", remember), (LeaseTable, "handle_timer", resend)]


@mutant(Kind.DESTINATION, Kind.CONTENT, Kind.TOKEN)
def reuse_rooms() -> list[Patch]:
    """Words: a room is never reused."""

    def next_room(self: LeaseTable) -> RoomId:
        serial = 1
        while RoomId(self.pairing.incarnation, serial) in self.leases:
            serial += 1
        return RoomId(self.pairing.incarnation, serial)

    return [(LeaseTable, "next_room", next_room)]


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


@mutant(Kind.TOKEN, schedule=schedules.complete_without_a_first_token)
def ready_without_a_first_token() -> list[Patch]:
    """I6: READY means COMPLETE, with its first token."""

    def complete(self: LeaseTable, lease: Lease, message: Drained, now: float) -> list[Any]:
        effects = self._take_first(lease, message.first) if message.first else []
        self._enter(lease, LeaseEvent.COMPLETE)
        self._remove(lease)
        return [*effects, LeaseReady(lease.room, message.bytes_written)]

    return [(LeaseTable, "_complete", complete)]


@mutant(Kind.CONTENT, Kind.TOKEN)
def ready_on_any_outcome() -> list[Patch]:
    """I6: a room that ended badly proves nothing about its pages' content."""
    original = LeaseTable._drained

    def drained(self: LeaseTable, message: Drained, now: float) -> list[Any]:
        return original(self, msgspec.structs.replace(message, outcome=Outcome.COMPLETE), now)

    return [(LeaseTable, "_drained", drained)]


@mutant(Kind.TOKEN)
def first_token_taken_while_revoking() -> list[Patch]:
    """I6: a first token counts only while its lease is GRANTED."""

    def first_token(self: LeaseTable, message: Any) -> list[Any]:
        lease = self._addressed(message)
        if lease is None or lease.first or not lease.needs_token:
            return []
        lease.first = message.first
        return [TakeFirstToken(lease.room, message.first)]

    return [(LeaseTable, "_first_token", first_token)]


@mutant(Kind.TOKEN)
def first_token_emitted_twice() -> list[Patch]:
    """I6: a first token is streamed once, though `Drained` repeats it."""

    def take_first(self: LeaseTable, lease: Lease, first: Any) -> list[Any]:
        return [TakeFirstToken(lease.room, first)]

    return [(LeaseTable, "_take_first", take_first)]


@mutant(Kind.LIVENESS)
def hung_rank_ignored() -> list[Patch]:
    """Words: a leader whose rank is silent past the bound ends its worker."""

    def handle_timer(self: RankWatch, now: float) -> list[Any]:
        return []

    return [(RankWatch, "handle_timer", handle_timer)]


@mutant(Kind.FENCES, schedule=schedules.machine_asleep)
def sleeper_accuses() -> list[Patch]:
    """Lost peers: whoever was itself asleep accuses nobody."""
    original = SilenceClock.tick

    def tick(self: SilenceClock[Any], now: float) -> list[Any]:
        self._last_tick = now
        return original(self, now)

    return [(SilenceClock, "tick", tick)]


@mutant(Kind.FENCES, schedule=schedules.machine_asleep_after_a_revoke)
def leases_age_in_their_sleep() -> list[Patch]:
    """Lost peers: every age runs on the same clock, which stands still while its owner sleeps."""

    def do_not_age(self: LeaseTable, slept_seconds: float, now: float) -> None:
        return

    return [(LeaseTable, "_do_not_age", do_not_age)]


@mutant(Kind.FENCES, schedule=schedules.decode_asleep_in_a_teardown)
def sleeper_accuses_its_ranks() -> list[Patch]:
    """Lost peers: deadlines of ranks move by the sleep of whoever judges them."""
    return [(Pairing, "slept_seconds", 0.0)]


@mutant(Kind.INVARIANT, Kind.CONTENT, schedule=schedules.evicted_while_leased)
def prefix_not_held_on_decode() -> list[Patch]:
    """I1: cached pages that a lease counts on are held by it."""
    from pdrt.kv.pages import Owner, OwnerKind
    from tests.sim.cache import PrefixCache

    return unheld(PrefixCache, Owner, OwnerKind.LEASE)


@mutant(Kind.SOURCE, Kind.CONTENT, Kind.DESTINATION)
def prefix_not_held_on_prefill() -> list[Patch]:
    """I3: a cached page that is read stays until every rank has drained the room."""
    from pdrt.kv.pages import Owner, OwnerKind
    from tests.sim.cache import PrefixCache

    return unheld(PrefixCache, Owner, OwnerKind.ROOM)


def unheld(cache: Any, owner: Any, kind: Any) -> list[Patch]:
    """Readers of `kind` find cached pages without holding them."""
    hold, drop = cache.hold, cache.drop

    def hold_not(self: Any, pages: list[int], holder: Any) -> None:
        if holder.kind is not kind:
            hold(self, pages, holder)

    def drop_held(self: Any, pages: list[int], holder: Any) -> None:
        held = [p for p in pages if holder in self._pages._holders.get(p, ())]
        drop(self, held if holder.kind is kind else pages, holder)

    return [(cache, "hold", hold_not), (cache, "drop", drop_held)]


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
    original = DecodeRank.segment_gone

    def segment_gone(self: DecodeRank, endpoint: str, generation: int) -> None:
        if self.worker.world.plan.engine is EngineKind.TCP:
            self.confirm(endpoint, generation)
        else:
            original(self, endpoint, generation)

    return [(DecodeRank, "segment_gone", segment_gone)]
