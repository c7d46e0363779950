"""Tables of docs/protocol.md and docs/metrics.md, generated from the code:
`python -m tests.docs_tables --write`.

Each stands between `<!-- generated:NAME -->` and `<!-- end -->`; without `--write` the command
only says whether they are up to date, as `tests/test_docs.py` does.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import msgspec

from pdrt.config import ProtocolConfig
from pdrt.observe.families import FAMILIES, Kind
from pdrt.protocol import gateway_messages, leases, messages, room_writer, rooms
from pdrt.protocol.gateway_messages import GatewayToWorker, WorkerToGateway
from pdrt.protocol.messages import NOT_RETRYABLE, DecodeToPrefill, PrefillToDecode, Reason

DOCS = Path(__file__).parents[1] / "docs"
DOCUMENTS = (DOCS / "protocol.md", DOCS / "metrics.md")
MARKED = re.compile(r"(<!-- generated:(\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def code(text: str) -> str:
    return f"`{text}`"


def transitions(listed: dict[tuple[Any, Any], Any]) -> str:
    """Events down, states across; an empty cell is an event that raises."""
    states = type(next(iter(listed))[0])
    events = type(next(iter(listed))[1])
    sources = [state for state in states if any(state is source for source, _ in listed)]
    rows = [
        [code(event.name), *(_cell(listed.get((source, event))) for source in sources)]
        for event in events
    ]
    return table(["event", *(code(source.name) for source in sources)], rows)


def _cell(state: Enum | None) -> str:
    return "" if state is None else code(state.name)


def direction(union: Any, module: ModuleType) -> str:
    """The messages of one direction."""
    return table(
        ["message", "says", "fields"],
        [
            [code(kind.__name__), _first_sentence(kind.__doc__), _fields(kind, module)]
            for kind in get_args(union)
        ],
    )


def _first_sentence(text: str | None) -> str:
    joined = " ".join((text or "").split())
    return re.split(r"(?<=\.) (?=[A-Z])", joined)[0]


def _fields(kind: Any, module: ModuleType) -> str:
    """As annotated in the source, which reads better than the resolved type."""
    annotations = {
        node.target.id: ast.unparse(node.annotation)
        for node in _class(module, kind.__name__).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    fields = kind.__struct_fields__
    return ", ".join(code(f"{name}: {annotations[name]}").replace("|", "\\|") for name in fields)


def _class(module: ModuleType, name: str) -> ast.ClassDef:
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    return next(x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == name)


def members(module: ModuleType, name: str) -> dict[str, str]:
    """Members of an Enum, with the docstrings below them."""
    found: dict[str, str] = {}
    for node in _class(module, name).body:
        match node:
            case ast.Assign(targets=[ast.Name(member)]):
                found[member] = ""
            case ast.Expr(ast.Constant(str(text))) if found:
                found[list(found)[-1]] = " ".join(text.split())
    return found


def outcomes() -> str:
    said = members(messages, "Outcome")
    return table(["outcome", "means"], [[code(name), text] for name, text in said.items()])


def reasons() -> str:
    rows = [
        [code(name), "no" if Reason[name] in NOT_RETRYABLE else "yes", text]
        for name, text in members(messages, "Reason").items()
    ]
    return table(["reason", "the request may go on", ""], rows)


def defaults() -> str:
    """Every bound and period, as the flags show them."""
    info = msgspec.inspect.type_info(ProtocolConfig)
    assert isinstance(info, msgspec.inspect.StructType)
    defaults = ProtocolConfig()
    rows = []
    for field in info.fields:
        value = getattr(defaults, field.name)
        shown = "not set" if value is None else f"{value:,}".removesuffix(".0")
        rows.append([code(field.name), shown, _description(field.type)])
    return table(["setting", "default", ""], rows)


def _description(info: Any) -> str:
    assert isinstance(info, msgspec.inspect.Metadata), info
    assert info.extra_json_schema is not None
    return str(info.extra_json_schema["description"])


def metrics() -> str:
    """Every metric, its samples named as a query names them."""
    rows = []
    for family in FAMILIES:
        name = family.name + ("_total" if family.kind is Kind.COUNTER else "")
        labels = ", ".join(code(label) for label in family.labels)
        rows.append([code(name), family.kind.value, labels, family.text])
    return table(["metric", "type", "labels", "meaning"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "lease-transitions": lambda: transitions(leases.TRANSITIONS),
    "room-transitions": lambda: transitions(rooms.TRANSITIONS),
    "writer-transitions": lambda: transitions(room_writer.TRANSITIONS),
    "decode-to-prefill": lambda: direction(DecodeToPrefill, messages),
    "prefill-to-decode": lambda: direction(PrefillToDecode, messages),
    "worker-to-gateway": lambda: direction(WorkerToGateway, gateway_messages),
    "gateway-to-worker": lambda: direction(GatewayToWorker, gateway_messages),
    "outcomes": outcomes,
    "reasons": reasons,
    "defaults": defaults,
    "metrics": metrics,
}


def generated(text: str) -> str:
    """`text` with every marked table made anew.

    Raises:
        KeyError: a marker names no table.
    """
    return MARKED.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


def main(arguments: Sequence[str]) -> int:
    stale = [path for path in DOCUMENTS if path.read_text() != generated(path.read_text())]
    for path in stale:
        if "--write" in arguments:
            path.write_text(generated(path.read_text()))
        else:
            print(f"{path.name} is stale: run python -m tests.docs_tables --write")
    return int(bool(stale) and "--write" not in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
