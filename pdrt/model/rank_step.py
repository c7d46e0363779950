"""A step as the leader's executor describes it to the other ranks': what is fed, and where it lies.

They compute the same forward and draw no token, so of a row they need neither sampling parameters
nor history.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdrt.model.batch import Row
from pdrt.sampling import Sampling

_ASKED = Sampling(max_tokens=1)
"""Stands for whatever sampling was asked for: that logits are wanted is all that counts here."""


class RankRow(msgspec.Struct, frozen=True, array_like=True):
    """What a `Row` is for a forward alone."""

    token_ids: list[int]
    start: int
    pages: list[int]
    """As many as its tokens need."""
    is_sampled: bool
    scored: int
    """How many tokens are scored."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[RankRow])


def encode_step(rows: Sequence[Row], page_size: int) -> bytes:
    """What `decode_step` makes the same forward of."""
    return _encoder.encode(
        [
            RankRow(
                token_ids=list(row.token_ids),
                start=row.start,
                pages=list(row.pages[: -(-row.end // page_size)]),
                is_sampled=row.sampling is not None,
                scored=len(row.scored),
            )
            for row in rows
        ]
    )


def decode_step(body: bytes) -> list[Row]:
    """The rows of `encode_step`, in order.

    Raises:
        msgspec.DecodeError: it is no such step.
    """
    return [
        Row(
            token_ids=row.token_ids,
            start=row.start,
            pages=row.pages,
            sampling=_ASKED if row.is_sampled else None,
            # Which tokens are scored does not matter either.
            scored=row.token_ids[: row.scored],
        )
        for row in _decoder.decode(body)
    ]
