"""Host memory for the `local` engine: a memfd, which the peer opens through /proc and maps.

/proc grants that to processes of the same user only. Nothing has a name in a file system, so
nothing is left behind by a kill.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence

from pdrt.errors import EngineError
from pdrt.kv.pool import KvPool
from pdrt.transfer.engine import ByteRange
from pdrt.transfer.host_copy import load_copy
from pdrt.transfer.local_memory import (
    CudaDescriptor,
    HostDescriptor,
    LocalDescriptor,
    other_kind,
)
from pdrt.transfer.processes import start_time, this_process
from pdrt.transfer.sending import batches

COPY_BYTES_MAX = 4 * 1024 * 1024
"""Copied in one call, in about a millisecond; after each, progress is noted for the watchdogs."""


class HostMemory:
    """Implements `Memory` for a pool in a memfd."""

    def __init__(self, pool: KvPool) -> None:
        assert pool.fd is not None, "a pool in host memory"
        self._pool = pool
        self._fd = pool.fd
        self._process = this_process()
        self.size_bytes = pool.size_bytes
        self._copy_ranges = load_copy()

    def describe(self, name: str) -> HostDescriptor:
        """See `Memory.describe`. Every generation is the same memory: what fences is death."""
        inode = os.fstat(self._fd).st_ino
        return HostDescriptor(self._process, self._fd, inode, self.size_bytes, name)

    def map(self, descriptor: LocalDescriptor) -> HostMapping:
        """See `Memory.map`."""
        if isinstance(descriptor, CudaDescriptor):
            raise other_kind(f"the memory of GPU {descriptor.device}", "host memory")
        return HostMapping(_map(descriptor))

    def copy(
        self, target: int, ranges: Sequence[ByteRange], on_progress: Callable[[], None]
    ) -> None:
        """See `Memory.copy`."""
        for batch in batches(ranges, COPY_BYTES_MAX):
            self._copy_ranges(target, self._pool.address, batch)
            on_progress()


class HostMapping:
    """Implements `Mapping`."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self.size_bytes = len(mapping)

    def close(self) -> None:
        """See `Mapping.close`."""
        self._mapping.close()


def _map(descriptor: HostDescriptor) -> mmap.mmap:
    """Open and verify the memfd that a segment names; map it shared."""
    process = descriptor.process
    path = f"/proc/{process.pid}/fd/{descriptor.fd}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise EngineError(
            f"cannot open the decode pool of process {process.pid}: {error.strerror}; the local "
            "engine needs both workers on one host under one user"
        ) from error
    try:
        found = os.fstat(fd)
        # After opening: had the pid been reused in between, the start time would tell.
        if start_time(process.pid) != process.start_time or found.st_ino != descriptor.inode:
            raise EngineError(f"process {process.pid} is not the decode worker that named it")
        if found.st_size != descriptor.size_bytes:
            raise EngineError(f"decode pool has {found.st_size} bytes, not {descriptor.size_bytes}")
        mapping = mmap.mmap(fd, descriptor.size_bytes, mmap.MAP_SHARED)
        mapping.madvise(mmap.MADV_DONTFORK)
        return mapping
    except (OSError, ValueError) as error:
        raise EngineError(f"cannot map the decode pool: {error}") from error
    finally:
        os.close(fd)
