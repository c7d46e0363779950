"""Processes of `pdrt up`: carries out the supervisor's effects and reports what children do.

One loop owns the supervisor; per child one task reads its announcement and awaits its end, and
two pass its output on line by line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import msgspec

from pdrt.cli.supervisor import Effect, Finish, Phase, Say, Send, Start, Supervisor

LINE_BYTES_MAX = 64 * 1024  # a longer line of a child is passed on in pieces
ANNOUNCEMENT_BYTES_MAX = 64 * 1024
PIPE_SECONDS_MAX = 2.0  # how long a dead child's pipes are read on, should a grandchild hold them
_COLOURS = (36, 33, 35, 32, 34, 31)


class Announced(msgspec.Struct, frozen=True):
    child: str
    facts: dict[str, Any]


class Exited(msgspec.Struct, frozen=True):
    child: str
    code: int


class StopAsked(msgspec.Struct, frozen=True):
    """A signal told us to end."""


class GaveUp(msgspec.Struct, frozen=True):
    """Somebody who watches from outside, as for readiness, found that it cannot go on."""

    text: str
    code: int


Event = Announced | Exited | StopAsked | GaveUp


class Launch(msgspec.Struct, frozen=True):
    """A command and its environment; `fds` are passed on to the child and closed here."""

    argv: list[str]
    environment: Mapping[str, str]
    fds: tuple[int, ...]


class Children:
    """Runs children until the supervisor finishes.

    `launch(name, announce_fd)` makes a child's command; `announced(name, facts)` hears what each
    life of a child announced, before the supervisor acts on it.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        launch: Callable[[str, int], Launch],
        announced: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._supervisor = supervisor
        self._launch = launch
        self._announced = announced
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._colours: dict[str, int] = {}
        self._code: int | None = None
        # Unbounded: a child puts two events a life, and lives are a second apart.
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
                return self._supervisor.announced(child, now)
            case Exited(child, code):
                return self._supervisor.exited(child, code, now)
            case StopAsked():
                if self._supervisor.phase is Phase.SERVING:
                    say("stopping; again to kill at once")
                return self._supervisor.stop(now)
            case GaveUp(text, code):
                return self._supervisor.give_up(text, code, now)

    async def _carry_out(self, effects: list[Effect], tasks: asyncio.TaskGroup) -> None:
        for effect in effects:
            match effect:
                case Start(child):
                    await self._start(child, tasks)
                case Send(child, number):
                    _signal_group(self._processes[child].pid, number)
                case Say(text):
                    say(text)
                case Finish(code):
                    self._code = code

    async def _start(self, child: str, tasks: asyncio.TaskGroup) -> None:
        """The kernel ends a child with the thread that made it: we are on the main thread, which
        lives as long as `up` does. Its own process group keeps the terminal's Ctrl-C from it."""
        read_fd, announce_fd = os.pipe()
        launch = self._launch(child, announce_fd)
        try:
            process = await asyncio.create_subprocess_exec(
                *launch.argv,
                env=launch.environment,
                pass_fds=(announce_fd, *launch.fds),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,
            )
        finally:
            for fd in (announce_fd, *launch.fds):
                os.close(fd)
        assert process.stdout is not None and process.stderr is not None
        self._processes[child] = process
        self._colours.setdefault(child, _COLOURS[len(self._colours) % len(_COLOURS)])
        pipes = [
            tasks.create_task(self._pass_on(child, process.stdout)),
            tasks.create_task(self._pass_on(child, process.stderr)),
        ]
        line = tasks.create_task(_first_line(os.fdopen(read_fd, "rb")))
        ended = tasks.create_task(process.wait())
        tasks.create_task(self._watch(child, process.pid, line, ended, pipes))

    async def _watch(
        self,
        child: str,
        pid: int,
        line: asyncio.Task[bytes],
        ended: asyncio.Task[int],
        pipes: list[asyncio.Task[None]],
    ) -> None:
        """Puts at most one `Announced`, then exactly one `Exited`, after the child's last words."""
        await asyncio.wait({ended, line}, return_when=asyncio.FIRST_COMPLETED)
        if line.done() and (text := line.result()):
            await self.inbox.put(Announced(child, json.loads(text)))
        code = await ended
        _signal_group(pid, signal.SIGKILL)  # whatever the child itself had started
        await asyncio.wait(pipes, timeout=PIPE_SECONDS_MAX)
        for task in (line, *pipes):
            task.cancel()
        await self.inbox.put(Exited(child, code))

    async def _pass_on(self, child: str, stream: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await stream.read(LINE_BYTES_MAX):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) >= LINE_BYTES_MAX:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._print(child, line)
        if rest:
            self._print(child, rest)

    def _print(self, child: str, line: bytes) -> None:
        prefix = f"{child:<9} |"
        if sys.stderr.isatty():
            prefix = f"\033[{self._colours[child]}m{prefix}\033[0m"
        print(prefix, line.decode(errors="replace").rstrip("\r"), file=sys.stderr, flush=True)


async def _first_line(file: BinaryIO) -> bytes:
    """The announcement, or nothing if the child closed the pipe without one."""
    reader = asyncio.StreamReader(limit=ANNOUNCEMENT_BYTES_MAX)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), file
    )
    try:
        return await reader.readline()
    finally:
        transport.close()


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # just ended; its `Exited` is on the way
        os.killpg(pid, number)


def say(text: str) -> None:
    print(f"pdrt up   | {text}", file=sys.stderr, flush=True)
