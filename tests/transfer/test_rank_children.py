"""Processes of ranks: how they are started, what is said of their end, and what that does to a
leader that still loads."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence

import pytest

from pdrt.transfer.processes import ProcessHandle
from pdrt.transfer.rank_children import RankChild, RankLaunch, spawn_ranks
from pdrt.transfer.worker_loop import ExitCode

HANG_SECONDS = 180.0

ECHO = "import socket, sys; socket.socket(fileno=int(sys.argv[2])).sendall(sys.argv[1].encode())"
LISTEN = "import socket, sys; socket.socket(fileno=int(sys.argv[2])).recv(1)"
"""Until the leader is gone."""


def launch(script: str) -> RankLaunch:
    """Ranks that run `script`, with rank and descriptor as arguments."""

    def command(rank: int, channel_fd: int) -> Sequence[str]:
        return [sys.executable, "-S", "-c", script, str(rank), str(channel_fd)]

    return RankLaunch(command, {}, ())


def spawn(script: str, ranks: int = 2) -> list[RankChild]:
    return spawn_ranks(launch(script), ranks)


def wait(child: RankChild) -> None:
    poller = select.poll()
    poller.register(child.fd, select.POLLIN)
    assert poller.poll(HANG_SECONDS * 1000), "it does not end"


def test_each_rank_has_a_channel_of_its_own() -> None:
    children = spawn(ECHO, 4)
    assert [child.rank for child in children] == [1, 2, 3]
    for child in children:
        child.end.settimeout(HANG_SECONDS)
        assert child.end.recv(10) == str(child.rank).encode()
        assert child.end.recv(10) == b"", "nobody else holds the other end"
        wait(child)
        child.close()
        child.end.close()


def test_one_rank_has_no_children() -> None:
    assert spawn(ECHO, 1) == []


@pytest.mark.parametrize(
    ("script", "how"),
    [
        ("raise SystemExit(3)", "ended with exit code 3"),
        ("pass", "ended with exit code 0"),
        ("import os; os.kill(os.getpid(), 15)", "was killed by SIGTERM"),
    ],
)
def test_its_fate_is_told_in_words(script: str, how: str) -> None:
    [child] = spawn(script)
    wait(child)
    assert child.fate() == f"rank 1 (process {child.pid}) {how}"
    child.close()
    child.end.close()


def test_it_lives_until_it_is_killed() -> None:
    """And it is named so that a peer can fence it."""
    [child] = spawn("import time; time.sleep(1000)")
    handle = ProcessHandle(child.named)
    assert child.fate() is None
    assert not handle.is_dead()
    os.kill(child.pid, signal.SIGSTOP)
    child.kill()
    wait(child)
    assert handle.is_dead()
    assert child.fate() == f"rank 1 (process {child.pid}) was killed by SIGKILL"
    child.kill()  # in vain
    handle.close()
    child.close()
    child.end.close()


LEADER = """
    import logging, sys, threading
    from pdrt.transfer.rank_children import RankLaunch, spawn_ranks, watched

    logging.basicConfig(format="%(message)s %(why)s")
    launch = RankLaunch(lambda rank, fd: [sys.executable, "-S", "-c", {script!r}], {{}}, ())
    with watched(spawn_ranks(launch, 3)):
        {load}
    print("loaded", flush=True)
"""


def lead(script: str, load: str) -> subprocess.CompletedProcess[str]:
    code = textwrap.dedent(LEADER).format(script=script, load=load)
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("script", "code", "how"),
    [
        # It has said why, and `pdrt up` does not start it again.
        ("raise SystemExit(2)", 2, "exit code 2"),
        ("raise SystemExit(1)", ExitCode.CANNOT_GO_ON.value, "exit code 1"),
        ("import os; os.kill(os.getpid(), 15)", ExitCode.CANNOT_GO_ON.value, "SIGTERM"),
    ],
)
def test_a_rank_that_ends_while_its_leader_loads_ends_it(script: str, code: int, how: str) -> None:
    """The leader waits for its ranks there, and would do so for ever."""
    done = lead(script, "threading.Event().wait()")
    assert done.returncode == code, done.stderr
    assert "worker ends rank " in done.stderr
    assert how in done.stderr
    assert "while it was starting" in done.stderr


def test_a_leader_that_has_loaded_watches_otherwise() -> None:
    done = lead(LISTEN, "pass")
    assert (done.returncode, done.stdout) == (0, "loaded\n"), done.stderr
