"""Has a process of a benchmark run as a rank of `pdrt up` does, with one prefill and one decode
worker: on the cores that it would have there, its pool resident, and without the garbage collector
going through what was imported."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pdrt.cli.cores import allowed_cpus, ranges, share_cores
from pdrt.config import DeviceConfig
from pdrt.kv.pool import KvPool
from pdrt.model.cgroup import cpu_quota
from pdrt.model.resources import share_device
from pdrt.model.steady import steady

ROLES = ("prefill", "decode")


def device_of(role: str, rank: int, ranks: int) -> DeviceConfig:
    """Cores of one rank: its part of its worker's, or all of them where they are fewer than ranks,
    so that a worker computes and sends on the same cores whatever its TP degree."""
    share = share_cores(allowed_cpus(), cpu_quota(), len(ROLES))[ROLES.index(role)]
    cpus = ranges(share.cpus) if share.cpus else None
    if len(share.cpus) < ranks:
        return DeviceConfig(cpus=cpus)
    worker = DeviceConfig(cpus=cpus, tensor_parallel_size=ranks)
    return share_device(worker, allowed_cpus(), cpu_quota())[rank]


@contextmanager
def as_worker(role: str, pool: KvPool, rank: int = 0, ranks: int = 1) -> Iterator[None]:
    """For this thread and those that it starts within."""
    cpus, interval = allowed_cpus(), sys.getswitchinterval()
    try:
        gc.freeze()
        steady(pool, device_of(role, rank, ranks))
        yield
    finally:
        gc.unfreeze()
        os.sched_setaffinity(0, cpus)
        sys.setswitchinterval(interval)
