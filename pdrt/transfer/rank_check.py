"""What a rank holds, against what its leader believes that it does.

While a rank is asked, both go on: what the leader has told it since then it may not know of, and
what it has answered before, the leader knows. So what stood before the question and stands when the
answer comes must be there, and nothing may be there that stood at neither.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

import msgspec

from pdrt.transfer.rank_messages import Checked, Held

Believed = Callable[[int], frozenset[Held]]
"""What the leader believes a rank to hold."""

NAMED_MAX = 8
"""Of what differs; the rest is counted."""


class Verdict(msgspec.Struct, frozen=True):
    """What a check of the other ranks has brought."""

    broken: tuple[str, ...]
    """Invariants, in words that name the rank."""
    missing: tuple[int, ...]
    """Ranks that have not answered in time."""

    def complaints(self) -> tuple[str, ...]:
        """All there is to say to whoever asked."""
        return (*self.broken, *(f"rank {rank} does not answer" for rank in self.missing))


class RankCheck:
    """One question to all other ranks, while their answers are awaited."""

    def __init__(self, ranks: Sequence[int], believed: Believed) -> None:
        """At the moment in which it is asked."""
        self.missing = set(ranks)
        self.broken: list[str] = []
        self.is_over = asyncio.Event()
        self._believed = believed
        self._before = {rank: believed(rank) for rank in ranks}

    def answered(self, rank: int, checked: Checked) -> None:
        """One rank has."""
        if checked.broken is not None:
            self.broken.append(f"rank {rank}: {checked.broken}")
        else:
            before, now = self._before[rank], self._believed(rank)
            difference = differs(before & now, before | now, checked.held)
            if difference is not None:
                self.broken.append(f"rank {rank} and its leader disagree: {difference}")
        self.missing.discard(rank)
        if not self.missing:
            self.is_over.set()

    def verdict(self) -> Verdict:
        """So far."""
        return Verdict(tuple(self.broken), tuple(sorted(self.missing)))


def differs(
    certain: frozenset[Held], possible: frozenset[Held], held: Collection[Held]
) -> str | None:
    """In words; None where all that is `certain` is held, and nothing that is not `possible`."""
    missing, unknown = certain - set(held), set(held) - possible
    parts = []
    if missing:
        parts.append(f"the rank lacks {_named(missing)}")
    if unknown:
        parts.append(f"the leader does not know of {_named(unknown)}")
    return "; ".join(parts) or None


def check_own(believed: frozenset[Held], held: Collection[Held]) -> None:
    """Of rank 0, which is never behind. Raises AssertionError where both differ."""
    difference = differs(believed, believed, held)
    assert difference is None, f"rank 0 and its leader disagree: {difference}"


def _named(differing: Collection[Held]) -> str:
    words = sorted(held.words for held in differing)
    rest = len(words) - NAMED_MAX
    return ", ".join(words[:NAMED_MAX]) + (f" and {rest} more" if rest > 0 else "")
