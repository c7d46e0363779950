"""The frame that both roles run in: one event loop, one tick, signals, and one way to end.

Every task lives in one TaskGroup. A broken invariant or an unexpected exception ends the worker:
it says why and exits, and whoever supervises it starts another. So it is with a task that ends
without a word: a TaskGroup takes a cancelled one for one that somebody wanted to end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any, NoReturn

from pdrt.protocol.clock import TICK_SECONDS

log = logging.getLogger(__name__)

Announce = Callable[[dict[str, Any]], None]
"""Told once, when a worker is up, where it is to be found."""

CHECK_SECONDS = 5.0
"""An idle worker checks all its invariants this often."""
LAST_WORDS_SECONDS = 0.1


class ExitCode(Enum):
    """Of a worker's process; 2 is a configuration error and comes from the command line."""

    STOPPED = 0
    BROKEN = 1
    """An invariant or an unexpected exception."""
    CANNOT_GO_ON = 3
    """`EndWorker`, or full tables: a successor starts empty."""


class WorkerLoop:
    """Tasks, tick and end of one worker."""

    def __init__(
        self, on_tick: Callable[[float], None], on_leave: Callable[[], None] | None
    ) -> None:
        """`on_tick(now)` every `TICK_SECONDS`; `on_leave()` at the first SIGTERM or SIGINT, which
        are ignored without it: another process decides."""
        self._on_tick = on_tick
        self._on_leave = on_leave
        self._loop = asyncio.get_running_loop()
        self._group = asyncio.TaskGroup()
        # Those of the group that have not ended.
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[ExitCode] = self._loop.create_future()
        self._is_leaving = False

    @property
    def is_ending(self) -> bool:
        """`end` has been called: tasks that still run are about to be cancelled."""
        return self._ended.done()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work` as a task of this worker; dropped when that is ending already, as nobody would
        cancel it any more."""
        if self.is_ending:
            work.close()
            return
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        # Nobody cancelled it: what it waited for was cancelled.
        if task.cancelled() and not task.cancelling():
            self.end(ExitCode.BROKEN, f"the task {task.get_name()!r} was cancelled from within")

    def end(self, code: ExitCode, why: str) -> None:
        """End the worker. The first reason counts."""
        if self._ended.done():
            return
        level = logging.INFO if code is ExitCode.STOPPED else logging.ERROR
        log.log(level, "worker ends", extra={"why": why})
        self._ended.set_result(code)

    async def run(self, **work: Coroutine[Any, Any, None]) -> ExitCode:
        """Run until `end` is called or something breaks. `work`, by name, lasts as long."""
        self._loop.set_exception_handler(self._broken)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._leave)
        try:
            async with self._group:
                self.start(self._tick(), "tick")
                for name, coroutine in work.items():
                    self.start(self._endless(name, coroutine), name)
                code = await self._ended
                for task in list(self._tasks):
                    task.cancel()
            return code
        except* Exception as errors:
            for error in errors.exceptions:
                log.error("worker broke", exc_info=error)
        return ExitCode.BROKEN

    def _leave(self) -> None:
        if self._on_leave is None:
            return
        if self._is_leaving:
            self.end(ExitCode.STOPPED, "told twice to stop")
            return
        self._is_leaving = True
        self._on_leave()

    async def _tick(self) -> None:
        while True:
            self._on_tick(time.monotonic())
            await asyncio.sleep(TICK_SECONDS)

    async def _endless(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        await work
        assert self.is_ending, f"the task {name!r} has ended by itself"

    def _broken(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception in a callback: nothing above it could handle it."""
        error = context.get("exception")
        # What goes wrong on a connection of the HTTP server ends that connection, and nothing else.
        is_callback = "handle" in context or not isinstance(error, OSError)
        if not isinstance(error, Exception) or "transport" in context or not is_callback:
            loop.default_exception_handler(context)
            return
        log.error("worker broke: %s", context.get("message"), exc_info=error)
        self.end(ExitCode.BROKEN, repr(error))


def exit_now(code: ExitCode) -> NoReturn:
    """Leave the process. The interpreter's own way out joins every thread, and so would wait for
    a forward or a copy that hangs, which may be the very reason for leaving."""
    # libzmq sends the last words in a thread of its own.
    time.sleep(LAST_WORDS_SECONDS)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code.value)
