"""JSON as models write it, read as it arrives. Pure."""

from __future__ import annotations

import re

import msgspec

from pdrt.gateway.chat.reader import NotACall, Reader, Steps, Write

DEPTH_MAX = 64
"""Containers within containers; each costs a frame whenever more text comes."""
SCALAR_CHARACTERS_MAX = 1024
"""Of a number; longer ones no client can read."""
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_NUMBER_OR_NAME = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_HEXADECIMAL = frozenset("0123456789abcdefABCDEF")
_UNKNOWN = "\\ufffd"
"""In place of half a surrogate pair, which is no character; many parsers refuse it."""


def json_value(reader: Reader, write: Write, depth: int = 0) -> Steps[None]:
    """Read one value. Valid JSON goes to `write` as it is read: the text as it is, but control
    characters within strings, which models leave as they are, are escaped.

    Raises:
        NotACall: it is no JSON, or nested too deeply; what was written is the beginning of some.
    """
    match (yield from reader.space(write)):
        case "{":
            yield from _container(reader, write, depth, "}")
        case "[":
            yield from _container(reader, write, depth, "]")
        case '"':
            yield from json_string(reader, write)
        case _:
            write((yield from scalar(reader, _NUMBER_OR_NAME)))


def json_text(reader: Reader) -> Steps[str]:
    """Read a string; its text."""
    parts: list[str] = []
    yield from json_string(reader, parts.append)
    text: str = msgspec.json.decode("".join(parts), type=str)
    return text


def json_string(reader: Reader, write: Write) -> Steps[None]:
    """Read one string, with its quotes."""
    yield from reader.expect('"')
    write('"')
    while True:
        match (yield from reader.peek()):
            case '"':
                write(reader.take())
                return
            case "\\":
                write((yield from _escape(reader)))
            case "":
                raise NotACall
            case character if character < " ":
                reader.take()
                write(escaped(character))
            case _:
                write(reader.run(_PLAIN))


def escaped(text: str) -> str:
    """Text as it stands in a JSON string."""
    return msgspec.json.encode(text).decode()[1:-1]


def scalar(reader: Reader, pattern: re.Pattern[str]) -> Steps[str]:
    """Read a number or a name, which must match `pattern`."""
    text = ""
    while _SCALAR.match((yield from reader.peek())):
        text += reader.run(_SCALAR)
        if len(text) > SCALAR_CHARACTERS_MAX:
            raise NotACall
    if not pattern.fullmatch(text):
        raise NotACall
    return text


def hexadecimal(reader: Reader, count: int) -> Steps[int]:
    """Read a number of that many digits."""
    digits = ""
    for _ in range(count):
        if (yield from reader.peek()) not in _HEXADECIMAL:
            raise NotACall
        digits += reader.take()
    return int(digits, 16)


def _container(reader: Reader, write: Write, depth: int, end: str) -> Steps[None]:
    if depth == DEPTH_MAX:
        raise NotACall
    write(reader.take())
    if (yield from reader.space(write)) == end:
        write(reader.take())
        return
    while True:
        if end == "}":
            yield from reader.space(write)
            yield from json_string(reader, write)
            yield from reader.space(write)
            yield from reader.expect(":")
            write(":")
        yield from json_value(reader, write, depth + 1)
        match (yield from reader.space(write)):
            case ",":
                write(reader.take())
            case character if character == end:
                write(reader.take())
                return
            case _:
                raise NotACall


def _escape(reader: Reader) -> Steps[str]:
    reader.take()
    character = yield from reader.peek()
    if not character or character not in '"\\/bfnrtu':
        raise NotACall
    reader.take()
    if character != "u":
        return f"\\{character}"
    first = yield from hexadecimal(reader, 4)
    if not 0xD800 <= first < 0xDC00 or not (yield from reader.follows("\\u")):
        return _unicode(first)
    reader.take(2)
    second = yield from hexadecimal(reader, 4)
    if 0xDC00 <= second < 0xE000:
        return f"\\u{first:04x}\\u{second:04x}"
    return _UNKNOWN + _unicode(second)


def _unicode(code: int) -> str:
    return _UNKNOWN if 0xD800 <= code < 0xE000 else f"\\u{code:04x}"
