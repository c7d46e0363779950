"""What counts as a lost request: the judges bite."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx2
import pytest

from tests.chaos.client import Broken, Events, Lost, Reading, Refusal, ask
from tests.chaos.faults import KINDS, draw_wave
from tests.chaos.shapes import COMPLETIONS, Answer, Shape

SHAPE = Shape("a shape", COMPLETIONS, {"prompt": [1, 2]})
USAGE = {"prompt_tokens": 2, "completion_tokens": 3}


def piece(text: str, finish_reason: str | None = None, index: int = 0) -> str:
    choice = {"index": index, "text": text, "finish_reason": finish_reason}
    return json.dumps({"choices": [choice]})


def usage() -> str:
    return json.dumps({"choices": [], "usage": USAGE})


def read(*data: str, choices: int = 1) -> Answer | Refusal:
    events = Events(choices)
    for one in data:
        events.take(one)
    return events.end()


def test_a_stream_that_is_complete() -> None:
    answer = read(piece("a"), piece("b", "length"), usage(), "[DONE]")
    assert answer == Answer(("ab",), ("length",), 2, 3)


def test_choices_are_told_apart() -> None:
    answer = read(
        piece("a"), piece("b", "stop", 1), piece("c", "length"), usage(), "[DONE]", choices=2
    )
    assert answer == Answer(("ac", "b"), ("length", "stop"), 2, 3)


def test_an_error_in_a_stream_needs_a_reason() -> None:
    assert read(piece("a"), json.dumps({"error": {"message": "why"}})) == Refusal(200, "why", 0.0)
    with pytest.raises(Lost, match="without a reason"):
        read(piece("a"), json.dumps({"error": {"message": ""}}))


@pytest.mark.parametrize(
    "data",
    (
        (),
        (piece("a"),),
        (piece("a", "length"), usage()),
        (piece("a", "length"), "[DONE]"),
        (piece("a"), usage(), "[DONE]"),
    ),
)
def test_a_stream_that_is_cut_off(data: tuple[str, ...]) -> None:
    with pytest.raises(Lost, match="cut off"):
        read(*data)


def test_a_stream_that_goes_on_after_its_end() -> None:
    with pytest.raises(Lost, match="after its end"):
        read(piece("a", "length"), piece("b"))
    with pytest.raises(Lost, match="after the end"):
        read(piece("a", "length"), usage(), "[DONE]", piece("b"))


async def answered(respond: Any) -> Answer | Refusal | Broken:
    """What a client makes of it, by a server that is a function."""
    async with httpx2.AsyncClient(transport=httpx2.MockTransport(respond)) as http:
        return await ask(http, "http://server", SHAPE, Reading(False), random.Random(0))


async def test_a_whole_answer() -> None:
    body = {
        "choices": [{"index": 0, "text": "ab", "finish_reason": "length"}],
        "usage": USAGE,
    }
    found = await answered(lambda request: httpx2.Response(200, json=body))
    assert found == Answer(("ab",), ("length",), 2, 3)


async def test_errors_of_the_server_with_a_reason() -> None:
    error = {"error": {"message": "nobody can serve"}}
    headers = {"retry-after": "3"}
    found = await answered(lambda request: httpx2.Response(503, json=error, headers=headers))
    assert found == Refusal(503, "nobody can serve", 3.0)


@pytest.mark.parametrize(
    "response",
    (
        httpx2.Response(500, text="Internal Server Error"),
        httpx2.Response(503, json={"error": {"message": ""}}),
        httpx2.Response(400, json={"error": {"message": "a good request is refused"}}),
    ),
)
async def test_errors_that_let_a_client_down(response: httpx2.Response) -> None:
    with pytest.raises(Lost):
        await answered(lambda request: response)


async def test_silence_and_broken_connections() -> None:
    def hang(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ReadTimeout("nothing came")

    def cut(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.RemoteProtocolError("peer closed connection")

    with pytest.raises(Lost, match="nothing for"):
        await answered(hang)
    assert isinstance(await answered(cut), Broken)


def test_waves_take_each_role_once_and_every_kind_in_time() -> None:
    drawn: set[str] = set()
    for seed in range(300):
        wave = draw_wave(random.Random(seed), list(KINDS))
        roles = [KINDS[name].role for name in wave]
        assert wave and len(roles) == len(set(roles))
        drawn.update(wave)
    assert drawn == KINDS.keys()
