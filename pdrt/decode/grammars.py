"""Matchers of the requests whose output has a grammar, compiled from when they are submitted."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pdrt.errors import RequestRefused, Unavailable
from pdrt.ids import RequestId
from pdrt.model.batch import Matcher
from pdrt.model.executor import Executor
from pdrt.protocol.gateway_messages import FinishReason
from pdrt.sampling import Grammar
from pdrt.scheduling.decode_request import End
from pdrt.transfer.worker_loop import WorkerLoop


class GrammarEvents(msgspec.Struct, frozen=True):
    """What the worker hears; the request may be over by then."""

    is_alive: Callable[[RequestId], bool]
    on_ready: Callable[[RequestId], None]
    on_over: Callable[[RequestId, End], None]
    """It cannot be compiled: anywhere, or here and now."""


class Grammars:
    """One matcher per request; it stays when the request is preempted and comes back."""

    def __init__(self, executor: Executor, loop: WorkerLoop, events: GrammarEvents) -> None:
        # Of requests that are alive, exactly those whose grammar has been compiled.
        self._matchers: dict[RequestId, Matcher] = {}
        self._executor = executor
        self._loop = loop
        self._events = events

    def begin(self, request: RequestId, grammar: Grammar) -> None:
        """Compile; the events say how it went. As many at once as there are requests."""
        self._loop.start(self._compile(request, grammar), "grammar")

    async def _compile(self, request: RequestId, grammar: Grammar) -> None:
        try:
            matcher = await self._executor.grammars.matcher(
                grammar, lambda: self._events.is_alive(request)
            )
        except (RequestRefused, Unavailable) as error:
            is_refused = isinstance(error, RequestRefused)
            reason = FinishReason.REJECTED if is_refused else FinishReason.UNAVAILABLE
            if self._events.is_alive(request):
                self._events.on_over(request, End(reason, f"{grammar.kind.value}: {error}"))
            return
        if self._events.is_alive(request):
            self._matchers[request] = matcher
            self._events.on_ready(request)

    def matcher(self, request: RequestId) -> Matcher:
        return self._matchers[request]

    def failure(self, request: RequestId) -> str | None:
        """Why its output could not follow its grammar in the last step, if so."""
        # Asked for each token: a name is not looked up where there are none.
        matcher = self._matchers.get(request) if self._matchers else None
        return None if matcher is None else matcher.failure

    def forget(self, request: RequestId) -> None:
        """The request is over."""
        self._matchers.pop(request, None)

    def check(self) -> None:
        """Raise AssertionError where a matcher has outlived its request."""
        assert all(map(self._events.is_alive, self._matchers)), self._matchers.keys()
