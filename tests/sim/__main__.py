"""`python -m tests.sim`: many seeds, one seed with its trace, or one mutant."""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from tests.sim.run import Result, run_calm_seed, run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--start", type=int, default=0, help="the first")
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--trace", action="store_true", help="print every event of --seed")
    parser.add_argument("--calm", action="store_true", help="no faults, and so no fence")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    arguments = parser.parse_args()
    run = run_calm_seed if arguments.calm else run_seed
    if arguments.seed is not None:
        result = run(arguments.seed, print if arguments.trace else None)
        print(result)
        return int(result.violation is not None)
    return run_many(range(arguments.start, arguments.start + arguments.seeds), arguments)


def run_many(seeds: range, arguments: argparse.Namespace) -> int:
    began = time.perf_counter()
    run = run_calm_seed if arguments.calm else run_seed
    results: list[Result] = []
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for result in pool.map(run, seeds, chunksize=8):
            results.append(result)
            if result.violation:
                print(f"seed {result.seed}: {result.violation}", flush=True)
    seconds = time.perf_counter() - began
    failed = sum(r.violation is not None for r in results)
    print(
        f"{len(results)} seeds, {failed} failed, {sum(r.events for r in results)} events, "
        f"{sum(r.rooms for r in results)} rooms, {sum(r.answered for r in results)} answered, "
        f"{sum(r.fences for r in results)} fences, {seconds:.1f} s, "
        f"{len(results) / seconds:.1f} seeds/s"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
