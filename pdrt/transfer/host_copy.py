"""Copies many ranges of host memory in one call, without the GIL: a copy that takes it for each of
them waits behind the event loop, time and again, for as long as copying 64 KB takes or longer.

Compiled with pdrt (`native/copy.cpp`); where there was no compiler, it goes range by range.
"""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from pdrt.transfer.engine import ByteRange

log = logging.getLogger(__name__)

LIBRARY = Path(__file__).parent / "native" / "libpdrt_copy.so"

CopyRanges = Callable[[int, int, Sequence[ByteRange]], None]
"""To an address from an address, all of these."""


def load_copy(path: Path = LIBRARY) -> CopyRanges:
    """The compiled one if it is there, else one that does the same."""
    try:
        call = ctypes.CDLL(str(path)).pdrt_copy_ranges
    except (OSError, AttributeError) as error:
        log.info("no compiled copy: the local engine copies range by range", extra={"why": error})
        return copy_one_by_one
    call.restype = None
    call.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)

    def copy_at_once(target: int, source: int, ranges: Sequence[ByteRange]) -> None:
        numbers = array("q")
        for piece in ranges:
            numbers.extend((piece.source_offset, piece.target_offset, piece.length))
        call(target, source, numbers.buffer_info()[0], len(ranges))

    return copy_at_once


def copy_one_by_one(target: int, source: int, ranges: Sequence[ByteRange]) -> None:
    """ctypes lets go of the GIL during each of them."""
    for piece in ranges:
        ctypes.memmove(target + piece.target_offset, source + piece.source_offset, piece.length)
