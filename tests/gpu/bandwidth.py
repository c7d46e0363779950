"""How fast `local` copies between two processes on one GPU, beside copies within one process:
`python -m tests.gpu.bandwidth`. No assertion: the figures are for people."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from pdrt.kv.cuda import CopyStream, CudaDevice, loaded_runtime
from pdrt.kv.pool import KvPool
from pdrt.protocol.room_writer import WriteOutcome
from pdrt.transfer.engine import ByteRange
from tests.gpu.sender import GPU, LAYOUT, PAGES, Sending

KIB = 1024
RUNS = (12 * KIB, 64 * KIB, 368 * KIB, 2048 * KIB)
"""Bytes that lie together: a page of one KV head up to a page of Llama-3.1-8B."""
TIMES = 9
COPIES_MAX = 256


def ranges_of(run: int) -> list[ByteRange]:
    """Runs that do not touch each other, of at most `COPIES_MAX` and the pool."""
    count = min(COPIES_MAX, PAGES * LAYOUT.page_bytes // (2 * run))
    return [ByteRange(2 * n * run, 2 * n * run, run) for n in range(count)]


def through_engine(sending: Sending, ranges: list[ByteRange]) -> float:
    """Seconds from the writer's `write` to its COMPLETED."""
    sending.connection.send(tuple(ranges))
    outcome, detail, seconds = sending.connection.recv()
    assert outcome is WriteOutcome.COMPLETED, detail
    return float(seconds)


class Within:
    """Copies from one pool of this process to another."""

    def __init__(self) -> None:
        self._source, self._target = (KvPool(LAYOUT, PAGES, GPU) for _ in range(2))
        self._stream = CopyStream(CudaDevice(loaded_runtime(), 0))

    def run_by_run(self, ranges: list[ByteRange]) -> float:
        """The same calls as the engine makes."""
        began = time.perf_counter()
        for piece in ranges:
            target = self._target.address + piece.target_offset
            source = self._source.address + piece.source_offset
            self._stream.copy(target, source, piece.length)
        self._stream.settle()
        return time.perf_counter() - began

    def at_once(self, ranges: list[ByteRange]) -> float:
        """One copy of as many bytes."""
        total = sum(piece.length for piece in ranges)
        began = time.perf_counter()
        self._stream.copy(self._target.address, self._source.address, total)
        self._stream.settle()
        return time.perf_counter() - began


def main() -> None:
    sending, within = Sending(), Within()
    print(f"{torch.cuda.get_device_name(GPU)}; GB/s, median of {TIMES}")
    print(f"{'run KiB':>8} {'runs':>5} {'engine':>8} {'same calls':>11} {'one copy':>9}")
    try:
        for run in RUNS:
            ranges = ranges_of(run)
            ways: list[Callable[[list[ByteRange]], float]] = [
                lambda r: through_engine(sending, r), within.run_by_run, within.at_once,
            ]  # fmt: skip
            found: list[list[float]] = [[] for _ in ways]
            for _ in range(TIMES):
                for way, seconds in zip(ways, found, strict=True):
                    seconds.append(way(ranges))
            total = sum(piece.length for piece in ranges)
            rates = [total / statistics.median(seconds) / 1e9 for seconds in found]
            figures = f"{rates[0]:8.1f} {rates[1]:11.1f} {rates[2]:9.1f}"
            print(f"{run // KIB:8} {len(ranges):5} {figures}")
    finally:
        sending.end()


if __name__ == "__main__":
    main()
