"""The hand-over survives its faults: seeds, calm seeds, directed schedules."""

from __future__ import annotations

import pytest

from tests.sim.plan import EngineKind
from tests.sim.run import run_calm_seed, run_seed
from tests.sim.schedules import SCHEDULES
from tests.sim.stage import Schedule, run_schedule
from tests.sim.sweeps import FAULTS, Fault, sweep

BATCH = 25


@pytest.mark.parametrize("first", range(0, 400, BATCH))
def test_seeds_survive_every_fault(first: int) -> None:
    for seed in range(first, first + BATCH):
        result = run_seed(seed)
        assert result.violation is None, f"python -m tests.sim --seed {seed} --trace: {result}"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10_000, 12_000, 10 * BATCH))
def test_many_seeds_survive_every_fault(first: int) -> None:
    for seed in range(first, first + 10 * BATCH):
        result = run_seed(seed)
        assert result.violation is None, f"python -m tests.sim --seed {seed} --trace: {result}"


@pytest.mark.parametrize("first", range(0, 150, BATCH))
def test_no_faults_no_fence(first: int) -> None:
    for seed in range(first, first + BATCH):
        result = run_calm_seed(seed)
        assert result.violation is None, f"python -m tests.sim --calm --seed {seed}: {result}"
        assert result.fences == 0


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.__name__)
def test_schedule_passes(schedule: Schedule) -> None:
    assert run_schedule(schedule).violation is None


def test_a_seed_repeats_itself() -> None:
    first: list[str] = []
    second: list[str] = []
    run_seed(7, first.append)
    run_seed(7, second.append)
    assert first == second
    assert len(first) > 100


def test_seeds_are_busy() -> None:
    """The faults are there: a simulator that never fences or preempts proves nothing."""
    results = [run_seed(seed) for seed in range(40)]
    assert sum(result.rooms for result in results) > 400
    assert sum(result.fences for result in results) > 40
    assert sum(result.answered for result in results) > 150
    assert sum(result.prompts_here for result in results) > 40


@pytest.mark.parametrize("engine", EngineKind, ids=lambda e: e.value)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_fault_at_every_third_step(engine: EngineKind, fault: Fault) -> None:
    assert list(sweep(engine, fault, stride=3)) == []


@pytest.mark.slow
@pytest.mark.parametrize("engine", EngineKind, ids=lambda e: e.value)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_fault_at_every_step_and_one_more(engine: EngineKind, fault: Fault) -> None:
    assert list(sweep(engine, fault)) == []
    for other in FAULTS:
        assert list(sweep(engine, fault, other, stride=8)) == []
