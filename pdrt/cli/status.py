"""`pdrt status`: the gateway's `/status` as tables.

The document is read leniently: a field that an older or newer gateway lacks shows as a dash.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdrt.cli.flags import KNOWN_KEYS, Parser
from pdrt.cli.http import get_json
from pdrt.cli.load import layer_from_environment
from pdrt.errors import PdrtError

DEFAULT_URL = "http://127.0.0.1:8000"
OWNERS = ("free", "sequence", "cache", "lease", "room")
ROWS_MAX = 50  # of one table; the rest is counted

Record = Mapping[str, Any]


def status(arguments: Sequence[str]) -> int:
    """0 if the deployment is ready, 1 if it is not."""
    flags = _parser().parse(arguments)
    layer_from_environment({}, KNOWN_KEYS, os.environ)  # refuses misspelt variables
    url = (flags["url"] or os.environ.get("PDRT_URL") or DEFAULT_URL).rstrip("/")
    document = _fetch(url, flags["api_key"] or os.environ.get("PDRT_API_KEY") or None)
    if flags["json"]:
        print(json.dumps(document, indent=2))
    else:
        render(document, Console())
    return 0 if document.get("ready") else 1


def _parser() -> Parser:
    parser = Parser(
        prog="pdrt status",
        description="Workers, rooms, leases and pages of a running gateway. Exit code 0 if it is "
        "ready to serve, 1 if not, 2 if it does not answer.",
        epilog="PDRT_URL and PDRT_API_KEY in the environment stand in for the flags.",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", metavar="TEXT", help=f"the gateway (default: {DEFAULT_URL})")
    parser.add_argument("--api-key", metavar="TEXT", help="sent as a bearer token")
    parser.add_argument("--json", action="store_true", help="print the document as it came")
    return parser


def _fetch(url: str, api_key: str | None) -> Record:
    if not url.startswith(("http://", "https://")):
        raise PdrtError(f"--url {url} is not an http:// or https:// address")
    try:
        answer = get_json(f"{url}/status", api_key, timeout_seconds=10.0)
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise PdrtError(
            f"nothing answers at {url} ({reason}); start it with `pdrt up`, or name it with --url"
        ) from error
    if answer.status in (401, 403):
        raise PdrtError(f"{url} wants an API key; give it with --api-key or PDRT_API_KEY")
    if answer.status != 200 or not isinstance(answer.body, dict):
        raise PdrtError(f"{url}/status answered {answer.status}: is this a pdrt gateway?")
    return answer.body


def render(document: Record, console: Console) -> None:
    """Tables on the console; empty ones are left out."""
    ready = bool(document.get("ready"))
    console.print(Text("ready" if ready else "not ready", style="green" if ready else "red bold"))
    for reason in _items(document, "reasons"):
        console.print(Text(f"  {reason}"))
    gateway = _record(document, "gateway")
    facts = [f"{key} {_short(key, value)}" for key, value in gateway.items()]
    console.print(Text("gateway  " + "  ".join(facts) if facts else "gateway"))
    workers = [worker for worker in _items(document, "workers") if isinstance(worker, Mapping)]
    if not workers:
        console.print("no workers: start some with `pdrt prefill` and `pdrt decode`")
        return
    for table in (
        _workers_table(workers),
        _pages_table(workers),
        _pairs_table(workers),
        _rooms_table(workers),
        _leases_table(workers),
        _quarantine_table(workers),
    ):
        if table.row_count:
            console.print(table)


def _workers_table(workers: Sequence[Record]) -> Table:
    table = _table(
        "workers", "role", "worker", "endpoint", "state", "running", "queued", "rooms", "leases", ""
    )
    for worker in workers:
        load = _record(worker, "status")
        state = _text(worker.get("state"))
        table.add_row(
            _text(worker.get("role")),
            _identity(worker),
            _text(worker.get("endpoint")),
            Text(state, style="green" if state == "live" else "red"),
            _text(load.get("running")),
            _text(load.get("queued")),
            _text(_count(load, "rooms") if worker.get("role") == "prefill" else None),
            _text(_count(load, "leases") if worker.get("role") == "decode" else None),
            Text("; ".join(_text(reason) for reason in _items(worker, "reasons")), style="red"),
        )
    return table


def _pages_table(workers: Sequence[Record]) -> Table:
    table = _table("pages by owner", "worker", *OWNERS, "quarantined", "total", right=True)
    for worker in workers:
        load = _record(worker, "status")
        pages = _record(load, "pages")
        if not pages:
            continue
        held = _text(load.get("quarantined_pages"))
        table.add_row(
            _identity(worker),
            *(_text(pages.get(owner)) for owner in OWNERS),
            Text(held, style="" if held in ("0", "-") else "yellow"),
            _text(load.get("pages_total")),
        )
    return table


def _pairs_table(workers: Sequence[Record]) -> Table:
    """Each decode worker with the prefill workers that write into it."""
    table = _table("pairs", "decode", "prefill", "endpoint", "generation", "state", "")
    for worker, writer in _entries(workers, "writers"):
        table.add_row(
            _identity(worker),
            _identity(writer),
            _text(writer.get("endpoint")),
            _text(writer.get("generation")),
            _text(writer.get("state")),
            Text(_text(writer.get("refusal") or ""), style="red"),
        )
    return table


def _rooms_table(workers: Sequence[Record]) -> Table:
    table = _table("rooms", "worker", "room", "state", "age", "pages")
    for worker, room in _entries(workers, "rooms"):
        table.add_row(_identity(worker), *_room_cells(room))
    return table


def _leases_table(workers: Sequence[Record]) -> Table:
    table = _table("leases", "worker", "room", "state", "age", "pages", "reason")
    for worker, lease in _entries(workers, "leases"):
        table.add_row(_identity(worker), *_room_cells(lease), _text(lease.get("reason")))
    return table


def _quarantine_table(workers: Sequence[Record]) -> Table:
    table = _table("quarantine", "worker", "room", "state", "age", "pages", "reason")
    for worker, lease in _entries(workers, "quarantine"):
        table.add_row(_identity(worker), *_room_cells(lease), _text(lease.get("reason")))
    return table


def _room_cells(room: Record) -> tuple[str, str, str, str]:
    age = room.get("age_seconds")
    shown = f"{age:.1f} s" if isinstance(age, int | float) else "-"
    return _text(room.get("room")), _text(room.get("state")), shown, _text(room.get("pages"))


def _table(title: str, *columns: str, right: bool = False) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        numeric = right and column != "worker"
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    return table


def _entries(workers: Sequence[Record], key: str) -> list[tuple[Record, Record]]:
    """(worker, entry) of every worker's list `key`, bounded; a bare value is an entry's room."""
    found: list[tuple[Record, Record]] = []
    for worker in workers:
        for entry in _items(_record(worker, "status"), key):
            found.append((worker, entry if isinstance(entry, Mapping) else {"room": entry}))
    if len(found) > ROWS_MAX:
        found[ROWS_MAX:] = [({}, {"room": f"and {len(found) - ROWS_MAX} more"})]
    return found


def _count(load: Record, key: str) -> Any:
    """How many there are; the list itself may be cut."""
    total = load.get(f"{key}_total")
    return len(_items(load, key)) if total is None and key in load else total


def _record(document: Record, key: str) -> Record:
    value = document.get(key)
    return value if isinstance(value, Mapping) else {}


def _items(document: Record, key: str) -> list[Any]:
    value = document.get(key)
    return value if isinstance(value, list) else []


def _identity(worker: Record) -> str:
    return _text(worker.get("worker"))[:8]


def _short(key: str, value: Any) -> str:
    return _text(value)[:8] if key in ("incarnation", "digest") else _text(value)


def _text(value: Any) -> str:
    return "-" if value is None else str(value)
