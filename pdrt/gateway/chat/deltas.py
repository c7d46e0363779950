"""What the text of an answer turns out to be, piece by piece. Pure."""

from __future__ import annotations

import msgspec


class Content(msgspec.Struct, frozen=True):
    """More of the answer."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """More of what the model thinks before it answers."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """A call begins; its arguments follow. Calls are numbered from 0 in order."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True):
    """More of the arguments of the call that began last. Joined they are a JSON object, unless the
    output ended within the call or the model broke off writing JSON."""

    index: int
    json_text: str


Delta = Content | Reasoning | ToolCallStart | ToolCallArguments


def merged(deltas: list[Delta]) -> list[Delta]:
    """The same with neighbours joined and empty ones left out: as few events as there can be."""
    result: list[Delta] = []
    texts: list[str] = []
    """Of those that are the last of `result` together."""

    def join() -> None:
        if len(texts) > 1:
            result[-1] = _with_text(result[-1], "".join(texts))

    for delta in deltas:
        text = _text(delta)
        if text == "":
            continue
        if text is None or not result or not _continues(result[-1], delta):
            join()
            result.append(delta)
            texts.clear()
        texts.append(text or "")
    join()
    return result


def _text(delta: Delta) -> str | None:
    """None of a call's start, which is whole."""
    match delta:
        case ToolCallStart():
            return None
        case ToolCallArguments():
            return delta.json_text
        case _:
            return delta.text


def _continues(last: Delta, delta: Delta) -> bool:
    return type(last) is type(delta) and getattr(last, "index", 0) == getattr(delta, "index", 0)


def _with_text(delta: Delta, text: str) -> Delta:
    match delta:
        case ToolCallArguments(index):
            return ToolCallArguments(index, text)
        case Reasoning():
            return Reasoning(text)
        case _:
            return Content(text)
