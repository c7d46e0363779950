"""A process is told apart from every other one, and its death is certain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from pdrt.errors import PeerRefused
from pdrt.protocol.messages import RankProcess
from pdrt.transfer.processes import ProcessHandle, pid_namespace, start_time, this_process
from tests.descriptors import no_more_fds, one_more_fd, open_descriptors

THREADED = """
import sys, threading
threading.Thread(target=lambda: sys.stdin.read()).start()
print("up", flush=True)
"""


class Child:
    """A process that waits, in a second thread too, until its stdin closes."""

    def __init__(self) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", THREADED], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.popen.stdout is not None
        assert self.popen.stdout.readline() == b"up\n"
        started = start_time(self.popen.pid)
        assert started is not None
        self.process = RankProcess(self.popen.pid, started, pid_namespace())

    def died(self) -> None:
        """Wait until it is dead, without reaping it: it stays a zombie."""
        os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOWAIT)


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.popen.kill()
    child.popen.communicate()


def test_this_process() -> None:
    handle = ProcessHandle(this_process())
    assert handle.pid == os.getpid()
    assert not handle.is_dead()
    handle.close()


def test_kill(child: Child) -> None:
    handle = ProcessHandle(child.process)
    assert not handle.is_dead()
    handle.kill()
    child.died()
    assert handle.is_dead(), "a zombie is dead"
    handle.kill()
    child.popen.wait()
    assert handle.is_dead(), "a reaped one too"
    handle.kill()
    handle.close()


def test_a_stopped_process_is_alive_and_can_be_killed(child: Child) -> None:
    handle = ProcessHandle(child.process)
    child.popen.send_signal(signal.SIGSTOP)
    assert not handle.is_dead()
    handle.kill()
    child.died()
    assert handle.is_dead()
    handle.close()


def test_a_process_lives_as_long_as_any_of_its_threads(child: Child) -> None:
    """The main thread has returned and waits for the other; the process is not dead."""
    handle = ProcessHandle(child.process)
    assert not handle.is_dead()
    child.popen.communicate()
    assert handle.is_dead()
    handle.close()


def test_a_reused_pid_is_refused(child: Child) -> None:
    earlier = msgspec.structs.replace(child.process, start_time=child.process.start_time - 1)
    with pytest.raises(PeerRefused, match="another one by now"):
        ProcessHandle(earlier)


def test_another_pid_namespace_is_refused(child: Child) -> None:
    elsewhere = msgspec.structs.replace(child.process, pid_namespace=1)
    with pytest.raises(PeerRefused, match=r"PID namespace.*--pid"):
        ProcessHandle(elsewhere)


def test_a_reaped_process_is_refused(child: Child) -> None:
    child.popen.kill()
    child.popen.communicate()
    with pytest.raises(PeerRefused):
        ProcessHandle(child.process)
    assert start_time(child.process.pid) is None


def test_a_zombie_is_taken_and_dead(child: Child) -> None:
    child.popen.kill()
    child.died()
    handle = ProcessHandle(child.process)
    assert handle.is_dead()
    handle.close()


@pytest.mark.parametrize("pid", [0, -1, 2**31, 2**40, 2**63])
def test_nonsense_pids_are_refused(pid: int) -> None:
    with pytest.raises(PeerRefused):
        ProcessHandle(RankProcess(pid, 1, pid_namespace()))


def test_refusals_leak_no_descriptors(child: Child) -> None:
    earlier = msgspec.structs.replace(child.process, start_time=child.process.start_time - 1)
    before = open_descriptors()
    for _ in range(5):
        with pytest.raises(PeerRefused):
            ProcessHandle(earlier)
    assert open_descriptors() <= before


def test_a_command_name_with_parentheses_and_blanks(tmp_path: object) -> None:
    """/proc/PID/stat holds the name unquoted; the start time is found all the same."""
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b') 1 2 (', 0, 0, 0); print(1, flush=1);"
    popen = subprocess.Popen(
        [sys.executable, "-c", code + "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert popen.stdout is not None
    before = start_time(popen.pid)
    popen.stdout.readline()
    assert start_time(popen.pid) == before
    popen.communicate(b"\n")


def test_too_few_descriptors_say_nothing_about_the_process(child: Child) -> None:
    """Neither for the pidfd, nor for what verifies it; and nothing is left open."""
    before = open_descriptors()
    with no_more_fds(), pytest.raises(OSError, match="Too many open files"):
        ProcessHandle(child.process)
    with one_more_fd(), pytest.raises(OSError, match="Too many open files"):
        ProcessHandle(child.process)  # one for the pidfd, none for /proc
    assert open_descriptors() <= before
    ProcessHandle(child.process).close()
