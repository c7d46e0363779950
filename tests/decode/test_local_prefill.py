"""Prompts that the decode worker computes itself: the same answers, whoever is missing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from pdrt.config import SchedulerConfig
from pdrt.decode.worker import DecodeWorker
from pdrt.kv.pages import OwnerKind
from pdrt.protocol.gateway_messages import FinishReason, Usage
from pdrt.protocol.messages import Reason
from pdrt.sampling import Grammar, GrammarKind, Sampling
from pdrt.scheduling import local_prefill
from pdrt.transfer.worker_loop import ExitCode
from tests.decode.deployment import (
    SCHEDULER,
    Deployment,
    GatewayPeer,
    Pair,
    Stream,
    deployed,
    in_use,
    prompt_of,
    until,
)
from tests.prefill.executor import StandInExecutor, identity, logprobs_of, output_of
from tests.transfer.copies import CopyGate

BESIDE = 4
LOCAL = msgspec.structs.replace(SCHEDULER, local_prefill="fallback", local_prefill_tokens=BESIDE)
STEP_TOKENS = SCHEDULER.max_num_batched_tokens


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a prefill worker that may come yet."""
    monkeypatch.setattr(local_prefill, "UNPAIRED_SECONDS", 0.0)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with deployed(scheduler=LOCAL) as pair:
        yield pair


class Alone:
    """A decode worker that is paired with nobody."""

    def __init__(self, deployment: Deployment, decode: DecodeWorker) -> None:
        self.deployment = deployment
        self.gateway = deployment.gateway
        self.decode = decode
        self.executor: StandInExecutor = decode.executor  # type: ignore[assignment]

    def submit(self, prompt: list[int], max_tokens: int = 8, **sampling: object) -> Stream:
        wanted = Sampling(max_tokens=max_tokens, temperature=0.0, **sampling)  # type: ignore[arg-type]
        return self.gateway.submit(self.decode.incarnation, prompt, wanted)

    def parts(self) -> list[list[int]]:
        """Tokens of each row of each step."""
        return [[len(row.token_ids) for row in rows] for rows in self.executor.steps]


@asynccontextmanager
async def alone(pages: int = 64, scheduler: SchedulerConfig = LOCAL) -> AsyncIterator[Alone]:
    deployment = Deployment(GatewayPeer())
    decode = deployment.add_decode(StandInExecutor(pages), deployment.config(scheduler=scheduler))
    await deployment.paired()
    made = Alone(deployment, decode)
    yield made
    made.executor.gate.set()
    await deployment.quiet()
    assert not decode.table.next_room().serial > 1, "a room was opened"
    await deployment.close()


def local_tokens(decode: DecodeWorker) -> int:
    found: int = decode.metrics.totals()["local_prefill_tokens"]
    return found


# Alone


@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 40, 93])
async def test_full_life(length: int) -> None:
    prompt = prompt_of(length, salt=length)
    async with alone() as made:
        stream = made.submit(prompt, 3)
        finished = await stream.end()
        assert (finished.reason, finished.usage) == (FinishReason.LENGTH, Usage(length, 3))
        assert stream.tokens == output_of(prompt, 3)
        assert stream.finishes == 1
        assert (stream.prefills, stream.cached_tokens) == ([made.decode.incarnation], 0)
        assert local_tokens(made.decode) == length
        metrics = made.decode.view.render().decode()
        assert 'reason="unpaired"' in metrics
        assert "pdrt_ttft_seconds_count" in metrics


@pytest.mark.parametrize("done", [1, 2, 5, 7])
async def test_an_attempt_goes_on_where_the_one_before_stopped(done: int) -> None:
    prompt, wanted = prompt_of(9), output_of(prompt_of(9), 8)
    async with alone() as made:
        sampling = Sampling(max_tokens=8, temperature=0.0)
        worker = made.decode.incarnation
        stream = made.gateway.submit(worker, prompt, sampling, earlier=wanted[:done])
        finished = await stream.end()
        assert (finished.reason, finished.usage) == (FinishReason.LENGTH, Usage(9, 8))
        assert stream.tokens == wanted[done:]


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
async def test_few_tokens(max_tokens: int) -> None:
    async with alone() as made:
        stream = made.submit(prompt_of(16), max_tokens)
        finished = await stream.end()
        assert (finished.reason, finished.usage) == (FinishReason.LENGTH, Usage(16, max_tokens))
        assert stream.tokens == output_of(prompt_of(16), max_tokens)


async def test_log_probabilities_of_prompt_and_output() -> None:
    prompt = prompt_of(21)
    async with alone() as made:
        stream = made.submit(prompt, 3, logprobs=1, prompt_logprobs=2)
        await stream.end()
        tokens = [*prompt, *stream.tokens]
        assert stream.scores is not None
        assert list(stream.scores.logprobs) == [logprobs_of(prompt, n, 2) for n in range(1, 21)]
        assert stream.logprobs == [logprobs_of(tokens, n, 1) for n in range(21, 24)]
        again = made.submit(prompt[:1], 1, prompt_logprobs=0)
        await again.end()
        assert again.scores is not None and again.scores.logprobs == ()


async def test_a_grammar_and_penalties() -> None:
    """The prompt is computed while the grammar is compiled, but for its last token."""
    prompt = prompt_of(20)
    async with alone() as made:
        made.executor.grammars.gate.clear()
        grammar = Grammar(GrammarKind.REGEX, "any")
        stream = made.submit(prompt, 4, grammar=grammar, repetition_penalty=1.1)
        await until(lambda: sum(map(sum, made.parts())) == 19, "all but the last token")
        assert stream.tokens == []
        made.executor.grammars.gate.set()
        await stream.end()
        assert stream.tokens == output_of(prompt, 4)
        refused = made.submit(prompt, 4, grammar=Grammar(GrammarKind.REGEX, "no"))
        assert (await refused.end()).reason is FinishReason.REJECTED
        lost = made.submit(prompt, 4, grammar=Grammar(GrammarKind.REGEX, "lost"))
        assert (await lost.end()).reason is FinishReason.REJECTED


async def test_more_than_there_are_pages_for() -> None:
    """Sequences are preempted, come back, and find what they had computed."""
    async with alone(pages=26) as made:
        prompts = [prompt_of(5 + salt % 30, salt) for salt in range(12)]
        streams = [made.submit(prompt, 20) for prompt in prompts]
        for prompt, stream in zip(prompts, streams, strict=True):
            assert (await stream.end()).reason is FinishReason.LENGTH
            assert stream.tokens == output_of(prompt, 20)


async def test_prompts_that_begin_alike_are_computed_once() -> None:
    async with alone() as made:
        await made.submit(prompt_of(33), 2).end()
        stream = made.submit([*prompt_of(32), 7, 8], 2)
        await stream.end()
        assert stream.cached_tokens == 32
        assert local_tokens(made.decode) == 33 + 2


async def beside_a_running_one(made: Alone, max_tokens: int) -> tuple[Stream, Stream]:
    """One that has its first of `max_tokens` and waits in a step, and one whose prompt is to be
    computed from the next step on; the executor's gate is closed."""
    made.executor.gate.clear()
    running = made.submit(prompt_of(5), max_tokens)
    await until(lambda: made.executor.is_running, "its prompt")
    made.executor.gate.step()
    await running.reach(1)
    await until(lambda: made.executor.is_running, "the step after it")
    stream = made.submit(prompt_of(30, salt=1), 2)
    await until(lambda: made.decode.scheduler.prompts_here, "the other one's admission")
    return running, stream


async def test_running_streams_have_a_token_in_every_step() -> None:
    async with alone() as made:
        running, stream = await beside_a_running_one(made, 40)
        made.executor.steps.clear()
        made.executor.gate.set()
        await stream.end()
        mixed = [parts for parts in made.parts() if len(parts) > 1]
        assert [parts[0] for parts in mixed] == [1] * len(mixed)
        assert max(parts[1] for parts in mixed) == BESIDE
        await running.end()
        assert running.tokens == output_of(prompt_of(5), 40)
        assert stream.tokens == output_of(prompt_of(30, salt=1), 2)


async def test_cancelled_it_stops_at_the_next_part() -> None:
    async with alone() as made:
        made.executor.gate.clear()
        stream = made.submit(prompt_of(90), 4)
        await until(lambda: made.executor.is_running, "the first part")
        made.gateway.cancel(made.decode.incarnation, stream)
        await made.gateway.inspect(made.decode.incarnation)
        assert in_use(made.decode.pages, OwnerKind.SEQUENCE) == 23, "a forward writes into some"
        made.executor.gate.set()
        assert (await stream.end()).reason is FinishReason.CANCELLED
        assert made.parts() == [[STEP_TOKENS]]


async def test_its_time_runs_out_in_the_prompt() -> None:
    async with alone() as made:
        made.executor.gate.clear()
        worker = made.decode.incarnation
        sampling = Sampling(max_tokens=4, temperature=0.0)
        stream = made.gateway.submit(worker, prompt_of(90), sampling, seconds_max=0.2)
        requests = made.decode.scheduler.requests
        await until(lambda: any(r.ended for r in requests.values()), "the deadline")
        made.executor.gate.set()
        assert (await stream.end()).reason is FinishReason.DEADLINE


async def test_a_step_that_fails_costs_the_prompt_in_it_alone() -> None:
    async with alone() as made:
        running, stream = await beside_a_running_one(made, 30)
        made.executor.gate.step()
        await until(lambda: any(len(parts) > 1 for parts in made.parts()), "both in one step")
        made.executor.failures = 1
        made.executor.gate.set()
        finished = await stream.end()
        assert finished.reason is FinishReason.FAILED
        assert "on purpose" in finished.detail
        assert (await running.end()).reason is FinishReason.LENGTH
        assert running.tokens == output_of(prompt_of(5), 30)


async def test_it_leaves_when_they_are_done() -> None:
    async with alone() as made:
        made.executor.gate.clear()
        stream = made.submit(prompt_of(40), 4)
        await until(lambda: made.executor.is_running, "a step")
        made.decode.loop._leave()
        made.executor.gate.set()
        assert (await stream.end()).reason is FinishReason.LENGTH
        assert await made.deployment.exit_code(made.decode) is ExitCode.STOPPED


async def test_the_status_says_why() -> None:
    async with alone() as made:
        made.executor.gate.clear()
        stream = made.submit(prompt_of(40), 4)
        await until(lambda: made.executor.is_running, "a step")
        report = await made.gateway.inspect(made.decode.incarnation)
        assert report.broken == ()
        (listed,) = msgspec.json.decode(report.status)["requests"]
        assert (listed["state"], listed["local_prefill"]) == ("running", "unpaired")
        assert made.gateway.registers[made.decode.incarnation].local_prefill
        assert made.decode.view.reasons() == []
        made.executor.gate.set()
        await stream.end()


# Beside prefill workers


async def test_with_a_prefill_worker_no_prompt_is_computed_here(pair: Pair) -> None:
    """Not even one token of one: what decode computes is what it says, but for first tokens."""
    streams = [pair.submit(prompt_of(1 + salt, salt), 5) for salt in range(30)]
    for salt, stream in enumerate(streams):
        await stream.end()
        assert stream.tokens == output_of(prompt_of(1 + salt, salt), 5)
        assert stream.prefills == [pair.prefill.incarnation]
    assert local_tokens(pair.decode) == 0
    computed = [row.token_ids for rows in pair.decode_executor.steps for row in rows]
    assert len(computed) == 30 * 4
    assert all(len(tokens) == 1 for tokens in computed)


async def test_the_last_prefill_worker_goes_in_the_middle_of_a_prompt() -> None:
    """It goes on here, and with a new prefill worker rooms are opened again."""
    deployment = Deployment(GatewayPeer())
    leaving = deployment.add_prefill(StandInExecutor(64), deployment.config(shutdown_timeout=0.05))
    decode = deployment.add_decode(StandInExecutor(64), deployment.config(scheduler=LOCAL))
    await deployment.paired()
    slow: StandInExecutor = leaving.executor  # type: ignore[assignment]
    slow.gate.clear()
    sampling = Sampling(max_tokens=6, temperature=0.0)
    stream = deployment.gateway.submit(decode.incarnation, prompt_of(40), sampling)
    await until(lambda: slow.is_running, "prefill")
    leaving.loop._leave()
    rooms = leaving.table.rooms
    await until(lambda: {r.reason for r in rooms.values()} == {Reason.SHUTDOWN}, "its time's end")
    slow.gate.set()
    assert (await stream.end()).reason is FinishReason.LENGTH
    assert stream.tokens == output_of(prompt_of(40), 6)
    assert await deployment.exit_code(leaving) is ExitCode.STOPPED
    deployment.forgive(leaving)
    computed = local_tokens(decode)
    assert computed > 0
    deployment.add_prefill(StandInExecutor(64), deployment.config())
    await deployment.paired()
    stream = deployment.gateway.submit(decode.incarnation, prompt_of(40, salt=1), sampling)
    await stream.end()
    assert stream.tokens == output_of(prompt_of(40, salt=1), 6)
    assert local_tokens(decode) == computed
    await deployment.quiet()
    await deployment.close()


async def test_when_its_rooms_are_used_up(pair: Pair, copies: CopyGate) -> None:
    copies.failures = 100
    stream = pair.submit(prompt_of(10), 6)
    assert (await stream.end()).reason is FinishReason.LENGTH
    copies.failures = 0
    # The first room's token was told at once; the others went on from there.
    assert stream.tokens == output_of(prompt_of(10), 6)
    assert stream.prefills[-1] == pair.decode.incarnation
    assert b'pdrt_local_prefill_requests_total{reason="rooms_failed"' in pair.decode.view.render()


async def test_one_that_every_prefill_worker_refuses_serves_all_the_same() -> None:
    """And says what is wrong."""
    deployment = Deployment(GatewayPeer())
    theirs = StandInExecutor(8, identity_=identity("theirs"))
    deployment.add_prefill(theirs, deployment.config())
    decode = deployment.add_decode(
        StandInExecutor(8, identity_=identity("ours")), deployment.config(scheduler=LOCAL)
    )
    await until(decode.view.refused_pairs, "the refusal")
    sampling = Sampling(max_tokens=2, temperature=0.0)
    stream = deployment.gateway.submit(decode.incarnation, prompt_of(5), sampling)
    await stream.end()
    assert stream.tokens == output_of(prompt_of(5), 2)
    await deployment.close()


async def test_short_prompts_go_both_ways() -> None:
    """Which is quicker is measured: each way is tried, and long prompts are always handed over."""
    scheduler = msgspec.structs.replace(LOCAL, local_prefill="short", local_prefill_short_tokens=8)
    async with deployed(scheduler=scheduler) as pair:
        for salt in range(6):
            stream = pair.submit(prompt_of(6, salt), 3)
            await stream.end()
            assert stream.tokens == output_of(prompt_of(6, salt), 3)
        handed_over = pair.decode.table.next_room().serial - 1
        computed = local_tokens(pair.decode)
        assert handed_over >= 1
        assert computed == 6 * (6 - handed_over) > 0
        stream = pair.submit(prompt_of(9, salt=9), 3)
        await stream.end()
        assert stream.prefills == [pair.prefill.incarnation]
        assert local_tokens(pair.decode) == computed
