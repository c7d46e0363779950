"""The model: a function from tokens to the next one, and what each page of KV then holds."""

from __future__ import annotations

from collections.abc import Sequence

from tests.sim.plan import PAGE_SIZE


def next_token(tokens: Sequence[int]) -> int:
    """Greedy decoding of a very small model."""
    return hash((len(tokens), tuple(tokens[-8:]))) % 50_000


def page_content(tokens: Sequence[int], index: int) -> int:
    """What page `index` holds once the KV of `tokens` is computed. Depends on every token before
    it, as attention does."""
    return hash(tuple(tokens[: (index + 1) * PAGE_SIZE]))


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)
