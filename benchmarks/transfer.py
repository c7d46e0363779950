"""What the transfer engines move: `python benchmarks/transfer.py`.

Sender and receiver are processes of their own. Per engine and size of a run (one contiguous piece),
beside what bounds it, taken in turn in the same run: a warm memcpy for `local`, bare sockets with
the same number of connections for the others. GB/s are 10^9 bytes. Then a prompt of 2,048 tokens of
Llama-3.1-8B's shape at TP 1→1, 2→1 and 1→2, and what a hand-over costs besides its bytes.

    gbs            through the engine
    memcpy, raw    what it is held against, and to_… its share of that; sync: mooncake's own default
                   call, a run at a time
    to_matched     seconds per byte at unequal TP, to those at 1→1
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import uvloop
from as_worker import device_of
from bars import Document
from documents import Output, add_flags, finish
from empty_handover import PROMPTS
from empty_handover import measure as measure_handover
from rows import Figures, Row, Take, flat, print_rows, repeat, unclean
from transfer_party import (
    LLAMA_8B,
    PAGES,
    Copy,
    Party,
    Prompt,
    Raw,
    Reach,
    Runs,
    Show,
    Shown,
    Sync,
    Took,
)

from pdrt.cli.torture.engines import ENGINES
from pdrt.config import WorkerConfig
from pdrt.ids import new_incarnation
from pdrt.model.resources import usable_cpus
from pdrt.transfer.engines import tcp_connections

KIB = 1024
SIZES = {"12k": 12 * KIB, "64k": 64 * KIB, "368k": 368_640, "2m": 2048 * KIB}
"""A page of SmolLM2-135M is 368,640 bytes."""
RUNS_MIN, RUNS_MAX = 64, 1024
BURST_BYTES = 1 << 26
"""Of one burst, as far as the number of runs goes."""
BURSTS = 9
"""Of each kind, in turn; the first of each warms up."""
BESIDE: dict[str, dict[str, type[Runs]]] = {
    "local": {"memcpy": Copy},
    "tcp": {"raw": Raw},
    "mooncake": {"raw": Raw, "sync": Sync},
}
"""What each engine is held against."""
PROMPT_BYTES = PAGES * LLAMA_8B.page_bytes
PROMPT_TPS = ((1, 1), (2, 1), (1, 2))
START_SECONDS = 0.02
"""Until all senders begin: each has read its line by then."""


class Rig:
    """Senders and receivers of one engine at one pair of TP degrees."""

    def __init__(self, senders: Sequence[Party], receivers: Sequence[Party]) -> None:
        self._senders = senders
        self._receivers = receivers

    def reach(self, engine: str, connections: int) -> None:
        """`connections`: of raw sockets. Raises PdrtError where the engine does not run here."""
        decode, count = new_incarnation(), len(self._senders)
        shown = []
        for rank, party in enumerate(self._receivers):
            show = Show(engine, decode, rank, len(self._receivers), connections)
            shown.append(party.ask(show, Shown))
        port = shown[0].socket_port
        segments = tuple(each.segment for each in shown)
        for rank, party in enumerate(self._senders):
            party.ask(Reach(engine, rank, count, decode, segments, port, connections), Took)

    def seconds(self, job: Runs) -> float:
        """Of one burst of the only sender."""
        took = self._senders[0].ask(job, Took)
        return took.ended - took.began

    def prompt_seconds(self) -> float:
        """From the first sender's beginning to the last one's end."""
        job = Prompt(time.monotonic() + START_SECONDS)
        for party in self._senders:
            party.tell(job)
        took = [party.answer(Took) for party in self._senders]
        return max(each.ended for each in took) - min(each.began for each in took)


@contextlib.contextmanager
def rig(engine: str, senders: int, receivers: int, connections: int = 0) -> Iterator[Rig]:
    with contextlib.ExitStack() as stack:
        sending = [stack.enter_context(Party("sender")) for _ in range(senders)]
        receiving = [stack.enter_context(Party("receiver")) for _ in range(receivers)]
        made = Rig(sending, receiving)
        made.reach(engine, connections)
        yield made


def runs_of(size: int) -> int:
    return max(RUNS_MIN, min(RUNS_MAX, BURST_BYTES // size))


def measure_runs(made: Rig, engine: str, size: int) -> Figures:
    """Medians of bursts through the engine, and of what it is held against, in turn."""
    runs = runs_of(size)
    others = {name: kind(size, runs) for name, kind in BESIDE[engine].items()}
    seconds: dict[str, list[float]] = {name: [] for name in ("own", *others)}
    for _ in range(BURSTS):
        seconds["own"].append(made.seconds(Runs(size, runs)))
        for name, job in others.items():
            seconds[name].append(made.seconds(job))
    moved = size * runs / 1e9
    rates = {name: moved / statistics.median(each[1:]) for name, each in seconds.items()}
    figures = {"gbs": rates["own"]}
    for name in others:
        figures |= {f"{name}_gbs": rates[name], f"to_{name}": rates["own"] / rates[name]}
    return figures


def measure_prompt(rigs: dict[str, Rig]) -> Figures:
    """The same bytes at each pair of degrees, in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in rigs}
    for _ in range(BURSTS):
        for name, made in rigs.items():
            seconds[name].append(made.prompt_seconds())
    medians = {name: statistics.median(each[1:]) for name, each in seconds.items()}
    matched = medians["1to1"]
    rates = {f"{name}_gbs": PROMPT_BYTES / 1e9 / each for name, each in medians.items()}
    ratios = {
        f"{name}_to_matched": each / matched for name, each in medians.items() if name != "1to1"
    }
    return {**rates, **ratios}


async def runs_rows(engine: str, repeats: int) -> list[Row]:
    """A row per size."""
    with rig(engine, 1, 1, connections()) as made:

        def take(size: int) -> Take:
            async def measure(attempt: int) -> Figures:
                return await asyncio.to_thread(measure_runs, made, engine, size)

            return measure

        return [
            await repeat(f"{engine}_{name}", take(size), (), repeats)
            for name, size in SIZES.items()
        ]


def connections() -> int:
    """As many as the tcp engine has, whose sender looks at the cores that it may run on."""
    cpus = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, usable_cpus(cpus, None, device_of("prefill", 0, 1)).cpus)
        return tcp_connections(WorkerConfig())
    finally:
        os.sched_setaffinity(0, cpus)


async def prompt_row(engine: str, repeats: int) -> Row:
    with contextlib.ExitStack() as stack:
        rigs = {
            f"{senders}to{receivers}": stack.enter_context(rig(engine, senders, receivers))
            for senders, receivers in PROMPT_TPS
        }

        async def take(attempt: int) -> Figures:
            return await asyncio.to_thread(measure_prompt, rigs)

        return await repeat(f"{engine}_prompt", take, (), repeats)


async def measure_all(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for engine in options.engine or ENGINES:
        rows += await runs_rows(engine, options.repeats)
        rows.append(await prompt_row(engine, options.repeats))

    for name, tokens in PROMPTS.items():

        async def handover(attempt: int, tokens: int = tokens) -> Figures:
            return await measure_handover(tokens)

        rows.append(await repeat(name, handover, (), options.repeats))
    return rows


def to_mooncake(rows: Sequence[Row]) -> dict[str, float | None]:
    """What the tcp engine moves, to what mooncake does over TCP."""
    rates = {row.name: row.figures.get("gbs") for row in rows}
    ratios: dict[str, float | None] = {}
    for size in SIZES:
        own, other = rates.get(f"tcp_{size}"), rates.get(f"mooncake_{size}")
        if own and other:
            ratios[f"tcp_{size}.to_mooncake"] = own / other
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", action="append", choices=ENGINES, help="only these")
    parser.add_argument("--repeats", type=int, default=3, help="medians of so many clean runs")
    add_flags(parser)
    options = parser.parse_args()
    rows = uvloop.run(measure_all(options))
    print_rows(rows)
    document = Document("transfer", flat(rows) | to_mooncake(rows), unclean(rows))
    return finish(document, {"rows": rows}, Output(options.json, options.check))


if __name__ == "__main__":
    sys.exit(main())
