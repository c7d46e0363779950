"""How fast this machine reads memory and multiplies, measured beside what is held against it.

`floors.c`, compiled here and now, because what torch reaches is no floor: its own operators lose
to memory and arithmetic what others may not. Without a compiler torch stands in, and says so.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch

SOURCE = Path(__file__).with_name("floors.c")
BUFFER_BYTES = 384 * 2**20
"""Far beyond any cache of today's processors that a core may use."""
ROUNDS = 4_000_000
"""Of arithmetic: some tens of milliseconds, a tenth of a second of AMX products."""
BEST_OF = 2
"""Per measurement: a disturbed one is no floor."""
MATRIX = 1024
"""Of torch's matrix product, where there is no compiler."""


class Floor(msgspec.Struct, frozen=True):
    """At most, with the threads asked for."""

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, size_bytes: float, flops: float) -> float:
        """Nothing that reads and computes so much takes less."""
        return max(size_bytes / self.bytes_per_second, flops / self.flops_per_second)


class Floors:
    """Measures, as often as asked. The threads inherit the caller's cores.

    Attributes:
        note: whose figures these are, for the record.
    """

    def __init__(self, dtype: str, threads: int) -> None:
        """`dtype` of the model: bfloat16 is computed by AMX or dot products, if any."""
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)
        self._memory = _memory(BUFFER_BYTES)
        self._library = compile_library()
        self._dtype = dtype
        self.note = self._arithmetic()

    def _arithmetic(self) -> str:
        if self._library is None:
            return "no C compiler: torch's sum and matrix product stand in, slower than a floor"
        if not self._has_bfloat16():
            return "floors.c: float32 multiply-adds"
        if self._library.floors_has_tiles():
            return "floors.c: AMX products of bfloat16"
        return "floors.c: bfloat16 dot products"

    def _has_bfloat16(self) -> bool:
        return self._dtype == "bfloat16" and hasattr(self._library, "floors_bfloat16")

    def measure(self) -> Floor:
        """Takes a fraction of a second."""
        return Floor(max(self._read() for _ in range(BEST_OF)), max(
            self._compute() for _ in range(BEST_OF)
        ))  # fmt: skip

    def close(self) -> None:
        self._pool.shutdown()

    def _read(self) -> float:
        """Bytes a second."""
        library, part = self._library, BUFFER_BYTES // self._threads // 4096 * 4096
        if library is None:
            words = self._memory.view(torch.int64)
            return BUFFER_BYTES / _timed(lambda: words.sum().item())
        start = self._memory.data_ptr()  # of a page

        def read(index: int) -> None:
            library.floors_read(start + index * part, part)

        return self._threads * part / self._all(read)

    def _compute(self) -> float:
        """Floating-point operations a second."""
        library = self._library
        if library is None:
            a = torch.ones(MATRIX, MATRIX, dtype=getattr(torch, self._dtype))
            return 2.0 * MATRIX**3 / _timed(lambda: a @ a)
        kind = "bfloat16" if self._has_bfloat16() else "float"
        run = getattr(library, f"floors_{kind}")
        flops = float(getattr(library, f"floors_{kind}_flops")(ROUNDS))
        return self._threads * flops / self._all(lambda _: run(ROUNDS))

    def _all(self, work: Callable[[int], object]) -> float:
        """Seconds until every thread has done its part; ctypes lets them run side by side."""
        return _timed(lambda: list(self._pool.map(work, range(self._threads))))


def _memory(size: int) -> torch.Tensor:
    """In huge pages where the kernel has them: it is read a fifth faster so."""
    mapping = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8).fill_(1)


def compile_library() -> ctypes.CDLL | None:
    """For this processor; None without a compiler."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "floors.so"
        command = [os.environ.get("CC", "cc"), "-O3", "-march=native", "-ffp-contract=fast",
                   "-shared", "-fPIC", "-o", str(path), str(SOURCE)]  # fmt: skip
        try:
            subprocess.run(command, check=True, capture_output=True)
            library = ctypes.CDLL(str(path))
        except (OSError, subprocess.CalledProcessError):
            return None
    library.floors_read.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.floors_read.restype = ctypes.c_uint64
    for kind in ("float", "bfloat16"):
        if hasattr(library, f"floors_{kind}"):
            getattr(library, f"floors_{kind}").argtypes = [ctypes.c_int64]
            getattr(library, f"floors_{kind}").restype = ctypes.c_float
            getattr(library, f"floors_{kind}_flops").argtypes = [ctypes.c_int64]
            getattr(library, f"floors_{kind}_flops").restype = ctypes.c_double
    return library


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
