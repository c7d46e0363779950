"""Takes a pool's memory from the kernel before it is used.

The first touch of a page of shared memory costs some microseconds, mostly to clear it: a
millisecond per MB, measured in a virtual machine. As free pages come before cached ones, every
prompt would pay it, in its forward and again in its transfer, until the whole pool has been used
once. So a thread touches all of it, whenever its core has nothing else to do.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable

import torch

PIECE_BYTES = 2**20
"""Touched at once: a millisecond, for which whoever maps memory meanwhile may have to wait."""
SPARE_BYTES = 2**29
"""Of the machine's memory, left untouched: pools may be larger in sum than what there is."""
LOOK_EVERY_PIECES = 16
MADV_POPULATE_WRITE = 23
"""Linux 5.14; `mmap` of Python 3.11 does not know it, and would keep the GIL."""


def populate(memory: torch.Tensor, available_bytes: Callable[[], int]) -> threading.Thread:
    """Touch all of a CPU tensor, in a thread of the lowest priority; its content stays as it is.

    Ends early where the kernel is too old for it, or has too little memory left. `available_bytes`
    says how much there is.
    """
    thread = threading.Thread(
        target=_populate, args=(memory, available_bytes), name="pdrt-populate", daemon=True
    )
    thread.start()
    return thread


def _populate(memory: torch.Tensor, available_bytes: Callable[[], int]) -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = memory.numel() * memory.element_size()
    for piece, start in enumerate(range(0, size, PIECE_BYTES)):
        if piece % LOOK_EVERY_PIECES == 0 and available_bytes() < SPARE_BYTES:
            return
        length = min(PIECE_BYTES, size - start)
        if madvise(memory.data_ptr() + start, length, MADV_POPULATE_WRITE) != 0:
            return
