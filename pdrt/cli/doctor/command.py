"""`pdrt doctor`: what this machine lacks, and what to do about it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdrt.cli.cores import allowed_cpus
from pdrt.cli.doctor import cuda, hardware, software, system
from pdrt.cli.doctor.finding import GIB, Finding, Verdict, warning
from pdrt.cli.flags import Parser
from pdrt.cli.roles import has_cuda
from pdrt.errors import ConfigError
from pdrt.model.cgroup import available_memory_bytes, cpu_quota
from pdrt.model.resources import cpu_flags

STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILS: "red bold"}
PIPE_WIDTH = 160
EXIT_FAILS = 1

Check = Callable[[], Finding | list[Finding]]


def doctor(arguments: Sequence[str]) -> int:
    """0 if everything that serving needs is there, 1 if not."""
    flags = _parser().parse(arguments)
    if flags["kv_cache_memory_bytes"] <= 0:
        raise ConfigError("--kv-cache-memory-bytes: above 0")
    found = examine(checks(flags))
    if flags["json"]:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        console = Console()
        (console if console.is_terminal else Console(width=PIPE_WIDTH)).print(table(found))
    return EXIT_FAILS if any(f.verdict is Verdict.FAILS for f in found) else 0


def _parser() -> Parser:
    parser = Parser(
        prog="pdrt doctor",
        description="What this machine lacks for `pdrt up`, and what to do about it. Exit code 0 "
        "if everything that serving needs is there.",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print the findings as JSON")
    add("--no-torch", action="store_true", help="leave torch alone, whose import takes seconds")
    add("--host", metavar="TEXT", default="127.0.0.1", help="address to look for ports on")
    add("--port", metavar="INT", type=int, default=8000)
    add("--worker-port", metavar="INT", type=int, default=8001)
    add("--kv-cache-memory-bytes", metavar="INT", type=int, default=GIB, help="pool per worker")
    return parser


def checks(flags: dict[str, Any]) -> dict[str, Check]:
    """By name, in the order in which they are told."""
    has_gpu = has_cuda()
    devices = hardware.rdma_devices()
    pool = flags["kv_cache_memory_bytes"]
    wanted = {"--port": flags["port"], "--worker-port": flags["worker_port"]}
    found: dict[str, Check] = {
        "python": software.python,
        "packages": lambda: software.packages(software.own_requirements()),
        "torch": lambda: [] if flags["no_torch"] else software.torch(has_gpu),
        "optional packages": software.optional_packages,
        "mooncake": lambda: software.mooncake(has_gpu),
        "cpu features": lambda: hardware.cpu_features(cpu_flags()),
        "cores": lambda: hardware.cores(len(allowed_cpus()), os.cpu_count() or 1, cpu_quota()),
        "memory": lambda: hardware.memory(available_memory_bytes(), pool),
        "limits": lambda: hardware.limits(bool(devices)),
        "shared memory": system.shared_memory,
        "pidfd": system.pidfd,
        "processes": system.pid_namespace,
        "ptrace": system.ptrace,
        "gpu": lambda: hardware.gpu(has_gpu),
        "cuda": lambda: [] if flags["no_torch"] else cuda.sharing(has_gpu),
        "rdma": lambda: hardware.rdma(devices, hardware.has_libibverbs()),
        "loopback": system.loopback,
        "ports": lambda: system.ports(flags["host"], wanted),
        "host name": system.host_name,
        "proxy": lambda: system.proxies(dict(os.environ)),
        "model cache": system.model_cache,
    }
    return found


def examine(found: dict[str, Check]) -> list[Finding]:
    """Every check. One that a strange system breaks says so, and the others go on."""
    findings: list[Finding] = []
    for name, check in found.items():
        try:
            result = check()
        except (OSError, ValueError, LookupError) as error:
            text = f"could not be checked: {error!r}"
            result = warning(name, text, "look at it by hand, and report this")
        findings += result if isinstance(result, list) else [result]
    return findings


def table(findings: Sequence[Finding]) -> Table:
    """Verdict, name, what was found, and what to do."""
    made = Table(box=None, pad_edge=False, show_header=False)
    for column in ("verdict", "name", "text"):
        made.add_column(column, overflow="fold")
    for finding in findings:
        verdict = Text(finding.verdict.value, style=STYLES[finding.verdict])
        text = Text(finding.text)
        if finding.remedy:
            text.append(f"\n→ {finding.remedy}", style="bold")
        made.add_row(verdict, finding.name, text)
    return made
