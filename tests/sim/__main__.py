"""`python -m tests.sim`: many seeds, one seed or schedule with its trace, or one mutant."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

from tests.sim.mutants import MUTANTS
from tests.sim.run import Result, run_calm_seed, run_seed
from tests.sim.schedules import SCHEDULES
from tests.sim.stage import run_schedule

CHUNK_SEEDS = 16


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many (default 200)")
    parser.add_argument("--start", type=int, default=0, help="the first (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--calm", action="store_true", help="no faults, and so no fence")
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--schedule", choices=sorted(s.__name__ for s in SCHEDULES))
    parser.add_argument("--trace", action="store_true", help="print every event of it")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), metavar="NAME", help="break one rule")
    parser.add_argument("--list-mutants", action="store_true", help="one name a line")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    if arguments.list_mutants:
        print("\n".join(MUTANTS))
        return 0
    if arguments.mutant is not None and arguments.seed is None:
        return hunt(arguments.mutant)
    if arguments.schedule is not None or arguments.seed is not None:
        return replay(arguments)
    return run_many(arguments)


def hunt(name: str) -> int:
    """1 when the mutant is caught, as it must be."""
    mutant = MUTANTS[name]
    print(f"{name}: {mutant.rule}")
    result = mutant.hunt()
    if result is None:
        print(f"NOT caught by {mutant.caught_by}")
        return 0
    where = mutant.caught_by if mutant.schedule else f"seed {result.seed}"
    print(f"caught by {where}: {result.violation}")
    return 1


def replay(arguments: argparse.Namespace) -> int:
    """One run, with its trace if wanted; under a mutant if one is named."""
    trace = print if arguments.trace else None
    schedule = next((s for s in SCHEDULES if s.__name__ == arguments.schedule), None)

    def run() -> Result:
        if schedule is not None:
            return run_schedule(schedule, trace)
        return (run_calm_seed if arguments.calm else run_seed)(arguments.seed, trace)

    if arguments.mutant is None:
        result = run()
    else:
        with MUTANTS[arguments.mutant].applied():
            result = run()
    print(result)
    return int(result.violation is not None)


def run_many(arguments: argparse.Namespace) -> int:
    """1 when any seed fails. Keeps only sums, so that a million seeds need no memory."""
    began = time.perf_counter()
    seeds = range(arguments.start, arguments.start + arguments.seeds)
    run = run_calm_seed if arguments.calm else run_seed
    failed = events = rooms = answered = fences = 0
    for result in results(run, seeds, arguments.jobs):
        events += result.events
        rooms += result.rooms
        answered += result.answered
        fences += result.fences
        if result.violation is not None:
            failed += 1
            print(f"seed {result.seed}: {result.violation}", flush=True)
    seconds = time.perf_counter() - began
    print(
        f"{len(seeds)} seeds, {failed} failed, {events} events, {rooms} rooms, "
        f"{answered} requests answered, {fences} fences, {seconds:.1f} s, "
        f"{len(seeds) / seconds:.1f} seeds/s"
    )
    return int(failed > 0)


def results(run: Callable[[int], Result], seeds: range, jobs: int) -> Iterator[Result]:
    """In order; chunk by chunk, so that few results wait."""
    if jobs == 1:
        yield from map(run, seeds)
        return
    step = CHUNK_SEEDS * jobs * 8
    with ProcessPoolExecutor(jobs) as pool:
        for first in range(seeds.start, seeds.stop, step):
            part = range(first, min(first + step, seeds.stop))
            yield from pool.map(run, part, chunksize=CHUNK_SEEDS)


if __name__ == "__main__":
    sys.exit(main())
