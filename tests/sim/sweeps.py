"""One hand-over, and one fault at every step of it: what chance need not find."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pdrt.protocol.messages import Reason
from tests.sim.fabric import Fate
from tests.sim.plan import HEAL_SECONDS_MAX, EngineKind
from tests.sim.run import verdict
from tests.sim.stage import PROMPT, Stage, only_first

STEPS_MAX = 160
Fault = Callable[[Stage], None]


def abort(stage: Stage) -> None:
    """The first client goes."""
    world = stage.world
    world.gateways[0].abort(world.requests[0])


def move(stage: Stage) -> None:
    """The first request goes on in another attempt."""
    world = stage.world
    world.gateways[0].move(world.requests[0])


def crash_prefill(stage: Stage) -> None:
    for prefill in list(stage.world.prefills.values()):
        prefill.die("crash")


def crash_decode(stage: Stage) -> None:
    for decode in list(stage.world.decodes.values()):
        decode.die("crash")


def lose_next_message(stage: Stage) -> None:
    """The next message of either side is lost."""
    lost: list[object] = []

    def intercept(message: object) -> object | None:
        if lost:
            return message
        lost.append(message)
        return None

    stage.world.network.intercept = intercept  # type: ignore[assignment]


def successor(stage: Stage) -> None:
    """Another incarnation listens, and the old one lives on."""
    slot = stage.world.prefill_slots["p0"]
    if slot.listeners:
        stage.world.start_prefill(slot)
        for decode in stage.world.decodes.values():
            for connection in decode.connections.values():
                connection.reconnect()
        stage.run(5.0)


def write_unsettled(stage: Stage) -> None:
    """The next write errs and lands later."""
    stage.world.direct = only_first(Fate.LANDS_AFTER_ERROR)


def write_hangs(stage: Stage) -> None:
    stage.world.direct = only_first(Fate.HANGS)


def stall_prefill(stage: Stage) -> None:
    for prefill in stage.world.prefills.values():
        prefill.stall(4.0)


def stall_decode(stage: Stage) -> None:
    for decode in stage.world.decodes.values():
        decode.stall(4.0)


def hang_prefill_rank(stage: Stage) -> None:
    for prefill in stage.world.prefills.values():
        prefill.ranks[1].is_hung = True


def hang_decode_rank(stage: Stage) -> None:
    for decode in stage.world.decodes.values():
        decode.ranks[1].is_hung = True


def end_rooms(stage: Stage) -> None:
    """The prefill worker sheds what it has."""
    for prefill in stage.world.prefills.values():
        for room in list(prefill.table.rooms):
            prefill.post(prefill.end_room, room, Reason.OVERLOADED)


def leave(stage: Stage) -> None:
    for prefill in stage.world.prefills.values():
        prefill.post(prefill.table.leave)


def flap(stage: Stage) -> None:
    """The endpoint is delisted for a moment."""
    stage.world.prefill_slots["p0"].unlisted_until = stage.world.sim.now + 0.4


FAULTS: tuple[Fault, ...] = (
    abort,
    move,
    crash_prefill,
    crash_decode,
    lose_next_message,
    successor,
    write_unsettled,
    write_hangs,
    stall_prefill,
    stall_decode,
    hang_prefill_rank,
    hang_decode_rank,
    end_rooms,
    leave,
    flap,
)


def play(stage: Stage, engine: EngineKind, step: int, faults: tuple[Fault, ...]) -> None:
    """Two requests with a common prefix; after `step` events, the faults."""
    world = stage.start(engine, prefill_ranks=2, decode_ranks=2)
    stage.ask()
    stage.ask((*PROMPT[:8], 1, 2, 3), max_tokens=2)
    world.sim.run_events(step)
    for fault in faults:
        fault(stage)
    stage.run(6.0)
    world.heal()
    world.run_until_quiet(world.sim.now + HEAL_SECONDS_MAX)


def sweep(engine: EngineKind, *faults: Fault, stride: int = 1) -> Iterator[str]:
    """What goes wrong, step by step; nothing, if all is well."""
    for step in range(0, STEPS_MAX, stride):
        stage = Stage()
        text, _ = verdict(lambda stage=stage, step=step: play(stage, engine, step, faults))
        if text is not None:
            names = ", ".join(fault.__name__ for fault in faults)
            yield f"{engine.value}, {names} at step {step}: {text}"
