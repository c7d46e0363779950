"""What happens to streams: clients that leave or do not read, workers that vanish or err."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import msgspec
import openai
import pytest

from pdrt.gateway import requests
from pdrt.protocol.gateway_messages import FinishReason, Role, Submit
from pdrt.protocol.messages import PROTOCOL_VERSION
from tests.gateway.conftest import HANG_SECONDS, KEY, Deploy, Deployment, eventually
from tests.gateway.stand_in import StandIn, begins, says

VERSION = bytes([PROTOCOL_VERSION])
TEXT = "The quick brown 🙂 fox jumps over the lazy dog, and then 👩‍👩‍👧 again."


async def two_decodes(deployment: Deployment) -> tuple[StandIn, StandIn]:
    """The one that got the request of a client, and the other."""
    _, first = await deployment.pair()
    second = deployment.stand_in(Role.DECODE)
    await deployment.known(second)
    return first, second


def continue_on(deployment: Deployment, workers: tuple[StandIn, StandIn], end_first: Any) -> None:
    """Whoever is asked first begins and then does `end_first(worker, submit)`; the other goes on
    to the end."""
    output = deployment.ids(TEXT)

    def answer(worker: StandIn, submit: Submit) -> None:
        if submit.request.attempt == 0:
            begins(worker, output, 7)(submit)
            end_first(worker, submit)
        else:
            says(worker, output)(submit)

    for worker in workers:
        worker.on_submit = lambda submit, worker=worker: answer(worker, submit)


async def text_of(stream: Any) -> tuple[str, str | None]:
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    return text, chunks[-1].choices[0].finish_reason


def lose(worker: StandIn, submit: Submit) -> None:
    asyncio.get_running_loop().call_later(0.05, worker.die)


def skip(worker: StandIn, submit: Submit) -> None:
    worker.tokens(submit.request, 9, [5])


def repeat(worker: StandIn, submit: Submit) -> None:
    worker.finish(submit.request, FinishReason.UNAVAILABLE)


def hang(worker: StandIn, submit: Submit) -> None:
    worker.say(healthy=False, reasons=("a forward hangs",), hangs=True)


@pytest.mark.parametrize("end_first", [lose, skip, repeat, hang])
async def test_the_stream_goes_on_elsewhere_with_no_token_twice(
    deployment: Deployment, end_first: Any
) -> None:
    workers = await two_decodes(deployment)
    continue_on(deployment, workers, end_first)
    text, reason = await text_of(await deployment.chat(stream=True))
    assert (text, reason) == (TEXT, "stop")
    (first,), (second,) = sorted((w.submits for w in workers), key=lambda s: s[0].request.attempt)
    assert second.output_token_ids == tuple(deployment.ids(TEXT)[:7])
    assert (first.token_ids, first.sampling) == (second.token_ids, second.sampling)


async def test_the_same_without_a_stream(deployment: Deployment) -> None:
    workers = await two_decodes(deployment)
    continue_on(deployment, workers, lose)
    raw = await deployment.client.chat.completions.with_raw_response.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}]
    )
    chat = raw.parse()
    assert chat.choices[0].message.content == TEXT
    assert chat.usage.completion_tokens == len(deployment.ids(TEXT))
    assert set(raw.headers["x-pdrt-decode"].split(",")) == {worker.name for worker in workers}


async def test_duplicates_are_dropped(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    output = deployment.ids(TEXT)

    def answer(submit: Submit) -> None:
        for index in range(len(output)):
            decode.tokens(submit.request, max(0, index - 3), output[max(0, index - 3) : index + 1])
        decode.finish(submit.request, FinishReason.STOP)

    decode.on_submit = answer
    assert await text_of(await deployment.chat(stream=True)) == (TEXT, "stop")


async def test_the_last_worker_lost_ends_the_stream_with_an_error(deploy: Deploy) -> None:
    async with deploy(worker_wait_seconds=0.2) as deployment:
        _, decode = await deployment.pair()
        continue_on(deployment, (decode, decode), lose)
        with pytest.raises(openai.APIError, match="the decode worker was lost"):
            await text_of(await deployment.chat(stream=True))


async def test_a_stream_waits_for_the_last_workers_successor(deployment: Deployment) -> None:
    """New clients are told to come back meanwhile."""
    _, decode = await deployment.pair()
    continue_on(deployment, (decode, decode), lose)
    answer = asyncio.create_task(text_of(await deployment.chat(stream=True)))
    await eventually_waiting(deployment)
    with pytest.raises(openai.InternalServerError) as caught:
        await deployment.chat()
    assert caught.value.status_code == 503
    assert int(caught.value.response.headers["retry-after"]) >= 1
    successor = deployment.stand_in(Role.DECODE)
    continue_on(deployment, (successor, successor), lose)
    assert await answer == (TEXT, "stop")
    (submit,) = successor.submits
    assert submit.output_token_ids == tuple(deployment.ids(TEXT)[:7])


async def eventually_waiting(deployment: Deployment) -> None:
    """Its request has lost its worker, and waits."""
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            gateway = (await deployment.http.get("/status")).json()["gateway"]
            if (gateway["requests"], gateway["attempts"]) == (1, 0):
                return
            await asyncio.sleep(0.01)


async def test_a_new_one_waits_for_a_connection_that_is_dialled_again(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only decode worker's: it is missed at once, long before its silence is judged."""
    monkeypatch.setattr(requests, "REDIAL_SECONDS_MAX", HANG_SECONDS)
    async with deploy(protocol={"silence_seconds": 1e8}, api={"api_key": (KEY,)}) as deployment:
        _, decode = await deployment.pair()
        decode.on_submit = says(decode, deployment.ids(TEXT))
        decode.hang_up()
        reason = f"decode {decode.name}: cannot be reached"
        await deployment.until_unready(reason)

        async def ask() -> tuple[str, str | None]:
            return await text_of(await deployment.chat(stream=True))

        answer = asyncio.create_task(ask())
        await eventually_waiting(deployment)
        decode.dial()
        assert await answer == (TEXT, "stop")


async def test_a_draining_worker_gets_nothing_new(deployment: Deployment) -> None:
    workers = await two_decodes(deployment)
    for worker in workers:
        worker.on_submit = says(worker, deployment.ids("a"))
    workers[0].say(draining=True)
    await deployment.heard(workers[0])
    for _ in range(5):
        await deployment.chat()
    assert (len(workers[0].submits), len(workers[1].submits)) == (0, 5)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_cancels_upstream(
    deployment: Deployment, is_stream: bool
) -> None:
    _, decode = await deployment.pair()
    decode.on_submit = begins(decode, deployment.ids(TEXT), 3)
    if is_stream:
        stream = await deployment.chat(stream=True)
        await anext(aiter(stream))
        await stream.close()
    else:
        asking = asyncio.create_task(deployment.chat())
        await eventually(lambda: decode.submits, "submitted")
        asking.cancel()
    await eventually(lambda: decode.cancels, "cancelled upstream")
    assert decode.cancels[0].reason == "client_gone"
    assert decode.cancels[0].request == decode.submits[0].request


async def test_a_cancel_is_resent_until_it_is_answered(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    decode.answers_cancels = False
    asking = asyncio.create_task(deployment.chat())
    await eventually(lambda: decode.submits, "submitted")
    asking.cancel()
    await eventually(lambda: len(decode.cancels) >= 3, "resent")
    decode.finish(decode.submits[0].request, FinishReason.CANCELLED)


async def test_credit_follows_the_reader(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    output = deployment.ids(TEXT)
    decode.on_submit = begins(decode, output, 20)
    stream = await deployment.chat(stream=True)
    await eventually(lambda: decode.credits and decode.credits[-1].tokens_taken == 20, "credited")
    decode.finish(decode.submits[0].request, FinishReason.STOP)
    await text_of(stream)


async def test_a_client_that_does_not_read_gets_no_credit(deploy: Deploy) -> None:
    tokens_max = 100_000
    async with deploy(max_model_len=1 << 20, api={"api_key": (KEY,)}) as deployment:
        _, decode = await deployment.pair()
        said = 0

        def credited() -> int:
            return max([credit.tokens_taken for credit in decode.credits], default=0)

        async def say_what_is_credited() -> None:
            """As a decode worker does: token by token, at most 256 ahead of its credit."""
            nonlocal said
            while said < min(tokens_max, credited() + 256):
                decode.tokens(decode.submits[0].request, said, [65 + said % 20])
                said += 1
                await asyncio.sleep(0.0005)  # together they would be one small event

        _, writer = await _ask(deployment, {"stream": True, "max_tokens": tokens_max})
        await eventually(lambda: decode.submits, "submitted")
        await say_what_is_credited()
        await eventually(credited, "a first credit")
        quiet_rounds = 0
        while quiet_rounds < 5:
            before = said
            await say_what_is_credited()
            await asyncio.sleep(0.1)
            quiet_rounds = quiet_rounds + 1 if said == before else 0
        assert 256 < said < tokens_max / 4
        writer.close()
        await eventually(lambda: decode.cancels, "cancelled upstream")


async def _ask(
    deployment: Deployment, fields: dict[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request on a connection that reads nothing by itself."""
    host, _, port = deployment.url.removeprefix("http://").rpartition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
    body = json.dumps({"model": "tiny", "prompt": "x", **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return reader, writer


async def test_bad_frames_harm_nobody(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    decode.on_submit = says(decode, deployment.ids(TEXT))
    for frame in (b"", VERSION, b"\xff" * 100, VERSION + b"\x93"):
        decode.send_raw(frame)
    honest = decode.worker
    decode.send(msgspec.structs.replace(decode.register, worker=12345))
    assert await text_of(await deployment.chat(stream=True)) == (TEXT, "stop")
    metrics = (await deployment.http.get("/metrics")).text
    for reason, count in (("version", 2), ("content", 2), ("identity", 1)):
        line = f'pdrt_rejected_frames_total{{reason="{reason}",role="gateway"'
        assert any(m.startswith(line) and m.endswith(f" {count}.0") for m in metrics.splitlines())
    assert honest == decode.worker
