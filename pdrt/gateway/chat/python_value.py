"""Literals of Python as models write them, read as they arrive and written as JSON. Pure.

Nothing is evaluated, nor given to Python's compiler: what comes out of a model may come from an
attacker, and a compiler has no bounds of its own.
"""

from __future__ import annotations

import re

from pdrt.gateway.chat.json_value import DEPTH_MAX, escaped, hexadecimal, scalar
from pdrt.gateway.chat.reader import NotACall, Reader, Steps, Write

_NAMES = {
    "True": "true", "False": "false", "None": "null",
    # Models mix the two languages up.
    "true": "true", "false": "false", "null": "null",
}  # fmt: skip
_NUMBER_OR_NAME = re.compile(rf"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|{'|'.join(_NAMES)}")
_PLAIN = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}
_ESCAPES = {
    "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r",
    "t": "\t", "v": "\v", "\n": "",
}  # fmt: skip
_DIGITS = {"x": 2, "u": 4, "U": 8}
_OCTAL = frozenset("01234567")


def python_value(reader: Reader, write: Write, depth: int = 0) -> Steps[None]:
    """Read one string, number, bool, None, list, tuple or dict (with strings as keys); JSON goes to
    `write` as it is read.

    Raises:
        NotACall: it is something else, or nested too deeply; what was written is the beginning of
            some JSON.
    """
    if depth > DEPTH_MAX:
        raise NotACall
    match (yield from reader.space()):
        case "{":
            yield from _container(reader, write, depth, "}")
        case "[":
            yield from _container(reader, write, depth, "]")
        case "(":
            yield from _parentheses(reader, write, depth)
        case "'" | '"':
            yield from _string(reader, write)
        case _:
            text = yield from scalar(reader, _NUMBER_OR_NAME)
            write(_NAMES.get(text, text))


def _container(reader: Reader, write: Write, depth: int, end: str) -> Steps[int]:
    """A list or dict; how many items it has. A comma may come after the last."""
    write(reader.take())
    items = 0
    while (yield from reader.space()) != end:
        if items:
            write(", ")
        if end == "}":
            yield from _string(reader, write)
            yield from reader.space()
            yield from reader.expect(":")
            write(": ")
        yield from python_value(reader, write, depth + 1)
        items += 1
        if (yield from reader.space()) == ",":
            reader.take()
        elif not (yield from reader.follows(end)):
            raise NotACall
    reader.take()
    write(end)
    return items


def _parentheses(reader: Reader, write: Write, depth: int) -> Steps[None]:
    """A tuple, which is a list in JSON; or one value in parentheses, which is that value. It is
    held until that is known."""
    reader.take()
    items: list[str] = []
    is_tuple = (yield from reader.space()) == ")"
    while (yield from reader.space()) != ")":
        parts: list[str] = []
        yield from python_value(reader, parts.append, depth + 1)
        items.append("".join(parts))
        if (yield from reader.space()) == ",":
            reader.take()
            is_tuple = True
        elif not (yield from reader.follows(")")):
            raise NotACall
    reader.take()
    write(f"[{', '.join(items)}]" if is_tuple else items[0])


def _string(reader: Reader, write: Write) -> Steps[None]:
    quote = yield from reader.peek()
    if not quote or quote not in "'\"":
        raise NotACall
    is_long = yield from reader.follows(quote * 3)
    end = quote * 3 if is_long else quote
    reader.take(len(end))
    write('"')
    while not (yield from reader.follows(end)):
        match (yield from reader.peek()):
            case "":
                raise NotACall
            case "\\":
                write((yield from _escape(reader)))
            case character if character == quote:
                write(escaped(reader.take()))
            case _:
                write(escaped(reader.run(_PLAIN[quote])))
    reader.take(len(end))
    write('"')


def _escape(reader: Reader) -> Steps[str]:
    reader.take()
    character = yield from reader.peek()
    if character in _OCTAL:
        return escaped(chr((yield from _octal(reader))))
    if not character or character == "N":
        raise NotACall
    reader.take()
    if character in _DIGITS:
        code = yield from hexadecimal(reader, _DIGITS[character])
        if code > 0x10FFFF:
            raise NotACall
        return escaped("\ufffd" if 0xD800 <= code < 0xE000 else chr(code))
    # As in Python, a backslash before any other character stays.
    return escaped(_ESCAPES.get(character, f"\\{character}"))


def _octal(reader: Reader) -> Steps[int]:
    digits = ""
    while len(digits) < 3 and (yield from reader.peek()) in _OCTAL:
        digits += reader.take()
    return int(digits, 8)
