"""Who used this machine's processors while a benchmark ran.

Only what is on this machine can be told: of a server elsewhere, nothing is known.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

PROC = Path("/proc")


class CpuTimes(msgspec.Struct, frozen=True):
    """Clock ticks since boot."""

    busy: int
    total: int
    ours: dict[int, int]
    """By process: of this one, and of those whose command line names the server."""


class CpuShares(msgspec.Struct, frozen=True):
    """Per cent of all processors' time."""

    busy: float
    others: float
    """Used by processes that are neither the server nor this one: beyond a few per cent, the
    figures beside it mean little."""


def cpu_times(server: str, proc: Path = PROC) -> CpuTimes | None:
    """Now; None where the kernel does not say. `server`: text in its command lines."""
    try:
        fields = [int(x) for x in (proc / "stat").read_text().splitlines()[0].split()[1:9]]
        entries = os.listdir(proc)
    except (OSError, ValueError, IndexError):
        return None
    ours = {}
    for pid in map(int, filter(str.isdecimal, entries)):
        if pid == os.getpid() or _names(proc / str(pid), server):
            ticks = _ticks(proc / str(pid))
            if ticks is not None:
                ours[pid] = ticks
    # user, nice, system, idle, iowait, irq, softirq, steal; guest time is part of user time.
    return CpuTimes(sum(fields) - fields[3] - fields[4], sum(fields), ours)


def cpu_shares(before: CpuTimes | None, after: CpuTimes | None) -> CpuShares | None:
    """Between two readings. A process that ended in between counts as somebody else's."""
    if before is None or after is None or after.total <= before.total:
        return None
    total = after.total - before.total
    busy = after.busy - before.busy
    ours = sum(ticks - before.ours.get(pid, 0) for pid, ticks in after.ours.items())
    return CpuShares(100 * busy / total, max(0.0, 100 * (busy - ours) / total))


def _names(process: Path, server: str) -> bool:
    try:
        command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return False
    return server.encode() in command


def _ticks(process: Path) -> int | None:
    try:
        # After the name, which may hold blanks: user and system time are the 14th and 15th field.
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, IndexError, ValueError):
        return None
