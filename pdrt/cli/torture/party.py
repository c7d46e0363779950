"""What runs on both ends of a trial: one command at a time from stdin, one answer to stdout."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Protocol

import torch
import uvloop

from pdrt.cli.child import die_with_parent
from pdrt.cli.torture.messages import Answer, Command, Refused, Setup, command_of, line_of
from pdrt.errors import PdrtError
from pdrt.ids import Incarnation, new_incarnation
from pdrt.kv.layout import KvLayout
from pdrt.kv.pool import KvPool

LAYOUT = KvLayout(page_size=16, kv_heads=8, layers=32, head_dim=128, dtype="bfloat16")
"""Llama-3.1-8B's: a page is 2 MiB."""
BYTE_MIN, BYTE_END = 1, 256
"""A writer never writes 0, which is what a page's next owner fills it with: every byte that lands
in it is seen."""

Handler = Callable[[Command], Awaitable[Answer]]


class Role(Protocol):
    """One end: `Target` or `Writer`."""

    def __init__(self, setup: Setup, incarnation: Incarnation) -> None: ...

    async def handle(self, command: Command) -> Answer: ...

    def ready(self) -> Answer: ...


def run_party(role: type[Role], parent_pid: int) -> int:
    """Until stdin ends. What libraries print goes to stderr."""
    die_with_parent(parent_pid)
    # Mooncake complains of everything that is done to it here.
    os.environ.setdefault("GLOG_minloglevel", "3")
    answers = os.dup(1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    uvloop.run(_serve(role, answers))
    # Copies that hang must not keep the process.
    os._exit(0)


async def _serve(role: type[Role], answers: int) -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    party: Role | None = None
    while line := await reader.readline():
        command = command_of(line)
        try:
            if isinstance(command, Setup):
                party = role(command, new_incarnation())
                answer = party.ready()
            else:
                assert party is not None, "the first command is Setup"
                answer = await party.handle(command)
        except PdrtError as error:
            answer = Refused(str(error))
        os.write(answers, line_of(answer))


def make_pool(pages: int, device: str) -> KvPool:
    """Raises ConfigError when there is no memory for it."""
    return KvPool(LAYOUT, pages, torch.device(device))


def bytes_of(pool: KvPool, first: int, count: int) -> torch.Tensor:
    """Pages as uint8, shape (count * page_bytes,)."""
    return pool.tensor[first : first + count].reshape(-1).view(torch.uint8)


def pattern(count: int, seed: int) -> torch.Tensor:
    """What the pages of a writer with this seed hold: uint8 without zeros, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count * LAYOUT.page_bytes,)
    return torch.randint(BYTE_MIN, BYTE_END, shape, generator=generator, dtype=torch.uint8)
