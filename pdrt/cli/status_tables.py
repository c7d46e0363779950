"""A gateway's `/status` as tables and bars.

The document is read leniently: a field that an older or newer gateway lacks shows as a dash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdrt.cli.status_rates import Rates, record

OWNERS = {
    "sequence": ("█", "green"),
    "lease": ("▓", "blue"),
    "room": ("▒", "magenta"),
    "cache": ("░", "cyan"),
    "free": ("·", "bright_black"),
}
"""How each owner's share of a bar is drawn, with and without colours."""
QUARANTINED = ("!", "red")
BAR_WIDTH = 32
ROWS_MAX = 50  # of one table; the rest is counted

Record = Mapping[str, Any]


def render(document: Record, rates: Rates, rows_max: int = ROWS_MAX) -> RenderableType:
    """The document and what two of them say of speed; empty tables are left out."""
    ready = bool(document.get("ready"))
    parts: list[RenderableType] = [
        Text("ready" if ready else "not ready", style="green" if ready else "red bold")
    ]
    parts += [Text(f"  {reason}") for reason in _items(document, "reasons")]
    gateway = {k: v for k, v in record(document, "gateway").items() if k != "totals"}
    facts = [f"{key} {_short(key, value)}" for key, value in gateway.items()]
    parts.append(Text("gateway  " + "  ".join(facts) if facts else "gateway"))
    if rates.facts:
        parts.append(Text(rates.span + "  " + "  ".join(rates.facts), style="bold"))
    workers = [worker for worker in _items(document, "workers") if isinstance(worker, Mapping)]
    if not workers:
        parts.append("no workers: start some with `pdrt prefill` and `pdrt decode`")
    for table in (
        _workers_table(workers, rates),
        _ranks_table(workers, rows_max),
        _pages_table(workers),
        _pairs_table(workers, rows_max),
        _rooms_table(workers, rows_max),
        _leases_table(workers, rows_max),
        _quarantine_table(workers, rows_max),
    ):
        if table.row_count:
            parts.append(table)
    return Group(*parts)


def _workers_table(workers: Sequence[Record], rates: Rates) -> Table:
    table = _table(
        "workers", "role", "worker", "endpoint", "state", "running", "queued", "in flight",
        "tokens/s", "step p50", "",
    )  # fmt: skip
    for worker in workers:
        load = record(worker, "status")
        state = _text(worker.get("state"))
        own = rates.workers.get(_text(worker.get("worker")))
        lost = worker.get("lost_seconds")
        since = f" {lost:.0f} s" if isinstance(lost, int | float) else ""
        table.add_row(
            _text(worker.get("role")),
            _identity(worker),
            _text(worker.get("endpoint") or load.get("data_endpoint")),
            Text(state + since, style="green" if state == "live" else "red"),
            _text(load.get("running")),
            _text(load.get("queued")),
            _in_flight(load),
            "-" if own is None else own.tokens_per_second,
            "-" if own is None else own.step,
            Text("; ".join(_text(reason) for reason in _items(worker, "reasons")), style="red"),
            style="dim" if state == "lost" else None,
        )
    return table


def _in_flight(load: Record) -> str:
    """How many rooms or leases there are, by phase or state."""
    for key, by in (("rooms", "rooms_by_phase"), ("leases", "leases_by_state")):
        if key in load:
            states = record(load, by)
            shown = ", ".join(f"{n} {name}" for name, n in states.items() if n)
            return f"{key} {_text(_count(load, key))}" + (f" ({shown})" if shown else "")
    return "-"


def _ranks_table(workers: Sequence[Record], rows_max: int) -> Table:
    """Each process of every worker."""
    table = _table("ranks", "worker", "rank", "pid", "computes on", "state", "KV by engine", "")
    for worker, rank in _entries(workers, "ranks", rows_max):
        state = _text(rank.get("state"))
        since = rank.get("heard_seconds")
        if state == "silent" and isinstance(since, int | float):
            state += f" {since:.0f} s"
        table.add_row(
            _identity(worker),
            _text(rank.get("rank", rank.get("room"))),
            _text(rank.get("pid")),
            _text(rank.get("device")),
            Text(state, style="" if state in ("serving", "-") else "red"),
            _engine_bytes(rank),
            Text(_turned_away(rank), style="yellow"),
        )
    return table


def _engine_bytes(rank: Record) -> str:
    shown = record(rank, "engine_bytes")
    return ", ".join(f"{engine} {_size(count)}" for engine, count in shown.items()) or "-"


def _turned_away(rank: Record) -> str:
    """What its port for KV has refused."""
    parts = []
    for key, what in (("refused_peers", "connections"), ("refused_writes", "writes")):
        parts += [f"{_text(n)} {what} refused: {why}" for why, n in record(rank, key).items()]
    return "; ".join(parts)


def _size(count: Any) -> str:
    """Bytes, in the unit that leaves few digits."""
    if not isinstance(count, int | float):
        return _text(count)
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def _pages_table(workers: Sequence[Record]) -> Table:
    table = _table("pages by owner", "worker", "", *OWNERS, "quarantined", "total", right=True)
    for worker in workers:
        load = record(worker, "status")
        pages = record(load, "pages")
        if not pages:
            continue
        held = _text(load.get("quarantined_pages"))
        table.add_row(
            _identity(worker),
            pages_bar(pages, load.get("quarantined_pages")),
            *(_text(pages.get(owner)) for owner in OWNERS),
            Text(held, style="" if held in ("0", "-") else "yellow"),
            _text(load.get("pages_total")),
        )
    return table


def pages_bar(pages: Record, quarantined: Any, width: int = BAR_WIDTH) -> Text:
    """Owners' shares side by side, `width` characters wide. An owner that has pages is seen, be
    they ever so few. Quarantined pages are leases' pages: shown apart, not twice."""
    held = quarantined if isinstance(quarantined, int) and quarantined > 0 else 0
    counts = {owner: pages.get(owner) for owner in OWNERS}
    sizes = {o: n if isinstance(n, int) and n > 0 else 0 for o, n in counts.items()}
    held = min(held, sizes["lease"])
    sizes["lease"] -= held
    shares = [(QUARANTINED, held), *((OWNERS[owner], n) for owner, n in sizes.items())]
    bar = Text()
    for ((character, style), _), cells in zip(
        shares, _cells([n for _, n in shares], width), strict=True
    ):
        bar.append(character * cells, style=style)
    return bar


def _cells(counts: Sequence[int], width: int) -> list[int]:
    """`width` shared out: one for whatever is not 0, the rest in proportion, what rounding leaves
    to the largest."""
    total = sum(counts)
    if not total:
        return [0] * len(counts)
    spare = width - sum(count > 0 for count in counts)
    cells = [int(count > 0) + spare * count // total for count in counts]
    cells[counts.index(max(counts))] += width - sum(cells)
    return cells


def _pairs_table(workers: Sequence[Record], rows_max: int) -> Table:
    """Each decode worker with the prefill workers that write into it."""
    table = _table("pairs", "decode", "prefill", "endpoint", "generation", "state", "engine", "")
    for worker, writer in _entries(workers, "writers", rows_max):
        table.add_row(
            _identity(worker),
            _identity(writer),
            _text(writer.get("endpoint")),
            _text(writer.get("generation")),
            _text(writer.get("state")),
            _text(writer.get("engine")),
            _pair_words(writer),
        )
    return table


def _pair_words(writer: Record) -> Text:
    """Why they are no pair; else why no better engine is used."""
    if refusal := writer.get("refusal"):
        return Text(_text(refusal), style="red")
    return Text("; ".join(_text(why) for why in writer.get("passed_over") or []), style="dim")


def _rooms_table(workers: Sequence[Record], rows_max: int) -> Table:
    table = _table("rooms", "worker", "room", "state", "age", "pages", "phase", "computed", "for")
    for worker, room in _entries(workers, "rooms", rows_max):
        table.add_row(
            _identity(worker),
            *_room_cells(room),
            _text(room.get("phase")),
            f"{_text(room.get('computed'))} of {_text(room.get('tokens'))}",
            _text(room.get("peer"))[:8],
        )
    return table


def _leases_table(workers: Sequence[Record], rows_max: int) -> Table:
    table = _table("leases", "worker", "room", "state", "age", "pages", "reason")
    for worker, lease in _entries(workers, "leases", rows_max):
        table.add_row(_identity(worker), *_room_cells(lease), _text(lease.get("reason")))
    return table


def _quarantine_table(workers: Sequence[Record], rows_max: int) -> Table:
    table = _table("quarantine", "worker", "room", "state", "age", "pages", "reason")
    for worker, lease in _entries(workers, "quarantine", rows_max):
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


def _entries(workers: Sequence[Record], key: str, rows_max: int) -> list[tuple[Record, Record]]:
    """(worker, entry) of every worker's list `key`, bounded; a bare value is an entry's room."""
    found: list[tuple[Record, Record]] = []
    for worker in workers:
        for entry in _items(record(worker, "status"), key):
            found.append((worker, entry if isinstance(entry, Mapping) else {"room": entry}))
    if len(found) > rows_max:
        found[rows_max:] = [({}, {"room": f"and {len(found) - rows_max} more"})]
    return found


def _count(load: Record, key: str) -> Any:
    """How many there are; the list itself may be cut."""
    total = load.get(f"{key}_total")
    return len(_items(load, key)) if total is None and key in load else total


def _items(document: Record, key: str) -> list[Any]:
    value = document.get(key)
    return value if isinstance(value, list) else []


def _identity(worker: Record) -> str:
    return _text(worker.get("worker"))[:8]


def _short(key: str, value: Any) -> str:
    return _text(value)[:8] if key in ("incarnation", "digest") else _text(value)


def _text(value: Any) -> str:
    return "-" if value is None else str(value)
