"""`pdrt status`: the gateway's `/status` as tables, once or again and again."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from pdrt.cli.client import EPILOG, Gateway, add_address_flags
from pdrt.cli.flags import Parser
from pdrt.cli.status_rates import rates
from pdrt.cli.status_tables import render
from pdrt.errors import ConfigError, PdrtError

WATCH_SECONDS = 2.0
WATCH_SECONDS_MIN = 0.2
"""Each look asks every worker."""
WATCH_ROWS_MAX = 12
"""Of one table of the live view, which has one screen."""
PIPE_WIDTH = 160
"""Columns where there is no terminal to fit."""

Record = Mapping[str, Any]


def status(arguments: Sequence[str]) -> int:
    """0 if the deployment is ready, 1 if it is not."""
    flags = _parser().parse(arguments)
    gateway = Gateway(flags)
    if flags["watch"] is not None:
        return _watch(gateway.status, _seconds(flags["watch"]), flags["json"])
    document = gateway.status()
    if flags["json"]:
        print(json.dumps(document, indent=2))
    else:
        _console().print(render(document, rates(document)))
    return 0 if document.get("ready") else 1


def _parser() -> Parser:
    parser = Parser(
        prog="pdrt status",
        description="Workers, rooms, leases, pages and speed of a running gateway. Exit code 0 if "
        "it is ready to serve, 1 if not, 2 if it does not answer.",
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_address_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the document as it came")
    parser.add_argument(
        "--watch",
        metavar="SECONDS",
        nargs="?",
        const=str(WATCH_SECONDS),
        help=f"look again every so many seconds ({WATCH_SECONDS:.0f} if not given), until Ctrl-C; "
        "on a terminal in place, with --json a line each time",
    )
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not WATCH_SECONDS_MIN <= seconds <= 3600:
        raise ConfigError(f"--watch {text!r}: seconds from {WATCH_SECONDS_MIN} to 3600")
    return seconds


def _console() -> Console:
    console = Console()
    return console if _is_screen(console) else Console(width=PIPE_WIDTH)


def _is_screen(console: Console) -> bool:
    """Whether something can be shown in place; on a dumb terminal nothing would be seen at all."""
    return console.is_terminal and not console.is_dumb_terminal


def _watch(fetch: Callable[[], Record], seconds: float, is_json: bool) -> int:
    """Until Ctrl-C. A gateway that is away is waited for, once it has been seen."""
    view = View(fetch(), time.monotonic())
    console = _console()
    try:
        if is_json:
            while True:
                print(json.dumps(view.line()), flush=True)
                time.sleep(seconds)
                view.look(fetch, time.monotonic())
        if not _is_screen(console):
            while True:
                console.print(view.shown(), Text())
                time.sleep(seconds)
                view.look(fetch, time.monotonic())
        with Live(view.shown(), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(seconds)
                view.look(fetch, time.monotonic())
                live.update(view.shown(), refresh=True)
    except KeyboardInterrupt:
        return 0 if view.document.get("ready") else 1


class View:
    """The newest document, and the one before it."""

    def __init__(self, document: Record, now: float) -> None:
        self.document = document
        self._rates = rates(document)
        self._seen_at = now
        self._trouble: str | None = None

    def look(self, fetch: Callable[[], Record], now: float) -> None:
        """Fetch again; what goes wrong is shown over what was seen last."""
        try:
            document = fetch()
        except PdrtError as error:
            self._trouble = str(error)
            return
        self._rates = rates(document, self.document, now - self._seen_at)
        self.document, self._seen_at, self._trouble = document, now, None

    def line(self) -> Record:
        """The newest document, or why there is none."""
        return self.document if self._trouble is None else {"error": self._trouble}

    def shown(self) -> RenderableType:
        body = render(self.document, self._rates, WATCH_ROWS_MAX)
        if self._trouble is None:
            return body
        return Group(Text(self._trouble, style="red bold"), body)
