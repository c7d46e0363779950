"""Calls into engines that may take long, or never return: nobody else waits for them, and somebody
says their name. What threads have to say is said on the loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar, TypeVarTuple

log = logging.getLogger(__name__)

OPEN_SHARE = 0.8
"""Of `--retire-seconds-max`, which the leader gives a rank: who says itself what hangs knows more.
Longer than what engines give their own connections."""

Result = TypeVar("Result")
_Ts = TypeVarTuple("_Ts")


async def on_own_thread(call: Callable[[*_Ts], Result], *arguments: *_Ts) -> Result:
    """As `asyncio.to_thread`, but on a thread of its own: the loop has a handful that all share,
    and as many calls that hang would hold up everybody. For what is done once per generation."""
    thread = ThreadPoolExecutor(1, "pdrt-engine")
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, call, *arguments)
    finally:
        thread.shutdown(wait=False)


def tell(loop: asyncio.AbstractEventLoop, call: Callable[[*_Ts], object], *arguments: *_Ts) -> None:
    """From a thread: have the loop call it."""
    try:
        loop.call_soon_threadsafe(call, *arguments)
    except RuntimeError:
        # The loop is closed, at exit: there is nobody left to tell.
        return


@contextmanager
def named_when_slow(seconds: float, what: str, **fields: object) -> Iterator[None]:
    """Say so in the log when this takes longer."""
    loop = asyncio.get_running_loop()
    timer = loop.call_later(seconds, _say, f"{what} takes longer than {seconds:g} s", fields)
    try:
        yield
    finally:
        timer.cancel()


def _say(words: str, fields: dict[str, object]) -> None:
    log.error(words, extra=fields)
