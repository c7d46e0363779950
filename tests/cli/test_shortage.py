"""What `pdrt up` says of a machine that is too small, and what it makes of its memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.cli.shortage import (
    GATEWAY_BYTES,
    POOL_BYTES,
    PROCESS_BYTES,
    WEIGHTS_GROWTH,
    of_cores,
    of_memory,
    pool_share,
)
from pdrt.model.placement import CPU_POOL_BYTES

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("cores", "quota", "workers"), [(2, None, 2), (64, None, 2), (2, 2.0, 2), (2, 8.0, 2)]
)
def test_with_a_core_for_each_worker_nothing_is_lost(
    cores: int, quota: float | None, workers: int
) -> None:
    assert of_cores(cores, quota, workers) is None


@pytest.mark.parametrize(
    ("cores", "quota", "workers", "begins"),
    [
        (1, None, 2, "1 core for 2 workers: they take turns"),
        (2, 1.0, 2, "1 core for 2 workers: they take turns"),
        (64, 0.5, 2, "0.5 cores for 2 workers: they take turns"),
        (3, None, 4, "3 cores for 4 workers: they take turns"),
        (64, 4.0, 2, "4 cores for 2 workers, as time on any of 64: none is pinned"),
    ],
)
def test_with_fewer_it_says_how_many_and_what_that_costs(
    cores: int, quota: float | None, workers: int, begins: str
) -> None:
    lost = of_cores(cores, quota, workers)
    assert lost is not None and lost.startswith(begins)
    assert "\n" not in lost


def test_with_enough_memory_pools_have_the_usual_size() -> None:
    assert POOL_BYTES == CPU_POOL_BYTES
    assert pool_share(16 * GIB, 270 * MIB, 2) is None


def test_too_little_memory_is_shared_out() -> None:
    share = pool_share(3 * GIB, 270 * MIB, 2)
    assert share is not None and 400 * MIB < share < POOL_BYTES
    assert of_memory(3 * GIB, share, 2).startswith(
        f"3072 MiB of memory for 2 workers: KV pools of {share // MIB} MiB each instead of 1024 MiB"
    )


def test_too_little_memory_for_the_model_is_said() -> None:
    share = pool_share(GIB, 270 * MIB, 2)
    assert share is not None and share <= 0
    assert "may not hold the model 2 times" in of_memory(GIB, share, 2)


@given(st.integers(0, 64 * GIB), st.integers(0, 4 * GIB), st.integers(1, 8))
def test_shares_never_take_more_than_there_is(available: int, weights: int, workers: int) -> None:
    share = pool_share(available, weights, workers)
    pool = POOL_BYTES if share is None else share
    each = pool + weights * WEIGHTS_GROWTH + PROCESS_BYTES
    assert workers * each + GATEWAY_BYTES <= available
