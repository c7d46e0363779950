"""How much a request may hold. Pure.

A body may hold millions of items. It is decoded straight into types, which costs some tens of
milliseconds at worst (as untyped lists and dicts, the garbage collector made it seconds), and its
items are counted before any Python code looks at each.
"""

from __future__ import annotations

import msgspec

from pdrt.sampling import SamplingDefaults

STOPS_MAX = 64
STOP_CHARACTERS_MAX = 1024
"""Each stop string costs a search per token."""
STOP_TOKEN_IDS_MAX = 1024
"""They travel with the request."""
LOGIT_BIAS_MAX = 1024
"""They travel with the request, and each is added in every step."""
CACHE_SALT_CHARACTERS_MAX = 256
"""It travels with the request; a digest has 64."""
MESSAGES_MAX = 16_384
"""Each costs a turn of the chat template, some 40 µs; with it, a token at least."""
PARTS_MAX = 16_384
"""Parts of all messages together."""
OFF_BYTES_MAX = 256
"""A longer value is not among those that ask for nothing; it is not read."""
COMPLETION_TOKENS_DEFAULT = 16
"""As in OpenAI's completions API."""
RESPONSE_LOGPROBS_MAX = 1 << 22
"""Log probabilities in one answer that is not streamed; they wait in memory, 100 bytes each."""


class Limits(msgspec.Struct, frozen=True):
    """What the configuration and the model allow."""

    tokens_max: int
    """What the context holds."""
    choices_max: int
    logprobs_max: int
    grammar_bytes_max: int
    sampling: SamplingDefaults = SamplingDefaults()
    """Of the model, where a client gives nothing."""
