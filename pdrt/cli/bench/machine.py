"""Who used this machine's processors while a benchmark ran.

Only what is on this machine can be told: of a server elsewhere, nothing is known.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

PROC = Path("/proc")


class CpuTimes(msgspec.Struct, frozen=True):
    """Clock ticks since boot."""

    busy: int
    total: int
    ours: int
    """Of this process, of the server's, and of the children of both, those that have ended too."""


class CpuShares(msgspec.Struct, frozen=True):
    """Per cent of all processors' time."""

    busy: float
    others: float
    """Used by processes that are neither the server nor this one: beyond a few per cent, the
    figures beside it mean little."""


class _Process(msgspec.Struct, frozen=True):
    parent: int
    ticks: int
    """With those of its children that have ended and were waited for."""


def cpu_times(server: Sequence[str], proc: Path = PROC) -> CpuTimes | None:
    """Now; None where the kernel does not say. `server`: process ids, or text in command lines."""
    try:
        fields = [int(x) for x in (proc / "stat").read_text().splitlines()[0].split()[1:9]]
        entries = os.listdir(proc)
    except (OSError, ValueError, IndexError):
        return None
    processes: dict[int, _Process] = {}
    for pid in map(int, filter(str.isdecimal, entries)):
        if (process := _read(proc / str(pid))) is not None:
            processes[pid] = process
    roots = {pid for pid in processes if pid == os.getpid() or _is_named(proc, pid, server)}
    ours = sum(processes[pid].ticks for pid in _with_children(roots, processes))
    # user, nice, system, idle, iowait, irq, softirq, steal; guest time is part of user time.
    return CpuTimes(sum(fields) - fields[3] - fields[4], sum(fields), ours)


def cpu_shares(before: CpuTimes | None, after: CpuTimes | None) -> CpuShares | None:
    """Between two readings. One of the server's own processes that ended in between counts as
    somebody else's, and what it had used before with it."""
    if before is None or after is None or after.total <= before.total:
        return None
    total = after.total - before.total
    busy = after.busy - before.busy
    ours = max(0, after.ours - before.ours)
    return CpuShares(100 * busy / total, 100 * max(0, busy - ours) / total)


def _with_children(roots: set[int], processes: Mapping[int, _Process]) -> set[int]:
    """And their children, and so on: a server's own may be called anything."""
    found = set(roots)
    while more := {pid for pid, p in processes.items() if p.parent in found} - found:
        found |= more
    return found


def _is_named(proc: Path, pid: int, server: Sequence[str]) -> bool:
    try:
        command = (proc / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return False
    return any(pid == int(s) if s.isdecimal() else s.encode() in command for s in server)


def _read(process: Path) -> _Process | None:
    try:
        # After the name, which may hold blanks: the parent is the fourth field of all, user and
        # system time are the 14th and 15th, and those of its children that ended the next two.
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        return _Process(int(fields[1]), sum(map(int, fields[11:15])))
    except (OSError, IndexError, ValueError):
        return None
