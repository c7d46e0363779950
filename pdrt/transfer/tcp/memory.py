"""Between sockets and a pool: host memory directly, GPU memory through a piece of pinned memory.

Each connection's thread has a stage of its own. A piece is on it for as long as the thread works on
that, so that whoever waits for the thread has waited for its copies too.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Protocol

import torch

from pdrt.kv.cuda import CopyStream
from pdrt.kv.pool import KvPool, bytes_at
from pdrt.transfer.tcp.sockets import receive_all
from pdrt.transfer.tcp.wire import PIECE_BYTES_MAX

Ranges = Sequence[tuple[int, int]]
"""Offset in the pool and length, bytes."""


class Stage(Protocol):
    """For one thread, one piece at a time."""

    def take(self, connection: socket.socket, ranges: Ranges) -> None:
        """Read these ranges of the pool from a socket; in place when it returns.

        Raises:
            OSError: the connection broke. Some of it may be in place; nothing more will be.
        """

    def give(self, ranges: Ranges) -> list[memoryview]:
        """The bytes of these ranges, to be sent before the next call."""


class Copies(Protocol):
    """`kv.cuda.CopyStream`."""

    def copy(self, target: int, source: int, length: int) -> None: ...

    def settle(self) -> None: ...


class HostStage:
    """No stage at all: the pool's own bytes."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._bytes = bytes_at(pool.address, pool.size_bytes)

    def take(self, connection: socket.socket, ranges: Ranges) -> None:
        receive_all(connection, self.give(ranges))

    def give(self, ranges: Ranges) -> list[memoryview]:
        return [self._bytes[offset : offset + length] for offset, length in ranges]


class DeviceStage:
    """Room for one piece, and the stream that copies between it and the pool."""

    def __init__(self, pool_address: int, stage: torch.Tensor, copies: Copies) -> None:
        """`stage`: bytes in host memory that the device reaches."""
        self._pool_address = pool_address
        self._tensor = stage
        self._address = stage.data_ptr()
        self._stage = bytes_at(self._address, stage.nbytes)
        self._copies = copies

    def take(self, connection: socket.socket, ranges: Ranges) -> None:
        receive_all(connection, [self._stage[: sum(length for _, length in ranges)]])
        staged = self._address
        for offset, length in ranges:
            self._copies.copy(self._pool_address + offset, staged, length)
            staged += length
        self._copies.settle()

    def give(self, ranges: Ranges) -> list[memoryview]:
        staged = self._address
        for offset, length in ranges:
            self._copies.copy(staged, self._pool_address + offset, length)
            staged += length
        self._copies.settle()
        return [self._stage[: staged - self._address]]


def make_stage(pool: KvPool) -> Stage:
    """On the thread that will use it.

    Raises:
        RuntimeError: the GPU, or its driver, has not the memory for it.
    """
    if pool.cuda is None:
        return HostStage(pool)
    pinned = torch.empty(PIECE_BYTES_MAX, dtype=torch.uint8, pin_memory=True)
    return DeviceStage(pool.address, pinned, CopyStream(pool.cuda.device))
