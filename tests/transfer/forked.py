"""Processes that start at once: forked from one that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from pdrt.cli.child import die_with_parent

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["tests.prefill.process", "tests.ranks.process", "tests.scale.host", "tests.transfer.receiver"]
)

START_SECONDS = 120.0
"""The first one waits for the imports."""


class Forked:
    """A process that runs `main(connection, *arguments)`, and what it has said."""

    def __init__(self, main: Callable[..., None], *arguments: object) -> None:
        self.connection, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_run, args=(main, theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()
        self._said: list[Any] = []
        assert self.connection.poll(START_SECONDS), "it does not start"
        self.first: Any = self.connection.recv()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def said(self) -> list[Any]:
        """Everything after its first word."""
        try:
            while self.connection.poll(0):
                self._said.append(self.connection.recv())
        except EOFError:
            pass
        return self._said

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _run(main: Callable[..., None], connection: Connection, *arguments: object) -> None:
    die_with_parent(os.getppid())
    main(connection, *arguments)
