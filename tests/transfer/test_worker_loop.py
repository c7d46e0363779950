"""One way to end: whatever stops working without having been told to ends its worker, loudly."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pdrt.transfer.worker_loop import ExitCode, WorkerLoop

HANG_SECONDS = 120.0


def make_loop() -> WorkerLoop:
    return WorkerLoop(lambda now: None, lambda: None)


async def for_ever() -> None:
    await asyncio.Event().wait()


async def returns() -> None:
    await asyncio.sleep(0)


async def raises() -> None:
    await asyncio.sleep(0)
    raise KeyError("a bug")


async def waits_for_what_is_cancelled() -> None:
    """As an await of an executor's future, which somebody has cancelled."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.cancel)
    await future


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (returns, "the task 'compute' has ended by itself"),
        (raises, "a bug"),
        (waits_for_what_is_cancelled, "the task 'compute' was cancelled from within"),
    ],
)
async def test_work_that_stops_ends_the_worker(
    work: Callable[[], Awaitable[None]], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        code = await make_loop().run(compute=work(), http=for_ever())  # type: ignore[arg-type]
    assert code is ExitCode.BROKEN
    shown = caplog.text + "".join(str(vars(record).get("why", "")) for record in caplog.records)
    assert said in shown


@pytest.mark.parametrize("work", [raises, waits_for_what_is_cancelled])
async def test_so_does_a_task_that_was_started_later(
    work: Callable[[], Awaitable[None]],
) -> None:
    loop = make_loop()
    asyncio.get_running_loop().call_soon(loop.start, work(), "room")
    async with asyncio.timeout(HANG_SECONDS):
        assert await loop.run(compute=for_ever()) is ExitCode.BROKEN


async def test_a_task_that_was_started_later_may_end() -> None:
    loop = make_loop()
    ended = asyncio.Event()

    async def work() -> None:
        ended.set()

    async def compute() -> None:
        loop.start(work(), "room")
        await ended.wait()
        await asyncio.sleep(0)
        loop.end(ExitCode.STOPPED, "the test is over")
        await asyncio.sleep(0)

    async with asyncio.timeout(HANG_SECONDS):
        assert await loop.run(compute=compute()) is ExitCode.STOPPED


async def test_so_does_an_exception_in_a_callback(caplog: pytest.LogCaptureFixture) -> None:
    def breaks() -> None:
        raise OSError("whatever the kind: half of its effects are missing")

    asyncio.get_running_loop().call_soon(asyncio.get_running_loop().call_soon, breaks)
    async with asyncio.timeout(HANG_SECONDS):
        assert await make_loop().run(compute=for_ever()) is ExitCode.BROKEN
    assert "half of its effects are missing" in caplog.text


@pytest.mark.parametrize(
    "context",
    [
        {"message": "a client's host is gone", "exception": TimeoutError(110, "timed out")},
        {"message": "protocol.data_received() failed", "exception": KeyError(), "transport": None},
        {"message": "socket.send() raised exception."},
    ],
    ids=["os_error", "connection", "no_exception"],
)
async def test_what_befalls_one_connection_does_not(
    context: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    loop = make_loop()

    async def compute() -> None:
        asyncio.get_running_loop().call_exception_handler(context)
        loop.end(ExitCode.STOPPED, "the test is over")

    with caplog.at_level(logging.ERROR):
        async with asyncio.timeout(HANG_SECONDS):
            assert await loop.run(compute=compute()) is ExitCode.STOPPED
    assert context["message"] in caplog.text


async def test_an_ending_loop_takes_no_new_task() -> None:
    """What begins while tasks are being cancelled would be waited for and never end."""
    loop = make_loop()

    async def work() -> None:
        try:
            await for_ever()
        finally:
            loop.start(for_ever(), "late")

    asyncio.get_running_loop().call_later(0.05, loop.end, ExitCode.CANNOT_GO_ON, "test")
    async with asyncio.timeout(HANG_SECONDS):
        assert await loop.run(compute=work()) is ExitCode.CANNOT_GO_ON
