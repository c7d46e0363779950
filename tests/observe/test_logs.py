"""Log lines: one per record, fields as key=value, quoted where needed."""

from __future__ import annotations

import logging
import re
import sys

from pdrt.observe.logs import LineFormatter


def formatted(message: str, *arguments: object, **fields: object) -> str:
    logger = logging.getLogger("pdrt.test")
    record = logger.makeRecord(
        logger.name, logging.INFO, __file__, 1, message, arguments, None, extra=fields
    )
    return LineFormatter("decode").format(record)


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
    try:
        raise ValueError("broken")
    except ValueError:
        record = logging.LogRecord("p", logging.ERROR, "f", 1, "failed", (), sys.exc_info())
    first, *rest = LineFormatter("gateway").format(record).splitlines()
    assert first.endswith("ERROR   gateway failed")
    assert rest[-1] == "ValueError: broken"
