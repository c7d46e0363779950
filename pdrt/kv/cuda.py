"""CUDA's runtime library where torch does not reach: memory that other processes can map, and
copies on a stream of their own, settled by an event.

It is the libcudart that torch has loaded, called through ctypes: documented C functions that CUDA
12 and 13 have in common. torch's own way, `UntypedStorage._share_cuda_`, was rejected: it is
private, keeps counters in /dev/shm that a kill leaves behind, and shares blocks of torch's
allocator, which hold other tensors too and which `cudaIpcGetMemHandle` refuses where they are
`expandable_segments`. A pool is an allocation of its own: its handle is all of it and nothing else.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from pathlib import Path
from typing import Any

GRANULE_BYTES = 2 * 2**20
"""A smaller allocation is a part of a block of this size, and what is shared is the block."""
HANDLE_BYTES = 64
"""CUDA_IPC_HANDLE_SIZE."""
PCI_BUS_ID_BYTES = 32

# Of CUDA's headers (driver_types.h); the names there are in the comments.
LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
COPY_BY_ADDRESS = 4  # cudaMemcpyDefault
STREAM_NON_BLOCKING = 1  # cudaStreamNonBlocking: it and the default stream do not wait
EVENT_BLOCKING_SYNC = 1  # cudaEventBlockingSync: who waits sleeps
EVENT_DISABLE_TIMING = 2  # cudaEventDisableTiming
ATTRIBUTE_COMPUTE_MODE = 20  # cudaDevAttrComputeMode
ATTRIBUTE_MPS_ENABLED = 133  # cudaDevAttrMpsEnabled
COMPUTE_MODE_DEFAULT = 0  # cudaComputeModeDefault: any number of processes


class CudaError(RuntimeError):
    """A call of the runtime failed."""

    def __init__(self, call: str, status: int, words: str) -> None:
        super().__init__(f"{call}: {words} ({status})")
        self.status = status


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t, which is passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


_int, _unsigned, _size = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t
_pointer, _out = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cudaSetDevice": (_int,),
    "cudaDeviceGetAttribute": (ctypes.POINTER(ctypes.c_int), _int, _int),
    "cudaDeviceGetPCIBusId": (ctypes.c_char_p, _int, _int),
    "cudaDeviceSynchronize": (),
    "cudaMalloc": (_out, _size),
    "cudaMemset": (_pointer, _int, _size),
    "cudaFree": (_pointer,),
    "cudaIpcGetMemHandle": (ctypes.POINTER(_Handle), _pointer),
    "cudaIpcOpenMemHandle": (_out, _Handle, _unsigned),
    "cudaIpcCloseMemHandle": (_pointer,),
    "cudaStreamCreateWithFlags": (_out, _unsigned),
    "cudaEventCreateWithFlags": (_out, _unsigned),
    "cudaEventRecord": (_pointer, _pointer),
    "cudaEventSynchronize": (_pointer,),
    "cudaMemcpyAsync": (_pointer, _pointer, _size, _int, _pointer),
    "cudaGetLastError": (),
}
_QUEUED = {"cudaMemcpyAsync", "cudaEventRecord"}
"""Microseconds each. To let go of the GIL costs the wait for it afterwards, up to the interpreter's
switch interval, and that once per page."""


class CudaRuntime:
    """A libcudart. Any thread may call."""

    def __init__(self, path: str | Path) -> None:
        """Raises OSError: it cannot be loaded."""
        self.path = str(path)
        without_gil, with_gil = ctypes.CDLL(self.path), ctypes.PyDLL(self.path)
        self._functions: dict[str, Any] = {}
        for name, arguments in _ARGUMENTS.items():
            function = getattr(with_gil if name in _QUEUED else without_gil, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
            self._functions[name] = function
        self._words = without_gil.cudaGetErrorString
        self._words.argtypes, self._words.restype = (ctypes.c_int,), ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> None:
        """Raises CudaError: any status but success."""
        status: int = self._functions[name](*arguments)
        if status:
            # CUDA keeps it per thread, and torch would take it for an error of its own next call.
            self._functions["cudaGetLastError"]()
            raise CudaError(name, status, self._words(status).decode(errors="replace"))


@functools.cache
def loaded_runtime() -> CudaRuntime:
    """Of the process: torch, which has been imported, has loaded it.

    Raises:
        OSError: it has not: built for CPUs only, or linked with it statically.
    """
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line[line.find("/") :] if "/" in line else ""
        if Path(path).name.startswith("libcudart.so"):
            return CudaRuntime(path)
    raise OSError("this torch has loaded no libcudart.so; install a CUDA build of it from PyPI")


class CudaDevice:
    """One GPU. CUDA has a current device per thread: each method makes it this one."""

    def __init__(self, runtime: CudaRuntime, index: int) -> None:
        """`index` as torch and CUDA count, after CUDA_VISIBLE_DEVICES."""
        self._runtime = runtime
        self.index = index

    def call(self, name: str, *arguments: Any) -> None:
        """Raises CudaError."""
        self._runtime.call("cudaSetDevice", self.index)
        self._runtime.call(name, *arguments)

    def queue(self, name: str, *arguments: Any) -> None:
        """`call` without making the device current: the caller has, on this thread."""
        self._runtime.call(name, *arguments)

    def create(self, name: str, *arguments: Any) -> int:
        """What a call gives back through its first argument: an address."""
        made = ctypes.c_void_p()
        self.call(name, ctypes.byref(made), *arguments)
        assert made.value is not None, name
        return made.value

    def attribute(self, number: int) -> int:
        """One of cudaDeviceAttr."""
        value = ctypes.c_int()
        self.call("cudaDeviceGetAttribute", ctypes.byref(value), number, self.index)
        return value.value

    @functools.cached_property
    def bus_id(self) -> str:
        """Where it is in this machine, the same for every process: `0000:1B:00.0`."""
        text = ctypes.create_string_buffer(PCI_BUS_ID_BYTES)
        self.call("cudaDeviceGetPCIBusId", text, PCI_BUS_ID_BYTES, self.index)
        return text.value.decode()

    def has_mps(self) -> bool:
        """Processes share one context on it, which is the MPS server's."""
        return bool(self.attribute(ATTRIBUTE_MPS_ENABLED))

    def map_shared(self, handle: bytes) -> int:
        """Address, here, of what another process has shared; on another GPU, with peer access."""
        assert len(handle) == HANDLE_BYTES, len(handle)
        shared = _Handle.from_buffer_copy(handle)
        return self.create("cudaIpcOpenMemHandle", shared, LAZY_PEER_ACCESS)

    def unmap(self, address: int) -> None:
        """What `map_shared` gave."""
        self.call("cudaIpcCloseMemHandle", address)


class CudaAllocation:
    """Zeroed memory of one GPU, given back when nothing refers to it any more; tensors over it,
    made by `torch.as_tensor`, do."""

    def __init__(self, device: CudaDevice, size_bytes: int) -> None:
        """Raises CudaError: there is not enough."""
        self.device = device
        self.size_bytes = size_bytes
        whole = -(-size_bytes // GRANULE_BYTES) * GRANULE_BYTES
        self.address = device.create("cudaMalloc", whole)
        # Not at the interpreter's exit, when CUDA may be gone: the end of the process frees it too.
        weakref.finalize(self, device.call, "cudaFree", self.address).atexit = False
        device.call("cudaMemset", self.address, 0, whole)
        device.call("cudaDeviceSynchronize")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Bytes, for torch: numba's protocol, version 3."""
        return {
            "shape": (self.size_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }

    def share(self) -> bytes:
        """What another process of this machine maps it by.

        Raises:
            CudaError: this kind of memory, or this machine, cannot share.
        """
        handle = _Handle()
        self.device.call("cudaIpcGetMemHandle", ctypes.byref(handle), self.address)
        return bytes(handle.reserved)


class CopyStream:
    """A stream that waits for no other, and the event that settles what was queued on it. For one
    thread."""

    def __init__(self, device: CudaDevice) -> None:
        """Raises CudaError."""
        self._device = device
        self._stream = device.create("cudaStreamCreateWithFlags", STREAM_NON_BLOCKING)
        flags = EVENT_BLOCKING_SYNC | EVENT_DISABLE_TIMING
        self._event = device.create("cudaEventCreateWithFlags", flags)

    def copy(self, target: int, source: int, length: int) -> None:
        """Queue a copy of `length` bytes, on this GPU or to a peer. The calling thread has created
        this stream.

        Raises:
            CudaError: not queued.
        """
        self._device.queue("cudaMemcpyAsync", target, source, length, COPY_BY_ADDRESS, self._stream)

    def settle(self) -> None:
        """Return once everything queued has ended and is in place.

        Raises:
            CudaError: nothing can be said of it.
        """
        self._device.queue("cudaEventRecord", self._event, self._stream)
        self._device.queue("cudaEventSynchronize", self._event)
