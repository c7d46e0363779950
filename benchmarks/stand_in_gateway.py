"""A stand-in for the gateway, a process of its own: it has workers find each other, and takes what
else they say."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from pdrt.config import SecurityConfig
from pdrt.ids import Incarnation, new_incarnation
from pdrt.protocol.codec import encode
from pdrt.protocol.gateway_messages import Register, Registered
from pdrt.transfer.channel import RouterChannel
from pdrt.transfer.cluster_key import read_key
from pdrt.transfer.frames import FrameReader

FRAME_BYTES = 1 << 24


class Peer(msgspec.Struct, frozen=True):
    """The process, as workers and measurements see it."""

    address: str
    incarnation: Incarnation
    pid: int
    security: SecurityConfig

    def cpu_seconds(self) -> float:
        """Of all its threads, so far."""
        tasks = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) * 1e-9


@contextlib.contextmanager
def gateway_process(cluster_key: str | None = None) -> Iterator[Peer]:
    """It ends with the context. `cluster_key`: its file."""
    command = [sys.executable, __file__, *([] if cluster_key is None else [cluster_key])]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        port, incarnation = process.stdout.readline().split()
        security = SecurityConfig(cluster_key=cluster_key)
        yield Peer(f"127.0.0.1:{port}", Incarnation(int(incarnation)), process.pid, security)


async def gateway(security: SecurityConfig) -> None:
    """Answers every `Register` with the prefill workers so far. Runs until its stdin ends."""
    incarnation = new_incarnation()
    reader: FrameReader[Any] = FrameReader(Register, FRAME_BYTES, "worker")
    endpoints: dict[Incarnation, str] = {}

    def on_frame(peer: bytes, frame: bytes) -> None:
        if b"Register" not in frame[:32]:
            return
        register = reader.read(frame)
        assert register is not None, "its type was looked at"
        if register.endpoint is not None:
            endpoints[register.worker] = register.endpoint
        known = tuple(endpoints.values())
        channel.send(peer, encode(Registered(incarnation, register.worker, register.seq, known)))

    channel = RouterChannel("127.0.0.1", 0, on_frame, FRAME_BYTES, read_key(security))
    print(channel.port, incarnation, flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    key = sys.argv[1] if len(sys.argv) > 1 else None
    uvloop.run(gateway(SecurityConfig(cluster_key=key)))
