"""One rank of a test's worker, in a process of its own: loads and computes as frames on stdin say.

`python -m tests.model.rank_process`. A frame is its length (4 bytes, little endian) and a message.
"""

from __future__ import annotations

import os
import sys
from typing import BinaryIO

import msgspec
import torch

from pdrt.config import DeviceConfig, ModelConfig
from pdrt.errors import PdrtError
from pdrt.model.collectives import RankPlace
from pdrt.model.rank_executor import RankExecutor

ONE_CORE = DeviceConfig(device="cpu", threads=1)


class Load(msgspec.Struct, tag=True):
    model: ModelConfig
    place: RankPlace


class Step(msgspec.Struct, tag=True):
    body: bytes


class ReadPages(msgspec.Struct, tag=True):
    pages: list[int]


class WritePages(msgspec.Struct, tag=True):
    pages: list[int]
    content: list[bytes]


class Leave(msgspec.Struct, tag=True):
    """The executor is closed; another may be loaded."""


Command = Load | Step | ReadPages | WritePages | Leave


class Done(msgspec.Struct, tag=True):
    pages: list[bytes] = []


class Failed(msgspec.Struct, tag=True):
    why: str


Reply = Done | Failed


def write_frame(stream: BinaryIO, message: Command | Reply) -> None:
    body = msgspec.msgpack.encode(message)
    stream.write(len(body).to_bytes(4, "little") + body)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes:
    """Raises EOFError."""
    size = stream.read(4)
    if not size:
        raise EOFError
    return stream.read(int.from_bytes(size, "little"))


def page_bytes(pool: torch.Tensor, page: int) -> memoryview:
    """One page of a pool, to read or to write."""
    return memoryview(pool[page].view(torch.uint8).numpy()).cast("B")


class Rank:
    """Answers every command."""

    def __init__(self) -> None:
        self._executor: RankExecutor | None = None

    def do(self, command: Command) -> Reply:
        match command:
            case Load(model, place):
                self._executor = RankExecutor.load(model, ONE_CORE, lambda text: None, place)
                return Done()
            case Leave():
                if self._executor is not None:
                    self._executor.close()
                self._executor = None
                return Done()
        assert self._executor is not None
        pool = self._executor.pool.tensor
        match command:
            case Step(body):
                self._executor.step_blocking(body)
            case ReadPages(pages):
                return Done([bytes(page_bytes(pool, page)) for page in pages])
            case WritePages(pages, content):
                for page, data in zip(pages, content, strict=True):
                    page_bytes(pool, page)[:] = data
        return Done()


def main() -> None:
    # What a library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    rank = Rank()
    while True:
        try:
            frame = read_frame(sys.stdin.buffer)
        except EOFError:
            return
        command: Command = msgspec.msgpack.decode(frame, type=Command)
        try:
            reply = rank.do(command)
        except PdrtError as error:
            reply = Failed(f"{type(error).__name__}: {error}")
        write_frame(answers, reply)


if __name__ == "__main__":
    main()
