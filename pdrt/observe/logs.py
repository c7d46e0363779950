"""One readable line per log record on stderr: `HH:MM:SS LEVEL role message key=value …`."""

from __future__ import annotations

import json
import logging
import sys

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


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
        for key, value in vars(record).items():
            if key not in _STANDARD:
                words.append(f"{key}={_plain(value)}")
        line = " ".join(words)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _plain(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    is_plain = text and text.isprintable() and not any(c in text for c in ' "=')
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def setup_logging(role: str, level: str) -> None:
    """Called once per process. Libraries below stay at warning unless `level` is debug."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(role))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    logging.getLogger("pdrt").setLevel(level.upper())
    logging.captureWarnings(True)
