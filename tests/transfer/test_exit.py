"""A worker that must go goes, whatever its threads do."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import threading
from concurrent.futures import ThreadPoolExecutor
from pdrt.transfer.worker_loop import ExitCode, exit_now
ThreadPoolExecutor(1).submit(threading.Event().wait)
exit_now(ExitCode.CANNOT_GO_ON)
"""


def test_a_thread_that_hangs_does_not_keep_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], timeout=180, check=False)
    assert done.returncode == 3
