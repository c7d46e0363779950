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
    run: list[str] = []
    kind: Content | Reasoning | ToolCallArguments | None = None

    def end_run() -> None:
        if kind is not None and run:
            result.append(_with_text(kind, "".join(run)))
        run.clear()

    for delta in deltas:
        if isinstance(delta, ToolCallStart):
            end_run()
            kind = None
            result.append(delta)
            continue
        if kind is None or not _continues(kind, delta):
            end_run()
            kind = delta
        text = delta.json_text if isinstance(delta, ToolCallArguments) else delta.text
        if text:
            run.append(text)
    end_run()
    return result


def _continues(last: Delta, delta: Delta) -> bool:
    if isinstance(last, ToolCallArguments) and isinstance(delta, ToolCallArguments):
        return last.index == delta.index
    return type(last) is type(delta)


def _with_text(kind: Content | Reasoning | ToolCallArguments, text: str) -> Delta:
    match kind:
        case ToolCallArguments(index):
            return ToolCallArguments(index, text)
        case Content():
            return Content(text)
        case Reasoning():
            return Reasoning(text)
