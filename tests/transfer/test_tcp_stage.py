"""The tcp engine over GPU memory, as far as a CPU reaches: through a stage, and settled there.

The device is host memory here, and its copies happen when they are waited for, as late as may be.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Iterator

import pytest
import torch

from pdrt.kv.pool import bytes_at
from pdrt.transfer.tcp.memory import DeviceStage

POOL_BYTES = 4096
RANGES = [(1000, 300), (16, 8), (2048, 512)]
TOTAL = sum(length for _, length in RANGES)


class LateCopies:
    """A stream that runs when somebody waits for it."""

    def __init__(self) -> None:
        self._queued: list[tuple[int, int, int]] = []

    def copy(self, target: int, source: int, length: int) -> None:
        self._queued.append((target, source, length))

    def settle(self) -> None:
        for target, source, length in self._queued:
            ctypes.memmove(target, source, length)
        self._queued.clear()


class Device:
    """A pool and a stage."""

    def __init__(self) -> None:
        self._memory = torch.zeros(POOL_BYTES, dtype=torch.uint8)
        stage = torch.zeros(TOTAL + 64, dtype=torch.uint8)
        self.pool = bytes_at(self._memory.data_ptr(), POOL_BYTES)
        self.stage = DeviceStage(self._memory.data_ptr(), stage, LateCopies())


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_what_is_given_is_what_the_pool_holds() -> None:
    device = Device()
    content = bytes(n * 7 % 251 for n in range(POOL_BYTES))
    device.pool[:] = content
    given = b"".join(bytes(part) for part in device.stage.give(RANGES))
    assert given == b"".join(content[offset : offset + length] for offset, length in RANGES)


def test_what_is_taken_is_in_place_when_that_is_said(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    device = Device()
    data = bytes(n % 253 + 1 for n in range(TOTAL))
    ends[0].sendall(data + b"the next piece")
    device.stage.take(ends[1], RANGES)
    expected = bytearray(POOL_BYTES)
    taken = 0
    for offset, length in RANGES:
        expected[offset : offset + length] = data[taken : taken + length]
        taken += length
    assert bytes(device.pool) == bytes(expected)
    assert ends[1].recv(100) == b"the next piece"


def test_half_a_piece_never_reaches_the_pool(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    device = Device()
    ends[0].sendall(bytes([1]) * (TOTAL // 2))
    ends[0].shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError):
        device.stage.take(ends[1], RANGES)
    assert not any(device.pool)
