"""`python -m tests.chaos`: rounds of faults under load, for as long as one likes."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from pdrt.model.fetch import resolve_model
from tests.chaos.chaos import Chaos
from tests.chaos.cluster import Cluster
from tests.chaos.faults import ALL_KINDS, KINDS
from tests.chaos.hosts import Hosts
from tests.chaos.shapes import Shapes
from tests.e2e.reference import Reference
from tests.model.tiny import make_tiny_model

FLAG_HELP = "for every process of a role, as in decode:--local-prefill=fallback"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first round (default 0)")
    parser.add_argument("--rounds", type=int, default=10, help="how many (default 10)")
    parser.add_argument("--waves", type=int, default=5, help="of faults, a round (default 5)")
    parser.add_argument("--kind", action="append", choices=sorted(ALL_KINDS), help="only these")
    parser.add_argument(
        "--hosts", action="store_true", help="one for each process: network namespaces, for root"
    )
    parser.add_argument("--workers", type=int, default=2, help="of each role (default 2)")
    parser.add_argument("--clients", type=int, default=8, help="that want answers (default 8)")
    parser.add_argument("--storm", type=int, default=0, help="aborts before each round (default 0)")
    parser.add_argument("--model", help="a real one (default: a tiny random one)")
    parser.add_argument("--flag", action="append", default=[], metavar="ROLE:FLAG", help=FLAG_HELP)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here too")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs here")
    return parser.parse_args()


async def run(arguments: argparse.Namespace, folder: Path) -> int:
    """1 when a round failed; that is the last one."""
    if arguments.model is None:
        model = make_tiny_model(folder / "tiny", max_position_embeddings=4096, num_hidden_layers=6)
    else:
        model = resolve_model(arguments.model, print)
    make = Hosts if arguments.hosts else Cluster
    with make(folder, str(model), arguments.workers, arguments.flag) as cluster:
        chaos = Chaos(cluster, Shapes(Reference(model), 40, 300), arguments.clients)
        kinds = arguments.kind or list(ALL_KINDS if arguments.hosts else KINDS)
        failed = True
        try:
            await chaos.begin()
            for seed in range(arguments.seed, arguments.seed + arguments.rounds):
                if arguments.storm:
                    await chaos.storm(arguments.storm, seed)
                await chaos.random_round(seed, arguments.waves, kinds)
                print(f"round with seed {seed} is over", file=sys.stderr, flush=True)
            failed = False
        except AssertionError as error:
            print(f"{cluster.logs()}\nFAILED: {error}", file=sys.stderr)
        finally:  # Ctrl-C too
            print(chaos.report)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(chaos.report.facts(), indent=1) + "\n")
    return int(failed)


def main() -> int:
    arguments = parse()
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
        return asyncio.run(run(arguments, arguments.keep))
    with tempfile.TemporaryDirectory(prefix="pdrt-chaos-") as folder:
        return asyncio.run(run(arguments, Path(folder)))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
