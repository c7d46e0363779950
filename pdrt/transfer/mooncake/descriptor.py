"""What a receiving instance says of itself in a segment."""

from __future__ import annotations

import msgspec

NAME = "mooncake"


class MooncakeDescriptor(msgspec.Struct, frozen=True):
    """Where an instance and the memory behind it are."""

    host: str
    port: int
    """Where its peers ask how it is reached."""
    data_port: int
    """Where they connect to; 0 when not over TCP."""
    protocol: str
    address: int
    """Of the pool's first byte, in the receiver's process."""
    size_bytes: int
