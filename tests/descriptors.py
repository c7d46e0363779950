"""What this process has open, and a process that can open nothing more."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections.abc import Iterator

LASTING = 16
"""Numbers below are those of the test run itself: nobody closes them."""


def open_descriptors() -> set[str]:
    """The number of each and what it is, so that one that was opened shows, whatever others end
    meanwhile: libzmq closes sockets of earlier tests in a thread of its own. What these have left
    to the garbage collector is not counted."""
    gc.collect()
    found: set[str] = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the folder's own, and what just ended
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return found


def no_more_fds() -> contextlib.AbstractContextManager[None]:
    """Within it, whatever opens something fails with EMFILE: its limit is reached, and stays so
    when something is closed meanwhile."""
    return _limited(min(_first_free(), LASTING))


def one_more_fd() -> contextlib.AbstractContextManager[None]:
    """Within it, one can be opened, and not a second one beside it."""
    return _limited(_first_free() + 1)


def _first_free() -> int:
    gc.collect()  # what it closes later would make room
    first_free = os.open("/dev/null", os.O_RDONLY)
    os.close(first_free)
    return first_free


@contextlib.contextmanager
def _limited(numbers: int) -> Iterator[None]:
    """To so many, from 0 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (numbers, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
