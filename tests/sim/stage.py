"""A small cluster for directed schedules: no faults but those that the schedule makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tests.sim.core import Kind, Violation
from tests.sim.decode import DecodeWorker
from tests.sim.fabric import Fate, InFlight
from tests.sim.plan import HEAL_SECONDS_MAX, EngineKind, FaultRates, Plan
from tests.sim.prefill import PrefillWorker
from tests.sim.requests import Request, RequestState
from tests.sim.run import Result, verdict
from tests.sim.world import World

Trace = Callable[[str], None] | None
PROMPT = tuple(range(100, 110))


class Stage:
    """A small cluster without faults, for one schedule."""

    world: World

    def __init__(self, trace: Trace = None) -> None:
        self._trace = trace

    def start(self, engine: EngineKind, **changes: Any) -> World:
        plan = Plan(
            engine=engine,
            prefill_workers=1,
            decode_workers=1,
            prefill_ranks=1,
            decode_ranks=1,
            kv_heads=4,
            prefill_pages=32,
            decode_pages=32,
            gateways=1,
            requests=0,
            rates=FaultRates(),
            faults=0,
        )
        self.world = World(1, msgspec.structs.replace(plan, **changes), self._trace)
        self.world.network.heal()
        self.run(1.0)
        return self.world

    def run(self, seconds: float) -> None:
        self.world.sim.run_until(self.world.sim.now + seconds)

    def run_until_written(self) -> None:
        """Until the first write has been accepted."""
        while not self.world.writes:
            self.run(0.01)

    def ask(self, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 4) -> Request:
        return self.world.add_request(prompt, max_tokens)

    def finish(self, fences: int) -> None:
        """Liveness, and exactly so many fences."""
        self.world.heal()
        self.world.run_until_quiet(self.world.sim.now + HEAL_SECONDS_MAX)
        if self.world.fences != fences:
            raise Violation(Kind.FENCES, f"{self.world.fences} fences, {fences} expected")

    def expect_answered(self, *requests: Request) -> None:
        for request in requests:
            if request.state is not RequestState.ANSWERED:
                raise Violation(Kind.LIVENESS, f"request {request.serial}: {request.state}")

    @property
    def prefill(self) -> PrefillWorker:
        return next(iter(self.world.prefills.values()))

    @property
    def decode(self) -> DecodeWorker:
        return next(iter(self.world.decodes.values()))


Schedule = Callable[[Stage], None]


def run_schedule(schedule: Schedule, trace: Trace = None) -> Result:
    """Play it; say what it found."""
    stage = Stage(trace)
    text, kind = verdict(lambda: schedule(stage))
    world = stage.world
    here = world.prompts_here
    return Result(0, world.sim.events, world.rooms, world.fences, 0, here, text, kind)


def only_first(fate: Fate) -> Callable[[InFlight], Fate]:
    """The first write meets `fate`, all others succeed."""
    fates = iter((fate,))
    return lambda write: next(fates, Fate.SUCCEEDS)


def lose_first(kind: type) -> Callable[[Any], Any]:
    """The first message of `kind` is lost."""
    lost: list[Any] = []

    def intercept(message: Any) -> Any:
        if isinstance(message, kind) and not lost:
            lost.append(message)
            return None
        return message

    return intercept
