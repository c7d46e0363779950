"""What `pdrt up` prints, written by a thread of its own.

A terminal that is stopped (Ctrl-S) or a pager at the end of the pipe takes nothing. Were the loop
to wait for it, the children's pipes would fill, workers would stand still in the middle of a log
line, and their peers would take them for lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time

from pdrt.observe.logs import JsonFormatter

LINES_MAX = 1024
"""Waiting to be written; then lines are dropped and counted. One is 64 KiB at most."""
CLOSE_SECONDS_MAX = 2.0
"""For the last lines, at the end."""
STDOUT, STDERR = 1, 2


class Terminal:
    """Lines to stdout and stderr, in order. Nothing here waits, but for `close`."""

    def __init__(self, stdout: int = STDOUT, stderr: int = STDERR, is_json: bool = False) -> None:
        """`is_json`: what goes to stderr is one JSON object a line, whoever said it."""
        self.has_colours = os.isatty(stderr)
        self._is_json = is_json
        self._stdout = stdout
        self._stderr = stderr
        self._queue: queue.Queue[tuple[int, bytes] | None] = queue.Queue(LINES_MAX)
        self._dropped = 0
        """Since the last line that found a place."""
        # A daemon: one that waits for a terminal for ever must not keep the process.
        self._thread = threading.Thread(target=self._write, name="terminal", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        """A line of our own."""
        self._put(self._stderr, self._said("up", text))

    def log(self, child: str, line: str, colour: int) -> None:
        """A line of a child's. One that is JSON says itself whose it is."""
        is_whole = self._is_json and line.startswith("{")
        self._put(self._stderr, line if is_whole else self._said(child, line, colour))

    def _said(self, who: str, text: str, colour: int | None = None) -> str:
        if self._is_json:
            record = logging.LogRecord("pdrt.cli", logging.INFO, "", 0, "%s", (text,), None)
            return JsonFormatter(who).format(record)
        prefix = "pdrt up   |" if who == "up" else f"{who:<9} |"
        if colour is not None and self.has_colours:
            prefix = f"\033[{colour}m{prefix}\033[0m"
        return f"{prefix} {text}"

    def show(self, text: str) -> None:
        """Lines to stdout."""
        self._put(self._stdout, text)

    def _put(self, fd: int, text: str) -> None:
        try:
            if self._dropped:
                self._queue.put_nowait((self._stderr, self._complaint()))
                self._dropped = 0
            self._queue.put_nowait((fd, _encode(text)))
        except queue.Full:
            self._dropped += 1

    def _complaint(self) -> bytes:
        text = f"{self._dropped} lines dropped: this output was not being read"
        return _encode(self._said("up", text))

    def _write(self) -> None:
        """The thread."""
        while (item := self._queue.get()) is not None:
            fd, data = item
            # Nobody reads any more: we serve on in silence.
            with contextlib.suppress(OSError):
                while data:
                    data = data[os.write(fd, data) :]

    def close(self, seconds_max: float = CLOSE_SECONDS_MAX) -> None:
        """Wait until all is written, or for so long."""
        deadline = time.monotonic() + seconds_max
        last = [(self._stderr, self._complaint())] if self._dropped else []
        for item in (*last, None):
            try:
                self._queue.put(item, timeout=max(0.0, deadline - time.monotonic()))
            except queue.Full:
                return
        self._thread.join(max(0.0, deadline - time.monotonic()))


def _encode(text: str) -> bytes:
    return (text + "\n").encode(errors="replace")
