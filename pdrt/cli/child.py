"""What a role process does for the `pdrt up` that started it: die with it, and report to it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from collections.abc import Callable
from typing import Any

from pdrt.errors import PdrtError

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """The kernel kills this process when `pdrt up` dies, even by SIGKILL. SIGKILL, because nobody
    is left to watch a slow shutdown; a planned stop sends SIGTERM first. The check after the call
    closes the gap in which the parent may have died before the kernel knew.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise PdrtError(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:
        raise PdrtError("pdrt up ended before this process began")


def announce_to(fd: int) -> Callable[[dict[str, Any]], None]:
    """Writes the facts as one JSON line to an inherited pipe, and closes it."""
    os.set_inheritable(fd, False)

    def announce(facts: dict[str, Any]) -> None:
        with open(fd, "w", encoding="utf-8") as pipe:
            pipe.write(json.dumps(facts) + "\n")

    return announce
