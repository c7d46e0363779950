"""What this process has open, and a process that can open nothing more."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections.abc import Iterator


def open_descriptors() -> list[str]:
    """The numbers of all that is open, but not of what earlier tests have left to the garbage
    collector: it is not closed while one counts."""
    gc.collect()
    return os.listdir("/proc/self/fd")


@contextlib.contextmanager
def no_more_fds() -> Iterator[None]:
    """Within it, whatever opens something fails with EMFILE: its limit is reached."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first_free = os.open("/dev/null", os.O_RDONLY)
    os.close(first_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
