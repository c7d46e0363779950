"""What a worker's process does once, when it has loaded: from then on nothing of its own holds up a
step that need not."""

from __future__ import annotations

import os
import sys

from pdrt.config import DeviceConfig
from pdrt.kv.pool import KvPool
from pdrt.kv.populate import populate
from pdrt.model.cgroup import available_memory_bytes, cpu_quota
from pdrt.model.resources import usable_cpus

GIL_SECONDS_MAX = 0.0005
"""How long the event loop may keep the GIL from the compute thread, which gives it up hundreds of
times a step. Python's own default is 5 ms: a third of a step, whenever the loop has much to do."""


def steady(pool: KvPool, device: DeviceConfig) -> None:
    """The thread that calls this, the event loop's, and those that it starts later, of sockets and
    copies, keep to the worker's own cores: the copies of a hand-over, megabytes a prompt, cost the
    worker that sends them, and not the steps of the one that receives. And the pool is made
    resident."""
    sys.setswitchinterval(GIL_SECONDS_MAX)
    os.sched_setaffinity(0, usable_cpus(os.sched_getaffinity(0), cpu_quota(), device).cpus)
    if pool.fd is not None:
        populate(pool.tensor, available_memory_bytes)
