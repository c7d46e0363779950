"""The processes that are harmed: several workers of each role and a gateway, started by hand so
that each has a name, a log of its own, and a successor when it dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.chaos.proc import Use, read_use
from tests.e2e.deployment import HANG_SECONDS, Deployment

SILENCE_SECONDS = 2.0
POLL_SECONDS = 0.25
PROTOCOL = (
    *("--hello-interval-seconds", "0.5", "--silence-seconds", str(SILENCE_SECONDS)),
    # Twice in a row is a coincidence of a busy machine; a stopped worker is woken long before.
    *("--kill-lost-after-seconds", "60"),
)
WORKER = (
    *("--dtype", "float32", "--kv-cache-memory-bytes", str(64 * 2**20)),
    *("--max-model-len", "1024"),  # a pool holds one such sequence of a real, small model too
    *("--max-num-seqs", "12", "--max-num-batched-tokens", "64", "--stream-tokens-max", "48"),
)


class Cluster(Deployment):
    """`workers` prefill workers, as many decode workers, and one gateway."""

    def __init__(
        self, folder: Path, model: str, workers: int = 2, flags: Sequence[str] = ()
    ) -> None:
        """`flags`: for one role more than it has anyway, as in `decode:--local-prefill=short`."""
        super().__init__(folder, model)
        self._flags = [flag.partition(":")[::2] for flag in flags]
        numbers = range(workers)
        self.names = {
            "prefill": [f"prefill-{n}" for n in numbers],
            "decode": [f"decode-{n}" for n in numbers],
            "gateway": ["gateway"],
        }

    def start(self, name: str) -> None:
        """Start, or start again. On the main thread only: the kernel ends a child with the thread
        that made it."""
        role = name.partition("-")[0]
        given = [flag for for_role, flag in self._flags if for_role == role]
        more = [*self.flags_of(name), *given]
        if role == "gateway":
            self.gateway(name, *PROTOCOL, *more)
        elif role == "prefill":
            self.prefill(name, *WORKER, *PROTOCOL, *more)
        else:
            self.decode(name, *WORKER, *PROTOCOL, *more)

    def flags_of(self, name: str) -> list[str]:
        """What is this process's alone."""
        return []

    def start_all(self) -> None:
        for names in self.names.values():
            for name in names:
                self.start(name)

    async def complete(self) -> float:
        """Once every worker is paired with every other; the seconds that it took."""
        return await self._until(lambda: [] if self.is_complete() else ["not all are paired"])

    async def whole(self) -> float:
        """Once nothing is held, in flight or broken anywhere; the seconds that it took."""
        return await self._until(self.troubles)

    async def _until(self, troubles: Callable[[], list[str]]) -> float:
        """Asks seldom, as each time every worker is asked. The loop goes on meanwhile."""
        began = time.monotonic()
        while found := await asyncio.to_thread(troubles):
            seconds = time.monotonic() - began
            assert seconds < HANG_SECONDS, f"after {seconds:.0f} s: {'; '.join(found)}"
            await asyncio.sleep(POLL_SECONDS)
        return time.monotonic() - began

    def uses(self) -> dict[int, Use]:
        """What each process takes of the machine, by pid."""
        pids = [process.pid for process in self.processes.values() if process.is_running]
        return {pid: read_use(pid) for pid in pids}

    def name_of(self, pid: int) -> str:
        return next(name for name, process in self.processes.items() if process.pid == pid)
