"""Whether something that is done very often leaves anything behind."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

BLOCKS_MAX = 1000
"""What may differ by chance, such as a table that was just made larger. One small object for each
of 100,000 times would be a hundred times as many."""


def left_by(work: Callable[[range], None], times: int) -> int:
    """Blocks of memory that are still allocated after `work` was done `times` times, beyond those
    that were before; every block that Python hands out counts, whoever asked for it. `work` does
    it once for each number of a range, and no number comes twice. What is bounded has grown to its
    bound before: a tenth is done first."""
    before_that = times // 10
    work(range(before_that))
    before = allocated()
    work(range(before_that, before_that + times))
    return allocated() - before


def allocated() -> int:
    """Blocks, after everything that can be freed was."""
    gc.collect()
    return sys.getallocatedblocks()
