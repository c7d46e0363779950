"""Grammars of outputs: compiled once per worker, then followed token by token.

None of it happens in this process: `pdrt.model.grammar_server` says why.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

from pdrt.errors import RequestRefused, Unavailable
from pdrt.model.grammar_limits import check_grammar
from pdrt.model.grammar_messages import ServerOptions, Words, end_words
from pdrt.model.grammar_processes import Compiled, GrammarProcess, ProcessLost, Server
from pdrt.sampling import Grammar

__all__ = ["Grammars", "OutputMatcher", "check_grammar"]

log = logging.getLogger(__name__)

CACHED_MAX = 64
"""Grammars whose processes are kept when no output follows them: some MB each, as they share what
they were forked from."""
COMPILED_AT_ONCE = 4
"""So that one that takes long does not hold all others up."""

Started = Server | RequestRefused | ProcessLost
Result = TypeVar("Result")
IsWanted = Callable[[], bool]


class Unwanted:
    """Nobody waited for it any more when its turn came: it was not compiled."""


class OutputMatcher:
    """Implements `pdrt.model.batch.Matcher`.

    Once the grammar is complete and an end token has come, only end tokens are permitted: whoever
    ignores them (`ignore_eos`) gets more of them, and nothing else. So it is when the grammar's
    process is lost.

    Attributes:
        failure: why the output cannot follow its grammar any further, if it cannot.
    """

    def __init__(self, process: GrammarProcess, ends: Words) -> None:
        self._process = process
        self._name = process.name(self)
        self._ends = ends
        self._taken: int | None = None
        """Output tokens that have been told."""
        self.failure: str | None = None

    def advance(self, output_ids: Sequence[int]) -> None:
        """See `Matcher.advance`. Does not wait: what may come next is found meanwhile."""
        if self.failure is not None or self._taken == len(output_ids):
            return
        taken = self._taken or 0
        assert len(output_ids) >= taken, "an output does not become shorter"
        try:
            self._process.advance(self._name, output_ids[taken:])
        except ProcessLost as lost:
            self._process.is_lost = True
            self._fail(str(lost))
        self._taken = len(output_ids)

    def fill(self, bitmask: Words, row: int) -> None:
        """See `Matcher.fill`; `bitmask` is a numpy array."""
        assert self._taken is not None, "it advances first"
        if self.failure is None:
            try:
                words = self._process.mask(self._name)
            except ProcessLost as lost:
                self._process.is_lost = True
                self._fail(str(lost))
            else:
                if not words:
                    self._fail("matching takes too long, or no token can follow")
        bitmask[row] = self._ends if self.failure else np.frombuffer(words, dtype=np.int32)

    def _fail(self, reason: str) -> None:
        self.failure = f"the grammar cannot be followed any further: {reason}"
        log.error("an output cannot follow its grammar, and ends", extra={"reason": reason})


class Grammars:
    """Has grammars compiled; used from the event loop, waits in threads of its own."""

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._options = ServerOptions(str(directory), vocab_size, tuple(eos_token_ids))
        self._ends: Words = end_words(eos_token_ids, vocab_size)
        # They, and the processes that they start, may use any core: on those that a worker computes
        # on, which its own threads keep to, compiling would hold up its steps.
        cores = os.sched_getaffinity(0)
        self._threads = ThreadPoolExecutor(
            COMPILED_AT_ONCE, "pdrt-grammar", os.sched_setaffinity, (0, cores)
        )
        self._server: Future[Started] | None = None
        """Once there was a grammar; the latest, should one have died."""
        # Least recently used first. Refusals too, so that asking again costs nothing. What is
        # not done is never dropped: one turn for each of the requests that are alive, as those of
        # the others are skipped.
        self._compiled: OrderedDict[Grammar, Future[Compiled | Unwanted]] = OrderedDict()
        # Of grammars that are not done, who waits for them. Read by the threads.
        self._waiting: dict[Grammar, list[IsWanted]] = {}

    async def matcher(self, grammar: Grammar, is_wanted: IsWanted = lambda: True) -> OutputMatcher:
        """A matcher of its own for one request; equal grammars are compiled once.

        `is_wanted`: whether the request still lives. Asked from other threads, when the grammar's
        turn has come: clients that leave cannot pile up work for those who stay.

        Raises:
            RequestRefused: xgrammar is not installed, or refuses the grammar, or cannot compile it
                within its limits of time and memory; or the model has no end; or the request is
                not wanted any more.
            Unavailable: no process could be had for it; that says nothing about the grammar.
        """
        check_grammar(grammar)
        if not self._ends.any():
            raise RequestRefused("this model names no end token, so no grammar could ever end")
        process = await self._process(grammar, is_wanted)
        if isinstance(process, ProcessLost):
            process = await self._process(grammar, is_wanted)  # by a new server
        while isinstance(process, Unwanted) and is_wanted():
            process = await self._process(grammar, is_wanted)  # it came just too late
        self._shrink()
        match process:
            case GrammarProcess():
                return OutputMatcher(process, self._ends)
            case RequestRefused():
                raise RequestRefused(str(process), process.param)
            case ProcessLost():
                raise Unavailable(f"the process that compiles grammars is lost: {process}")
            case Unwanted():
                raise RequestRefused("the request is over")

    async def _process(self, grammar: Grammar, is_wanted: IsWanted) -> Compiled | Unwanted:
        server = await self._started()
        if isinstance(server, ProcessLost):
            return server
        future = self._compiled.get(grammar)
        if future is None or _is_lost(future):
            self._waiting[grammar] = []
            future = self._compiled[grammar] = self._threads.submit(self._compile, server, grammar)
        if not future.done():
            self._waiting[grammar].append(is_wanted)
        self._compiled.move_to_end(grammar)
        result = await _result(future)
        if self._compiled.get(grammar) is future:
            self._waiting.pop(grammar, None)
        return result

    def _compile(self, server: Server, grammar: Grammar) -> Compiled | Unwanted:
        """In a thread."""
        is_wanted = any(wants() for wants in self._waiting[grammar])
        return server.compile(grammar) if is_wanted else Unwanted()

    async def _started(self) -> Server | ProcessLost:
        if self._server is None or _is_dead(self._server):
            self._server = self._threads.submit(_start, self._options, self._server)
        server = await _result(self._server)
        if isinstance(server, RequestRefused):
            raise RequestRefused(str(server))
        return server

    def close(self) -> None:
        """End all processes and threads; matchers that are left permit only the end."""
        self._threads.shutdown(cancel_futures=True)
        for future in self._compiled.values():
            process = None if future.cancelled() else future.result()
            if isinstance(process, GrammarProcess):
                process.link.close()
        server = None if self._server is None or self._server.cancelled() else self._server.result()
        if isinstance(server, Server):
            server.close()

    def _shrink(self) -> None:
        """Drop the least recently used; outputs that follow them keep theirs."""
        idle = [grammar for grammar, future in self._compiled.items() if future.done()]
        for grammar in idle[: max(0, len(self._compiled) - CACHED_MAX)]:
            del self._compiled[grammar]


def _start(options: ServerOptions, dead: Future[Started] | None) -> Started:
    if dead is not None and isinstance(old := dead.result(), Server):
        old.close()
    try:
        return Server(options)
    except RequestRefused as refused:
        return refused
    except ProcessLost as lost:
        return lost


def _is_dead(server: Future[Started]) -> bool:
    if not server.done():
        return False
    started = server.result()
    return isinstance(started, ProcessLost) or (
        isinstance(started, Server) and not started.link.is_open
    )


def _is_lost(compiled: Future[Compiled | Unwanted]) -> bool:
    """There is no process, or it has ended: too much memory or time for one step, or somebody
    killed it."""
    if not compiled.done():
        return False
    process = compiled.result()
    return isinstance(process, ProcessLost | Unwanted) or (
        isinstance(process, GrammarProcess) and process.is_lost
    )


async def _result(future: Future[Result]) -> Result:
    """Waits; cancelling one who waits does not cancel what others wait for."""
    await asyncio.wait([asyncio.wrap_future(future)])
    return future.result()
