"""Is the death of a process the end of what it has told the GPU to write? The claim that the fence
of `local` rests on (docs/protocol.md), tried: a writer is stopped or not, killed with seconds of
copies queued, and once its pidfd says that it is dead, nothing may change any more.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pdrt.kv.cuda import CudaAllocation, CudaDevice, loaded_runtime
from pdrt.protocol.messages import RankProcess
from pdrt.transfer.processes import ProcessHandle, pid_namespace, start_time
from tests.gpu.queue_writer import WORDS
from tests.gpu.sender import ENDLESS, Sending

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("queue_writer.py")
COPIES = 900
"""Queued at once; a driver takes about a thousand before the next one has to wait."""
SHARE = 16
"""Of the GPU's memory, one part is copied at a time: milliseconds each."""
COPY_BYTES_MAX = 8 * 2**30
NEIGHBOUR_BYTES = 64 * 2**20
WATCH_SECONDS = 2.0
"""After the fence: about as long as the queue would have lasted."""
LOOKS = 1000
MIXED_SAMPLES = 4096


class Target:
    """Memory that others write to, and what it held when a fence returned."""

    def __init__(self, size: int) -> None:
        device = CudaDevice(loaded_runtime(), 0)
        self.size = size
        allocation = CudaAllocation(device, size)
        self.handle = allocation.share().hex()
        self.tensor = torch.as_tensor(allocation, device=torch.device("cuda", 0)).view(torch.int64)
        # Spread over all of it: a copy shows in some of them long before it is complete.
        self._samples = self.tensor[:: max(1, self.tensor.numel() // MIXED_SAMPLES)]

    def look(self) -> torch.Tensor:
        return self._samples.cpu()

    def is_changing(self) -> bool:
        """Somebody writes to it right now: two looks differ."""
        first = self.look()
        return any(not torch.equal(self.look(), first) for _ in range(LOOKS))

    def keep(self) -> torch.Tensor:
        copy = self.tensor.clone()
        torch.cuda.synchronize()
        return copy

    def differs(self, kept: torch.Tensor) -> int:
        """Words that are not as they were."""
        return int((self.tensor != kept).sum())


@pytest.fixture(scope="module")
def target() -> Target:
    _, total = torch.cuda.mem_get_info()
    return Target(min(COPY_BYTES_MAX, total // SHARE) // 2**21 * 2**21)


class Writer:
    """A process of `queue_writer`, and the means to fence it."""

    def __init__(self, target: Target, copies: int) -> None:
        command = [sys.executable, str(SCRIPT), loaded_runtime().path, target.handle]
        self.process = subprocess.Popen(
            [*command, str(target.size), str(copies)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self.said() == "queued"
        self.fence = handle_of(self.process.pid)

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self) -> None:
        """A neighbour: to copy."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.fence.close()


def handle_of(pid: int) -> ProcessHandle:
    started = start_time(pid)
    assert started is not None
    return ProcessHandle(RankProcess(pid, started, pid_namespace()))


def kill_and_wait(fence: ProcessHandle) -> float:
    """As a decode worker does; seconds until the pidfd says that it is dead."""
    began = time.monotonic()
    fence.kill()
    while not fence.is_dead():
        time.sleep(0.0005)
    return time.monotonic() - began


def assert_still(target: Target, kept: torch.Tensor) -> None:
    until = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < until:
        assert target.differs(kept) == 0, "THE FENCE DOES NOT HOLD: written after the death"


@pytest.fixture
def neighbour() -> Iterator[Writer]:
    neighbour = Writer(Target(NEIGHBOUR_BYTES), copies=0)
    yield neighbour
    neighbour.close()


@pytest.mark.parametrize("trial", range(3))
@pytest.mark.parametrize("is_stopped", [True, False], ids=["stopped", "running"])
def test_death_ends_what_is_queued(
    target: Target, neighbour: Writer, is_stopped: bool, trial: int
) -> None:
    writer = Writer(target, COPIES)
    try:
        if is_stopped:
            writer.process.send_signal(signal.SIGSTOP)
        # Counter-example: a stopped process writes on. Whoever waits for a while and then takes the
        # pages for his own has them overwritten.
        assert target.is_changing(), "the trial proves nothing: the queue is empty"
        neighbour.tell()
        seconds = kill_and_wait(writer.fence)
        kept = target.keep()
        assert_still(target, kept)
        shares = [int((kept == word * 0x0101010101010101).sum()) for word in WORDS]
        print(f"dead after {seconds * 1000:.1f} ms, words of each source: {shares}")
        assert sum(shares) == kept.numel(), "whole words of the one or the other"
    finally:
        writer.close()
    assert neighbour.said() == "done", "a fence disturbs nobody else"


@pytest.mark.parametrize("is_stopped", [True, False], ids=["stopped", "running"])
def test_death_ends_the_engines_own_writes(is_stopped: bool) -> None:
    sending = Sending()
    try:
        sending.connection.send(ENDLESS)
        assert sending.connection.recv() == "writing"
        pid = sending.process.pid
        assert pid is not None
        fence = handle_of(pid)
        words = sending.words()
        first = words.clone()
        assert any(not torch.equal(words, first) for _ in range(LOOKS)), "it writes"
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
        kill_and_wait(fence)
        kept = words.clone()
        torch.cuda.synchronize()
        until = time.monotonic() + WATCH_SECONDS
        while time.monotonic() < until:
            assert torch.equal(words, kept), "THE FENCE DOES NOT HOLD"
        fence.close()
    finally:
        sending.end()
