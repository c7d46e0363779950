"""A `Cancel` that overtakes its `Submit`: the request never runs."""

from __future__ import annotations

from pdrt.decode.early_cancels import EARLY_MAX, EarlyCancels
from pdrt.ids import Incarnation, RequestId
from pdrt.protocol.codec import encode
from pdrt.protocol.gateway_messages import Cancel, FinishReason, Submit
from pdrt.sampling import Sampling
from tests.decode.deployment import Pair, Stream, prompt_of, until


def request(serial: int, gateway: int = 1) -> RequestId:
    return RequestId(Incarnation(gateway), serial, 1)


async def test_it_never_runs(pair: Pair) -> None:
    name, worker = request(1 << 20, pair.gateway.incarnation), pair.decode.incarnation
    sampling = Sampling(max_tokens=4, temperature=0.0)
    submit = Submit(name, worker, tuple(prompt_of(20)), (), sampling, 60.0, ())
    stream = pair.gateway.streams[name] = Stream(submit)
    pair.gateway.send(worker, encode(Cancel(name, worker, "client gone")))
    assert (await stream.end()).reason is FinishReason.CANCELLED
    pair.gateway.send(worker, encode(submit))
    await until(lambda: pair.decode.table.stale["submit_after_cancel"], "the Submit")
    assert not pair.decode.scheduler.requests
    # Nothing was said of it, and nothing computed but what comes after it.
    await pair.serves()
    assert (stream.finishes, stream.tokens) == (1, [])
    assert {row.token_ids for row in pair.prefill_executor.steps[0]} == {(5, 6, 7)}


def test_the_newest_are_remembered() -> None:
    early = EarlyCancels()
    for serial in range(EARLY_MAX + 10):
        early.note(request(serial))
        early.note(request(serial))
    assert request(9) not in early
    assert request(10) in early
    assert request(EARLY_MAX + 9) in early
