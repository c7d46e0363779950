"""Pure core of `pdrt up`: what children did and the time in, what to do about it out.

A child that dies is restarted with a growing pause while the others keep serving; one that was
asked to leave (`pdrt drain`, SIGTERM) and did so is restarted at once, which makes a rolling
restart; one that is refused by its own configuration is not. One whose event loop stands still, or
that is stopped, beats no more: it is shown where it hangs, and killed. No process, clock or output
here: `pdrt.cli.children` carries out the effects.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from enum import Enum

import msgspec

from pdrt.cli.main import EXIT_REFUSED

PAUSE_SECONDS = 1.0  # before the first restart, doubling
PAUSE_SECONDS_MAX = 30.0
STEADY_SECONDS = 60.0  # a life this long forgets the failures before it
STARTS_MAX = 3  # starts of a child that never came up before `up` gives up
LAST_CHANCE_SECONDS = 2.0  # from showing where a silent child hangs to its end
ASLEEP_SECONDS = 1.0  # a timer this late was asleep itself: beats have come that it has not read


class ChildState(Enum):
    NEW = "new"  # not started yet
    STARTING = "starting"  # its process runs and has not announced itself
    UP = "up"  # its process runs and has announced itself
    PAUSED = "paused"  # died; starts again at `restart_at`
    ENDED = "ended"  # no process, and none will be started


_NEXT = {
    ChildState.NEW: {ChildState.STARTING},
    ChildState.STARTING: {ChildState.UP, ChildState.PAUSED, ChildState.ENDED},
    ChildState.UP: {ChildState.STARTING, ChildState.PAUSED, ChildState.ENDED},
    ChildState.PAUSED: {ChildState.STARTING, ChildState.ENDED},
    ChildState.ENDED: set(),
}


class Phase(Enum):
    SERVING = "serving"  # a child that ends is restarted
    STOPPING = "stopping"  # children were asked to end; killed at `kill_at`
    KILLING = "killing"  # children were killed; waits for their exits
    DONE = "done"  # every child has ended


class Start(msgspec.Struct, frozen=True):
    """Start the child's process."""

    child: str


class Send(msgspec.Struct, frozen=True):
    """Send a signal to the child's process."""

    child: str
    signal: signal.Signals


class ShowStacks(msgspec.Struct, frozen=True):
    """Have the child's process, not those that it started, say where its threads are."""

    child: str


class Say(msgspec.Struct, frozen=True):
    """Tell the user."""

    text: str


class Finish(msgspec.Struct, frozen=True):
    """No process is left: end with this code."""

    code: int


Effect = Start | Send | ShowStacks | Say | Finish


class Child(msgspec.Struct, kw_only=True):
    """One role's process and its history."""

    name: str
    state: ChildState = ChildState.NEW
    started_at: float = 0.0  # of the latest life
    restart_at: float | None = None  # set exactly while PAUSED
    failures: int = 0  # deaths in a row, none of them after a steady life
    was_up: bool = False  # announced itself in any life
    heard_at: float | None = None  # latest beat of a life; None before the first
    shown_at: float | None = None  # when it was silent for too long; None again with the next beat

    @property
    def runs(self) -> bool:
        return self.state in (ChildState.STARTING, ChildState.UP)

    def to(self, state: ChildState) -> None:
        assert state in _NEXT[self.state], f"{self.name}: {self.state} to {state}"
        self.state = state


class Supervisor:
    """`now` is monotonic seconds. Children start side by side: each waits by itself for those that
    it needs."""

    def __init__(
        self, names: Sequence[str], stop_seconds_max: float, hang_seconds_max: float
    ) -> None:
        """`stop_seconds_max`: for children to end when asked. `hang_seconds_max`: a child that has
        beaten may be silent for so long."""
        assert names and len(set(names)) == len(names)
        self._children = {name: Child(name=name) for name in names}
        self._stop_seconds_max = stop_seconds_max
        self._hang_seconds_max = hang_seconds_max
        self._kill_at: float | None = None  # set exactly while STOPPING
        self._code = 0  # what `up` will exit with
        self.phase = Phase.SERVING

    def state_of(self, name: str) -> ChildState:
        return self._children[name].state

    def start(self, now: float) -> list[Effect]:
        """Once, at the beginning."""
        return [self._begin(child, now) for child in self._children.values()]

    def announced(self, name: str) -> None:
        """The child is bound and serves its role."""
        child = self._children[name]
        child.to(ChildState.UP)
        child.was_up = True

    def beaten(self, name: str, now: float) -> None:
        """The child's event loop turns."""
        child = self._children[name]
        if child.runs:
            child.heard_at, child.shown_at = now, None

    def exited(self, name: str, code: int, now: float) -> list[Effect]:
        """The child's process is gone; `code` is negative for a signal, as in subprocess."""
        child = self._children[name]
        assert child.runs, f"{name} exited while {child.state}"
        if self.phase is not Phase.SERVING:
            child.to(ChildState.ENDED)
            return self._finish_if_empty()
        if child.state is ChildState.UP and code == 0:
            return [Say(f"{name} left when asked; starting it anew"), self._begin(child, now)]
        if not child.was_up and code == EXIT_REFUSED:
            child.to(ChildState.ENDED)
            return self.give_up(f"{name} cannot start; its message is above", EXIT_REFUSED, now)
        if now - child.started_at >= STEADY_SECONDS:
            child.failures = 0
        child.failures += 1
        if not child.was_up and child.failures >= STARTS_MAX:
            child.to(ChildState.ENDED)
            text = f"{name} {describe_exit(code)} in each of {STARTS_MAX} starts"
            return self.give_up(text, 1, now)
        pause = min(PAUSE_SECONDS * 2.0 ** min(child.failures - 1, 16), PAUSE_SECONDS_MAX)
        child.to(ChildState.PAUSED)
        child.restart_at = now + pause
        return [Say(f"{name} {describe_exit(code)}; restarting in {pause:g} s")]

    def give_up(self, text: str, code: int, now: float) -> list[Effect]:
        """`up` cannot go on: stop all, and end with `code`."""
        if self.phase is not Phase.SERVING:
            return []
        self._code = code
        return [Say(f"{text}; stopping all"), *self.stop(now)]

    def stop(self, now: float) -> list[Effect]:
        """Asks all to end; asked again, kills them."""
        match self.phase:
            case Phase.SERVING:
                self.phase = Phase.STOPPING
                self._kill_at = now + self._stop_seconds_max
                for child in self._children.values():
                    if child.state is ChildState.PAUSED:
                        child.to(ChildState.ENDED)
                        child.restart_at = None
                return [*self._send_all(signal.SIGTERM), *self._finish_if_empty()]
            case Phase.STOPPING:
                return self._kill()
            case Phase.KILLING | Phase.DONE:
                return []

    def deadline(self) -> float | None:
        """When `timer` is next due."""
        children = self._children.values()
        times = [self._kill_at, *(child.restart_at for child in children)]
        times += [self._silent_until(child) for child in children]
        return min((time for time in times if time is not None), default=None)

    def timer(self, now: float) -> list[Effect]:
        if self._kill_at is not None and now >= self._kill_at:
            names = ", ".join(child.name for child in self._children.values() if child.runs)
            text = f"{names} did not end within {self._stop_seconds_max:g} s; killing"
            return [Say(text), *self._kill()]
        effects: list[Effect] = []
        for child in self._children.values():
            if child.restart_at is not None and now >= child.restart_at:
                effects.append(self._begin(child, now))
            until = self._silent_until(child)
            if until is not None and now >= until:
                effects += self._hangs(child, now, now - until)
        return effects

    def _silent_until(self, child: Child) -> float | None:
        """When something is done about its silence."""
        is_watched = self.phase is Phase.SERVING and child.state is ChildState.UP
        if not is_watched or child.heard_at is None:
            return None
        if child.shown_at is not None:
            return child.shown_at + LAST_CHANCE_SECONDS
        return child.heard_at + self._hang_seconds_max

    def _hangs(self, child: Child, now: float, late: float) -> list[Effect]:
        if late > ASLEEP_SECONDS:
            child.heard_at, child.shown_at = now, None
            return []
        if child.shown_at is None:
            child.shown_at = now
            silent = f"{child.name} has been silent for {self._hang_seconds_max:g} s"
            text = f"{silent}: its event loop hangs, or it is stopped; its threads are at"
            return [Say(text), ShowStacks(child.name)]
        child.heard_at = child.shown_at = None  # its exit comes
        return [Say(f"{child.name} stays silent; killing it"), Send(child.name, signal.SIGKILL)]

    def _begin(self, child: Child, now: float) -> Effect:
        child.to(ChildState.STARTING)
        child.started_at = now
        child.restart_at = child.heard_at = child.shown_at = None
        return Start(child.name)

    def _kill(self) -> list[Effect]:
        self.phase = Phase.KILLING
        self._kill_at = None
        return list(self._send_all(signal.SIGKILL))

    def _send_all(self, sent: signal.Signals) -> Iterable[Effect]:
        return [Send(child.name, sent) for child in self._children.values() if child.runs]

    def _finish_if_empty(self) -> list[Effect]:
        if any(child.state is not ChildState.ENDED for child in self._children.values()):
            return []
        self.phase = Phase.DONE
        self._kill_at = None
        return [Finish(self._code)]


def describe_exit(code: int) -> str:
    """`died (SIGKILL)` or `ended (exit code 1)`."""
    if code >= 0:
        return f"ended (exit code {code})"
    try:
        return f"died ({signal.Signals(-code).name})"
    except ValueError:
        return f"died (signal {-code})"
