"""Directed schedules: what chance is too rare for. Each passes on the product and fails on the
mutant that it is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pdrt.ids import RoomId
from pdrt.protocol.decode_peers import ENGINES_MAX, EngineState
from pdrt.protocol.messages import Drained, FirstToken, Grant, Welcome
from tests.sim.core import Kind, Violation
from tests.sim.fabric import Fate, InFlight
from tests.sim.plan import EngineKind
from tests.sim.stage import PROMPT, Schedule, Stage, lose_first, only_first
from tests.sim.world import PrefillSlot


def answer_to_revoke_lost(stage: Stage) -> None:
    """The answer to a `Revoke` is lost; the next `Revoke` is answered too, without a fence."""
    world = stage.start(EngineKind.MOONCAKE)
    world.checks_seq = False
    world.direct = only_first(Fate.CRAWLS)
    world.network.intercept = lose_first(Drained)
    request = stage.ask()
    stage.run_until_written()
    world.gateways[0].abort(request)
    stage.finish(fences=0)


def complete_without_a_first_token(stage: Stage) -> None:
    """`FirstToken` lost, then COMPLETE without one: the request goes on in another room."""
    world = stage.start(EngineKind.TCP)
    seen: list[Any] = []

    def intercept(message: Any) -> Any:
        if len(seen) == 2 or not isinstance(message, FirstToken | Drained):
            return message
        seen.append(message)
        is_drained = isinstance(message, Drained)
        return msgspec.structs.replace(message, first=None) if is_drained else None

    world.network.intercept = intercept
    request = stage.ask()
    stage.finish(fences=0)
    stage.expect_answered(request)
    if world.rooms != 2:
        raise Violation(Kind.TOKEN, f"{world.rooms} rooms, 2 expected")


def machine_asleep(stage: Stage) -> None:
    """Every process sleeps past all bounds, in the middle of a hand-over: nobody is accused."""
    world = stage.start(EngineKind.TCP)
    world.direct = only_first(Fate.CRAWLS)
    request = stage.ask()
    stage.run_until_written()
    for process in world.processes():
        process.stall(5.0)
    stage.run(5.0)
    stage.finish(fences=0)
    stage.expect_answered(request)


def evicted_while_leased(stage: Stage) -> None:
    """Cached pages that an open room counts on cannot be evicted."""
    world = stage.start(EngineKind.TCP)
    first = stage.ask()
    stage.run(3.0)
    stage.expect_answered(first)
    world.direct = only_first(Fate.CRAWLS)
    written = world.writes
    second = stage.ask((*PROMPT[:8], 7, 7, 7))
    while world.writes == written:
        stage.run(0.01)
    if not any(leased.held for leased in stage.decode.scheduler.leased.values()):
        raise Violation(Kind.INVARIANT, "the schedule meets no prefix hit on decode")
    stage.decode.cache.make_room(stage.decode.pages.total)
    stage.finish(fences=0)
    stage.expect_answered(first, second)


def same_page_behind_another_prefix(stage: Stage) -> None:
    """What begins one prompt stands behind something else in another: its KV is not the same."""
    stage.start(EngineKind.TCP)
    first = stage.ask((1, 2, 3, 4, *PROMPT))
    stage.run(3.0)
    second = stage.ask((*PROMPT[:4], 5, 6, 7, 8, 9))
    stage.finish(fences=0)
    stage.expect_answered(first, second)


def decode_restarts_under_a_write(stage: Stage) -> None:
    """Bytes for the old life arrive when the new one listens on the same generation."""
    world = stage.start(EngineKind.MOONCAKE)
    world.direct = only_first(Fate.CRAWLS)
    request = stage.ask()
    stage.run_until_written()
    stage.run(0.05)
    stage.decode.die("crash")
    stage.finish(fences=0)
    stage.expect_answered(request)


def fence_beside_another_pair(stage: Stage) -> None:
    """Two prefill workers on the same generation number; one of them is fenced."""
    world = stage.start(EngineKind.MOONCAKE, prefill_workers=2)
    world.direct = only_first(Fate.LANDS_AFTER_ERROR)
    request = stage.ask()
    stage.finish(fences=1)
    stage.run(4.0)
    stage.expect_answered(request)


def revoke_before_the_open(stage: Stage) -> None:
    """`Grant`, and `Revoke` at its heels."""
    world = stage.start(EngineKind.TCP)

    def intercept(message: Any) -> Any:
        if isinstance(message, Grant):
            world.sim.after(0.005, world.gateways[0].abort, world.requests[0])
        return message

    world.network.intercept = intercept
    stage.ask()
    stage.finish(fences=0)
    stage.run(2.0)


def successor_answers_for_a_living_writer(stage: Stage) -> None:
    """`Revoke` reaches the new incarnation while the old one has still to write."""
    world = stage.start(EngineKind.LOCAL)
    world.direct = only_first(Fate.STARTS_LATE)
    request = stage.ask()
    stage.run_until_written()
    world.start_prefill(world.prefill_slots["p0"])
    for connection in stage.decode.connections.values():
        connection.reconnect()
    stage.run(4.0)
    stage.finish(fences=0)
    stage.expect_answered(request)


def retired_under_mapped_memory(stage: Stage) -> None:
    """Two writers of one generation, the old one through memory, the new one through the network:
    the generation is retired for the new one, while the old one has still to write."""
    world = stage.start(EngineKind.MOONCAKE, is_mixed=True)
    fates = iter((Fate.STARTS_VERY_LATE, Fate.LANDS_AFTER_ERROR))
    world.direct = lambda write: next(fates, Fate.SUCCEEDS)
    request = stage.ask()
    stage.run_until_written()
    if {lease.engine for lease in stage.decode.table.leases.values()} != {"local"}:
        raise Violation(Kind.INVARIANT, "the schedule meets no write through memory")
    world.out_of_reach.add(EngineKind.LOCAL)
    world.start_prefill(world.prefill_slots["p0"])
    for connection in stage.decode.connections.values():
        connection.reconnect()
    stage.run(4.0)
    stage.finish(fences=1)
    stage.expect_answered(request)


def dirty_end_lost(stage: Stage) -> None:
    """`Drained(UNSETTLED)` is lost; the room is unknown by the time it is revoked."""
    world = stage.start(EngineKind.MOONCAKE)
    world.direct = only_first(Fate.LANDS_AFTER_ERROR)
    world.network.intercept = lose_first(Drained)
    request = stage.ask()
    stage.finish(fences=1)
    stage.run(4.0)
    stage.expect_answered(request)


def two_ranks_report_twice(stage: Stage) -> None:
    """Of four ranks, 1 and 3 end twice while writes of 0 and 2 are under way."""
    world = stage.start(EngineKind.MOONCAKE, prefill_ranks=4)

    def direct(write: InFlight) -> Fate:
        is_late = write.instance.rank.index in (0, 2)
        return Fate.CRAWLS if is_late else Fate.SUCCEEDS

    world.direct = direct
    for rank in stage.prefill.ranks[1::2]:
        rank.report = twice(rank.report)
    request = stage.ask(tuple(range(100, 140)))  # of several steps
    stage.run_until_written()
    stage.run(0.05)
    world.gateways[0].abort(request)
    stage.finish(fences=0)
    stage.run(2.0)


def twice(call: Callable[..., None]) -> Callable[..., None]:
    def call_twice(*arguments: Any) -> None:
        call(*arguments)
        call(*arguments)

    return call_twice


def rank_dies_under_a_write(stage: Stage) -> None:
    """One rank of the writer dies; what it has in the network still lands."""
    world = stage.start(EngineKind.MOONCAKE, prefill_ranks=2)
    world.direct = lambda write: Fate.CRAWLS if write.instance.rank.index else Fate.SUCCEEDS
    request = stage.ask()
    while not stage.prefill.ranks[1].writers or world.writes < 2:
        stage.run(0.01)
    stage.run(0.03)
    stage.prefill.rank_died(stage.prefill.ranks[1])
    world.direct = None
    stage.run(3.0)
    stage.finish(fences=1)
    stage.expect_answered(request)


def one_unsettled_write(stage: Stage) -> None:
    """One write does not settle while rooms of two decode workers are open."""
    world = stage.start(EngineKind.MOONCAKE, decode_workers=2)
    fates = iter((*[Fate.CRAWLS] * 5, Fate.LANDS_AFTER_ERROR))
    world.direct = lambda write: next(fates, Fate.CRAWLS)
    requests = []
    for serial in range(6):
        requests.append(stage.ask((serial, *PROMPT)))
    stage.run(0.5)
    stage.finish(fences=1)
    stage.expect_answered(*requests)
    undisturbed = [d for d in world.decodes.values() if not d.table.fences]
    if [d.failures for d in undisturbed] != [0]:
        raise Violation(Kind.FENCES, "the other pair was disturbed")


def room_without_pages_ends_dirty(stage: Stage) -> None:
    """A room that was granted no pages ends UNSETTLED: its pair must be usable again."""
    stage.start(EngineKind.TCP)
    request = stage.ask(max_tokens=1)
    while not stage.world.rooms:
        stage.run(0.01)
    while not stage.prefill.ranks[0].writers:
        stage.run(0.001)
    rank = stage.prefill.ranks[0]
    rank.post(rank.lose_task, next(iter(rank.writers)))
    stage.finish(fences=1)
    stage.expect_answered(request)


def decode_asleep_in_a_teardown(stage: Stage) -> None:
    """A decode leader that slept does not end for its own rank's sake."""
    world = stage.start(EngineKind.MOONCAKE)
    world.direct = only_first(Fate.LANDS_AFTER_ERROR)
    request = stage.ask()
    decode, peer = stage.decode, stage.decode.table.pairing.peers["p0"]
    while not peer.is_retiring:
        stage.run(0.001)
    decode.stall(5.0)
    stage.run(6.0)
    stage.finish(fences=1)
    stage.expect_answered(request)
    if not decode.is_alive:
        raise Violation(Kind.FENCES, "it ended itself for having slept")


def prefill_asleep_in_a_teardown(stage: Stage) -> None:
    """The same of a prefill leader, whose engine instance is being destroyed."""
    world = stage.start(EngineKind.TCP)
    world.direct = only_first(Fate.LANDS_AFTER_ERROR)
    request = stage.ask()
    prefill = stage.prefill
    peer = next(iter(prefill.table.peers.known.values()))
    while not any(e.state is EngineState.CLOSING for e in peer.engines.values()):
        stage.run(0.001)
    prefill.stall(5.0)
    stage.run(6.0)
    stage.finish(fences=1)
    stage.expect_answered(request)
    if not prefill.is_alive:
        raise Violation(Kind.FENCES, "it ended itself for having slept")


def machine_asleep_after_a_revoke(stage: Stage) -> None:
    """A lease does not age while everybody sleeps: its writer drains once it may."""
    world = stage.start(EngineKind.LOCAL)
    world.direct = only_first(Fate.CRAWLS)
    request = stage.ask()
    stage.run_until_written()
    world.gateways[0].abort(request)
    stage.run(0.02)
    for process in world.processes():
        process.stall(8.0)
    stage.run(8.0)
    stage.finish(fences=0)


def one_worker_under_two_names(stage: Stage) -> None:
    """A prefill worker is dialled at two addresses: a fence of one must not miss the other."""
    world = stage.start(EngineKind.MOONCAKE)
    alias = world.prefill_slots["q0"] = PrefillSlot("q0")
    alias.listeners = world.prefill_slots["p0"].listeners
    world.network.aliases["p0"] = "q0"
    world.direct = lambda write: Fate.LANDS_AFTER_ERROR
    stage.run(2.5)
    for serial in range(4):
        stage.ask((serial, *PROMPT))
    stage.run(15.0)


def fences_faster_than_writes_end(stage: Stage) -> None:
    """Each generation is fenced for one write while another hangs on it: engines pile up."""
    generations = ENGINES_MAX + 2
    world = stage.start(EngineKind.MOONCAKE)
    first_rooms: dict[int, RoomId] = {}

    def direct(write: InFlight) -> Fate:
        """Of each two requests, the first room of one hangs, and of the other does not settle."""
        serial = stage.prefill.ranks[0].grants[write.room].token_ids[0]
        is_first = first_rooms.setdefault(serial, write.room) == write.room
        return (Fate.HANGS, Fate.LANDS_AFTER_ERROR)[serial % 2] if is_first else Fate.SUCCEEDS

    world.direct = direct
    requests = []
    peer = stage.decode.table.pairing.peers["p0"]
    for generation in range(1, generations + 1):
        requests += [stage.ask((2 * generation + turn, *PROMPT)) for turn in range(2)]
        while peer.floor <= generation:
            stage.run(0.01)
    stage.finish(fences=generations)
    stage.run(4.0)
    stage.expect_answered(*requests)


def prompt_computed_here_under_a_write(stage: Stage) -> None:
    """Its writer falls silent and writes all the same, when decode has begun with the prompt."""
    world = stage.start(EngineKind.LOCAL, local_prefill=True)
    world.direct = only_first(Fate.STARTS_LATE)
    until = world.sim.now + 2.8

    def intercept(message: Any) -> Any:
        is_said_by_prefill = isinstance(message, Welcome | FirstToken | Drained)
        return None if is_said_by_prefill and world.sim.now < until else message

    world.network.intercept = intercept
    stage.run(1.0)
    request = stage.ask()
    stage.run(3.0)
    stage.finish(fences=0)
    stage.expect_answered(request)
    if world.prompts_here != 1:
        raise Violation(Kind.LIVENESS, f"{world.prompts_here} prompts were computed here")


def lands_wrong(stage: Stage) -> None:
    """The engine reports success, but a page holds something else: nobody decodes from it."""
    world = stage.start(EngineKind.TCP, kv_checksum=True)
    world.direct = only_first(Fate.LANDS_WRONG)
    request = stage.ask()
    stage.finish(fences=1)
    stage.expect_answered(request)
    if (world.rooms, stage.decode.mismatches) != (2, 1):
        raise Violation(Kind.CONTENT, "nothing was found, or too much")


def lands_after_success(stage: Stage) -> None:
    """The engine reports success of what is still in the network: its pages wait for a fence."""
    world = stage.start(EngineKind.MOONCAKE, kv_checksum=True)
    world.direct = only_first(Fate.LANDS_AFTER_SUCCESS)
    request = stage.ask()
    stage.finish(fences=1)
    stage.run(4.0)
    stage.expect_answered(request)


def lands_after_success_for_nobody(stage: Stage) -> None:
    """The same, when its client goes away while `Drained` is on its way."""
    world = stage.start(EngineKind.MOONCAKE, kv_checksum=True)
    world.direct = only_first(Fate.LANDS_AFTER_SUCCESS)

    def intercept(message: Any) -> Any:
        if isinstance(message, Drained) and (job := request.job) is not None:
            stage.decode.post(stage.decode.cancel, job)
        return message

    world.network.intercept = intercept
    request = stage.ask()
    stage.finish(fences=1)
    stage.run(4.0)


SCHEDULES: tuple[Schedule, ...] = (
    answer_to_revoke_lost,
    complete_without_a_first_token,
    machine_asleep,
    evicted_while_leased,
    same_page_behind_another_prefix,
    decode_restarts_under_a_write,
    fence_beside_another_pair,
    revoke_before_the_open,
    successor_answers_for_a_living_writer,
    retired_under_mapped_memory,
    dirty_end_lost,
    two_ranks_report_twice,
    rank_dies_under_a_write,
    one_unsettled_write,
    room_without_pages_ends_dirty,
    decode_asleep_in_a_teardown,
    prefill_asleep_in_a_teardown,
    machine_asleep_after_a_revoke,
    one_worker_under_two_names,
    fences_faster_than_writes_end,
    prompt_computed_here_under_a_write,
    lands_wrong,
    lands_after_success,
    lands_after_success_for_nobody,
)
