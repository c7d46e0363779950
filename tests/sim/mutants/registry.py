"""What a mutant is, and how it is caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from tests.sim.core import Kind
from tests.sim.run import Result, run_calm_seed, run_seed
from tests.sim.stage import Schedule, run_schedule

Patch = tuple[object, str, Any]


class Mutant:
    """One broken rule. Caught by a directed schedule, or by chance within `seeds` seeds."""

    def __init__(
        self,
        build: Callable[[], list[Patch]],
        kinds: tuple[Kind, ...],
        how: Schedule | int,
        is_calm: bool,
    ) -> None:
        self.name = build.__name__
        self.rule = build.__doc__ or ""
        self.kinds = frozenset(kinds)
        self.schedule = None if isinstance(how, int) else how
        self.seeds = how if isinstance(how, int) else 0
        self.is_calm = is_calm
        self._build = build

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, replacement in self._build():
                stack.enter_context(patch.object(owner, name, replacement))
            yield

    def hunt(self) -> Result | None:
        """The first violation of the right kind, or None when the mutant escapes. A rule may have
        other victims too, on the way."""
        with self.applied():
            return next((result for result in self._runs() if result.kind in self.kinds), None)

    def _runs(self) -> Iterator[Result]:
        if self.schedule is not None:
            yield run_schedule(self.schedule)
        else:
            run = run_calm_seed if self.is_calm else run_seed
            yield from map(run, range(self.seeds))

    @property
    def caught_by(self) -> str:
        """For people."""
        if self.schedule is not None:
            return f"schedule {self.schedule.__name__}"
        return f"{self.seeds} {'calm ' if self.is_calm else ''}seeds"


MUTANTS: dict[str, Mutant] = {}


def mutant(
    *kinds: Kind, seeds: int = 300, schedule: Schedule | None = None, is_calm: bool = False
) -> Callable[[Callable[[], list[Patch]]], Callable[[], list[Patch]]]:
    """Register a mutant: the violations it may be caught for, and where they are looked for."""

    def register(build: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
        MUTANTS[build.__name__] = Mutant(build, kinds, schedule or seeds, is_calm)
        return build

    return register
