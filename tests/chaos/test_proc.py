"""What is done to processes from outside is really done."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.chaos import proc

CHILD = """
import socket, sys, subprocess
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("up", flush=True)
for line in sys.stdin:
    try:
        match line.strip():
            case "read":
                print("end" if not peer.recv(1) else "data", flush=True)
            case "open":
                open("/dev/null")
                print("opened", flush=True)
            case "write":
                with open(sys.argv[2], "a") as file:
                    file.write("x")
                print("written", flush=True)
    except OSError as error:
        print(type(error).__name__, error.errno, flush=True)
"""


class Child:
    """A process with one connection to us."""

    def __init__(self, file: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
            self._popen = subprocess.Popen(
                [sys.executable, "-c", CHILD, port, file],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self.end, _ = server.accept()
        self.pid = self._popen.pid
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._input, self._output = self._popen.stdin, self._popen.stdout
        assert self._output.readline() == "up\n"

    def does(self, what: str) -> str:
        self._input.write(f"{what}\n")
        self._input.flush()
        return self._output.readline().strip()

    def close(self) -> None:
        self.end.close()
        self._popen.kill()
        self._popen.communicate()


@pytest.fixture
def child(tmp_path: object) -> Iterator[Child]:
    child = Child(f"{tmp_path}/log")
    yield child
    child.close()


def test_a_connection_ends_on_both_sides(child: Child) -> None:
    (fd,) = proc.connections_of(child.pid)
    assert proc.end_connection(child.pid, fd)
    assert child.end.recv(1) == b""
    assert child.does("read") == "end"
    assert not proc.connections_of(child.pid)


def test_a_connection_is_reset(child: Child) -> None:
    (fd,) = proc.connections_of(child.pid)
    assert proc.reset_connection(child.pid, fd)
    with pytest.raises(ConnectionResetError):
        child.end.recv(1)
    assert child.does("read") != "data"


@pytest.mark.parametrize("close", (proc.end_connection, proc.reset_connection))
def test_a_connection_that_is_gone(child: Child, close: Callable[[int, int], bool]) -> None:
    assert not close(child.pid, 999)


def test_limits_of_a_running_process(child: Child) -> None:
    assert child.does("open") == "opened" and child.does("write") == "written"
    fds = {int(fd) for fd in os.listdir(f"/proc/{child.pid}/fd")}
    before = proc.limit(child.pid, resource.RLIMIT_NOFILE, max(fds) + 1)
    assert child.does("open") == "OSError 24"
    assert proc.limit(child.pid, resource.RLIMIT_NOFILE, before) == max(fds) + 1
    before = proc.limit(child.pid, resource.RLIMIT_FSIZE, 0)
    assert child.does("write") == "OSError 27"
    proc.limit(child.pid, resource.RLIMIT_FSIZE, before)
    assert child.does("open") == "opened" and child.does("write") == "written"


def test_use_and_children(child: Child) -> None:
    use = proc.read_use(child.pid)
    assert use.fds == len(os.listdir(f"/proc/{child.pid}/fd"))
    assert use.threads == 1 and use.anonymous_bytes > 2**20
    assert proc.children_of(os.getpid(), CHILD.strip()[:20]) == [child.pid]
    assert not proc.children_of(os.getpid(), "no such word")
