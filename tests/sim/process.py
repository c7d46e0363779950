"""A worker's processes: what arrives, when it is read, and in which order effects are applied."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from pdrt.ids import Incarnation
from tests.sim.plan import TICK_SECONDS

if TYPE_CHECKING:
    from tests.sim.world import World

Event = tuple[Callable[..., Any], tuple[Any, ...]]


class Rank:
    """One process of a worker other than its leader's loop: FIFO from the leader, FIFO back."""

    def __init__(self, worker: Process, index: int) -> None:
        self.worker = worker
        self.index = index
        self.is_hung = False
        self._inbox: deque[Event] = deque()
        self._last_down = 0.0
        self._last_up = 0.0

    def send(self, call: Callable[..., None], *arguments: Any) -> None:
        """From the leader. Rank 0 is the leader's own process: no delay."""
        if self.index == 0:
            self.post(call, *arguments)
            return
        sim = self.worker.world.sim
        self._last_down = max(self._last_down, sim.now + sim.rng.random() * 0.02)
        sim.after(self._last_down - sim.now, self.post, call, *arguments)

    def answer(self, call: Callable[..., Any], *arguments: Any) -> None:
        """To the leader, as an event of its loop."""
        worker = self.worker
        if self.index == 0:
            worker.post(call, *arguments)
            return
        sim = worker.world.sim
        self._last_up = max(self._last_up, sim.now + sim.rng.random() * 0.02)
        sim.after(self._last_up - sim.now, worker.post, call, *arguments)

    def post(self, call: Callable[..., None], *arguments: Any) -> None:
        """An event of this rank. A hung one reads nothing."""
        if not self.worker.is_alive:
            return
        if self.is_hung or (self.index == 0 and self.worker.is_stalled):
            self._inbox.append((call, arguments))
        else:
            call(*arguments)

    def wake(self) -> None:
        self.is_hung = False
        while self._inbox and not self.is_hung and self.worker.is_alive:
            call, arguments = self._inbox.popleft()
            call(*arguments)


class Process:
    """A worker: the leader's loop and its ranks. One event at a time; its effects, and those of
    events nested in them, are applied in the order in which they were returned."""

    def __init__(self, world: World, name: str, incarnation: Incarnation, ranks: int) -> None:
        self.world = world
        self.name = name
        self.incarnation = incarnation
        self.is_alive = True
        self.is_stalled = False
        self.is_backlogged = False
        """Ticks on time, but reads its inbox at ticks only."""
        self.ranks: list[Any] = [self.make_rank(index) for index in range(ranks)]
        self._inbox: deque[Event] = deque()
        self._effects: deque[Any] = deque()
        self._is_applying = False
        self._is_waking = False
        world.sim.after(world.sim.rng.random() * TICK_SECONDS, self.tick)

    # For the two roles

    def make_rank(self, index: int) -> Rank:
        return Rank(self, index)

    def apply(self, effect: Any) -> None:
        raise NotImplementedError

    def handle_timer(self, now: float) -> Iterable[Any]:
        raise NotImplementedError

    def check(self) -> None:
        """Raise AssertionError where the worker's tables contradict each other."""
        raise NotImplementedError

    def on_death(self) -> None:
        """Memory and connections are gone."""

    # Events

    def post(self, call: Callable[..., Iterable[Any] | None], *arguments: Any) -> None:
        """Something arrives."""
        if not self.is_alive:
            return
        if self.is_stalled or self.is_backlogged:
            self._inbox.append((call, arguments))
        else:
            self.step(call, *arguments)

    def step(self, call: Callable[..., Iterable[Any] | None], *arguments: Any) -> None:
        """One event of the loop, with everything that follows from it at once."""
        effects = call(*arguments)
        if effects:
            self._effects.extend(effects)
        if self._is_applying:
            return
        self._is_applying = True
        had_effects = bool(self._effects)
        while self._effects and self.is_alive:
            self.apply(self._effects.popleft())
        self._is_applying = False
        if had_effects and self.is_alive:
            self.check()

    def drain_inbox(self) -> None:
        while self._inbox and self.is_alive:
            call, arguments = self._inbox.popleft()
            self.step(call, *arguments)

    def tick(self) -> None:
        """The loop's timer; a stalled process takes it when it wakes."""
        if not self.is_alive:
            return
        if not self.is_stalled:
            self.take_tick()
        jitter = 0.9 + 0.2 * self.world.sim.rng.random()
        self.world.sim.after(TICK_SECONDS * jitter, self.tick)

    def take_tick(self) -> None:
        """Everything that has arrived is read before anybody is accused of silence."""
        self.drain_inbox()
        if self.is_alive:
            self.step(self.handle_timer, self.world.sim.now)

    # Faults

    def stall(self, seconds: float) -> None:
        """SIGSTOP of the leader, SIGCONT later."""
        if self.is_alive and not self.is_stalled:
            self.world.sim.say(self.name, "stalls for %.2f s", seconds)
            self.is_stalled = True
            self.world.sim.after(seconds, self.wake)

    def wake(self) -> None:
        if not self.is_alive or not self.is_stalled:
            return
        self.world.sim.say(self.name, "wakes")
        self.is_stalled = False
        self.take_tick()
        if self.is_alive and not self.ranks[0].is_hung:
            self.ranks[0].wake()

    def backlog(self, seconds: float) -> None:
        """A busy loop: timers run, sockets wait."""
        self.world.sim.say(self.name, "reads late for %.2f s", seconds)
        self.is_backlogged = True
        self.world.sim.after(seconds, self.catch_up)

    def catch_up(self) -> None:
        self.is_backlogged = False
        if self.is_alive and not self.is_stalled:
            self.drain_inbox()

    def rank_died(self, rank: Rank) -> None:
        """No rank is replaced alone."""
        self.die(f"rank {rank.index} died")

    def die(self, why: str) -> None:
        """All its processes are gone at once: leader and ranks."""
        if not self.is_alive:
            return
        self.world.sim.say(self.name, "dies: %s", why)
        self.is_alive = False
        self._inbox.clear()
        self._effects.clear()
        self.on_death()
        self.world.worker_died(self)
