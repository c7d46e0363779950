"""What a worker's process does once, when it has loaded: from then on nothing of its own holds up a
step that need not."""

from __future__ import annotations

import gc
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
    """Blocks for the time of one full garbage collection.

    Everything that is loaded is exempt from garbage collection: walking the objects of torch and
    transformers, 360,000, stops all threads for a tenth of a second and more. The thread that
    calls this, the event loop's, and those that it starts later, of sockets and copies, stay on the
    worker's own cores: a worker takes none of another one's time. And the pool is made resident.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(GIL_SECONDS_MAX)
    os.sched_setaffinity(0, usable_cpus(os.sched_getaffinity(0), cpu_quota(), device).cpus)
    if pool.fd is not None:
        populate(pool.tensor, available_memory_bytes)
