"""Tool calls that are written as a list of Python calls, as they arrive. Pure."""

from __future__ import annotations

from pdrt.gateway.chat.calls import CallParser
from pdrt.gateway.chat.json_value import escaped
from pdrt.gateway.chat.python_value import python_value
from pdrt.gateway.chat.reader import NotACall, Steps

_BEGIN, _END = "<|python_start|>", "<|python_end|>"


class PythonicParser(CallParser):
    """`[name(key=literal, …), …]` at the beginning of the output, within `<|python_start|>` and
    `<|python_end|>` or not. Whatever comes after it is content."""

    def _parse(self) -> Steps[None]:
        reader = self._reader
        try:
            yield from reader.space()
            if (yield from reader.follows(_BEGIN)):
                reader.take(len(_BEGIN))
                yield from reader.space()
            yield from self._list()
        except NotACall:
            self._give_up()
        else:
            reader.drop()
            yield from reader.space(reader.drop)
            if (yield from reader.follows(_END)):
                reader.take(len(_END))
                reader.drop()
                yield from reader.space(reader.drop)
        yield from reader.until((), self._content)

    def _list(self) -> Steps[None]:
        reader = self._reader
        yield from reader.expect("[")
        following = ","
        while following != "]":
            yield from reader.space()
            yield from self._call()
            following = yield from reader.space()
            if following == ",":
                reader.take()
                following = yield from reader.space()
            elif following != "]":
                raise NotACall
        reader.take()

    def _call(self) -> Steps[None]:
        reader = self._reader
        name = yield from self._word()
        if name not in self._names:
            raise NotACall
        yield from reader.space()
        yield from reader.expect("(")
        keys: set[str] = set()
        while (yield from reader.space()) != ")":
            key = yield from self._word()
            yield from reader.space()
            yield from reader.expect("=")
            if not key or key in keys:
                raise NotACall
            self._begin_argument(name, key, is_first=not keys)
            keys.add(key)
            yield from python_value(reader, self._arguments)
            if (yield from reader.space()) == ",":
                reader.take()
            elif not (yield from reader.follows(")")):
                raise NotACall
        reader.take()
        if not keys:
            self._start(name)
        self._arguments("}" if keys else "{}")

    def _begin_argument(self, name: str, key: str, is_first: bool) -> None:
        if is_first:
            self._start(name)
        self._arguments(f'{"{" if is_first else ", "}"{escaped(key)}": ')
