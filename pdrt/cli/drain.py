"""`pdrt drain`: a worker finishes what it has and leaves, as after SIGTERM."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from pdrt.cli.client import EPILOG, Gateway, add_address_flags
from pdrt.cli.flags import Parser
from pdrt.errors import ConfigError, PdrtError

POLL_SECONDS = 0.5
WAIT_SECONDS = 300.0
"""Far longer than a worker may take to finish, and to be started again."""
EXIT_TIMEOUT = 1

Record = Mapping[str, Any]


def drain(arguments: Sequence[str]) -> int:
    """0 when it was asked to leave (with --wait: when it is gone), 1 when waiting took too long."""
    flags = _parser().parse(arguments)
    seconds_max = _seconds(flags["timeout"])
    gateway = Gateway(flags)
    pairs = _pairs(gateway.status())
    worker = _ask(gateway, flags["worker"])
    label = f"{worker['role']} {worker['worker']}"
    print(f"{label} takes nothing new, finishes what it has, and leaves", flush=True)
    deadline = time.monotonic() + seconds_max
    if flags["wait"] or flags["replaced"]:
        while not _is_gone(gateway.status(), worker["worker"]):
            if not _pause(deadline):
                print(f"{label} is still there after {seconds_max:g} s")
                return EXIT_TIMEOUT
        print(f"{label} is gone", flush=True)
    if flags["replaced"]:
        while (now := _pairs(gateway.status())) < pairs:
            if not _pause(deadline):
                print(f"{now} pairs of workers serve after {seconds_max:g} s, of {pairs} before")
                return EXIT_TIMEOUT
        print(f"{now} pairs of workers serve ({pairs} before)")
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="pdrt drain",
        description="Have a worker take no new requests, finish or hand on those it has within its "
        "--shutdown-timeout, and end: as SIGTERM does. `pdrt up` then starts it anew; for a "
        "rolling restart, drain one worker after another with --replaced.",
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "worker", metavar="WORKER", help="as `pdrt status` shows it, or the beginning of its name"
    )
    add_address_flags(parser)
    parser.add_argument("--wait", action="store_true", help="until it is gone")
    parser.add_argument(
        "--replaced",
        action="store_true",
        help="also until as many pairs of workers serve as before, another in its place",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        default=str(WAIT_SECONDS),
        help=f"how long to wait at most (default: {WAIT_SECONDS:g})",
    )
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 1e9:
        raise ConfigError(f"--timeout {text} is not a number of seconds above 0")
    return seconds


def _ask(gateway: Gateway, name: str) -> Record:
    """The worker that is leaving now."""
    answer = gateway.post(f"/workers/{quote(name, safe='')}/drain")
    body = answer.body if isinstance(answer.body, dict) else {}
    if answer.status == 200:
        return body
    error = body.get("error")
    if not isinstance(error, dict):
        raise PdrtError(f"{gateway.url} answered {answer.status}: is this a pdrt gateway?")
    raise PdrtError(f"{error.get('message')}; `pdrt status` lists the workers")


def _pause(deadline: float) -> bool:
    """False when the time is up."""
    if time.monotonic() >= deadline:
        return False
    time.sleep(POLL_SECONDS)
    return True


def _is_gone(document: Record, name: str) -> bool:
    return all(w["worker"] != name or w["state"] == "lost" for w in document["workers"])


def _pairs(document: Record) -> int:
    """Pairs of a decode and a prefill worker that can serve together."""
    usable = [w for w in document["workers"] if w["state"] == "live" and w["healthy"]]
    endpoints = {w["endpoint"] for w in usable if w["role"] == "prefill"}
    return sum(len(endpoints.intersection(w["paired"])) for w in usable if w["role"] == "decode")
