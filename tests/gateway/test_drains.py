"""Asking a worker to leave: until it obeys, over HTTP, and its last word."""

from __future__ import annotations

import asyncio

import pytest

from pdrt.config import ProtocolConfig
from pdrt.gateway.doubts import DOUBT_SECONDS, PROBE_SERIAL, Doubts
from pdrt.gateway.drains import ASK_SECONDS_MAX, RESEND_SECONDS, Drains
from pdrt.gateway.registry import Registry, WorkerEvent
from pdrt.ids import Incarnation
from pdrt.protocol.gateway_messages import Drain, FinishReason, Gone, Inspect, Role
from tests.gateway.conftest import HANG_SECONDS, Deployment, eventually
from tests.gateway.stand_in import begins, says
from tests.gateway.workers import DIGEST, GATEWAY, decode

WORKER = Incarnation(9)
ASKED = [Drain(WORKER, GATEWAY)]


@pytest.fixture
def registry() -> Registry:
    made = Registry(GATEWAY, (DIGEST,), ProtocolConfig(), workers_max=4, now=0.0)
    made.on_register(decode(WORKER), 0.0)
    return made


def test_it_is_asked_again_until_it_says_that_it_leaves(registry: Registry) -> None:
    drains = Drains(GATEWAY, registry)
    assert drains.ask(WORKER, 0.0) == ASKED
    assert drains.on_tick(0.5 * RESEND_SECONDS) == []
    assert drains.on_tick(RESEND_SECONDS) == ASKED
    assert drains.on_tick(1.5 * RESEND_SECONDS) == []
    assert drains.on_tick(2.0 * RESEND_SECONDS) == ASKED
    registry.on_register(decode(WORKER, seq=2, draining=True), 2.1)
    assert drains.on_tick(3.5) == []
    assert drains.ask(WORKER, 3.6) == []
    registry.on_register(decode(WORKER, seq=3), 4.0)  # it has forgotten nothing: it never obeyed
    assert drains.on_tick(9.0) == []


def test_a_lost_or_unknown_worker_is_asked_nothing(registry: Registry) -> None:
    drains = Drains(GATEWAY, registry)
    assert drains.ask(Incarnation(77), 0.0) == []
    drains.ask(WORKER, 0.0)
    registry.on_gone(WORKER, WorkerEvent.LEFT, 0.5)
    assert drains.on_tick(RESEND_SECONDS) == []
    assert drains.ask(WORKER, 2.0) == []


def test_one_that_was_silent_is_asked_again_when_it_comes_back(registry: Registry) -> None:
    drains = Drains(GATEWAY, registry)
    drains.ask(WORKER, 0.0)
    registry.on_gone(WORKER, WorkerEvent.DIED, 0.5)
    assert drains.on_tick(RESEND_SECONDS) == []
    registry.on_register(decode(WORKER, seq=2), 1.5)
    assert drains.on_tick(2.0) == ASKED


def test_who_never_obeys_is_given_up(registry: Registry) -> None:
    drains = Drains(GATEWAY, registry)
    drains.ask(WORKER, 0.0)
    assert drains.on_tick(ASK_SECONDS_MAX - 0.1) == ASKED
    assert drains.on_tick(ASK_SECONDS_MAX + 5.0) == []
    assert drains.ask(WORKER, 100.0) == ASKED


async def test_over_http_and_idempotent(deployment: Deployment) -> None:
    _, worker = await deployment.pair()
    for name in (worker.name, worker.name[:6], worker.name.upper()):
        answer = await deployment.http.post(f"/workers/{name}/drain")
        assert answer.status_code == 200
        assert answer.json() == {"role": "decode", "worker": worker.name, "state": "live"}
    await eventually(lambda: worker.drains, "the worker is asked")
    worker.say(draining=True)

    await deployment.heard(worker)
    asked = len(worker.drains)
    answer = await deployment.http.post(f"/workers/{worker.name}/drain")
    assert answer.json()["state"] == "draining"
    await deployment.heard(worker)
    assert len(worker.drains) == asked, "it is asked no more"
    # It takes nothing new.
    answer = await deployment.http.post("/v1/completions", json={"model": "tiny", "prompt": [5]})
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
    assert not worker.submits


async def test_what_cannot_be_asked(deployment: Deployment) -> None:
    first, second = await deployment.pair()
    unknown = "0" if "0" not in (first.name[0], second.name[0]) else "zz"
    for name, status, word in (
        (f"{unknown}123", 404, "begins with"),
        ("..%2f..", 404, ""),
        ("", 404, ""),
    ):
        answer = await deployment.http.post(f"/workers/{name}/drain")
        assert answer.status_code == status and word in answer.json()["error"]["message"]
    answer = await deployment.http.get(f"/workers/{first.name}/drain")
    assert answer.status_code == 405
    answer = await deployment.http.post(
        f"/workers/{first.name}/drain", headers={"authorization": ""}
    )
    assert answer.status_code == 401
    first.send(Gone(first.worker))
    first.die()
    async with asyncio.timeout(HANG_SECONDS):
        while answer.status_code != 409:
            answer = await deployment.http.post(f"/workers/{first.name}/drain")
    assert "is lost already" in answer.json()["error"]["message"]


async def test_a_name_that_may_be_several_is_refused(deployment: Deployment) -> None:
    workers = [deployment.stand_in(Role.PREFILL) for _ in range(17)]  # two begin alike
    for worker in workers:
        await deployment.known(worker)
    begins_so = [w.name[0] for w in workers]
    (letter, *_) = [x for x in begins_so if begins_so.count(x) > 1]
    answer = await deployment.http.post(f"/workers/{letter}/drain")
    assert answer.status_code == 409
    assert "may be any of: prefill " in answer.json()["error"]["message"]
    assert not any(worker.drains for worker in workers)


@pytest.mark.parametrize("is_told_by_itself", [True, False])
async def test_the_requests_of_a_worker_known_to_have_ended_move_at_once(
    deployment: Deployment, is_told_by_itself: bool
) -> None:
    output = deployment.ids("one two three four")
    _, first = await deployment.pair()
    first.on_submit = begins(first, output, 2)
    events = await deployment.client.completions.create(
        model="tiny", prompt=[5], stream=True, temperature=0
    )
    second = deployment.stand_in(Role.DECODE)
    second.on_submit = says(second, output)
    await deployment.known(second)
    if is_told_by_itself:
        first.send(Gone(first.worker))
    else:
        first.die()
        assert (await deployment.http.post(f"/workers/{first.name}/gone")).status_code == 200
    text = "".join([event.choices[0].text async for event in events])
    assert text == deployment.tokenizer.decode(output)
    assert [submit.output_token_ids for submit in second.submits] == [tuple(output[:2])]


async def test_a_living_worker_that_is_called_dead_loses_nothing(deployment: Deployment) -> None:
    output = deployment.ids("one two three four")
    _, worker = await deployment.pair()
    worker.on_submit = begins(worker, output, 2)
    events = await deployment.client.completions.create(model="tiny", prompt=[5], stream=True)
    for _ in range(5):
        answer = await deployment.http.post(f"/workers/{worker.name}/gone")
        assert (answer.status_code, answer.json()["state"]) == (200, "live")
        beats = len(worker.registered)
        await eventually(lambda beats=beats: len(worker.registered) > beats, "a heartbeat")
    (submit,) = worker.submits
    worker.tokens(submit.request, 2, output[2:])
    worker.finish(submit.request, FinishReason.STOP)
    text = "".join([event.choices[0].text async for event in events])
    assert text == deployment.tokenizer.decode(output)


def test_a_doubt_ends_with_the_worker_or_with_time(registry: Registry) -> None:
    doubts = Doubts(GATEWAY, registry)
    probe = Inspect(WORKER, PROBE_SERIAL, GATEWAY)
    assert doubts.ask(WORKER, 0.0) == [probe]
    assert doubts.on_tick(1.0) == [probe]
    assert doubts.ask(WORKER, 1.5) == [probe]  # it does not last longer for being asked again
    assert doubts.on_tick(DOUBT_SECONDS) == []
    assert doubts.ask(WORKER, 3.0) == [probe]
    registry.on_gone(WORKER, WorkerEvent.LEFT, 3.5)
    assert doubts.on_tick(4.0) == []
    assert doubts.ask(WORKER, 4.0) == []
    assert doubts.ask(Incarnation(77), 4.0) == []
