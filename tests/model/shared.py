"""A model shared by several ranks: the leader's executor here, each other rank in a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pdrt.config import ModelConfig
from pdrt.kv.layout import slice_plan
from pdrt.model.collectives import RankPlace
from pdrt.model.executor import Executor
from tests.model.conftest import POOL_BYTES
from tests.model.rank_process import (
    ONE_CORE,
    Command,
    Done,
    Failed,
    Leave,
    Load,
    ReadPages,
    Reply,
    Step,
    WritePages,
    page_bytes,
    read_frame,
    write_frame,
)

SECONDS_MAX = 120.0


class RankProcess:
    """One rank other than the leader's."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.model.rank_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._unanswered = 0

    def tell(self, command: Command) -> None:
        assert self.process.stdin is not None
        write_frame(self.process.stdin, command)
        self._unanswered += 1

    def answers(self) -> list[Reply]:
        """To all that it was told since the last time."""
        assert self.process.stdout is not None
        count, self._unanswered = self._unanswered, 0
        return [
            msgspec.msgpack.decode(read_frame(self.process.stdout), type=Reply)
            for _ in range(count)
        ]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Shared:
    """Executors over as many ranks as asked for, one after the other, in the same processes."""

    def __init__(self, rendezvous: Path, others: int) -> None:
        """`others`: ranks beside the leader's at most."""
        self._rendezvous = rendezvous
        self._loads = 0
        self.others = [RankProcess() for _ in range(others)]
        self.used: list[RankProcess] = []
        self.executor: Executor | None = None

    def load(self, directory: Path | str, ranks: int, **settings: Any) -> Executor:
        """The leader's executor; the one before it is closed."""
        self.leave()
        settings = {"dtype": "float32", "kv_cache_memory_bytes": POOL_BYTES, **settings}
        model = ModelConfig(model=str(directory), **settings)
        if ranks == 1:
            self.executor = Executor.load(model, ONE_CORE, lambda text: None)
            return self.executor
        self._loads += 1
        path = str(self._rendezvous / f"rendezvous-{self._loads}")
        places = [RankPlace(rank, ranks, path, SECONDS_MAX) for rank in range(ranks)]
        self.used = self.others[: ranks - 1]
        for other, place in zip(self.used, places[1:], strict=True):
            other.tell(Load(model, place))
        self.executor = Executor.load(model, ONE_CORE, lambda text: None, places[0])
        self.executor.tell_ranks = self._step
        self.answers()
        return self.executor

    def _step(self, body: bytes) -> None:
        for other in self.used:
            other.tell(Step(body))

    def answers(self) -> list[Reply]:
        """Of all ranks, none of which has failed."""
        answers = [answer for other in self.used for answer in other.answers()]
        assert not [answer for answer in answers if isinstance(answer, Failed)], answers
        return answers

    def read_pages(self, pages: Sequence[int]) -> list[list[bytes]]:
        """By rank, the content of some pages."""
        assert self.executor is not None
        pool = self.executor.pool.tensor
        content = [[bytes(page_bytes(pool, page)) for page in pages]]
        self.answers()
        for other in self.used:
            other.tell(ReadPages(list(pages)))
            [answer] = other.answers()
            assert isinstance(answer, Done)
            content.append(answer.pages)
        return content

    def write_pages(self, pages: Sequence[int], content: Sequence[Sequence[bytes]]) -> None:
        assert self.executor is not None
        for page, data in zip(pages, content[0], strict=True):
            page_bytes(self.executor.pool.tensor, page)[:] = data
        self.answers()
        for other, held in zip(self.used, content[1:], strict=True):
            other.tell(WritePages(list(pages), list(held)))
        self.answers()

    def leave(self) -> None:
        """All ranks let go of the model."""
        if self.executor is not None:
            self.executor.close()
            for other in self.used:
                other.tell(Leave())
            self.answers()
        self.executor, self.used = None, []

    def end(self) -> None:
        if self.executor is not None:
            self.executor.close()
        for other in self.others:
            other.end()


def handed_over(
    executor: Executor, content: Sequence[Sequence[bytes]], ranks: int
) -> list[list[bytes]]:
    """Pages of `content`, by prefill rank, as `ranks` decode ranks hold them."""
    layout = executor.layout
    size = layout.head_bytes * (-(-layout.kv_heads // ranks))
    pages = len(content[0])
    received = [[bytearray(size) for _ in range(pages)] for _ in range(ranks)]
    for sent, copies in zip(content, slice_plan(layout, len(content), ranks), strict=True):
        for copy in copies:
            for page in range(pages):
                data = sent[page][copy.source_offset : copy.source_offset + copy.length]
                end = copy.target_offset + copy.length
                received[copy.decode_rank][page][copy.target_offset : end] = data
    return [[bytes(page) for page in held] for held in received]
