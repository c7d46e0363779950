"""What a role process does for the `pdrt up` that started it: die with it, and report to it.

A loop that stands still cannot say so. It is told by its silence: while it turns, it sends a beat
a second down the pipe of its announcement, which needs neither a port nor a free descriptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import json
import os
import signal
from collections.abc import Callable
from typing import Any

from pdrt.errors import PdrtError

_PR_SET_PDEATHSIG = 1
BEAT_SECONDS = 1.0


def die_with_parent(parent_pid: int) -> None:
    """The kernel kills this process when the one that started it (`pdrt up`, or the leader of a
    worker's ranks) dies, even by SIGKILL. SIGKILL, because nobody is left to watch a slow shutdown;
    a planned stop sends SIGTERM first. The check after the call closes the gap in which the parent
    may have died before the kernel knew.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise PdrtError(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:
        raise PdrtError("whoever started this process ended before it began")


def show_stacks_when_asked() -> None:
    """SIGUSR1 writes to stderr where every thread is, whatever it is at: what hangs is named before
    it is killed."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def announce_to(fd: int) -> Callable[[dict[str, Any]], None]:
    """Writes the facts as one JSON line to an inherited pipe, and from then on beats for as long
    as the running loop turns. To be called on that loop."""
    os.set_inheritable(fd, False)
    # A reader that is stopped must not stop us.
    os.set_blocking(fd, False)

    def announce(facts: dict[str, Any]) -> None:
        os.write(fd, json.dumps(facts).encode() + b"\n")
        _beat(fd)

    return announce


def _beat(fd: int) -> None:
    # Full: beats enough are waiting to be read. Broken: nobody is left to read them.
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        os.write(fd, b"\n")
    asyncio.get_running_loop().call_later(BEAT_SECONDS, _beat, fd)
