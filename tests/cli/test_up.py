"""`pdrt up` as a user runs it, with stand-ins for the roles (tests/cli/stand_ins)."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
HANG_SECONDS = 180.0


class Up:
    """A running `pdrt up` and what it has printed so far."""

    def __init__(self, folder: Path, *flags: str, **environment: str) -> None:
        paths = [str(ROOT / "tests/cli/stand_ins"), str(ROOT)]
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PDRT_")}
        self._log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pdrt", "up", "--port", "0", *flags],
            env={**kept, "PYTHONPATH": ":".join(paths), **environment},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            cwd=folder,
        )

    def text(self) -> str:
        return Path(self._log.name).read_text()

    def wait_for(self, pattern: str, count: int = 1) -> list[re.Match[str]]:
        deadline = time.monotonic() + HANG_SECONDS
        while time.monotonic() < deadline:
            found = list(re.finditer(pattern, self.text()))
            if len(found) >= count:
                return found
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in:\n{self.text()}")

    def pids(self, role: str, count: int = 1) -> list[int]:
        return [int(m[1]) for m in self.wait_for(rf"{role} +\| pid=(\d+)", count)]

    def all_pids(self) -> list[int]:
        return [pid for role in ("gateway", "prefill-0", "decode-0") for pid in self.pids(role)]

    def wait(self) -> int:
        return self.process.wait(HANG_SECONDS)


@contextmanager
def running(folder: Path, *flags: str, **environment: str) -> Iterator[Up]:
    up = Up(folder, *flags, **environment)
    try:
        yield up
    finally:
        up.process.kill()
        up.process.wait()


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still there: {alive}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_it_says_how_to_use_it_and_stops_on_ctrl_c(tmp_path: Path) -> None:
    with running(tmp_path, PDRT_API_KEY="secret") as up:
        up.wait_for("is ready at http://127.0.0.1:")
        assert "/v1/chat/completions" in up.text() and '"stream":true' in up.text()
        assert "secret" not in up.text()
        pids = up.all_pids()
        up.process.send_signal(signal.SIGINT)
        assert up.wait() == 0
        wait_until_gone(pids)
        assert list(tmp_path.iterdir()) == [tmp_path / "log"]


def test_sigterm_stops_all(tmp_path: Path) -> None:
    with running(tmp_path) as up:
        pids = up.all_pids()
        up.process.terminate()
        assert up.wait() == 0
        wait_until_gone(pids)


def test_killing_it_leaves_no_process_behind(tmp_path: Path) -> None:
    with running(tmp_path) as up:
        pids = up.all_pids()
        up.process.kill()
        up.wait()
        wait_until_gone(pids)


def test_a_restarted_gateway_comes_back_on_both_its_ports(tmp_path: Path) -> None:
    with running(tmp_path) as up:
        (ready,) = up.wait_for(r"is ready at http://127.0.0.1:(\d+)")
        (first,) = up.pids("gateway")
        os.kill(first, signal.SIGKILL)
        up.wait_for(r"gateway died \(SIGKILL\); restarting in 1 s")
        assert up.pids("gateway", 2)[1] != first
        # Nobody else can have been given one meanwhile: `up` holds them.
        ports = {match[1] for match in up.wait_for(r"worker_port=(\d+)", 2)}
        assert len(ports) == 1
        status = [sys.executable, "-m", "pdrt", "status", "--json"]
        status += ["--url", f"http://127.0.0.1:{ready[1]}"]
        deadline = time.monotonic() + HANG_SECONDS
        while subprocess.run(status, cwd=ROOT, capture_output=True, check=False).returncode != 0:
            assert time.monotonic() < deadline, "the workers did not come back"
        assert len(up.pids("prefill-0")) == len(up.pids("decode-0")) == 1


def test_a_killed_worker_comes_back(tmp_path: Path) -> None:
    with running(tmp_path) as up:
        up.wait_for("is ready at")  # a gateway that is not up yet need not be told
        (first,) = up.pids("decode-0")
        os.kill(first, signal.SIGKILL)
        assert up.pids("decode-0", 2)[1] != first
        assert len(up.pids("gateway")) == 1
        # The stand-ins' incarnations are their pids.
        up.wait_for(rf"gateway   \| posted /workers/{first:016x}/gone")


def test_a_role_that_refuses_its_configuration_ends_all(tmp_path: Path) -> None:
    with running(tmp_path, STAND_IN_FAIL="decode") as up:
        assert up.wait() == 2
        assert "decode-0  | pdrt: --stand-in: refused" in up.text()
        assert "decode-0 cannot start; its message is above; stopping all" in up.text()


def test_it_gives_up_when_no_pair_is_ready_in_time(tmp_path: Path) -> None:
    """One gateway of the stand-ins wants two workers; these two are on their way for too long."""
    with running(tmp_path, "--ready-timeout", "0.001") as up:
        assert up.wait() == 1
        assert "not ready after 0.001 s: " in up.text()


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        with running(tmp_path, "--port", port) as up:
            assert up.wait() == 2
        assert up.text() == (
            f"pdrt: port {port} on 127.0.0.1 is in use; choose another with --port\n"
        )


def test_a_length_that_the_model_does_not_have_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    with running(tmp_path, "--max-model-len", "129") as up:
        assert up.wait() == 2
        assert up.text() == "pdrt: --max-model-len 129: model takes 1 to 128 tokens\n"


def test_a_worker_that_is_asked_to_leave_is_started_anew_at_once(tmp_path: Path) -> None:
    with running(tmp_path) as up:
        up.wait_for("is ready at")
        (first,) = up.pids("decode-0")
        os.kill(first, signal.SIGTERM)
        assert up.pids("decode-0", 2)[1] != first
        assert "decode-0 left when asked; starting it anew" in up.text()
        assert "restarting in" not in up.text()


def test_each_worker_gets_its_cores_and_threads(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    with running(tmp_path, "--cpus", str(cpus[0]), PDRT_THREADS="3") as up:
        up.wait_for(rf"prefill-0 \| pid=\d+ cpus={cpus[0]} threads=3")
        up.wait_for(rf"decode-0  \| pid=\d+ cpus={cpus[0]} threads=3")
        assert "1 core for 2 workers: they take turns" in up.text()
        up.wait_for("is ready at")


def test_a_child_whose_parent_is_gone_does_not_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pdrt", "decode", "--parent-pid", "1", "--announce-fd", "1"],
        capture_output=True,
        cwd=ROOT,
        timeout=HANG_SECONDS,
        check=False,
    )
    refusal = b"pdrt: whoever started this process ended before it began\n"
    assert (done.returncode, done.stderr) == (2, refusal)
