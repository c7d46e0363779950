"""What each prefill worker's prefix cache is likely to hold, by what was sent there. Pure.

A guess only: workers evict, and other gateways send too. A wrong one costs compute, never an
answer. What a worker says it found tells how far its guesses are to be trusted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from pdrt.ids import Incarnation
from pdrt.kv.prefix import PageKey, page_keys

KEYS_MAX = 1 << 18
"""Of all workers together, shared out equally: 4 million tokens of 16-token pages, some 50 MB."""
KEYS_PER_PROMPT_MAX = 2048
"""Pages of one prompt that are looked at (32k tokens of 16-token pages, about 3 ms of the loop):
who has so much of a prompt is preferred enough."""
TRUST_SHARE = 1 / 8
"""Weight of the newest answer in `trust`: one surprise changes little, ten in a row nearly all."""


class Prompt:
    """A prompt as the router sees it; its keys are computed at most once."""

    def __init__(self, token_ids: Sequence[int], salt: str, may_reuse: bool = True) -> None:
        """`salt`: prefixes are shared between equal salts only. Without `may_reuse` the whole
        prompt is computed, whatever is cached (as for its log probabilities)."""
        self._token_ids = token_ids
        self._salt = salt
        self._may_reuse = may_reuse
        self._page_size = 0
        """Tokens a page, of `_keys`; 0 while there are none."""
        self._keys: tuple[PageKey, ...] = ()

    def is_same(self, other: Prompt) -> bool:
        """Whether both have the same keys, as far as that costs nothing to see."""
        return (
            self._token_ids is other._token_ids
            and self._salt == other._salt
            and self._may_reuse is other._may_reuse
        )

    @property
    def tokens(self) -> int:
        return len(self._token_ids)

    def keys(self, page_size: int) -> tuple[PageKey, ...]:
        """Of the full pages that a cache could save: never the last token's, which is always
        computed."""
        if not self._may_reuse:
            return ()
        if page_size != self._page_size:
            pages = min((self.tokens - 1) // page_size, KEYS_PER_PROMPT_MAX)
            tokens = self._token_ids[: pages * page_size]
            self._keys = tuple(page_keys(tokens, page_size, self._salt))
            self._page_size = page_size
        return self._keys


class _Known:
    """One worker incarnation."""

    def __init__(self) -> None:
        self.keys: OrderedDict[PageKey, None] = OrderedDict()
        """The one to forget first in front: longest unused, and of one prefix the end first."""
        self.trust = 1.0
        """Share of the pages expected in its cache that were found there, the newest weighing
        most: 0 where caching is off, about the hit rate where the cache is too small."""


class PrefixIndex:
    """The keys of prompts sent to each worker, the least recently used forgotten first."""

    def __init__(self, keys_max: int = KEYS_MAX) -> None:
        self._keys_max = keys_max
        self._known: dict[Incarnation, _Known] = {}
        """Of workers that something was sent to and that were not forgotten."""

    def __len__(self) -> int:
        """Keys of all workers."""
        return sum(len(known.keys) for known in self._known.values())

    def pages(self, worker: Incarnation, keys: Sequence[PageKey]) -> int:
        """Pages of the longest prefix that was sent there and is not forgotten."""
        known = self._known.get(worker)
        if known is None or not keys or keys[0] not in known.keys:
            return 0  # as most workers do, of which each is asked for each prompt
        return next((n for n, key in enumerate(keys) if key not in known.keys), len(keys))

    def trust(self, worker: Incarnation) -> float:
        """Of the pages that `pages` names, the share that is likely to be there, 0 to 1."""
        known = self._known.get(worker)
        return 1.0 if known is None else known.trust

    def record(self, worker: Incarnation, keys: Sequence[PageKey], pages_total: int) -> None:
        """A prompt goes to `worker`, whose pool has `pages_total` pages: it caches no more."""
        if not keys:
            return
        if worker not in self._known:
            self._known[worker] = _Known()
            for known in self._known.values():
                self._trim(known, self._keys_max)
        known = self._known[worker]
        for key in reversed(keys):
            known.keys[key] = None
            known.keys.move_to_end(key)
        self._trim(known, pages_total)

    def _trim(self, known: _Known, keys_max: int) -> None:
        keys_max = min(keys_max, self._keys_max // len(self._known))
        while len(known.keys) > keys_max:
            known.keys.popitem(last=False)

    def found(self, worker: Incarnation, expected_pages: int, found_pages: int) -> None:
        """`worker` has found so many of the pages expected there."""
        known = self._known.get(worker)
        if known is None or expected_pages == 0:
            return
        share = min(1.0, found_pages / expected_pages)
        known.trust += TRUST_SHARE * (share - known.trust)

    def forget(self, worker: Incarnation) -> None:
        """Its incarnation is gone, and its cache with it. Idempotent."""
        self._known.pop(worker, None)

    def check_invariants(self) -> None:
        """Raises AssertionError when a bound is exceeded."""
        assert len(self) <= self._keys_max
        assert all(0.0 <= known.trust <= 1.0 for known in self._known.values())
