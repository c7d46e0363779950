"""Which transfer engine a pair uses: the best that both have and that can be opened. Pure.

The decode worker shows segments for every engine that it offers, the prefill worker chooses. What
fences it follows from what it took.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from pdrt.protocol.messages import Segment

BEST_FIRST = ("local", "mooncake", "tcp")
"""One copy on one host; one-sided writes; bytes through sockets."""


def in_order(engines: Collection[str]) -> tuple[str, ...]:
    """Best first; what has no place in the order comes last, by name."""
    return (
        *(name for name in BEST_FIRST if name in engines),
        *sorted(name for name in engines if name not in BEST_FIRST),
    )


def rank_count(segments: Sequence[Segment]) -> int:
    """Decode ranks that these segments are of."""
    return max((segment.rank for segment in segments), default=-1) + 1


def on_offer(segments: Sequence[Segment]) -> tuple[str, ...]:
    """Engines through which every decode rank can be reached, in one way; best first."""
    ranks = rank_count(segments)
    shown: dict[str, list[int]] = {}
    for segment in segments:
        shown.setdefault(segment.engine, []).append(segment.rank)
    return in_order([name for name, of in shown.items() if len(of) == len(set(of)) == ranks])


def candidates(
    have: Sequence[str], segments: Sequence[Segment], refused: Collection[str]
) -> tuple[str, ...]:
    """What may be tried, best first. `refused`: could not be opened."""
    offered = on_offer(segments)
    return in_order([name for name in have if name in offered and name not in refused])


def none_in_common(have: Sequence[str], segments: Sequence[Segment]) -> str | None:
    """Words for a pair without a common engine; None when it has one."""
    offered = on_offer(segments)
    if set(offered) & set(have):
        return None
    return (
        f"no transfer engine in common: decode offers {_names(offered)}, prefill has "
        f"{_names(in_order(have))}; see --transfer"
    )


def passed_over(
    taken: str, have: Sequence[str], segments: Sequence[Segment], refused: Mapping[str, str]
) -> tuple[str, ...]:
    """Why it is none of the better ones, one text for each."""
    offered = on_offer(segments)
    order = in_order({*BEST_FIRST, *have, *offered})
    return tuple(
        f"{name}: {_why_not(name, have, offered, refused)}" for name in order[: order.index(taken)]
    )


def _why_not(
    name: str, have: Sequence[str], offered: Sequence[str], refused: Mapping[str, str]
) -> str:
    if name in refused:
        return refused[name]
    sides = {"decode": offered, "prefill": have}
    missing = [side for side, names in sides.items() if name not in names]
    if not missing:
        return "it could not be opened when this generation was, which keeps its engine"
    return f"{' and '.join(missing)} {'does' if len(missing) == 1 else 'do'} not offer it"


def _names(engines: Sequence[str]) -> str:
    return ", ".join(engines) or "none"
