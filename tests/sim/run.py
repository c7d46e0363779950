"""One seed: draw, run, judge."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from tests.sim import faults
from tests.sim.core import Kind, Violation
from tests.sim.plan import draw, draw_calm
from tests.sim.world import World


class Result(msgspec.Struct, frozen=True):
    """What one seed did."""

    seed: int
    events: int
    rooms: int
    fences: int
    answered: int
    prompts_here: int
    """Computed by decode workers."""
    violation: str | None = None
    kind: Kind | None = None


def run_seed(seed: int, trace: Callable[[str], None] | None = None) -> Result:
    """Every fault, then healing, then liveness."""
    world = World(seed, draw(random.Random(f"plan {seed}")), trace)
    world.sim.say("world", "%s", world.plan)
    faults.add_load(world)
    faults.add_faults(world)
    return judge(seed, world, world.run)


def run_calm_seed(seed: int, trace: Callable[[str], None] | None = None) -> Result:
    """Nothing but aborts and stalls below the bounds: there must be no fence."""
    world = World(seed, draw_calm(random.Random(f"calm {seed}")), trace)
    world.sim.say("world", "%s", world.plan)
    faults.add_load(world)
    faults.add_short_stalls(world)

    def run() -> None:
        world.run()
        if world.fences:
            raise Violation(Kind.FENCES, f"{world.fences} fences on a network without faults")

    return judge(seed, world, run)


def judge(seed: int, world: World, run: Callable[[], None]) -> Result:
    """Run, and turn whatever is raised into a result."""
    text, kind = verdict(run)
    answered = sum(request.state.value == "answered" for request in world.requests)
    return Result(
        seed, world.sim.events, world.rooms, world.fences, answered, world.prompts_here, text, kind
    )


def verdict(run: Callable[[], None]) -> tuple[str | None, Kind | None]:
    """What `run` violates, if anything."""
    try:
        run()
    except Violation as violation:
        return str(violation), violation.kind
    except (AssertionError, KeyError) as error:
        return f"invariant: {error!r} at {_where(error)}", Kind.INVARIANT
    return None, None


def _where(error: BaseException) -> str:
    trace = error.__traceback__
    lines = []
    while trace is not None:
        frame = trace.tb_frame
        lines.append(f"{frame.f_code.co_name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " > ".join(lines[-5:])
