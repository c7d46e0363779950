"""Log lines: one per record, fields as key=value or as JSON, and nothing that a reader does or
does not do stops who writes them."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pdrt.observe.logs import (
    LINE_BYTES_MAX,
    LINES_MAX,
    BackgroundHandler,
    JsonFormatter,
    LineFormatter,
)

HANG_SECONDS = 120.0


def record(message: str, *arguments: object, **fields: object) -> logging.LogRecord:
    logger = logging.getLogger("pdrt.test")
    return logger.makeRecord(
        logger.name, logging.INFO, __file__, 1, message, arguments, None, extra=fields
    )


def failed() -> logging.LogRecord:
    try:
        raise ValueError("broken")
    except ValueError:
        return logging.LogRecord("p", logging.ERROR, "f", 1, "failed", (), sys.exc_info())


def formatted(message: str, *arguments: object, **fields: object) -> str:
    return LineFormatter("decode").format(record(message, *arguments, **fields))


def as_json(made: logging.LogRecord, worker: str | None = None) -> dict[str, Any]:
    formatter = JsonFormatter("decode")
    formatter.worker = worker
    line = formatter.format(made)
    assert "\n" not in line
    assert len(line.encode()) <= LINE_BYTES_MAX
    parsed = json.loads(line)
    assert isinstance(parsed, dict)
    return parsed


def test_a_line() -> None:
    line = formatted("room %s ended", "d1:7", outcome="complete", seconds=0.12345, pages=3)
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d INFO    decode room d1:7 ended outcome=complete seconds=0\.123 pages=3",
        line,
    )


def test_values_that_would_break_the_line_are_quoted() -> None:
    line = formatted("x", reason="peer said: no\nmore", empty="", quote='a"b')
    assert line.endswith(r'reason="peer said: no\nmore" empty="" quote="a\"b"')


def test_a_traceback_follows() -> None:
    first, *rest = LineFormatter("gateway").format(failed()).splitlines()
    assert first.endswith("ERROR   gateway failed")
    assert rest[-1] == "ValueError: broken"


def test_a_json_line_has_typed_fields_and_a_time_with_its_zone() -> None:
    made = record("room %s ended", "d1:7", seconds=0.12345, pages=3, ok=True, why=None, odd={1})
    line = as_json(made, worker="00d1")
    assert {key: line[key] for key in line if key != "time"} == {
        "level": "info",
        "role": "decode",
        "worker": "00d1",
        "logger": "pdrt.test",
        "message": "room d1:7 ended",
        "seconds": 0.12345,
        "pages": 3,
        "ok": True,
        "why": None,
        "odd": "{1}",
    }
    when = datetime.fromisoformat(line["time"])
    assert when.utcoffset() == timedelta(0)
    assert abs(when - datetime.fromtimestamp(made.created, UTC)) < timedelta(milliseconds=1)


def test_a_json_line_holds_the_traceback() -> None:
    assert as_json(failed())["exception"].endswith("ValueError: broken")


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "line\nbreak \u2028 \x00 \ud800"},
        {"text": "é" * 100_000},
        {f"f{i}": "\x00" * 2000 for i in range(100)},
        {"number": float("nan"), "huge": 10**400},
    ],
    ids=["odd_characters", "long", "many", "numbers"],
)
def test_whatever_is_logged_is_one_bounded_json_object(fields: dict[str, object]) -> None:
    assert as_json(record("x" * 100_000, **fields))["level"] == "info"


def test_fields_cannot_pass_for_ours() -> None:
    line = as_json(record("x", worker="other", level="none", exception="fake"), worker="00d1")
    assert (line["worker"], line["level"]) == ("00d1", "info")
    assert (line["field_worker"], line["field_exception"]) == ("other", "fake")


def test_lines_that_nobody_reads_are_dropped_counted_and_told_of() -> None:
    read, write = os.pipe()
    handler = BackgroundHandler(write)
    handler.setFormatter(LineFormatter("decode"))
    long = "y" * 1000
    for _ in range(LINES_MAX + 200):  # the pipe takes 64, and one is being written
        handler.emit(record(long))
    assert 0 < handler.dropped <= 200
    # A reader comes: everything that was kept, then what was lost.
    with os.fdopen(read, "rb") as pipe:
        lines = [pipe.readline()]
        assert lines[0].endswith(long.encode() + b"\n")
        while handler.dropped > handler._told:
            lines.append(pipe.readline())
            handler.emit(record("again"))
        while handler._queue.full():
            lines.append(pipe.readline())
        handler.emit(record("last"))
        while not lines[-1].endswith(b"last\n"):
            lines.append(pipe.readline())
        assert [line for line in lines if b"log lines dropped" in line]
        handler.close()
    os.close(write)


def test_lines_for_a_full_disk_are_counted_and_told_of(tmp_path: Path) -> None:
    output = os.open("/dev/full", os.O_WRONLY)
    handler = BackgroundHandler(output)
    handler.setFormatter(LineFormatter("decode"))
    for _ in range(3):
        handler.emit(record("lost"))
    while handler.dropped < 3:
        time.sleep(0.001)
    room = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(room, output)
    handler.emit(record("there"))
    handler.close()
    first, second = (tmp_path / "log").read_text().splitlines()
    assert "3 log lines dropped" in first and second.endswith("there")
    os.close(output)
    os.close(room)


SCRIPT = """
import logging, sys
from pdrt.observe.logs import setup_logging
setup_logging("decode", "info", "json")
for _ in range(5000):
    logging.getLogger("pdrt.test").info("z" * 1000)
import warnings; warnings.warn("old")
logging.getLogger("uvicorn.error").warning("from a library")
logging.shutdown()
print("done")
"""


def run_script(stderr: int) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=stderr,
        timeout=HANG_SECONDS,
        check=True,
    )
    return done.stdout.decode()


def test_a_pipe_that_is_full_or_closed_stops_nobody() -> None:
    read, write = os.pipe()
    assert run_script(write) == "done\n", "full"
    os.close(read)
    assert run_script(write) == "done\n", "closed"
    os.close(write)


def test_what_libraries_and_python_warn_of_is_json_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("5000", "1")],
        capture_output=True,
        timeout=HANG_SECONDS,
        check=True,
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["logger"] for line in lines] == ["pdrt.test", "py.warnings", "uvicorn.error"]
    assert all(line["role"] == "decode" for line in lines)
