"""The memory of one rank's KV pool: one contiguous tensor, on CPU inside a memfd, on a GPU an
allocation of its own.

Neither has a name or a `/dev/shm` entry: when the last process that maps it dies, it is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

from pdrt.errors import ConfigError
from pdrt.kv.cuda import CudaAllocation, CudaDevice, loaded_runtime
from pdrt.kv.layout import KvLayout


class KvPool:
    """`[page, kv_head, layer, k/v, token, head_dim]` of one rank.

    Attributes:
        tensor: the pool; shape (pages, kv_heads, layers, 2, page_size, head_dim).
        address: of the first byte, in this process.
        fd: the memfd that other local processes map (CPU only, else None).
        cuda: the allocation that other local processes map (GPU only, else None).
    """

    def __init__(self, layout: KvLayout, pages: int, device: torch.device) -> None:
        """Allocate `pages` pages of `layout` (of this rank's heads) on `device`, the CPU or one
        GPU by its number.

        Raises:
            ConfigError: the memory cannot be had; says how much was asked for.
        """
        self.layout = layout
        self.pages = pages
        self.size_bytes = pages * layout.page_bytes
        self.fd: int | None = None
        self.cuda: CudaAllocation | None = None
        shape = (
            pages, layout.kv_heads, layout.layers, 2, layout.page_size, layout.head_dim,
        )  # fmt: skip
        dtype: torch.dtype = getattr(torch, layout.dtype)
        try:
            if device.type == "cpu":
                self.tensor = self._map_memfd(dtype).view(shape)
            else:
                self.tensor = self._allocate(device).view(dtype).view(shape)
        except (OSError, RuntimeError, OverflowError) as error:
            self.close()
            raise ConfigError(
                f"no memory for a KV pool of {pages} pages ({self.size_bytes / 2**20:.0f} MiB): "
                f"{error}; give a smaller --kv-cache-memory-bytes"
            ) from error
        self.address: int = self.tensor.data_ptr()

    def _map_memfd(self, dtype: torch.dtype) -> torch.Tensor:
        self.fd = os.memfd_create("pdrt-kv", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.size_bytes)
        mapping = mmap.mmap(self.fd, self.size_bytes, mmap.MAP_SHARED)
        # A forked child must not keep a writable view of pages it does not own.
        mapping.madvise(mmap.MADV_DONTFORK)
        return torch.frombuffer(mapping, dtype=dtype)

    def _allocate(self, device: torch.device) -> torch.Tensor:
        """Bytes."""
        assert device.type == "cuda", device
        assert device.index is not None, device
        self.cuda = CudaAllocation(CudaDevice(loaded_runtime(), device.index), self.size_bytes)
        tensor = torch.as_tensor(self.cuda, device=device)
        assert tensor.data_ptr() == self.cuda.address, "torch has made a copy"
        return tensor

    def close(self) -> None:
        """Give the memfd back; the memory goes with the tensor."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        self.cuda = None


def bytes_at(address: int, size_bytes: int) -> memoryview:
    """Writable bytes of host memory, which the caller keeps."""
    return memoryview((ctypes.c_ubyte * size_bytes).from_address(address)).cast("B")
