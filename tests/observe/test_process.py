"""What a process takes of the machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pdrt.observe.process import read_process

HANG_SECONDS = 180.0
COUNTS = """
import os, threading, time
from pdrt.observe.process import read_process

before = read_process()
assert before.open_fds is not None
assert before.threads is not None
threading.Thread(target=threading.Event().wait, daemon=True).start()
os.pipe()
during = read_process()
assert during.open_fds == before.open_fds + 2
assert during.threads == before.threads + 1
assert during.resident_bytes is not None
assert during.resident_bytes > 1_000_000
assert during.started_at is not None
assert during.started_at < time.time()
"""


def test_open_files_and_threads_are_counted() -> None:
    """In a process where nothing else begins or ends."""
    subprocess.run([sys.executable, "-c", COUNTS], timeout=HANG_SECONDS, check=True)


def test_where_proc_is_hidden_it_says_so(tmp_path: Path) -> None:
    use = read_process(tmp_path)
    facts = (use.resident_bytes, use.open_fds, use.threads, use.started_at)
    assert facts == (None, None, None, None)
