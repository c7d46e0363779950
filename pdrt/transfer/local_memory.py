"""What the `local` engine asks of a kind of memory: to be found by a peer, to find the peer's, and
to copy there. Host memory and GPU memory are the two kinds (`local_host`, `local_cuda`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from pdrt.errors import EngineError
from pdrt.protocol.messages import RankProcess
from pdrt.transfer.engine import ByteRange


class HostDescriptor(msgspec.Struct, frozen=True, tag="host"):
    """Where a receiver's pool is that lies in a memfd."""

    process: RankProcess
    fd: int
    """Of the memfd, in that process."""
    inode: int
    size_bytes: int
    name: str
    """Of the segment: prefill endpoint and generation. Two pairings never look alike."""


class CudaDescriptor(msgspec.Struct, frozen=True, tag="cuda"):
    """Where a receiver's pool is that lies on a GPU."""

    process: RankProcess
    device: str
    """The GPU's PCI address."""
    handle: bytes
    """Of CUDA IPC. Whoever has it can map the pool."""
    size_bytes: int
    name: str
    """As `HostDescriptor.name`."""


LocalDescriptor = HostDescriptor | CudaDescriptor


class CopyUnsettledError(Exception):
    """A copy has been begun, and nothing can say whether it has ended."""


class Mapping(Protocol):
    """A peer's pool in this process's address space."""

    address: int
    size_bytes: int

    def close(self) -> None:
        """Unmap it; nothing copies there any more. Blocks."""


class Memory(Protocol):
    """The memory of this rank's pool."""

    size_bytes: int

    def describe(self, name: str) -> LocalDescriptor:
        """For peers. `name`: of the segment."""

    def map(self, descriptor: LocalDescriptor) -> Mapping:
        """Verify and map what a peer has described. Blocks.

        Raises:
            EngineError: it cannot be mapped, or is not what it says; says what to do.
        """

    def copy(
        self, target: int, ranges: Sequence[ByteRange], on_progress: Callable[[], None]
    ) -> None:
        """Copy from this pool to a mapping at address `target`; returns once all of it is in place.
        Always called on one thread. `on_progress`: after each part.

        Raises:
            CopyUnsettledError: what was begun may go on.
            Exception: whatever it failed with; nothing goes on.
        """


def other_kind(theirs: str, ours: str) -> EngineError:
    """Pools of two kinds."""
    return EngineError(
        f"the decode pool is in {theirs}, this worker's in {ours}: the local engine copies between "
        "pools of one kind; give both workers the same --device"
    )
