"""Tool calls that are written in JSON, as they arrive. Pure.

A call is announced when its name is known and its arguments begin; from then on they are passed on
as they come. What breaks off before is content, all of it; what breaks off after is content from
there on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Set

from pdrt.gateway.chat.bodies import NAME_PATTERN
from pdrt.gateway.chat.deltas import ToolCallArguments, ToolCallStart
from pdrt.gateway.chat.json_value import json_text, json_value
from pdrt.gateway.chat.parser import Parser
from pdrt.gateway.chat.reader import NotACall, Steps

NewId = Callable[[], str]
"""Gives 24 random hexadecimal digits; passed in, so that all of this is pure."""

_NAME = re.compile(NAME_PATTERN)
_NAME_CHARACTERS = re.compile(r"[a-zA-Z0-9_-]+")
_ARGUMENTS = ("arguments", "parameters")
_OURS = ("name", *_ARGUMENTS)
_BESIDES = ("type", "id")
"""What else a call that no marker announces may hold: JSON with other keys is an answer."""


class CallParser(Parser):
    """Base of all formats: announces calls."""

    def __init__(self, names: Set[str], new_id: NewId) -> None:
        """`names` are the functions there are. Where nothing but its looks makes a text a call, it
        must name one of them; after a marker it need not, and the client sees what was made up."""
        self._names = names
        self._new_id = new_id
        self._calls = 0
        super().__init__()

    def _start(self, name: str) -> None:
        self._deltas.append(ToolCallStart(self._calls, self._call_id(), name))
        self._calls += 1

    def _call_id(self) -> str:
        return f"call_{self._new_id()}"

    def _arguments(self, text: str) -> None:
        self._deltas.append(ToolCallArguments(self._calls - 1, text))
        self._reader.drop()

    def _call_object(self, is_marked: bool) -> Steps[None]:
        """`{"name": …, "arguments": {…}}`, keys in any order."""
        reader = self._reader
        name: str | None = None
        held: list[str] | None = None
        """Arguments that came before the name."""
        is_started = False
        yield from reader.expect("{")
        end = yield from reader.space()
        while end != "}":
            match (yield from self._key()):
                case "name" if name is None:
                    name = yield from json_text(reader)
                    self._check_name(name, is_marked)
                case key if key in _ARGUMENTS and held is None and not is_started:
                    if not (yield from reader.follows("{")):
                        raise NotACall
                    is_started = name is not None
                    if name is not None:
                        self._start(name)
                        yield from json_value(reader, self._arguments)
                    else:
                        held = []
                        yield from json_value(reader, held.append)
                case key if key in _BESIDES or (is_marked and key not in _OURS):
                    yield from json_value(reader, lambda _: None)
                case _:
                    raise NotACall
            end = yield from reader.space()
            if end == ",":
                reader.take()
                yield from reader.space()
            elif end != "}":
                raise NotACall
        reader.take()
        if name is None:
            raise NotACall
        if not is_started:
            self._start(name)
            self._arguments("{}" if held is None else "".join(held))
        reader.drop()

    def _key(self) -> Steps[str]:
        key = yield from json_text(self._reader)
        yield from self._reader.space()
        yield from self._reader.expect(":")
        yield from self._reader.space()
        return key

    def _check_name(self, name: str, is_marked: bool) -> None:
        if name not in self._names and not (is_marked and _NAME.match(name)):
            raise NotACall

    def _word(self) -> Steps[str]:
        """Characters that names are made of; may be none."""
        word = ""
        while _NAME_CHARACTERS.match((yield from self._reader.peek())):
            word += self._reader.run(_NAME_CHARACTERS)
        return word


class HermesParser(CallParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number, text between them."""

    def _parse(self) -> Steps[None]:
        while (yield from self._content_until("<tool_call>")):
            try:
                yield from self._reader.space()
                yield from self._call_object(is_marked=True)
            except NotACall:
                self._give_up()
            else:
                yield from self._end()

    def _end(self) -> Steps[None]:
        reader = self._reader
        yield from reader.space(reader.drop)
        if (yield from reader.follows("</tool_call>")):
            reader.take(len("</tool_call>"))
            reader.drop()
            yield from reader.space(reader.drop)


class Llama3JsonParser(CallParser):
    """`{"name": …, "parameters": {…}}`, more of it after `;`: as the whole output, or after
    `<|python_tag|>`."""

    def _parse(self) -> Steps[None]:
        yield from self._all(is_marked=False)
        while (yield from self._content_until("<|python_tag|>")):
            yield from self._all(is_marked=True)

    def _all(self, is_marked: bool) -> Steps[None]:
        reader = self._reader
        try:
            yield from reader.space()
            if not is_marked and (yield from reader.follows("<|python_tag|>")):
                reader.take(len("<|python_tag|>"))
                yield from reader.space()
            following = "{"
            while following == "{":
                yield from self._call_object(is_marked=False)
                following = yield from reader.space(reader.drop)
                if following == ";":
                    reader.take()
                    following = yield from reader.space()
        except NotACall:
            pass
        self._give_up()


class MistralParser(CallParser):
    """`[TOOL_CALLS]` and a list of calls; or, newer, a name and its arguments."""

    def _call_id(self) -> str:
        # Templates of Mistral refuse a conversation whose ids are longer or have other characters.
        return self._new_id()[:9]

    def _parse(self) -> Steps[None]:
        while (yield from self._content_until("[TOOL_CALLS]")):
            try:
                if (yield from self._reader.space()) == "[":
                    yield from self._list()
                else:
                    yield from self._named()
            except NotACall:
                self._give_up()
            else:
                self._reader.drop()
                yield from self._reader.space(self._reader.drop)

    def _list(self) -> Steps[None]:
        reader = self._reader
        following = ","
        while following == ",":
            reader.take()
            yield from reader.space()
            yield from self._call_object(is_marked=True)
            following = yield from reader.space(reader.drop)
        yield from reader.expect("]")

    def _named(self) -> Steps[None]:
        reader = self._reader
        name = yield from self._word()
        self._check_name(name, is_marked=True)
        if (yield from reader.follows("[CALL_ID]")):
            reader.take(len("[CALL_ID]"))
            yield from self._word()
        if (yield from reader.follows("[ARGS]")):
            reader.take(len("[ARGS]"))
        if (yield from reader.space()) != "{":
            raise NotACall
        self._start(name)
        yield from json_value(reader, self._arguments)
