"""What a worker and the processes of its grammars say to each other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

Words = np.ndarray[Any, np.dtype[np.int32]]
"""A bitmask of tokens: bit i of word j is token 32 j + i."""

MESSAGE_BYTES_MAX = 160 * 1024
"""Linux sends one message of up to 208 KiB by default; the largest are grammars and masks (32 KiB
for a vocabulary of 2**18)."""
TOKENS_PER_MESSAGE = 8192
"""Of a resumed output; at most 5 bytes each."""


class ServerOptions(msgspec.Struct, frozen=True):
    """The model whose outputs are followed."""

    directory: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The server can take grammars; or a grammar is compiled."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Why not, in words for the client."""

    text: str


class Mask(msgspec.Struct, frozen=True, tag="mask"):
    """Answer to `Fill`: int32 words, little-endian; empty where the grammar has no answer."""

    words: bytes


class Advance(msgspec.Struct, frozen=True, tag="advance"):
    """A matcher's next output tokens, none for a new one without any."""

    matcher: int
    tokens: list[int]
    dropped: list[int] = []
    """Matchers that are no more."""


class Fill(msgspec.Struct, frozen=True, tag="fill"):
    """Asks for the matcher's `Mask`, which is made when it advances."""

    matcher: int


ToProcess = Advance | Fill
FromProcess = Ready | Refused | Mask


def end_words(ends: Iterable[int], vocab_size: int) -> Words:
    """Bitmask (ceil(vocab_size / 32),) of a model's end tokens."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    bits[[token for token in ends if 0 <= token < vocab_size]] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
