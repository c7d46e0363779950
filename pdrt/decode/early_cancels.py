"""Requests that were cancelled before they came. Pure.

Each connection keeps its order, but when one is made anew libzmq was seen to interleave what still
came by the old one: a `Cancel` may overtake its `Submit`. The gateway has been told by then that
the request has ended, and would not be asked about it until its first token.
"""

from __future__ import annotations

from pdrt.ids import RequestId

EARLY_MAX = 1024
"""The newest that are remembered: as many as may be queued, so no `Submit` on its way is missed."""


class EarlyCancels:
    """What is not to run, should it come."""

    def __init__(self) -> None:
        self._requests: dict[RequestId, None] = {}
        """Oldest first; at most `EARLY_MAX`. Some have run and ended: nobody can tell."""

    def __contains__(self, request: RequestId) -> bool:
        return request in self._requests

    def note(self, request: RequestId) -> None:
        """A `Cancel` has come for a request that is not here. Idempotent."""
        self._requests[request] = None
        if len(self._requests) > EARLY_MAX:
            del self._requests[next(iter(self._requests))]
