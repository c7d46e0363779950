"""Processes of `pdrt up`: carries out the supervisor's effects and reports what children do.

One loop owns the supervisor; per life of a child, small tasks read its announcement and its beats,
pass its output on line by line, and await its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from pdrt.cli.supervisor import (
    Effect,
    Finish,
    Phase,
    Say,
    Send,
    ShowStacks,
    Start,
    Supervisor,
)
from pdrt.cli.terminal import Terminal

LINE_BYTES_MAX = 64 * 1024  # a longer line of a child is passed on in pieces
PIPE_SECONDS_MAX = 2.0  # how long a dead child's output is read on, should somebody hold the pipe
_COLOURS = (36, 33, 35, 32, 34, 31)


class Announced(msgspec.Struct, frozen=True):
    child: str
    facts: dict[str, Any]


class Beaten(msgspec.Struct, frozen=True):
    """Its event loop turns."""

    child: str


class Exited(msgspec.Struct, frozen=True):
    child: str
    code: int


class StopAsked(msgspec.Struct, frozen=True):
    """A signal told us to end."""


class GaveUp(msgspec.Struct, frozen=True):
    """Somebody who watches from outside, as for readiness, found that it cannot go on."""

    text: str
    code: int


Event = Announced | Beaten | Exited | StopAsked | GaveUp


class Launch(msgspec.Struct, frozen=True):
    """A command and its environment; `fds` are passed on to the child and closed here."""

    argv: list[str]
    environment: Mapping[str, str]
    fds: tuple[int, ...]


@dataclass(frozen=True)
class Life:
    """One process of a child, and the tasks that read from it."""

    child: str
    pid: int
    announcement: asyncio.Future[bytes]
    words: asyncio.Task[None]
    output: asyncio.Task[None]
    end: asyncio.Task[int]


class Children:
    """Runs children until the supervisor finishes.

    `launch(name, announce_fd)` makes a child's command; `announced(name, facts)` hears what each
    life of a child announced, and `ended(name)` that it is over, before the supervisor acts on it.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        launch: Callable[[str, int], Launch],
        announced: Callable[[str, dict[str, Any]], None],
        ended: Callable[[str], None],
        terminal: Terminal,
    ) -> None:
        self._supervisor = supervisor
        self._terminal = terminal
        self._launch = launch
        self._announced = announced
        self._ended = ended
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        """Each child's latest that could be started."""
        self._colours: dict[str, int] = {}
        self._code: int | None = None
        # Unbounded: a child puts an event a second, and none of them takes long.
        self.inbox: asyncio.Queue[Event] = asyncio.Queue()

    async def run(self) -> int:
        """The exit code for `pdrt up`. SIGINT, SIGTERM and SIGHUP ask all to end."""
        loop = asyncio.get_running_loop()
        for asked in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if asked is signal.SIGHUP and signal.getsignal(asked) is signal.SIG_IGN:
                continue  # nohup
            loop.add_signal_handler(asked, self.inbox.put_nowait, StopAsked())
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._carry_out(self._supervisor.start(time.monotonic()), tasks)
                while self._code is None:
                    event = await self._next_event()
                    await self._carry_out(self._react(event), tasks)
        finally:
            for process in self._processes.values():
                if process.returncode is None:
                    _signal_group(process.pid, signal.SIGKILL)
        return self._code

    async def _next_event(self) -> Event | None:
        deadline = self._supervisor.deadline()
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return await asyncio.wait_for(self.inbox.get(), timeout)
        except TimeoutError:
            return None

    def _react(self, event: Event | None) -> list[Effect]:
        now = time.monotonic()
        match event:
            case None:
                return self._supervisor.timer(now)
            case Announced(child, facts):
                self._announced(child, facts)
                self._supervisor.announced(child)
                return []
            case Beaten(child):
                self._supervisor.beaten(child, now)
                return []
            case Exited(child, code):
                self._ended(child)
                return self._supervisor.exited(child, code, now)
            case StopAsked():
                if self._supervisor.phase is Phase.SERVING:
                    self._terminal.say("stopping; again to kill at once")
                return self._supervisor.stop(now)
            case GaveUp(text, code):
                return self._supervisor.give_up(text, code, now)

    async def _carry_out(self, effects: list[Effect], tasks: asyncio.TaskGroup) -> None:
        for effect in effects:
            match effect:
                case Start(child):
                    await self._start(child, tasks)
                case Send(child, number):
                    self._send(child, number)
                case ShowStacks(child):
                    self._show_stacks(child)
                case Say(text):
                    self._terminal.say(text)
                case Finish(code):
                    self._code = code

    def _send(self, child: str, number: signal.Signals) -> None:
        """A child that could not be started, or has just ended, has no process: its `Exited` is
        on the way, and what `_processes` holds may be an earlier life's, whose pid is another's."""
        process = self._processes.get(child)
        if process is not None and process.returncode is None:
            _signal_group(process.pid, number)

    def _show_stacks(self, child: str) -> None:
        process = self._processes[child]
        if process.returncode is None:
            process.send_signal(signal.SIGUSR1)

    async def _start(self, child: str, tasks: asyncio.TaskGroup) -> None:
        """The kernel ends a child with the thread that made it: we are on the main thread, which
        lives as long as `up` does. Its own process group keeps the terminal's Ctrl-C from it."""
        try:
            process, announce_read, output_read = await self._spawn(child)
        except OSError as error:  # out of memory, processes or descriptors: tried again later
            self._terminal.say(f"{child}: {error}")
            await self.inbox.put(Exited(child, os.EX_OSERR))
            return
        self._processes[child] = process
        self._colours.setdefault(child, _COLOURS[len(self._colours) % len(_COLOURS)])
        announcement = asyncio.get_running_loop().create_future()
        life = Life(
            child,
            process.pid,
            announcement,
            words=tasks.create_task(self._hear(child, announce_read, announcement)),
            output=tasks.create_task(self._pass_on(child, output_read)),
            end=tasks.create_task(process.wait()),
        )
        tasks.create_task(self._watch(life))

    async def _spawn(self, child: str) -> tuple[asyncio.subprocess.Process, int, int]:
        """And the pipes that its announcement and its output come from. Raises OSError; then
        nothing stays open."""
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            announce_read, announce_write = _pipe(ours, theirs)
            output_read, output_write = _pipe(ours, theirs)
            launch = self._launch(child, announce_write)
            for fd in launch.fds:
                theirs.callback(os.close, fd)
            # Our own pipe for output: with asyncio's, `wait` does not return before a grandchild
            # that holds the pipe has ended too (CPython issue 119710).
            process = await asyncio.create_subprocess_exec(
                *launch.argv,
                env=launch.environment,
                pass_fds=(announce_write, *launch.fds),
                stdin=subprocess.DEVNULL,
                stdout=output_write,
                stderr=output_write,
                process_group=0,
            )
            ours.pop_all()
        return process, announce_read, output_read

    async def _watch(self, life: Life) -> None:
        """Puts at most one `Announced`, beats, then exactly one `Exited`, after its last words."""
        first: set[asyncio.Future[Any]] = {life.end, life.announcement}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if life.announcement.done() and (line := life.announcement.result()):
            await self.inbox.put(Announced(life.child, json.loads(line)))
        code = await life.end
        _signal_group(life.pid, signal.SIGKILL)  # whatever the child itself had started
        await asyncio.wait({life.output}, timeout=PIPE_SECONDS_MAX)
        life.words.cancel()
        life.output.cancel()
        await self.inbox.put(Exited(life.child, code))

    async def _hear(self, child: str, fd: int, announcement: asyncio.Future[bytes]) -> None:
        """The announcement, which is empty if the child closed the pipe without one; then a beat a
        second."""
        async with _reading(fd) as stream:
            announcement.set_result(await stream.readline())
            while await stream.read(LINE_BYTES_MAX):
                await self.inbox.put(Beaten(child))

    async def _pass_on(self, child: str, fd: int) -> None:
        rest = b""
        async with _reading(fd) as stream:
            while chunk := await stream.read(LINE_BYTES_MAX):
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) >= LINE_BYTES_MAX:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._print(child, line)
        if rest:
            self._print(child, rest)

    def _print(self, child: str, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        self._terminal.log(child, text, self._colours[child])


def _pipe(reads: contextlib.ExitStack, writes: contextlib.ExitStack) -> tuple[int, int]:
    """Its ends, each closed by its own owner."""
    read, write = os.pipe()
    reads.callback(os.close, read)
    writes.callback(os.close, write)
    return read, write


@contextlib.asynccontextmanager
async def _reading(fd: int) -> AsyncIterator[asyncio.StreamReader]:
    """The read end of a pipe as a stream; closes it."""
    stream = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(fd, "rb", buffering=0)
    )
    try:
        yield stream
    finally:
        transport.close()


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # just ended; its `Exited` is on the way
        os.killpg(pid, number)
