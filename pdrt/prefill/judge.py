"""Which grants a prefill worker can never serve. Pure."""

from __future__ import annotations

import msgspec

from pdrt.kv.layout import KvLayout
from pdrt.model.identity import ModelIdentity
from pdrt.protocol.codec import FRAME_REST_BYTES, PAGE_CHECKSUM_BYTES, prompt_logprobs_bytes
from pdrt.protocol.messages import Grant


class Limits(msgspec.Struct, frozen=True):
    """What bounds the grants of one worker."""

    identity: ModelIdentity
    layout: KvLayout
    pages_total: int
    frame_bytes_max: int


def refusal(grant: Grant, limits: Limits) -> str | None:
    """Why `grant` can never be served, in words; None when it can."""
    length, length_max = len(grant.token_ids), limits.identity.max_model_len
    vocabulary = limits.identity.vocab_size
    wanted = limits.layout.pages_for(length)
    if not 0 < length <= length_max:
        return f"{length} tokens; 1 to {length_max} can be served"
    if wanted > limits.pages_total:
        return f"{length} tokens do not fit into the prefill pool ({limits.pages_total} pages)"
    if grant.first_page > wanted or len(grant.pages) not in (0, wanted - grant.first_page):
        return f"{len(grant.pages)} pages from {grant.first_page} on for {length} tokens"
    if max(grant.token_ids) >= vocabulary:  # no frame holds a negative one
        return f"token ids must be below {vocabulary}"
    if not grant.sampling.names_tokens_below(vocabulary):
        return f"biased and stop tokens must be below {vocabulary}"
    if grant.output_tokens >= length:
        return f"{grant.output_tokens} of {length} tokens are output"
    return _logprobs_refusal(grant, limits.frame_bytes_max)


def _logprobs_refusal(grant: Grant, frame_bytes_max: int) -> str | None:
    """The prompt's log probabilities travel in one frame."""
    top = grant.sampling.prompt_logprobs
    if top is None:
        return None
    tokens = len(grant.token_ids) - grant.output_tokens
    checksums = len(grant.pages) * PAGE_CHECKSUM_BYTES
    size = prompt_logprobs_bytes(tokens, top) + checksums + FRAME_REST_BYTES
    if size <= frame_bytes_max:
        return None
    return (
        f"prompt log probabilities of {tokens} tokens with {top} alternatives take up to {size} "
        f"bytes; a frame holds {frame_bytes_max} (frame_bytes_max): ask for fewer alternatives"
    )
