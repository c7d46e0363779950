"""What a receiver says of itself in a segment."""

from __future__ import annotations

import msgspec


class TcpDescriptor(msgspec.Struct, frozen=True):
    """How a sender reaches a segment. Carried by the handshake alone, as the token is a secret."""

    host: str
    port: int
    segment: int
    token: bytes
