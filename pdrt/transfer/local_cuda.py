"""GPU memory for the `local` engine: the peer maps the pool through CUDA IPC and copies on a stream
of its own, so that neither waits for forwards nor they for it; an event settles the copies.

The fence is the death of the writer's processes, as for host memory, and here it is a claim about
NVIDIA's driver: that what a process has queued on a GPU has ended, or never will begin, once that
process is dead. (A stopped one is not: its GPU works on.) docs/protocol.md says why the claim is
believed, tests/gpu/test_fence.py tries it. Under MPS it is known to be wrong, as the copies are
then the MPS server's: the engine is refused there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from pdrt.errors import ConfigError, EngineError
from pdrt.kv.cuda import HANDLE_BYTES, CopyStream, CudaAllocation, CudaDevice, CudaError
from pdrt.transfer.engine import ByteRange
from pdrt.transfer.local_memory import (
    CopyUnsettledError,
    CudaDescriptor,
    HostDescriptor,
    LocalDescriptor,
    other_kind,
)
from pdrt.transfer.processes import start_time, this_process

COPIES_MAX = 256
"""Queued before they are waited for: far from filling the GPU's queue, where a further one would
wait with the GIL in its hands. After each, progress is noted for the watchdogs."""


class CudaMemory:
    """Implements `Memory` for a pool on a GPU."""

    def __init__(self, pool: CudaAllocation) -> None:
        """Raises ConfigError: CUDA cannot share the pool, or the death of a process would not end
        its copies on this GPU."""
        self._pool = pool
        self._device = pool.device
        self._process = this_process()
        self.size_bytes = pool.size_bytes
        try:
            self._handle = pool.share()
            has_mps = self._device.has_mps()
        except CudaError as error:
            raise ConfigError(
                f"CUDA cannot share the pool on GPU {self._device.index}: {error}; use another "
                "--transfer"
            ) from error
        if has_mps:
            raise ConfigError(
                f"GPU {self._device.bus_id} is under CUDA MPS, where copies outlive their process: "
                "the local engine could not fence a writer; stop MPS or use another --transfer"
            )

    def describe(self, name: str) -> CudaDescriptor:
        """See `Memory.describe`. Every generation is the same memory: what fences is death."""
        device = self._device.bus_id
        return CudaDescriptor(self._process, device, self._handle, self.size_bytes, name)

    def map(self, descriptor: LocalDescriptor) -> CudaMapping:
        """See `Memory.map`. The runtime does not tell how large a mapping is: it is taken from
        the descriptor, which comes from the process that the handle does."""
        if isinstance(descriptor, HostDescriptor):
            raise other_kind("host memory", f"the memory of GPU {self._device.bus_id}")
        if len(descriptor.handle) != HANDLE_BYTES or descriptor.size_bytes <= 0:
            raise EngineError(f"{len(descriptor.handle)} bytes are no handle of CUDA IPC")
        process = descriptor.process
        try:
            address = self._device.map_shared(descriptor.handle)
        except CudaError as error:
            raise EngineError(
                f"GPU {self._device.bus_id} cannot map the decode pool of process {process.pid} on "
                f"GPU {descriptor.device}: {error}; the local engine needs both on one GPU, or on "
                "two with peer access (nvidia-smi topo -p2p w)"
            ) from error
        mapping = CudaMapping(self._device, address, descriptor.size_bytes)
        # After mapping: had the process ended before, the handle would be another's or nobody's.
        if start_time(process.pid) != process.start_time:
            mapping.close()
            raise EngineError(f"process {process.pid} is not the decode worker that named it")
        return mapping

    @functools.cached_property
    def _stream(self) -> CopyStream:
        return CopyStream(self._device)

    def copy(
        self, target: int, ranges: Sequence[ByteRange], on_progress: Callable[[], None]
    ) -> None:
        """See `Memory.copy`."""
        source = self._pool.address
        for first in range(0, len(ranges), COPIES_MAX):
            try:
                for piece in ranges[first : first + COPIES_MAX]:
                    self._stream.copy(
                        target + piece.target_offset, source + piece.source_offset, piece.length
                    )
            finally:
                # Where one was refused, those before it are on their way all the same.
                self._settle()
            on_progress()

    def _settle(self) -> None:
        try:
            self._stream.settle()
        except CudaError as error:
            why = f"the GPU does not say whether it has ended: {error}"
            raise CopyUnsettledError(why) from error


class CudaMapping:
    """Implements `Mapping`."""

    def __init__(self, device: CudaDevice, address: int, size_bytes: int) -> None:
        self._device = device
        self.address = address
        self.size_bytes = size_bytes

    def close(self) -> None:
        """See `Mapping.close`."""
        self._device.unmap(self.address)
