"""What follows a request through every process for those who read logs and traces. Pure value."""

from __future__ import annotations

import msgspec


class RequestContext(msgspec.Struct, frozen=True, omit_defaults=True):
    """Decides nothing: a request is served the same without it."""

    request_id: str = ""
    """The client's `x-request-id`, or the gateway's own; with a choice's index where there are
    several."""
    traceparent: str = ""
    """W3C trace context of the span that caused this one; empty when nothing is traced."""
