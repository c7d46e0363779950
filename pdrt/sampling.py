"""What a request asks of the sampler: one frozen struct, used by messages and executor alike."""

from __future__ import annotations

import msgspec


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling parameters of one request, already validated by the gateway.

    `temperature` 0 means greedy. `top_k` 0 and `top_p` 1 and `min_p` 0 switch the filter off.
    The random draw of the token at absolute position p depends on (`seed`, p) only, so that a
    request which moves to another worker goes on with the same draws.
    """

    max_tokens: int
    """Output tokens at most, counted over the whole request (not per room)."""
    min_tokens: int = 0
    """End-of-sequence tokens are masked until this many output tokens exist."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    """Unsigned 64 bit; the gateway draws one where the client gave none."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output as an end-of-sequence token does."""
