"""Has a process of a benchmark run as the workers of `pdrt up` do on this machine: on cores of its
own, its pool resident, and without the garbage collector going through what was imported."""

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
from pdrt.model.steady import steady

ROLES = ("prefill", "decode")


@contextmanager
def as_worker(role: str, pool: KvPool) -> Iterator[None]:
    """Of one prefill and one decode worker; all ranks of one of them share its cores. For this
    thread and those that it starts within."""
    share = share_cores(allowed_cpus(), cpu_quota(), len(ROLES))[ROLES.index(role)]
    cpus, interval = allowed_cpus(), sys.getswitchinterval()
    gc.freeze()
    steady(pool, DeviceConfig(cpus=ranges(share.cpus) if share.cpus else None))
    try:
        yield
    finally:
        gc.unfreeze()
        os.sched_setaffinity(0, cpus)
        sys.setswitchinterval(interval)
