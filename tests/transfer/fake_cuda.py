"""A GPU that is none: `fake_cudart.c`, compiled here and now, in the place of CUDA's library. The
code that calls it is the product's own."""

from __future__ import annotations

import ctypes
import gc
import subprocess
from pathlib import Path

import torch

from pdrt.kv.cuda import CudaAllocation, CudaDevice, CudaRuntime

SOURCE = Path(__file__).with_name("fake_cudart.c")


class FakeCuda:
    """The library, and what tests can have it do. One per path and process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runtime = CudaRuntime(path)
        self._library = ctypes.CDLL(str(path))

    @classmethod
    def build(cls, folder: Path) -> FakeCuda:
        path = folder / "libfake_cudart.so"
        flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        subprocess.run(["cc", *flags, str(SOURCE), "-o", str(path)], check=True)
        return cls(path)

    def device(self, index: int = 0) -> CudaDevice:
        return CudaDevice(self.runtime, index)

    def fail(self, call: str, status: int = 700, after: int = 0) -> None:
        """`call` fails from now on, after so many that succeed."""
        self._library.fake_fail(call.encode(), after, status)

    def set_attribute(self, attribute: int, value: int) -> None:
        self._library.fake_set_attribute(attribute, value)

    def hold(self) -> None:
        """Copies do not end any more."""
        self._library.fake_hold(1)

    def let_go(self) -> None:
        self._library.fake_hold(0)

    @property
    def waiting(self) -> int:
        """Threads that wait for copies to end."""
        return int(self._library.fake_waiting())

    @property
    def allocations(self) -> int:
        """Allocations and mappings that have not been given back, without those of garbage."""
        gc.collect()
        return int(self._library.fake_allocations())

    def reset(self) -> None:
        """As it was in the beginning, but for memory."""
        self.fail("")
        self.let_go()
        self.set_attribute(133, 0)


def bytes_of(allocation: CudaAllocation) -> torch.Tensor:
    """What `torch.as_tensor` makes of an allocation on a GPU: its bytes, and a reference to it."""
    memory = (ctypes.c_uint8 * allocation.size_bytes).from_address(allocation.address)
    memory.allocation = allocation  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8)


class FakePool:
    """As much of a `KvPool` on a GPU as the `local` engine looks at."""

    fd = None

    def __init__(self, device: CudaDevice, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.cuda = CudaAllocation(device, size_bytes)
        self.address = self.cuda.address
        self.bytes = bytes_of(self.cuda)
