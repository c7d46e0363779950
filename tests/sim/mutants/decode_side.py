"""Mutants of the decode half."""

from __future__ import annotations

from typing import Any

import msgspec

from pdrt.ids import RoomId
from pdrt.protocol.clock import SilenceClock
from pdrt.protocol.effects import LeaseReady, SendToPrefill, TakeFirstToken
from pdrt.protocol.leases import Lease, LeaseEvent, LeaseState, LeaseTable
from pdrt.protocol.messages import Drained, Outcome, Reason
from pdrt.protocol.pairing import Pairing
from pdrt.protocol.ranks import RankWatch
from tests.sim import schedules
from tests.sim.core import Kind
from tests.sim.jobs import Job, Scheduler
from tests.sim.mutants.registry import Patch, mutant
from tests.sim.plan import CONFIG


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


@mutant(Kind.DESTINATION, schedule=schedules.prompt_computed_here_under_a_write)
def rooms_freed_for_a_prompt_that_is_computed_here() -> list[Patch]:
    """I2: … nor does it free a page that its request's prompt is computed on decode after all."""
    original = Scheduler.begin_here

    def begin_here(self: Scheduler, job: Job) -> Any:
        effects, table = original(self, job), self.worker.table
        if effects is None:
            return None
        failed = [table.leases[room] for room, its in self.jobs.items() if its is job]
        return [e for lease in failed for e in free(table, lease, self.world.sim.now)]

    return [(Scheduler, "begin_here", begin_here)]


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


@mutant(Kind.CONTENT)
def checksums_not_compared() -> list[Patch]:
    """I6: with checksums, COMPLETE counts once what has landed is what was sent."""
    return [(LeaseTable, "_compare", LeaseTable._complete)]


@mutant(Kind.CONTENT)
def checksums_of_one_rank_are_enough() -> list[Patch]:
    """I6: … on every decode rank."""
    original = LeaseTable.checksummed

    def checksummed(self: LeaseTable, room: RoomId, rank: int, landed: Any, now: float) -> Any:
        lease = self.leases.get(room)
        if lease is not None and rank in lease.uncompared:
            lease.uncompared = {rank}
        return original(self, room, rank, landed, now)

    return [(LeaseTable, "checksummed", checksummed)]


@mutant(Kind.DESTINATION, schedule=schedules.lands_after_success)
def mismatch_taken_for_clean() -> list[Patch]:
    """I2: whose word about what has landed is wrong is not believed that nothing more can."""

    def differ(self: LeaseTable, lease: Lease, wrong: tuple[int, ...], now: float) -> list[Any]:
        lease.drained = None
        lease.uncompared.clear()
        return self._end(lease, Reason.CHECKSUM_MISMATCH, True, "", now)

    return [(LeaseTable, "_differ", differ)]


@mutant(Kind.DESTINATION, schedule=schedules.lands_after_success_for_nobody)
def checksums_not_compared_while_revoking() -> list[Patch]:
    """I2: … nor when nobody waits for the pages any more."""
    original = LeaseTable._compare

    def compare(self: LeaseTable, lease: Lease, message: Drained, now: float) -> list[Any]:
        is_granted = lease.state is LeaseState.GRANTED
        return (original if is_granted else LeaseTable._complete)(self, lease, message, now)

    return [(LeaseTable, "_compare", compare)]
