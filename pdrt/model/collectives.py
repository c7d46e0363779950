"""What the ranks of a worker compute together: sums, and the logits that each has a part of.

Plain collectives of torch.distributed's backends, called directly on tensors that are reused:
gloo over loopback on CPUs, NCCL between GPUs. Every rank calls the same ones in the same order,
with the same shapes; whoever fails in between leaves the others waiting for it, so a failure ends
the group, and with it the worker.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed
from torch import Tensor

from pdrt.errors import RanksLost
from pdrt.model.sharding import share

dist: Any = torch.distributed
"""Its stubs lack half of what it has."""

LOAD_SECONDS_MAX = 1800.0
"""How long ranks wait for the slowest to read its weights, from a disk that all of them read."""
LOOK_SECONDS = 0.02
"""How often a rank that has loaded looks for the others."""
KEPT_ROWS = 64
"""Rows of logits whose memory is kept between steps, as the fused decoder does."""


class RankPlace(msgspec.Struct, frozen=True):
    """One rank's place among the ranks of its worker, and how it finds the others."""

    rank: int
    ranks: int
    rendezvous: str
    """Path of a file, empty at first, that only this user can open: where ranks leave their
    addresses. One per life of a worker."""
    seconds_max: float
    """A rank that does not take part in a collective for so long is lost."""


class Collectives:
    """One rank's end. Used by the compute thread only."""

    def __init__(self, backend: Any, place: RankPlace, device: torch.device) -> None:
        """`backend`: a connected process group of torch.distributed."""
        self.rank, self.ranks = place.rank, place.ranks
        self.failure: str | None = None
        """Why the group has ended, once it has."""
        self._backend = backend
        self._device = device
        self._place = place
        self._scratch: dict[str, Tensor] = {}

    # In a forward

    def add(self, part: Tensor) -> Tensor:
        """Sum over all ranks, in place; the same to the bit on each.

        Raises:
            RanksLost: another rank is gone or silent.
        """
        if part.numel():
            self._do(self._backend.allreduce, [part])
        return part

    def gather(self, part: Tensor, total: int) -> Tensor:
        """Put columns that ranks hold a share of side by side, on rank 0.

        Args:
            part: (rows, columns of this rank), as `share(total, …)` divides them.

        Returns:
            On rank 0 (rows, total), valid until the next call; elsewhere `part`.

        Raises:
            RanksLost: another rank is gone or silent.
        """
        rows = len(part)
        if rows == 0:
            return part.new_empty(0, total) if self.rank == 0 else part
        width = -(-total // self.ranks)
        sent = part
        if part.shape[1] != width or not part.is_contiguous():
            sent = self._take("sent", part, rows, width)
            sent[:, : part.shape[1]] = part
        options = dist.GatherOptions()
        options.rootRank = 0
        if self.rank != 0:
            self._do(self._backend.gather, [], [sent], options)
            return part
        received = self._take("received", part, self.ranks * rows, width).view(-1, rows, width)
        self._do(self._backend.gather, [list(received.unbind())], [sent], options)
        whole = self._take("whole", part, rows, total)
        for rank, columns in enumerate(received):
            first, end = share(total, rank, self.ranks)
            whole[:, first:end] = columns[:, : end - first]
        return whole

    # While loading

    def least(self, value: int) -> int:
        """The least of all ranks' values.

        Raises:
            RanksLost: another rank is gone or silent.
        """
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        least = torch.tensor([value], dtype=torch.int64, device=self._device)
        self._do(self._backend.allreduce, [least], options)
        return int(least)

    def any(self, flag: bool) -> bool:
        """Whether it is set on any rank.

        Raises:
            RanksLost: another rank is gone or silent.
        """
        return self.least(-int(flag)) < 0

    # The end

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """What is computed together ends on all ranks or on none: should it raise, the others are
        not left waiting.

        Raises:
            RanksLost: the group has ended before.
        """
        if self.failure is not None:
            raise RanksLost(self.failure)
        is_whole = False
        try:
            yield
            is_whole = True
        finally:
            if not is_whole:
                self.close("a forward has failed, and the ranks are out of step")

    def close(self, why: str = "the worker has ended") -> None:
        """Leave the group; the others notice at once. Idempotent."""
        if self.failure is None:
            self.failure = f"rank {self.rank}: {why}"
        self._backend = None

    def _do(self, collective: Any, *arguments: Any) -> None:
        try:
            collective(*arguments).wait()
        except RuntimeError as error:
            text = str(error).splitlines()[0]
            self.close(
                f"a collective with the other ranks of this worker ended: {text}; one of them is "
                f"dead, or has not answered for {self._place.seconds_max:g} s"
            )
            raise RanksLost(str(self.failure)) from error

    def _take(self, name: str, like: Tensor, rows: int, width: int) -> Tensor:
        """(rows, width) of memory that grows up to what is kept, and is used again."""
        needed = rows * width
        memory = self._scratch.get(name)
        if memory is None or memory.numel() < needed or memory.dtype != like.dtype:
            memory = like.new_empty(needed)
            if rows <= KEPT_ROWS * self.ranks:
                self._scratch[name] = memory
        return memory[:needed].view(rows, width)


def join(place: RankPlace, device: torch.device) -> Collectives:
    """Meet the other ranks. Blocks until all of them are here.

    Raises:
        RanksLost: one did not come in time, or went away.
    """
    store = dist.FileStore(place.rendezvous, place.ranks)
    store.set(f"loaded/{place.rank}", "")
    deadline = time.monotonic() + LOAD_SECONDS_MAX
    for rank in range(place.ranks):
        _await(store, rank, deadline)
    try:
        backend = _connect(store, place, device)
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        raise RanksLost(f"rank {place.rank} cannot connect to the others: {text}") from error
    return Collectives(backend, place, device)


def _await(store: Any, rank: int, deadline: float) -> None:
    while not store.check([f"loaded/{rank}"]):
        if time.monotonic() > deadline:
            raise RanksLost(f"rank {rank} has not loaded its part within {LOAD_SECONDS_MAX:.0f} s")
        time.sleep(LOOK_SECONDS)


def _connect(store: Any, place: RankPlace, device: torch.device) -> Any:
    timeout = timedelta(seconds=place.seconds_max)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, place.rank, place.ranks, options)
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    # Left alone, it listens on whatever address this machine's name resolves to.
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._threads = 1
    return gloo(store, place.rank, place.ranks, options)
