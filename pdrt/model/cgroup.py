"""Cores' time and memory that may still be had here: of the machine, and of this process's control
groups, version 1 or 2. Only reads."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec


class System(msgspec.Struct, frozen=True):
    """Where the kernel shows it."""

    cgroups: Path = Path("/sys/fs/cgroup")
    process: Path = Path("/proc/self/cgroup")
    memory: Path = Path("/proc/meminfo")


SYSTEM = System()
MEMORY_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def cpu_quota(system: System = SYSTEM) -> float | None:
    """Cores' worth of time that is granted, by the least of all groups around this process, or None
    for no limit."""
    quotas = [_quota(folder) for folder in _folders(system, "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def available_memory_bytes(system: System = SYSTEM) -> int:
    """Bytes that can still be allocated."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in (_read(system.memory) or "").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for folder in _folders(system, "memory"):
        for limit_name, usage_name in MEMORY_FILES:
            limit, usage = _read(folder / limit_name), _read(folder / usage_name)
            if limit and usage and limit.isdecimal():
                # Page cache counts as usage but gives way; what is mapped is what matters.
                available = min(available, int(limit) - int(usage) + _cache_bytes(folder))
    return max(0, available)


def _quota(folder: Path) -> float | None:
    if text := _read(folder / "cpu.max"):
        microseconds, _, period = text.partition(" ")
    else:
        microseconds = _read(folder / "cpu.cfs_quota_us") or "-1"
        period = _read(folder / "cpu.cfs_period_us") or ""
    is_limited = microseconds.isdecimal() and period.isdecimal()
    return int(microseconds) / int(period) if is_limited else None


def _cache_bytes(folder: Path) -> int:
    for line in (_read(folder / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in {"inactive_file", "total_inactive_file"}:
            return int(value)
    return 0


def _folders(system: System, controller: str) -> Iterable[Path]:
    """Where this process's groups may show, from its own to the root: each limits what is in it.
    Inside a container the path is the host's and may not exist, and the root is ours."""
    for line in (_read(system.process) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root = system.cgroups
        elif controller in controllers.split(","):
            root = system.cgroups / controllers
        else:
            continue
        own = root / path.lstrip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))
    yield from (system.cgroups, system.cgroups / controller)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
