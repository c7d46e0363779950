"""A party's parent: it stops it, lets it go on and kills it, on whatever host it runs.

Signals do not pass through `ssh`, and a stopped process cannot be asked for anything. All other
lines go to the party unread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from pdrt.cli.torture.messages import NURSE_MARK

STOP, GO_ON, KILL = b"stop", b"go on", b"kill"
ACTIONS = {STOP: signal.SIGSTOP, GO_ON: signal.SIGCONT, KILL: signal.SIGKILL}
POLL_SECONDS = 0.001


def run_nurse(arguments: list[str]) -> int:
    """`arguments`: the party's own flags. Ends, and the party with it, when stdin ends."""
    parent = ["--parent-pid", str(os.getpid())]
    with subprocess.Popen(
        [sys.executable, "-m", "pdrt", "torture", *arguments, *parent],
        stdin=subprocess.PIPE,
        bufsize=0,  # or closing a dead party's stdin would flush into a broken pipe
    ) as party:
        assert party.stdin is not None
        for line in sys.stdin.buffer:
            if line.startswith(NURSE_MARK):
                _act(party, line.strip().removeprefix(NURSE_MARK))
                os.write(1, line)
            else:
                _pass_on(party.stdin, line)
        party.kill()
    return 0


def _act(party: subprocess.Popen[bytes], action: bytes) -> None:
    """Done once it is so: `kill` returns before the signal has worked."""
    party.send_signal(ACTIONS[action])
    if action == KILL:
        party.wait()
    while action == STOP and party.poll() is None and not _is_stopped(party.pid):
        time.sleep(POLL_SECONDS)


def _is_stopped(pid: int) -> bool:
    """Every thread of it: the last one may still be in the middle of a copy."""
    states = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return all(state in "TtZX" for state in states)


def _pass_on(stdin: IO[bytes], line: bytes) -> None:
    """A party that is dead takes nothing; whoever waits for its answer finds out."""
    with contextlib.suppress(BrokenPipeError):
        stdin.write(line)
