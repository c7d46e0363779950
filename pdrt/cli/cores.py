"""Cores of this machine that may be used, and how the workers of `pdrt up` share them."""

from __future__ import annotations

import itertools
import os

import msgspec


class Share(msgspec.Struct, frozen=True):
    """One worker's part. `cpus` is empty when only the number of threads is limited."""

    cpus: tuple[int, ...]
    threads: int


def share_cores(cpus: tuple[int, ...], quota: float | None, workers: int) -> list[Share]:
    """Whole cores, neighbours together, each worker as many as the next or one more.

    With fewer cores than workers, several take turns on one. Under a quota below the number of
    cores nobody is pinned: the quota counts time on any core, and a container's neighbours are
    told the same core numbers.
    """
    assert cpus and workers >= 1
    if quota is not None and quota < len(cpus):
        return [Share((), max(1, int(quota) // workers)) for _ in range(workers)]
    if len(cpus) < workers:
        return [Share((cpus[worker % len(cpus)],), 1) for worker in range(workers)]
    bounds = [len(cpus) * worker // workers for worker in range(workers + 1)]
    parts = [cpus[start:end] for start, end in itertools.pairwise(bounds)]
    return [Share(part, len(part)) for part in parts]


def allowed_cpus() -> tuple[int, ...]:
    """Cores that the kernel lets this process run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


def ranges(cpus: tuple[int, ...]) -> str:
    """`0-2,5`, as `--cpus` reads it."""
    parts: list[str] = []
    start = previous = cpus[0]
    for cpu in (*cpus[1:], -1):
        if cpu != previous + 1:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
            start = cpu
        previous = cpu
    return ",".join(parts)
