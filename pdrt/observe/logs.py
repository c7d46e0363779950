"""Log lines on stderr: for people `HH:MM:SS LEVEL role message key=value …`, or one JSON object a
line for collectors.

A thread of its own writes them. A terminal that is stopped, or a collector that does not read,
takes nothing: were the loop to wait for it, the worker would stand still in the middle of a line
and its peers would take it for lost.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import sys
import threading
import time
from datetime import UTC, datetime
from typing import Literal

import msgspec

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

LINE_BYTES_MAX = 32 * 1024
"""Of a JSON line: below what `pdrt up` and common collectors pass on in one piece."""
TEXT_CHARS_MAX = 2000
"""Of a message or a field."""
EXCEPTION_CHARS_MAX = 8000
"""Of a traceback's end, which says most."""
LINES_MAX = 1024
"""Waiting to be written; then lines are dropped and counted. 64 MiB at the very most."""
LINE_CHARS_MAX = 16 * 1024
"""Of a line for people."""
CLOSE_SECONDS_MAX = 1.0
"""For the last lines, at the end of the process."""
CUT = "…"


class LineFormatter(logging.Formatter):
    """Fields passed as `extra={...}` follow the message as `key=value`; a text with blanks in it
    is quoted, so that a line can be split again. A traceback follows on its own lines.
    """

    def __init__(self, role: str) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        time = self.formatTime(record, self.datefmt)
        words = [time, f"{record.levelname:<7}", self._role, record.getMessage()]
        for key, value in fields_of(record).items():
            words.append(f"{key}={_plain(value)}")
        line = _clip(" ".join(words), LINE_CHARS_MAX)
        if record.exc_info:
            line += "\n" + _clip_start(self.formatException(record.exc_info), EXCEPTION_CHARS_MAX)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object: `time` (RFC 3339), `level`, `role`, `worker` once it is known, `logger`,
    `message`, every field passed as `extra` with its own type, `exception`. A field that is named
    like one of ours gets `field_` before its name."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role
        self.worker: str | None = None

    def format(self, record: logging.LogRecord) -> str:
        own: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "role": self._role,
            "worker": self.worker,
            "logger": record.name,
            "message": _clip(record.getMessage(), TEXT_CHARS_MAX),
        }
        if self.worker is None:
            del own["worker"]
        fields = {
            (f"field_{key}" if key in own or key == "exception" else key): _typed(value)
            for key, value in fields_of(record).items()
        }
        if record.exc_info:
            text = self.formatException(record.exc_info)
            fields["exception"] = _clip_start(text, EXCEPTION_CHARS_MAX)
        line = _encode(own | fields)
        return line if len(line) <= LINE_BYTES_MAX else _encode(own | {"truncated": True})


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """What was passed as `extra`."""
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _encode(line: dict[str, object]) -> str:
    return msgspec.json.encode(line).decode()


def _typed(value: object) -> object:
    """JSON's own types as they are, a float that is no number as null, the rest as its text."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int) and abs(value) < 2**63:
        return value
    return _clip(str(value), TEXT_CHARS_MAX)


def _clip(text: str, chars_max: int) -> str:
    """Valid Unicode, cut at its end."""
    if len(text) > chars_max:
        text = text[:chars_max] + CUT
    return text.encode(errors="backslashreplace").decode()


def _clip_start(text: str, chars_max: int) -> str:
    text = _clip(text, len(text))
    return text if len(text) <= chars_max else CUT + text[-chars_max:]


def _plain(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    is_plain = text and text.isprintable() and not any(c in text for c in ' "=')
    return text if is_plain else json.dumps(text, ensure_ascii=False)


class BackgroundHandler(logging.Handler):
    """Hands lines to a thread; drops and counts them while that cannot write."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._unqueued = 0
        """Lines that found no place."""
        self._unwritten = 0
        """Lines that the output refused, as a full disk does. Counted by the thread alone."""
        self._told = 0
        """Of all these, those that a line has told of."""
        self._queue: queue.Queue[bytes | None] = queue.Queue(LINES_MAX)
        # A daemon: one that waits for a terminal for ever must not keep the process.
        self._thread = threading.Thread(target=self._write, name="logs", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Lines, since the start."""
        return self._unqueued + self._unwritten

    def emit(self, record: logging.LogRecord) -> None:
        """Never waits. A record that cannot be formatted is our bug, and logging says so."""
        dropped = self.dropped
        try:
            if dropped > self._told:
                self._queue.put_nowait(self._complaint(dropped - self._told))
                self._told = dropped
            self._queue.put_nowait((self.format(record) + "\n").encode(errors="backslashreplace"))
        except queue.Full:
            self._unqueued += 1
        except Exception:
            self.handleError(record)

    def _complaint(self, count: int) -> bytes:
        message = f"{count} log lines dropped: this output was not being read, or was full"
        record = logging.LogRecord("pdrt", logging.WARNING, "", 0, message, (), None)
        return (self.format(record) + "\n").encode()

    def _write(self) -> None:
        """The thread."""
        while (line := self._queue.get()) is not None:
            try:
                while line:
                    line = line[os.write(self._fd, line) :]
            except OSError:  # nobody reads any more, or the disk is full: we serve on in silence
                self._unwritten += 1

    def close(self) -> None:
        """Wait until all is written, or for a second."""
        deadline = time.monotonic() + CLOSE_SECONDS_MAX
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_SECONDS_MAX)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        super().close()


def setup_logging(role: str, level: str, format: Literal["text", "json"] = "text") -> None:
    """Called once per process. Libraries below stay at warning unless `level` is debug; what they
    and Python itself warn of comes in the same form."""
    handler = BackgroundHandler(sys.stderr.fileno())
    handler.setFormatter(JsonFormatter(role) if format == "json" else LineFormatter(role))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    logging.getLogger("pdrt").setLevel(level.upper())
    logging.captureWarnings(True)


def name_worker(worker: str) -> None:
    """From now on, lines say which incarnation this process is."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            handler.formatter.worker = worker


def lines_dropped() -> int:
    """Since the start of the process."""
    handlers = logging.getLogger().handlers
    return sum(h.dropped for h in handlers if isinstance(h, BackgroundHandler))
