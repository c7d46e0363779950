"""Real processes under the supervisor: small Python children in place of the roles."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pdrt.cli import supervisor
from pdrt.cli.children import Children, GaveUp, Launch, StopAsked
from pdrt.cli.supervisor import Supervisor
from pdrt.cli.terminal import LINES_MAX, Terminal
from tests.descriptors import no_more_fds, open_descriptors

pytestmark = pytest.mark.e2e
HANG_SECONDS = 180.0  # a bound against hanging, no expectation of speed

ROOT = Path(__file__).parents[2]
ANNOUNCE = "import json, os, signal, sys, time; os.write({fd}, b'{{\"pid\": %d}}\\n' % os.getpid())"
SERVE = "time.sleep(1000)"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); " + SERVE


class Stage:
    """Runs `scripts` by child name, and records what they announced."""

    def __init__(
        self,
        scripts: dict[str, str],
        stop_seconds_max: float = 30.0,
        announce: str = ANNOUNCE,
        stderr: int = 2,
        hang_seconds_max: float = 1e6,
    ) -> None:
        self.scripts = scripts
        self.announce = announce
        self.ended: list[str] = []
        self.lives: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        decides = Supervisor(tuple(scripts), stop_seconds_max, hang_seconds_max)
        self.terminal = Terminal(stderr=stderr)
        self.children = Children(
            decides,
            self.launch,
            lambda *fact: self.lives.put_nowait(fact),
            self.ended.append,
            self.terminal,
        )

    def launch(self, name: str, announce_fd: int) -> Launch:
        code = (
            self.announce.format(fd=announce_fd)
            + f"; os.close({announce_fd}); {self.scripts[name]}"
        )
        return Launch([sys.executable, "-c", code], os.environ, ())

    async def next_life(self) -> tuple[str, int]:
        async with asyncio.timeout(HANG_SECONDS):
            name, facts = await self.lives.get()
        return name, facts["pid"]

    def stop(self) -> None:
        self.children.inbox.put_nowait(StopAsked())


@asynccontextmanager
async def running(stage: Stage) -> AsyncIterator[asyncio.Task[int]]:
    async with asyncio.timeout(HANG_SECONDS):
        task = asyncio.create_task(stage.children.run())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.to_thread(stage.terminal.close)


def exists(pid: int) -> bool:
    """True unless it is gone, or dead and only waits for whoever adopted it to collect it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_a_killed_child_is_restarted_and_the_others_live_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    stage = Stage({"gateway": SERVE, "decode-0": SERVE})
    async with running(stage) as task:
        lives = dict([await stage.next_life(), await stage.next_life()])
        gateway, first = lives["gateway"], lives["decode-0"]
        os.kill(first, signal.SIGKILL)
        name, second = await stage.next_life()
        assert (name, second != first, exists(gateway)) == ("decode-0", True, True)
        assert stage.ended == ["decode-0"]
        stage.stop()
        assert await task == 0
    assert not exists(gateway) and not exists(second)
    assert "decode-0 died (SIGKILL); restarting in 1 s" in capfd.readouterr().err


async def test_too_few_descriptors_for_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A death like another: said, and tried again, with nothing left open."""
    monkeypatch.setattr(supervisor, "PAUSE_SECONDS", 0.01)
    stage = Stage({"prefill": SERVE})
    async with running(stage) as task:
        _, pid = await stage.next_life()
        before = len(open_descriptors())  # perhaps with one that is about to be closed
        with no_more_fds():
            os.kill(pid, signal.SIGKILL)
            while stage.ended.count("prefill") < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await stage.next_life()
        while len(open_descriptors()) > before:  # noqa: ASYNC110 (of the lives before it)
            await asyncio.sleep(0.01)
        stage.stop()
        assert await task == 0


async def test_output_is_passed_on_with_the_role_in_front(
    capfd: pytest.CaptureFixture[str],
) -> None:
    chatter = "print('one\\ntwo'); print('x' * 200_000, file=sys.stderr); print('cut', end='')"
    stage = Stage({"gateway": chatter})
    async with running(stage) as task:
        await stage.next_life()
        await stage.next_life()  # the second life: all output of the first has been passed on
        stage.stop()
        assert await task == 0
    lines = capfd.readouterr().err.splitlines()
    assert "gateway   | one" in lines and "gateway   | two" in lines
    assert "gateway   | cut" in lines
    assert sum(line.count("x") for line in lines if line.startswith("gateway   | x")) >= 200_000


async def test_a_terminal_that_takes_nothing_holds_nobody_up() -> None:
    """As after Ctrl-S. The child announces itself again only once all its output was taken."""
    lines = 4 * LINES_MAX
    read, write = os.pipe()
    stage = Stage({"gateway": f"print(('x' * 100 + '\\n') * {lines})"}, stderr=write)
    async with running(stage) as task:
        await stage.next_life()
        await stage.next_life()
        stage.stop()
        assert await task == 0
        reading = asyncio.create_task(asyncio.to_thread(_read_until, read, b"not being read"))
        while not reading.done():
            stage.terminal.say("another line")
            await asyncio.sleep(0.01)
        text = await reading
        assert b"lines dropped" in text and text.count(b"x" * 100) < lines
    os.close(read)
    os.close(write)


def _read_until(fd: int, end: bytes) -> bytes:
    text = b""
    while end not in text:
        text += os.read(fd, 65536)
    return text


async def test_a_child_deaf_to_sigterm_is_killed_in_the_end() -> None:
    stage = Stage({"gateway": STUBBORN}, stop_seconds_max=0.5)
    async with running(stage) as task:
        _, pid = await stage.next_life()
        stage.stop()
        assert await task == 0
    assert not exists(pid)


async def test_a_second_stop_kills_at_once() -> None:
    stage = Stage({"gateway": STUBBORN}, stop_seconds_max=1e6)
    async with running(stage) as task:
        _, pid = await stage.next_life()
        stage.stop()
        stage.stop()
        assert await task == 0
    assert not exists(pid)


async def test_what_a_dead_child_had_started_dies_too(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    spawn = (
        "import subprocess; p = subprocess.Popen(['sleep', '1000']); "
        f"open({str(mark)!r}, 'w').write(str(p.pid)); "
    )
    stage = Stage({"gateway": spawn + SERVE})
    async with running(stage) as task:
        _, pid = await stage.next_life()
        while not (mark.exists() and mark.read_text()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        grandchild = int(mark.read_text())
        os.kill(pid, signal.SIGKILL)
        await stage.next_life()
        assert not exists(grandchild)
        stage.stop()
        await task


async def test_giving_up_stops_all_and_returns_the_code() -> None:
    stage = Stage({"gateway": SERVE, "decode-0": SERVE})
    async with running(stage) as task:
        await stage.next_life()
        _, pid = await stage.next_life()
        await stage.children.inbox.put(GaveUp("not ready", 1))
        assert await task == 1
    assert not exists(pid)


async def test_a_child_that_ends_before_it_announces_is_given_up(
    capfd: pytest.CaptureFixture[str],
) -> None:
    stage = Stage({"gateway": ""}, announce="import sys; sys.exit('broken') #")
    async with running(stage) as task:
        assert await task == 1
    text = capfd.readouterr().err
    assert "gateway   | broken" in text
    assert "gateway ended (exit code 1) in each of 3 starts; stopping all" in text


class CannotStart(Stage):
    """From the life number `first_failure` on, no process can be made, and we are told to stop
    just before we notice."""

    def __init__(self, first_failure: int) -> None:
        super().__init__({"gateway": ""})
        self.lives_left = first_failure

    def launch(self, name: str, announce_fd: int) -> Launch:
        launch = super().launch(name, announce_fd)
        self.lives_left -= 1
        if self.lives_left > 0:
            return launch
        self.stop()
        return Launch(["/no/such/program"], os.environ, ())


@pytest.mark.parametrize("first_failure", [1, 2])
async def test_told_to_stop_when_a_process_could_not_be_made(
    first_failure: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    signalled: list[int] = []

    def note(group: int, number: int) -> None:
        if number != signal.SIGKILL:  # which each life's group gets after its end
            signalled.append(group)

    monkeypatch.setattr(os, "killpg", note)
    async with running(CannotStart(first_failure)) as task:
        assert await task == 0
    assert signalled == [], "an earlier life's pid may be another process's by now"


BEATS = """
import asyncio, os, sys, time
from pdrt.cli import child

def hangs():
    time.sleep(1000)

async def serve(fd, hangs_after):
    child.show_stacks_when_asked()
    child.BEAT_SECONDS = 0.05
    child.announce_to(fd)({"pid": os.getpid()})
    await asyncio.sleep(hangs_after)
    hangs()

asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2])))
"""


class BeatingStage(Stage):
    """Children whose loops turn for as many seconds as their script says, in their first life."""

    def launch(self, name: str, announce_fd: int) -> Launch:
        seconds, self.scripts[name] = self.scripts[name], "1000"
        command = [sys.executable, "-c", BEATS, str(announce_fd), seconds]
        return Launch(command, {**os.environ, "PYTHONPATH": str(ROOT)}, ())


async def test_children_that_hang_or_are_stopped_are_shown_killed_and_restarted(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "LAST_CHANCE_SECONDS", 0.5)
    scripts = {"gateway": "0.2", "prefill-0": "1000", "decode-0": "1000"}
    stage = BeatingStage(scripts, hang_seconds_max=8.0)
    async with running(stage) as task:
        lives = dict([await stage.next_life() for _ in scripts])
        os.kill(lives["decode-0"], signal.SIGSTOP)
        seconds = dict([await stage.next_life() for _ in range(2)])
        assert sorted(seconds) == ["decode-0", "gateway"]
        assert sorted(stage.ended) == ["decode-0", "gateway"]
        assert exists(lives["prefill-0"])
        stage.stop()
        assert await task == 0
    text = capfd.readouterr().err
    for name in ("gateway", "decode-0"):
        silent, killed, died = (
            text.index(f"{name} {what}")
            for what in ("has been silent for 8 s", "stays silent; killing it", "died (SIGKILL)")
        )
        assert silent < killed < died
    assert "in hangs" in text, "where the loop stood still"
