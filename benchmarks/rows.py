"""A row of a benchmark: taken several times, only while nobody else used the processors."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from documents import is_clean

from pdrt.cli.bench.machine import CpuShares, cpu_shares, cpu_times
from pdrt.errors import PdrtError

Figures = dict[str, float]
Take = Callable[[int], Awaitable[Figures]]
"""Takes a row once; told which attempt it is, so that no prompt comes twice."""

EXTRA_ATTEMPTS = 3
"""Beyond the repeats asked for, when attempts fail or are disturbed."""


class Attempt(msgspec.Struct, frozen=True):
    """One time that a row was taken."""

    figures: Figures
    cpu: CpuShares | None


class Row(msgspec.Struct, frozen=True):
    """Medians of the clean attempts; of all, where there are too few clean ones."""

    name: str
    figures: Figures
    is_clean: bool
    attempts: tuple[Attempt, ...]


async def repeat(name: str, take: Take, server: Sequence[str], repeats: int) -> Row:
    """Take a row until there are `repeats` clean attempts, `EXTRA_ATTEMPTS` more at most."""
    attempts: list[Attempt] = []
    for number in range(repeats + EXTRA_ATTEMPTS):
        if is_enough(attempts, repeats):
            break
        if (attempt := await attempt_once(name, take, server, number)) is not None:
            attempts.append(attempt)
    return settle(name, attempts, repeats)


async def attempt_once(name: str, take: Take, server: Sequence[str], number: int) -> Attempt | None:
    """Take a row once; None where that failed, which is said."""
    before = cpu_times(server)
    try:
        figures = await take(number)
    except PdrtError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return None
    attempt = Attempt(figures, cpu_shares(before, cpu_times(server)))
    _progress(name, number, attempt)
    return attempt


def is_enough(attempts: Sequence[Attempt], repeats: int) -> bool:
    """So many of them are clean."""
    return sum(is_clean(attempt.cpu) for attempt in attempts) >= repeats


def settle(name: str, attempts: Sequence[Attempt], repeats: int) -> Row:
    """The row of its attempts. Pure."""
    clean = [attempt for attempt in attempts if is_clean(attempt.cpu)]
    used = clean if len(clean) >= repeats else attempts
    names = {figure: None for attempt in used for figure in attempt.figures}
    # A figure that some attempts lack has no median: it would be of fewer than was asked for.
    medians = {
        figure: statistics.median(attempt.figures[figure] for attempt in used)
        for figure in names
        if all(figure in attempt.figures for attempt in used)
    }
    return Row(name, medians, len(clean) >= repeats, tuple(attempts))


def flat(rows: Sequence[Row]) -> dict[str, float | None]:
    """As documents hold them: `row.figure`."""
    return {f"{row.name}.{name}": value for row in rows for name, value in row.figures.items()}


def unclean(rows: Sequence[Row]) -> tuple[str, ...]:
    return tuple(row.name for row in rows if not row.is_clean)


def print_rows(rows: Sequence[Row]) -> None:
    """Each row's figures, a line each with its spread over the attempts."""
    for row in rows:
        print(row.name + ("" if row.is_clean else "  (not clean)"))
        for name, value in row.figures.items():
            taken = [a.figures[name] for a in row.attempts if name in a.figures]
            spread = f"{min(taken):.4g} to {max(taken):.4g}" if len(taken) > 1 else ""
            print(f"    {name:32}{value:>12.4g}   {spread}")
    shares = [f"{a.cpu.others:.1f}" for r in rows for a in r.attempts if a.cpu is not None]
    print(f"processor time of others, per cent, of each attempt: {' '.join(shares) or 'unknown'}")


def _progress(name: str, number: int, attempt: Attempt) -> None:
    others = "unknown" if attempt.cpu is None else f"{attempt.cpu.others:.1f} %"
    text = f"{name}, attempt {number + 1}: others' share of the processors {others}"
    print(text, file=sys.stderr, flush=True)
