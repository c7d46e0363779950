"""The standard set of several endpoints in turn, on one machine: while one is measured, the
processes of the others are stopped (SIGSTOP), so that all of them meet the same machine and none of
them disturbs another.

    python benchmarks/side_by_side.py \\
        --endpoint pdrt  http://127.0.0.1:8000 smollm2-135m-instruct 1234 \\
        --endpoint vllm  http://127.0.0.1:8192 smol 2345,2346,2347 --json-to DIRECTORY

Each endpoint is named with its URL, its model and the ids of its processes, whose children count
too. DIRECTORY gets NAME.json for each of them, as `serve.py --json` writes it, so that
`serve.py`'s `--peer` and `check.py` read it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bars import Document
from documents import Output, finish
from local import children
from rows import (
    EXTRA_ATTEMPTS,
    Attempt,
    Row,
    attempt_once,
    flat,
    is_enough,
    print_rows,
    settle,
    unclean,
)
from standard import ROWS, Standard

from pdrt.cli.bench.flags import parser, settings_of

SETTLE_SECONDS = 3.0
"""After an endpoint goes on: its timers catch up, its connections are made again."""


class Endpoint:
    """One of those that are compared."""

    def __init__(self, name: str, url: str, model: str, processes: str) -> None:
        self.name = name
        self._roots = [int(pid) for pid in processes.split(",")]
        self.server = [str(pid) for pid in self._roots]
        flags = ["--url", url, "--model", model]
        self.standard = Standard(settings_of(parser().parse(flags)))

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """It runs, until this ends."""
        self.signal(signal.SIGCONT)
        time.sleep(SETTLE_SECONDS)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        for root in self._roots:
            for pid in (root, *children(root)):
                os.kill(pid, number)


def take(endpoints: Sequence[Endpoint], row: str, repeats: int) -> list[Row]:
    """One row of each, in turn, until all of them have enough clean attempts."""
    attempts: list[list[Attempt]] = [[] for _ in endpoints]
    for number in range(repeats + EXTRA_ATTEMPTS):
        for endpoint, taken in zip(endpoints, attempts, strict=True):
            if is_enough(taken, repeats):
                continue
            name, once = f"{endpoint.name}, {row}", endpoint.standard.taker(row)
            with endpoint.going_on():
                attempt = asyncio.run(attempt_once(name, once, endpoint.server, number))
            if attempt is not None:
                taken.append(attempt)
    return [settle(row, taken, repeats) for taken in attempts]


def main(arguments: Sequence[str]) -> int:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = flags.add_argument
    words = ("NAME", "URL", "MODEL", "PIDS")
    add("--endpoint", nargs=4, metavar=words, action="append", required=True)
    add("--rows", nargs="+", choices=ROWS, default=["c1_256", "c1_1500", "c8_256", "mixed"])
    add("--repeats", type=int, default=3, help="of each row")
    add("--json-to", type=Path, required=True, metavar="DIRECTORY", help="gets NAME.json of each")
    given = flags.parse_args(arguments)
    endpoints = [Endpoint(*words) for words in given.endpoint]
    for endpoint in endpoints:
        endpoint.signal(signal.SIGSTOP)
    try:
        taken = [take(endpoints, row, given.repeats) for row in given.rows]
    finally:
        for endpoint in endpoints:
            endpoint.signal(signal.SIGCONT)
    for index, endpoint in enumerate(endpoints):
        rows = [row[index] for row in taken]
        print(f"\n{endpoint.name}")
        print_rows(rows)
        document = Document("serve", flat(rows), unclean(rows))
        detail = {"url": endpoint.standard.root, "rows": rows}
        finish(document, detail, Output(given.json_to / f"{endpoint.name}.json"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
