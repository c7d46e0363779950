"""Decodes what a channel receives; a frame that is not a message is counted, said once, dropped."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, Generic, TypeVar

from pdrt.protocol.codec import BadFrame, Decoder

log = logging.getLogger(__name__)

Message = TypeVar("Message")


class FrameReader(Generic[Message]):
    """The inbound side of one kind of channel."""

    def __init__(self, union: Any, frame_bytes_max: int, peers: str) -> None:
        """`union`: of the messages expected. `peers`: who sends them, for the log."""
        self.rejected: Counter[str] = Counter()
        """Frames that were not a message, by reason."""
        self._decoder: Decoder[Message] = Decoder(union, frame_bytes_max)
        self._peers = peers

    def read(self, frame: bytes) -> Message | None:
        """The message, or None for a frame that harms nobody."""
        try:
            return self._decoder.decode(frame)
        except BadFrame as error:
            self.rejected[error.reason] += 1
            # Once per reason: a peer of another protocol version is told from silence this way.
            if self.rejected[error.reason] == 1:
                log.warning("a frame from a %s was dropped: %s", self._peers, error)
            return None
