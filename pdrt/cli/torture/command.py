"""`pdrt torture`: does an engine's fence hold on this machine, on this fabric?"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from rich.console import Console

from pdrt.cli.flags import Parser
from pdrt.cli.torture.engines import ENGINES
from pdrt.cli.torture.network import Network, missing
from pdrt.cli.torture.nurse import run_nurse
from pdrt.cli.torture.places import HOSTS, NamespacePlaces, Places, RemotePlaces
from pdrt.cli.torture.report import LEGEND, Row, facts, is_broken, remarks, table
from pdrt.cli.torture.trial import Fabric, Fault, Outcome, Session
from pdrt.config import MooncakeConfig
from pdrt.errors import ConfigError, PdrtError

TRIALS, TIMEOUT_SECONDS = 3, 5.0
PIPE_WIDTH = 160
ROLES = ("target", "writer")
EXIT_BROKEN = 1


class Settings(msgspec.Struct, frozen=True):
    """What is tried, and how often."""

    fabric: Fabric
    trials: int = TRIALS
    timeout_seconds: float = TIMEOUT_SECONDS
    remote: tuple[str, str, str] | None = None
    """How pdrt is run where the writers are, their host's address, and the target's."""


def torture(arguments: Sequence[str]) -> int:
    """0 if the fence held in every trial, 1 if not."""
    flags = _parser().parse(arguments)
    if flags["nurse"] is not None:
        return run_nurse(["--party", flags["nurse"]])
    if flags["party"] is not None:
        return _run_party(flags["party"], flags["parent_pid"])
    settings = _settings(flags)
    rows = asyncio.run(run(settings))
    if flags["json"]:
        print(facts(settings.fabric.engine, settings.timeout_seconds, rows).decode())
    else:
        console = Console()
        console = console if console.is_terminal else Console(width=PIPE_WIDTH)
        console.print(table(rows, settings.timeout_seconds))
        console.print("\n".join(["", *remarks(rows), LEGEND]), highlight=False)
    return EXIT_BROKEN if is_broken(rows) else 0


def _parser() -> Parser:
    parser = Parser(
        prog="pdrt torture",
        description="Whether an engine's fence holds here: a writer is stopped, killed and cut off "
        "in the middle of its writes, its pages are taken back behind the fence, and whatever "
        "lands in them afterwards is counted. Beside it, as the counter-example, what a timeout "
        "in place of the fence would have let through. Exit code 0 if every fence held.",
        epilog="Between hosts: --writer-via 'ssh other pdrt' runs the writers there; --writer-host "
        "and --target-host are both addresses. Network namespaces and iptables are for root; "
        "elsewhere no packets are dropped, and the table says so.",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--engine", metavar="TEXT", help=f"one of {', '.join(ENGINES)}")
    add("--trials", metavar="INT", type=int, default=TRIALS, help="of each fault (default 3)")
    add(
        *("--timeout-seconds", "--timeout"),
        metavar="NUM",
        type=float,
        default=TIMEOUT_SECONDS,
        help="the counter-example's (default 5)",
    )
    add("--device", metavar="TEXT", default="cpu", help="where pools are, as in torch (cpu)")
    add("--writer-via", metavar="CMD", help="command that runs pdrt where the writers shall be")
    add("--writer-host", metavar="TEXT", help="address of the writers' host")
    add("--target-host", metavar="TEXT", help="address of this host that writers there reach")
    add("--mooncake-protocol", metavar="TEXT", default="tcp", help="as of workers (default tcp)")
    add("--mooncake-devices", metavar="TEXT", default="", help="as of workers")
    add("--json", action="store_true", help="print the figures as JSON")
    add("--nurse", choices=ROLES, help=argparse.SUPPRESS)
    add("--party", choices=ROLES, help=argparse.SUPPRESS)
    add("--parent-pid", type=int, help=argparse.SUPPRESS)
    return parser


def _settings(flags: dict[str, Any]) -> Settings:
    """Raises ConfigError."""
    if flags["engine"] not in ENGINES:
        raise ConfigError(f"--engine: one of {', '.join(ENGINES)}")
    if flags["trials"] < 1 or flags["timeout_seconds"] <= 0:
        raise ConfigError("--trials and --timeout-seconds: above 0")
    remote = tuple(flags[name] for name in ("writer_via", "writer_host", "target_host"))
    if None in remote and any(remote):
        raise ConfigError("--writer-via, --writer-host and --target-host go together")
    if any(remote) and flags["engine"] == "local":
        raise ConfigError("--writer-via: the local engine works within one host")
    try:
        mooncake = msgspec.convert(
            {name: flags[name] for name in MooncakeConfig.__struct_fields__}, MooncakeConfig
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"--mooncake-protocol: {error}") from error
    fabric = Fabric(flags["engine"], flags["device"], mooncake)
    return Settings(
        fabric, flags["trials"], flags["timeout_seconds"], remote if any(remote) else None
    )


def _run_party(role: str, parent_pid: int) -> int:
    # They import torch, which the trial itself does without.
    from pdrt.cli.torture.party import run_party
    from pdrt.cli.torture.target import Target
    from pdrt.cli.torture.writer import Writer

    return run_party(Target if role == "target" else Writer, parent_pid)


async def run(settings: Settings) -> list[Row]:
    """Every fault, one after the other.

    Raises:
        PdrtError: the engine does not run here, with or without faults.
    """
    with _places(settings) as places:
        async with Session(settings.fabric, places) as session:
            rows: list[Row] = []
            for fault in Fault:
                if any(row.error for row in rows):
                    rows.append(Row(fault, detail="not tried after the error before"))
                else:
                    rows.append(await _row(session, fault, places, settings))
            return rows


@contextlib.contextmanager
def _places(settings: Settings) -> Iterator[Places]:
    if settings.remote is not None:
        yield RemotePlaces(*settings.remote)
    elif settings.fabric.engine == "local":
        yield Places("the local engine does not use the network")
    elif (why := missing()) is not None:
        yield Places(why)
    else:
        with Network(HOSTS) as network:
            yield NamespacePlaces(network)


async def _row(session: Session, fault: Fault, places: Places, settings: Settings) -> Row:
    if fault.is_of_network and places.no_network is not None:
        return Row(fault, detail=places.no_network)
    engine, outcomes = settings.fabric.engine, list[Outcome]()
    try:
        for number in range(settings.trials):
            _progress(f"{engine}: {fault.value}, trial {number + 1}")
            outcomes.append(await session.fenced(fault))
        _progress(f"{engine}: {fault.value}, a timeout in place of the fence")
        timed_out = await session.timed_out(fault, settings.timeout_seconds)
    except PdrtError as error:
        return Row(fault, tuple(outcomes), error=str(error))
    return Row(fault, tuple(outcomes), timed_out)


def _progress(text: str) -> None:
    """On stderr: what is printed stays what it is for programs."""
    print(text, file=sys.stderr, flush=True)
